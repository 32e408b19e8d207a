"""What holds for all tests: the order of their files, and that what has been imported is no work for the garbage collector."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.compiled import forget_what_was_compiled
from tests.support.programs import Starter

HERE = Path(__file__).parent

TRAINERS = (
    "transformers", "lightning", "accelerate", "peft", "timm", "mmengine", "ignite", "ray", "deepspeed", "tensorboard",
)  # fmt: skip
collect_ignore = [] if all(map(importlib.util.find_spec, TRAINERS)) else ["trainers"]
"""What `make trainers` runs, in an environment of its own; named on the command line it is never left out."""
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore.append("kernels")  # what `make kernels` runs, with Triton, whose interpreter is no part of other tests

LONG = (
    "matrix/test_random_loops.py",
    "rules/test_alerts_end_to_end.py",
    "dashboards/test_nine_runs.py",
    "test_fault_injection.py",
    "matrix/test_matrix.py",
    "test_exits.py",
    "outputs/otlp/test_push.py",
    "matrix/test_distributed.py",
    "capture/test_local_norm.py",
    "capture/test_ordinary_model.py",
    "dashboards/test_dashboard_queries.py",
    "distributed/test_job.py",
    "statistics/test_device_chunks.py",
    "capture/test_count_only.py",
    "test_traps.py",
    "test_lifecycle.py",
    "outputs/http/test_tls.py",
    "distributed/test_discovery.py",
    "capture/test_compile.py",
    "test_torch_compat.py",
)
"""The files that take longest. They come first, so that no worker is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files first."""
    places = {HERE / name: place for place, name in enumerate(LONG)}
    assert all(path.is_file() for path in places)
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """A full collection looks at all of torch otherwise, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """One for all tests of a worker."""
    one = Starter(tmp_path_factory.mktemp("programs"))
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _each_by_itself() -> Iterator[None]:
    """What came before has no part in a test: torch's random numbers begin anew, and nothing is compiled.

    Where there is something compiled, a model is looked into from its second round on.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    yield
    forget_what_was_compiled()
