"""`DeviceMemory`: the numbers of PyTorch's allocators about the memory of CUDA devices, or of another accelerator.

It belongs to the training thread, which reads at most once a second; any thread may take the values of the last reading. A
device is neither initialised nor waited for: its allocator's own numbers are read, on the host, once the program has begun to
use it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Seconds from one reading to the next, at least.
INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """The memory of one device in bytes, and two counts of allocations; None where it is not counted.

    `device`: its name in PyTorch, such as `cuda:0`. `uuid`: 36 characters, without a prefix. `name`: of its model.
    """

    device: str
    allocated: int | None
    reserved: int | None
    active: int | None
    inactive_split: int | None
    requested: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    total: int | None
    retries: int | None
    ooms: int | None
    uuid: str | None
    name: str | None = None

    @property
    def driver_uuid(self) -> str | None:
        """The UUID as NVIDIA's driver and DCGM print it, None if there is none."""
        if self.uuid is None or not self.device.startswith("cuda:") or torch.version.hip is not None:
            return None
        return ("MIG-" if "MIG" in (self.name or "").split() else "GPU-") + self.uuid


# The allocator's number for each field of `DeviceStatistics` that is in bytes.
_BYTES = {
    **{name: (f"{name}_bytes", "current") for name in ("allocated", "reserved", "active", "inactive_split", "requested")},
    **{f"peak_{name}": (f"{name}_bytes", "peak") for name in ("allocated", "reserved")},
}

# Total memory, UUID and name.
_Facts = tuple[int | None, str | None, str | None]

_ACCELERATOR: Any = getattr(torch, "accelerator", None)


def built_for_devices() -> bool:
    """Return whether this PyTorch can have devices with memory of their own."""
    cuda: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return cuda or (_ACCELERATOR is not None and _ACCELERATOR.current_accelerator() is not None)


def _module(kind: str) -> Any:  # noqa: ANN401 - a module such as `torch.xpu`
    return torch.get_device_module(kind)


class DeviceMemory:
    """The memory of the devices that this process uses, at the last reading.

    A device is shown once PyTorch has reserved memory on it. A kind of device without numbers is not asked again.

    Args:
        used: Returns the kinds of device on which gradients were read: these are in use, also if their module cannot say so.
        cuda: PyTorch's module for CUDA.
        accelerator: PyTorch's module for another kind of device.
        module: Returns the module of a kind.
        clock: In seconds.
    """

    def __init__(
        self,
        *,
        used: Callable[[], frozenset[str]] = frozenset,
        cuda: Any = torch.cuda,  # noqa: ANN401 - what modules have depends on PyTorch's version
        accelerator: Any = _ACCELERATOR,  # noqa: ANN401 - as above
        module: Callable[[str], Any] = _module,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used = used
        self._cuda = cuda
        self._accelerator = accelerator
        self._module = module
        self._clock = clock
        self._due = float("-inf")
        self._readings = [self._of_cuda]
        if hasattr(accelerator, "memory_stats"):
            self._readings.append(self._of_another)
        self._seen: dict[Callable[[], object], tuple[DeviceStatistics, ...]] = {}
        self._facts: dict[str, _Facts] = {}  # of the devices that have been shown
        self._snapshot: tuple[DeviceStatistics, ...] = ()

    def snapshot(self) -> tuple[DeviceStatistics, ...]:
        """Return the values of the last reading. Safe from any thread, and no call to a device."""
        return self._snapshot

    def refresh(self) -> None:
        """Read again if the last reading was a second ago. On the training thread only. If that fails there are no values."""
        now = self._clock()
        if now >= self._due:
            self._due = now + INTERVAL
            self.refresh_now()

    def refresh_now(self) -> None:
        """Read again, however long ago the last reading was; otherwise like `refresh`."""
        with contextlib.ExitStack() as undone:
            undone.callback(self._forget)
            self._refresh()
            undone.pop_all()

    def _forget(self) -> None:
        self._seen, self._snapshot = {}, ()

    def _refresh(self) -> None:
        for reading in tuple(self._readings):
            try:
                self._seen[reading] = reading()
            except RuntimeError:
                # It has no such numbers, or its context is lost and all numbers with it.
                self._readings.remove(reading)
                self._seen.pop(reading, None)
        self._snapshot = tuple(device for devices in self._seen.values() for device in devices)

    def _of_cuda(self) -> tuple[DeviceStatistics, ...]:
        """Return the statistics of CUDA, or of AMD's devices, which have the same module."""
        cuda = self._cuda
        if not cuda.is_initialized():
            return ()
        # None of these calls disturbs a capture of a graph today. Waiting is safe with any version.
        if cuda.is_current_stream_capturing():
            return self._seen.get(self._of_cuda, ())
        # PyTorch's own allocator counts everything, others leave zeros.
        exact = cuda.get_allocator_backend() == "native"
        return tuple(self._devices("cuda", cuda, cuda.memory_stats_as_nested_dict, exact=exact))

    def _of_another(self) -> tuple[DeviceStatistics, ...]:
        """Return the statistics of the accelerator of a PyTorch that was not built for CUDA."""
        device = self._accelerator.current_accelerator()
        if device is None or device.type == "cuda":
            return ()
        module = self._module(device.type)
        initialised = getattr(module, "is_initialized", lambda: device.type in self._used())
        return tuple(self._devices(device.type, module, self._accelerator.memory_stats, exact=False)) if initialised() else ()

    def _devices(
        self,
        kind: str,
        module: Any,  # noqa: ANN401 - as above
        statistics: Callable[[int], Mapping[str, Any]],
        *,
        exact: bool,
    ) -> Iterator[DeviceStatistics]:
        for index in range(getattr(module, "device_count", lambda: 1)()):
            device, numbers = f"{kind}:{index}", statistics(index)
            # The program may reset the peak, so a device that has been shown stays.
            if device not in self._facts:
                if not _number(numbers, "reserved_bytes", "peak", exact=False):
                    continue
                properties = getattr(module, "get_device_properties", lambda _: None)(index)
                total, uuid, name = (getattr(properties, fact, None) for fact in ("total_memory", "uuid", "name"))
                self._facts[device] = None if total is None else int(total), None if uuid is None else str(uuid), name
            yield _read(device, numbers, self._facts[device], exact=exact)


def _read(device: str, numbers: Mapping[str, Any], facts: _Facts, *, exact: bool) -> DeviceStatistics:
    total, uuid, name = facts
    retries, ooms = numbers.get("num_alloc_retries"), numbers.get("num_ooms")
    return DeviceStatistics(
        device,
        **{field: _number(numbers, *name, exact=exact) for field, name in _BYTES.items()},
        total=total,
        retries=retries if exact or retries else None,
        ooms=ooms if exact or ooms else None,
        uuid=uuid,
        name=name,
    )


def _number(numbers: Mapping[str, Any], name: str, which: str, *, exact: bool) -> int | None:
    """Return one number over all pools, nested or flat. `exact`: 0 is a number also if nothing but 0 was ever counted there."""
    prefix = f"{name}.all."
    nested = numbers.get(name)
    pools = nested["all"] if nested else {key.removeprefix(prefix): numbers[key] for key in numbers if key.startswith(prefix)}
    return pools.get(which) if exact or any(pools.values()) else None
