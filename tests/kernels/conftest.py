"""Where the programs run: by Triton's interpreter on tensors of the CPU, or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import properties  # noqa: F401 - sets how many examples are drawn
from tests.support.statistics import WITH_MOMENTS
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.statistics.kernels import launch
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.kernels.launch import Launcher

HERE = Path(__file__).parent

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

WHERE = torch.device("cpu" if INTERPRETED else "cuda")
"""Where gradients are: with a GPU the same tests run on it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the interpreter does not run needs a GPU; the interpreter computes by numpy, which warns where a device says NaN."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:All-NaN slice") if INTERPRETED else pytest.mark.cuda)


def there(tensor: torch.Tensor) -> torch.Tensor:
    """A strided tensor where the programs run, in the same order in memory and at the same offset in it."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return memory.to(WHERE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of what is not finite; a device does not."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session")
def programs() -> Launcher:
    """The programs, sums of elements with them."""
    return Launcher(WHERE, WITH_MOMENTS, launch.programs())


def decided_at_once(errors: ErrorLog) -> Kernels:
    """A decision that waits for what is compared, so that nothing has to be waited for later."""
    return Kernels(
        WITH_MOMENTS, errors.boundary("kernels"), lambda vector: vector.clone().cpu().numpy, kinds=frozenset({WHERE.type})
    )
