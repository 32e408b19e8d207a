"""`DeviceMemory`: what PyTorch's allocators say about the memory of CUDA devices, or of another accelerator.

It belongs to the training thread, which reads at most once a second; any thread may take the values of the last reading. A
device is neither initialised nor waited for: its allocator's own numbers are read, on the host, once the program has begun to
use it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

INTERVAL = 1.0
"""Seconds from one reading to the next, at least."""


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """The memory of one device in bytes, and two counts of allocations; `None` where it is not counted."""

    device: str
    """The device as PyTorch names it, such as `cuda:0`."""
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
    """Without a prefix, 36 characters; `None` where the device, or PyTorch, gives none."""


class Cuda(Protocol):
    """What is used of `torch.cuda`. Only the first may be called before the program has initialised it."""

    def is_initialized(self) -> bool:
        """Whether this process may call the others: false again in a child that was forked."""

    def is_current_stream_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""

    def device_count(self) -> int:
        """Devices that this process sees."""

    def get_allocator_backend(self) -> str:
        """`native` for PyTorch's own allocator, which counts everything."""

    def memory_stats_as_nested_dict(self, device: int, /) -> Mapping[str, Any]:
        """The allocator's numbers. It makes no context on a device that was not used, and says 0."""

    def get_device_properties(self, device: int, /) -> object:
        """Facts about a device, among them `total_memory` and, since PyTorch 2.4, `uuid`."""


class Accelerator(Protocol):
    """What is used of `torch.accelerator`, which since PyTorch 2.9 also has `memory_stats(index)`."""

    def current_accelerator(self) -> torch.device | None:
        """The kind of accelerator that PyTorch was built for, whether or not there is one."""


class _Backend(Protocol):
    """One kind of device. Where it raises `RuntimeError`, it has no such numbers."""

    def state(self) -> bool | None:
        """Whether its statistics may be read; `None`: not at this moment."""

    def kind(self) -> str:
        """The kind of device, as in the device's name."""

    def counts_everything(self) -> bool:
        """Whether a number that was 0 from the start is a count, and not a number that is never counted."""

    def device_count(self) -> int:
        """How many devices there may be."""

    def statistics(self, index: int) -> Mapping[str, Any]:
        """The allocator's numbers, nested or flat."""

    def properties(self, index: int) -> object:
        """Facts about a device."""


_ACCELERATOR: Accelerator | None = getattr(torch, "accelerator", None)


def _module(kind: str) -> object:
    """The module of a kind of device, such as `torch.xpu`."""
    return torch.get_device_module(kind)


