"""The labels of `torch_train_info`: what does not change in a run, once it is known."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.distributed.identity import Identity, hostname
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.version import __version__


class TrainInfo:
    """Gives the labels, `None` as long as they are not known: a series that changed its name would be two.

    `devices`: the kinds of devices that gradients were read from so far. `expected`: those that the parameters were on at the
    start, which count until gradients are somewhere else.
    """

    def __init__(self, identity: Identity, devices: Callable[[], frozenset[str]], expected: frozenset[str]) -> None:
        self._identity = identity
        self._devices = devices
        self._expected = expected

    def __call__(self) -> dict[str, str] | None:
        """The labels by name."""
        found = self._devices()
        devices = found if found - self._expected else self._expected
        if not devices:
            return None
        return {
            "torch_version": str(torch.__version__),
            "exporter_version": __version__,
            "python_version": platform.python_version(),
            "host": hostname(),
            "local_rank": str(self._identity.local_rank),
            "devices": ",".join(sorted(devices)),
        }


def device_kinds(index: LayerIndex, models: Iterable[torch.nn.Module]) -> frozenset[str]:
    """Kinds of devices that gradients will be on; none where a parameter is yet to be made, or to get a device."""
    if any(is_lazy(parameter) or parameter.is_meta for module in models for parameter in module.parameters()):
        return frozenset()
    return frozenset(parameter.device.type for parameter in index.table.parameters() or ())
