"""The states of the global random generators, as they were when a forward began."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

# The states of global random generators: `torch`, `cuda` (by the number of the device), `numpy`, `python`. Not changed once made.
States = dict[str, Any]

# The only kind that NumPy's global generator has unless the user has replaced it.
NUMPY = "MT19937"


def random_states(devices: Iterable[torch.device] = ()) -> States:
    """Return the states of now; those of CUDA devices are on the host, so nothing waits."""
    states: States = {"torch": torch.default_generator.get_state(), "python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 - the global generator
    numbers = {torch.cuda.current_device() if device.index is None else device.index for device in devices if device.type == "cuda"}
    states["cuda"] = {number: torch.cuda.get_rng_state(number) for number in numbers}
    return states


def plain_states(states: States) -> States:
    """Return states without arrays of NumPy, so that `torch.load` reads them safely."""
    name, keys, *rest = states["numpy"] if isinstance(states["numpy"], tuple) else ("", np.zeros(0))
    numpy = (name, torch.from_numpy(keys.astype(np.int64)), *rest) if name == NUMPY else None
    return {**states, "numpy": numpy}


@contextlib.contextmanager
def restored_states(states: Mapping[str, Any]) -> Iterator[None]:
    """Set plain states, and set those from before at the end. Devices that this machine does not have are left alone."""
    cuda = {number: state for number, state in states["cuda"].items() if number < torch.cuda.device_count()}
    before = plain_states(random_states(torch.device("cuda", number) for number in cuda))
    try:
        _set({**states, "cuda": cuda})
        yield
    finally:
        _set(before)


def _set(states: Mapping[str, Any]) -> None:
    torch.default_generator.set_state(states["torch"])
    for number, state in states["cuda"].items():
        torch.cuda.set_rng_state(state, number)
    random.setstate(states["python"])
    if states["numpy"] is not None:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - as above
