"""Each test here begins as in a fresh process: what earlier ones compiled would leave gradients and first rounds out."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    compiler, utils = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.utils")
    if compiler is not None and utils is not None:
        compiler.reset()
        utils.counters.clear()
