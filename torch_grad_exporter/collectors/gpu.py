"""Collector `gpu`: the NVIDIA GPUs that PyTorch uses, as their driver sees them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, Kind, LabelledRows, Spec
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.resources.nvml import Gpu, Library, find_nvml
from torch_grad_exporter.resources.readings import Rising

METRICS = Section("GPUs")

GPU_UTILIZATION = METRICS.gauge(
    "torch_gpu_utilization_ratio", "Share of the driver's last sample period in which a kernel ran on the GPU.", "device", "uuid"
)
GPU_MEMORY_USED = METRICS.gauge(
    "torch_gpu_memory_used_bytes", "Memory of the GPU that all processes on it use.", "device", "uuid", unit="bytes"
)
GPU_POWER = METRICS.gauge("torch_gpu_power_watts", "Power that the GPU draws.", "device", "uuid", unit="watts")
GPU_TEMPERATURE = METRICS.gauge("torch_gpu_temperature_celsius", "Temperature of the GPU.", "device", "uuid", unit="celsius")
GPU_SM_CLOCK = METRICS.gauge(
    "torch_gpu_sm_clock_hertz", "Clock frequency of the GPU's streaming multiprocessors.", "device", "uuid", unit="hertz"
)
GPU_ENERGY = METRICS.counter(
    "torch_gpu_energy_joules_total",
    "Energy that the GPU has used since its driver was loaded; continues across resets of the GPU or its driver.",
    "device",
    "uuid",
    unit="joules",
    older=True,
)
GPU_THROTTLED = METRICS.counter(
    "torch_gpu_throttled_seconds_total",
    "Time for which the GPU's clocks were held down, by reason; reasons may overlap.",
    "device", "uuid", "reason",
    unit="seconds",
    older=True,
)  # fmt: skip
GPU_ECC_ERRORS = METRICS.counter(
    "torch_gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, by kind: corrected or uncorrected; continues across resets of the GPU or its driver.",
    "device", "uuid", "kind",
    older=True,
)  # fmt: skip

# Between two tries to open NVML where it is not there.
RETRY_SECONDS = 60.0

_Row = tuple[str, ...]
_Values = dict[Spec, dict[_Row, float]]


@dataclass(frozen=True, slots=True)
class _Question:
    """One value of a device.

    Attributes:
        spec: Its metric.
        calls: See `Library.ask`: of each the function, then the names of the constants that follow the device.
        field: The field of the answer, where that is a structure.
        times, over: The metric's units in one of NVML's, as a fraction, which is exact.
        label: The values of the labels after `device` and `uuid`.
    """

    spec: Spec
    calls: tuple[tuple[str, ...], ...]
    field: str = ""
    times: float = 1.0
    over: float = 1.0
    label: tuple[str, ...] = ()


# NVML's own names of its policies. Low utilisation is not among them: a GPU with nothing to do is not held down.
_REASONS = ("power", "thermal", "sync_boost", "board_limit", "reliability")
_KINDS = ("corrected", "uncorrected")

_TEMPERATURE = "NVML_TEMPERATURE_GPU"

QUESTIONS = (
    _Question(GPU_UTILIZATION, (("nvmlDeviceGetUtilizationRates",),), "gpu", over=100),
    # Older drivers know only the second call, and count what they keep for themselves as used.
    _Question(GPU_MEMORY_USED, (("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)), "used"),
    _Question(GPU_POWER, (("nvmlDeviceGetPowerUsage",),), over=1e3),
    # NVIDIA means to remove the first call.
    _Question(GPU_TEMPERATURE, (("nvmlDeviceGetTemperature", _TEMPERATURE), ("nvmlDeviceGetTemperatureV", _TEMPERATURE))),
    _Question(GPU_SM_CLOCK, (("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),), times=1e6),
    _Question(GPU_ENERGY, (("nvmlDeviceGetTotalEnergyConsumption",),), over=1e3),
    *(
        _Question(
            GPU_THROTTLED,
            (("nvmlDeviceGetViolationStatus", f"NVML_PERF_POLICY_{reason.upper()}"),),
            "violationTime",  # in nanoseconds
            over=1e9,
            label=(reason,),
        )
        for reason in _REASONS
    ),
    *(
        _Question(
            GPU_ECC_ERRORS,
            (("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}", "NVML_VOLATILE_ECC"),),
            label=(kind,),
        )
        for kind in _KINDS
    ),
)
SPECS = dict.fromkeys(question.spec for question in QUESTIONS)


class GpuCollector:
    """Families of the GPUs that this process uses.

    Where NVML is not there, there is nothing. A value that cannot be read is absent; so is all of a GPU that has gone, until it
    answers again, and its counters go on from where they were. When no GPU answers, or NVML itself has gone, `collect` raises, and
    the next one opens NVML again.

    Args:
        memory: The devices that PyTorch uses.
        nvml: The package's module, None for the installed one.
        clock: In seconds.
    """

    def __init__(
        self, memory: DeviceMemory, *, nvml: ModuleType | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._nvml = nvml or find_nvml()
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._library: Library | None = None
        self._retry_at = float("-inf")
        self._gpus: dict[str, Gpu] = {}
        self._rows = LabelledRows()
        self._totals: dict[Spec, dict[_Row, Rising[_Row]]] = {spec: {} for spec in SPECS if spec.kind is Kind.COUNTER}

    def collect(self) -> list[Family]:
        """Return the families of now."""
        try:
            # One at a time: a collection that fails closes what the other one is using.
            with self._lock:
                library = self._opened()
                return [] if library is None else self._families(library)
        finally:
            if self._closed:
                self.close()

    def close(self) -> None:
        """Give NVML back, or let the collection that is under way do so. Nothing is shown afterwards."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self._lock.release()

    def _families(self, library: Library) -> list[Family]:
        values: _Values = {spec: {} for spec in SPECS}
        with contextlib.ExitStack() as undone:
            undone.callback(self._keep_rising, {spec: {} for spec in SPECS})
            undone.callback(self._give_back)
            self._ask_all(library, values)
            undone.pop_all()
        self._keep_rising(values)
        return [self._rows.family(spec, rows) for spec, rows in values.items()]

    def _ask_all(self, library: Library, values: _Values) -> None:
        """Add the values of the GPUs. One that does not answer is left out; raises if none does."""
        failure: Exception | None = None
        for device in self._memory.snapshot():
            if device.uuid is not None and device.device.startswith("cuda:"):
                try:
                    self._ask(library, device.device, device.uuid, values)
                except library.closed:
                    raise
                except library.error as error:
                    self._gpus.pop(device.uuid, None)  # it may come back under another handle
                    failure = error.with_traceback(None)  # which would hold this frame, and so itself
        if failure is not None and not any(values.values()):
            raise failure

    def _ask(self, library: Library, device: str, uuid: str, values: _Values) -> None:
        """Add the values of one GPU, all or none; one that NVML does not know has none."""
        if uuid not in self._gpus and (listed := library.device(uuid)) is not None:
            self._gpus[uuid] = listed
        if (gpu := self._gpus.get(uuid)) is None:
            return
        answers = [(question, answer) for question in QUESTIONS if (answer := library.ask(gpu, *question.calls)) is not None]
        if not answers:
            library.probe(gpu)
        for question, answer in answers:
            number = getattr(answer, question.field) if question.field else answer
            values[question.spec][device, gpu.uuid, *question.label] = number * question.times / question.over

    def _keep_rising(self, values: _Values) -> None:
        """Replace counters by their risen totals: a GPU that is reset, or a driver that is loaded again, counts from 0."""
        for spec, totals in self._totals.items():
            rows = values[spec]
            for row in {**totals, **rows}:
                total = totals.setdefault(row, Rising())({row: rows[row]} if row in rows else {})
                if row in rows:
                    rows[row] = total

    def _opened(self) -> Library | None:
        if self._library is None and self._nvml is not None and not self._closed and self._clock() >= self._retry_at:
            self._library = Library.open(self._nvml)
            self._retry_at = self._clock() + RETRY_SECONDS if self._library is None else float("-inf")
        return self._library

    def _give_back(self) -> None:
        library, self._library = self._library, None
        self._gpus.clear()
        if library is not None:
            library.close()


COLLECTOR = Declaration("gpu", (METRICS,), lambda context: GpuCollector(context.memory), place=50, reads_devices=True)
