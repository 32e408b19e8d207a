"""What an import of the package does; who may import whom is checked by `make lint`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import sys, threading
import torch_grad_exporter
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert set(torch_grad_exporter.__all__) <= set(dir(torch_grad_exporter))
from torch_grad_exporter import *
assert start_exporter.__name__ == "start_exporter" and callable(explain) and callable(record)
from tests.support.torch_hooks import global_step_hooks
assert threading.active_count() == 1
assert global_step_hooks() == []
try:
    torch_grad_exporter.start_importer
except AttributeError as error:
    assert "start_importer" in str(error)
else:
    raise AssertionError("an unknown name")
"""


def test_importing_the_package_does_nothing() -> None:
    """Importing the package imports no PyTorch; importing every public name starts no thread and registers no hook."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
