"""What makes the programs run here: Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support import properties  # noqa: F401 - sets how many examples are drawn
from tests.support.statistics import WITH_MOMENTS
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.statistics.kernels import launch
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.kernels.launch import Launcher

assert os.environ.get("TRITON_INTERPRET") == "1", "run these by `make kernels`"


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of what is not finite; a device does not."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session")
def programs() -> Launcher:
    """The programs on the CPU, sums of elements with them."""
    return Launcher(torch.device("cpu"), WITH_MOMENTS, launch.programs())


def decided_at_once(errors: ErrorLog) -> Kernels:
    """A decision for tensors of the CPU, where everything has arrived at once."""
    return Kernels(WITH_MOMENTS, errors.boundary("kernels"), lambda vector: vector.clone().numpy, kinds=frozenset({"cpu"}))
