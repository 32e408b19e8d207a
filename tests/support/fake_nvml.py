"""A fake driver library under the real `pynvml`, whose names, argument orders and units stay in use."""
# ruff: noqa: ANN401 - what ctypes hands over has no types.

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pynvml
import pytest


@dataclass
class FakeGpu:
    """A GPU or a MIG device, with raw values in NVML's units."""

    uuid: str
    utilization: int = 57
    used: int = 3 * 2**30
    reserved: int = 600 * 2**20
    milliwatts: int = 123456
    celsius: int = 61
    clocks: dict[int, int] = field(default_factory=lambda: {pynvml.NVML_CLOCK_GRAPHICS: 1, pynvml.NVML_CLOCK_SM: 1980})
    millijoules: int = 987654321
    nanoseconds: dict[int, int] = field(default_factory=lambda: {policy: (policy + 1) * 500_000_000 for policy in range(12)})
    ecc: dict[tuple[int, int], int] = field(default_factory=lambda: {(0, 0): 7, (1, 0): 2, (0, 1): 1007, (1, 1): 1002})
    errors: dict[str, int] = field(default_factory=dict)
    """Return codes by the name of the C function; those that are not here succeed."""
    lost: int = 0
    """Return code of every function that is about this GPU, the search for its handle included."""


@dataclass
class FakeDriver:
    """libnvidia-ml: C functions by name that fill in what they are pointed to and return a code."""

    gpus: list[FakeGpu]
    errors: dict[str, int] = field(default_factory=dict)
    """Return codes of functions that are not about one GPU."""
    missing: set[str] = field(default_factory=set)
    """Functions that this version does not have."""
    opened: int = 0
    calls: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda name: None
    known: dict[str, object] = field(default_factory=dict)
    """The functions that `pynvml` has looked up."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Make `pynvml` call this instead of the library of the machine, until the test is over."""
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", self.known)
        return self

    def lack(self, function: str) -> None:
        """Remove a function, as in another version of the driver."""
        self.missing.add(function)
        self.known.clear()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> int:
        self.calls.append(name)
        self.before(name)
        if code := self.errors.get(name, 0):
            return code
        if not self.opened and name != "nvmlInitWithFlags":
            return pynvml.NVML_ERROR_UNINITIALIZED
        if name in ("nvmlInitWithFlags", "nvmlShutdown"):
            self.opened += 1 if name == "nvmlInitWithFlags" else -1
            return pynvml.NVML_SUCCESS
        if name == "nvmlDeviceGetHandleByUUID":
            return self._by_uuid(*arguments)
        gpu = self.gpus[ctypes.cast(arguments[0], ctypes.c_void_p).value - 1000]
        return gpu.lost or gpu.errors.get(name, 0) or ANSWERS[name](gpu, *arguments[1:]) or pynvml.NVML_SUCCESS

    def _by_uuid(self, uuid: Any, handle: Any) -> int:
        wanted = [number for number, gpu in enumerate(self.gpus) if gpu.uuid == uuid.value.decode()]
        return self._point(handle, wanted[0]) if wanted else pynvml.NVML_ERROR_NOT_FOUND

    def _point(self, handle: Any, number: int) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p)).contents.value = 1000 + number
        return self.gpus[number].lost


def fill(reference: Any, **values: object) -> None:
    """Write into what `ctypes.byref` points to."""
    for name, value in values.items():
        setattr(target(reference), name, value)


def memory_v2(gpu: FakeGpu, memory: Any) -> int:
    """Answer the second version of the call, which must be asked for by its number."""
    fill(memory, used=gpu.used, reserved=gpu.reserved)
    return 0 if target(memory).version == pynvml.nvmlMemory_v2 else pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def temperature(gpu: FakeGpu, sensor: Any, value: Any) -> int:
    """Answer for the only sensor that there is."""
    fill(value, value=gpu.celsius)
    return 0 if sensor.value == pynvml.NVML_TEMPERATURE_GPU else pynvml.NVML_ERROR_INVALID_ARGUMENT


ANSWERS: dict[str, Callable[..., int | None]] = {
    "nvmlDeviceGetUUID": lambda gpu, text, _: setattr(text, "value", gpu.uuid.encode()),
    "nvmlDeviceGetUtilizationRates": lambda gpu, rates: fill(rates, gpu=gpu.utilization, memory=99),
    "nvmlDeviceGetMemoryInfo": lambda gpu, memory: fill(memory, used=gpu.used + gpu.reserved),
    "nvmlDeviceGetMemoryInfo_v2": memory_v2,
    "nvmlDeviceGetPowerUsage": lambda gpu, value: fill(value, value=gpu.milliwatts),
    "nvmlDeviceGetTemperature": temperature,
    "nvmlDeviceGetTemperatureV": lambda gpu, value: fill(value, temperature=gpu.celsius),
    "nvmlDeviceGetClockInfo": lambda gpu, kind, value: fill(value, value=gpu.clocks[kind.value]),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu, value: fill(value, value=gpu.millijoules),
    "nvmlDeviceGetViolationStatus": lambda gpu, policy, status: fill(
        status, violationTime=gpu.nanoseconds[policy.value], referenceTime=5
    ),
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter, value: fill(value, value=gpu.ecc[kind.value, counter.value]),
}
"""The functions about one GPU."""


def target(reference: Any) -> Any:
    """Return what `ctypes.byref` points to."""
    return reference._obj  # private: ctypes has no other way back from a reference


def older(*missing: str) -> ModuleType:
    """The package without some names, as one of its older versions; UUIDs as bytes."""
    module = ModuleType("pynvml")
    vars(module).update({name: value for name, value in vars(pynvml).items() if name not in missing})
    module.nvmlDeviceGetUUID = lambda handle: pynvml.nvmlDeviceGetUUID(handle).encode()
    return module
