"""Collector `gpu`: NVIDIA GPUs as their driver sees them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, Kind, LabelledRows, Spec
from torch_grad_exporter.resources.cuda_visible_devices import ORDER, SILENT, VISIBLE, Installed, visible
from torch_grad_exporter.resources.devices import DeviceStatistics
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

RETRY_SECONDS = 60.0
"""Between two tries to open NVML where it is not there."""

_Row = tuple[str, ...]
_Found = dict[Spec, dict[_Row, float]]


@dataclass(frozen=True, slots=True)
class _Question:
    """One value of a device: the calls of NVML, see `Library.ask`, and how the answer is read."""

    spec: Spec
    calls: tuple[tuple[str, ...], ...]
    """Of each the function, then the names of the constants that follow the device."""
    field: str = ""
    """The field of the answer, where that is a structure."""
    times: float = 1.0
    over: float = 1.0
    label: tuple[str, ...] = ()
    """The values of the labels after `device` and `uuid`."""


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
            "violationTime",  # In nanoseconds.
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
    """Families of the GPUs that this process uses, or will use as far as that is certain.

    `cuda`: the devices that PyTorch uses; before it uses any, those that CUDA will show by the `environment` are taken, and
    of several processes on the host each takes the one of its `local_rank`. Where NVML is not there, there is nothing.
    A value that cannot be had is absent; so is all of a GPU that has gone, until it answers again, and its counters go on
    from where they were. When no GPU answers, or NVML itself has gone, `collect` raises, and the next one opens NVML
    anew. `clock` in seconds.
    """

    def __init__(
        self,
        cuda: Callable[[], Iterable[DeviceStatistics]],
        *,
        nvml: Callable[[], ModuleType | None] = find_nvml,
        environment: Mapping[str, str] = os.environ,
        local_rank: int = 0,
        local_world_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cuda = cuda
        self._nvml = nvml
        self._environment = environment
        self._local_rank = local_rank
        self._alone = local_world_size == 1
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._library: Library | None = None
        self._retry_at = float("-inf")
        self._names: tuple[object, Mapping[str, str]] | None = None
        self._gpus: dict[str, Gpu] = {}
        self._rows = LabelledRows()
        self._totals: dict[Spec, dict[_Row, Rising[_Row]]] = {spec: {} for spec in SPECS if spec.kind is Kind.COUNTER}

    def collect(self) -> list[Family]:
        """The families as of now."""
        try:
            # One at a time: a collection that fails closes what the other one is using.
            with self._lock:
                return self._collect()
        finally:
            if self._closed:
                self.close()

    def close(self) -> None:
        """Gives NVML back, or has the collection that is under way do so. Nothing is shown afterwards."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self._lock.release()

    def _collect(self) -> list[Family]:
        library = self._opened()
        if library is None:
            return []
        found: _Found = {spec: {} for spec in SPECS}
        with contextlib.ExitStack() as undone:
            undone.callback(self._keep_rising, {spec: {} for spec in SPECS})
            undone.callback(self._give_back)
            self._ask_all(library, found)
            undone.pop_all()
        self._keep_rising(found)
        return [self._rows.family(spec, values) for spec, values in found.items()]

    def _ask_all(self, library: Library, found: _Found) -> None:
        """Adds the values of the GPUs. One that does not answer is left out; raises if none does."""
        failure: Exception | None = None
        for device, uuid in self._devices(library).items():
            try:
                self._ask(library, device, uuid, found)
            except library.closed:
                raise
            except library.error as error:
                self._gpus.pop(device, None)  # It may come back under another handle.
                failure = error.with_traceback(None)  # Which would hold this frame, and so itself.
        if failure is not None and not any(found.values()):
            raise failure

    def _ask(self, library: Library, device: str, uuid: str, found: _Found) -> None:
        """Adds the values of one GPU, all or none; one that NVML does not know has none."""
        if device not in self._gpus and (gpu := library.device(uuid)) is not None:
            self._gpus[device] = gpu
        if device in self._gpus:
            gpu = self._gpus[device]
            values = list(_values(library, gpu))
            if not values:
                library.probe(gpu)
            for spec, more, value in values:
                found[spec][device, gpu.uuid, *more] = value

    def _keep_rising(self, found: _Found) -> None:
        """Replaces counters by what they have risen to: a GPU that is reset, or a driver that is loaded anew, counts from 0."""
        for spec, totals in self._totals.items():
            values = found[spec]
            for row in {**totals, **values}:
                total = totals.setdefault(row, Rising())({row: values[row]} if row in values else {})
                if row in values:
                    values[row] = total

    def _opened(self) -> Library | None:
        if self._library is None and not self._closed and self._clock() >= self._retry_at:
            self._library = Library.open(self._nvml)
            self._retry_at = self._clock() + RETRY_SECONDS if self._library is None else float("-inf")
        return self._library

    def _give_back(self) -> None:
        library, self._library, self._names = self._library, None, None
        if library is not None:
            library.close()

    def _devices(self, library: Library) -> Mapping[str, str]:
        """UUIDs of the devices by their name in PyTorch, looked up again when others are used."""
        used = {
            device.device: device.uuid for device in self._cuda() if device.uuid is not None and device.device.startswith("cuda:")
        }
        wanted = tuple(used.items()) or (self._environment.get(VISIBLE), self._environment.get(ORDER))
        if self._names is not None and self._names[0] == wanted:
            return self._names[1]
        self._gpus.clear()
        installed = [] if used else library.installed()
        names = used or self._expected(installed)
        self._names = (wanted, names) if SILENT not in installed else None
        return names

    def _expected(self, installed: Sequence[Installed]) -> dict[str, str]:
        """UUIDs of the devices that this process will use, if it uses any."""
        uuids = visible(self._environment, installed)
        mine = len(uuids) == 1 or self._alone
        return {f"cuda:{index}": uuid for index, uuid in enumerate(uuids) if mine or index == self._local_rank}


def _values(library: Library, gpu: Gpu) -> Iterator[tuple[Spec, tuple[str, ...], float]]:
    """The values of a device from NVML: metric, further labels, value in the metric's unit."""
    for question in QUESTIONS:
        if (found := library.ask(gpu, *question.calls)) is not None:
            number = getattr(found, question.field) if question.field else found
            yield question.spec, question.label, number * question.times / question.over


COLLECTOR = Declaration(
    "gpu",
    (METRICS,),
    lambda context: GpuCollector(
        context.memory.snapshot,
        local_rank=context.identity.local_rank,
        local_world_size=context.identity.local_world_size,
    ),
    place=50,
    reads_devices=True,
)