class DeviceMemory:
    """The memory of the devices that this process uses, as of the last reading.

    A device is shown once PyTorch has reserved memory on it. A backend without numbers is not asked again.
    `used`: the kinds of device on which gradients were read; such a one is known to be in use where its backend cannot
    say so. `clock` in seconds.
    """

    def __init__(
        self,
        *,
        used: Callable[[], frozenset[str]] = frozenset,
        cuda: Cuda = torch.cuda,
        accelerator: Accelerator | None = _ACCELERATOR,
        module: Callable[[str], object] = _module,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._due = float("-inf")
        self._backends: list[_Backend] = [_Cuda(cuda)]
        if accelerator is not None and hasattr(accelerator, "memory_stats"):
            self._backends.append(_Other(accelerator, module, used))
        self._seen: dict[_Backend, tuple[DeviceStatistics, ...]] = {}
        self._facts: dict[str, tuple[int | None, str | None]] = {}
        """Total memory and UUID of the devices that have been shown."""
        self._snapshot: tuple[DeviceStatistics, ...] = ()

    def snapshot(self) -> tuple[DeviceStatistics, ...]:
        """What was seen last. Safe from any thread, and no call to a device."""
        return self._snapshot

    def refresh(self) -> None:
        """Reads again if the last reading was a second ago. On the training thread only. If that fails there are no values."""
        now = self._clock()
        if now >= self._due:
            self._due = now + INTERVAL
            self.refresh_now()

    def refresh_now(self) -> None:
        """Reads again, however long ago the last reading was; otherwise as `refresh`."""
        with contextlib.ExitStack() as undone:
            undone.callback(self._forget)
            self._refresh()
            undone.pop_all()

    def _forget(self) -> None:
        self._seen, self._snapshot = {}, ()

    def _refresh(self) -> None:
        for backend in tuple(self._backends):
            try:
                if (state := backend.state()) is not None:
                    self._seen[backend] = tuple(self._devices(backend)) if state else ()
            except RuntimeError:
                # It has no such numbers, or its context is lost and all numbers with it.
                self._backends.remove(backend)
                self._seen.pop(backend, None)
        self._snapshot = tuple(device for devices in self._seen.values() for device in devices)

    def _devices(self, backend: _Backend) -> Iterator[DeviceStatistics]:
        exact = backend.counts_everything()
        for index in range(backend.device_count()):
            device = f"{backend.kind()}:{index}"
            statistics = backend.statistics(index)
            # The program may reset the peak, so a device that has been shown stays.
            if device not in self._facts:
                if not _bytes(statistics, "reserved", "peak", exact=False):
                    continue
                self._facts[device] = _facts(backend.properties(index))
            yield _read(device, statistics, self._facts[device], exact=exact)


class _Cuda:
    """CUDA, or what takes its place in PyTorch for AMD's devices."""

    def __init__(self, module: Cuda) -> None:
        self._module = module

    def state(self) -> bool | None:
        if not self._module.is_initialized():
            return False
        # None of these calls disturbs a capture of a graph today. Waiting is safe with any version.
        return None if self._module.is_current_stream_capturing() else True

    def kind(self) -> str:
        return "cuda"

    def counts_everything(self) -> bool:
        return self._module.get_allocator_backend() == "native"

    def device_count(self) -> int:
        return self._module.device_count()

    def statistics(self, index: int) -> Mapping[str, Any]:
        return self._module.memory_stats_as_nested_dict(index)

    def properties(self, index: int) -> object:
        return self._module.get_device_properties(index)


class _Other:
    """The accelerator of a PyTorch that was not built for CUDA."""

    def __init__(self, accelerator: Any, module: Callable[[str], object], used: Callable[[], frozenset[str]]) -> None:  # noqa: ANN401 - what it has depends on PyTorch's version
        self._accelerator = accelerator
        self._module = module
        self._used = used

    def state(self) -> bool | None:
        device = self._accelerator.current_accelerator()
        if device is None or device.type == "cuda":
            return False
        initialised = getattr(self._module(device.type), "is_initialized", None)
        return bool(initialised()) if initialised is not None else device.type in self._used()

    def kind(self) -> str:
        return str(self._accelerator.current_accelerator().type)

    def counts_everything(self) -> bool:
        return False

    def device_count(self) -> int:
        count: Callable[[], int] = getattr(self._module(self.kind()), "device_count", lambda: 1)
        return count()

    def statistics(self, index: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._accelerator.memory_stats(index)
        return found

    def properties(self, index: int) -> object:
        read: Callable[[int], object] = getattr(self._module(self.kind()), "get_device_properties", lambda _: None)
        return read(index)


def _facts(properties: object) -> tuple[int | None, str | None]:
    total, uuid = getattr(properties, "total_memory", None), getattr(properties, "uuid", None)
    return None if total is None else int(total), None if uuid is None else str(uuid)


def _read(device: str, statistics: Mapping[str, Any], facts: tuple[int | None, str | None], *, exact: bool) -> DeviceStatistics:
    total, uuid = facts
    retries, ooms = statistics.get("num_alloc_retries"), statistics.get("num_ooms")
    return DeviceStatistics(
        device,
        allocated=_bytes(statistics, "allocated", "current", exact=exact),
        reserved=_bytes(statistics, "reserved", "current", exact=exact),
        active=_bytes(statistics, "active", "current", exact=exact),
        inactive_split=_bytes(statistics, "inactive_split", "current", exact=exact),
        requested=_bytes(statistics, "requested", "current", exact=exact),
        peak_allocated=_bytes(statistics, "allocated", "peak", exact=exact),
        peak_reserved=_bytes(statistics, "reserved", "peak", exact=exact),
        total=total,
        retries=retries if exact or retries else None,
        ooms=ooms if exact or ooms else None,
        uuid=uuid,
    )


def _bytes(statistics: Mapping[str, Any], name: str, which: str, *, exact: bool) -> int | None:
    """One number over all pools. `exact`: 0 is a number also if nothing but 0 was ever counted there."""
    nested = statistics.get(f"{name}_bytes")
    numbers = nested["all"] if nested is not None else _flat(statistics, f"{name}_bytes.all.")
    return numbers.get(which) if exact or any(numbers.values()) else None


def _flat(statistics: Mapping[str, Any], prefix: str) -> Mapping[str, int]:
    return {key.removeprefix(prefix): value for key, value in statistics.items() if key.startswith(prefix)}
