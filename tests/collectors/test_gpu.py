"""GPUs through NVML: which of them are shown, their values in base units, and what is lost when something fails."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from tests.support.catalogue import CATALOGUE
from tests.support.collected import series
from tests.support.fake_nvml import FakeDriver, FakeGpu, older
from torch_grad_exporter.collectors.cuda_memory import GPU_INFO
from torch_grad_exporter.collectors.gpu import QUESTIONS, GpuCollector
from torch_grad_exporter.resources.devices import DeviceStatistics

A, B, C = (f"{letter * 8}-8ff3-c2dc-3b0d-fafd804516ae" for letter in "abc")
MEMORY = "torch_gpu_memory_used_bytes"

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN


def used(**uuids: str | None) -> tuple[DeviceStatistics, ...]:
    """Return what the training thread publishes of devices in use, by their index."""
    return tuple(DeviceStatistics(f"cuda:{name[1:]}", *[0] * 10, uuid) for name, uuid in uuids.items())


@dataclass
class Scene:
    """A collector with a fake driver, devices in use and a clock."""

    driver: FakeDriver
    devices: tuple[DeviceStatistics, ...] = ()
    now: float = 1000.0
    module: ModuleType = pynvml

    def collector(self) -> GpuCollector:
        memory = SimpleNamespace(snapshot=lambda: self.devices)
        return GpuCollector(memory, nvml=self.module, clock=lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Return one GPU that CUDA uses."""
    return Scene(FakeDriver([FakeGpu(f"GPU-{A}")]).install(monkeypatch), used(_0=A))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Return three GPUs of one model that are not in use yet."""
    return Scene(FakeDriver([FakeGpu(f"GPU-{uuid}") for uuid in (A, B, C)]).install(monkeypatch))


def test_every_value(single: Scene) -> None:
    """All values of a GPU are shown in base units with its name in PyTorch and its UUID in NVML."""
    values = {
        ("utilization_ratio",): 0.57,
        ("memory_used_bytes",): 3 * 2**30,  # Without what the driver keeps for itself.
        ("power_watts",): 123.456,
        ("temperature_celsius",): 61,
        ("sm_clock_hertz",): 1_980_000_000,
        ("energy_joules_total",): 987654.321,
        ("throttled_seconds_total", "power"): 0.5,
        ("throttled_seconds_total", "thermal"): 1.0,
        ("throttled_seconds_total", "sync_boost"): 1.5,
        ("throttled_seconds_total", "board_limit"): 2.0,
        ("throttled_seconds_total", "reliability"): 3.0,
        ("ecc_errors_total", "corrected"): 7,
        ("ecc_errors_total", "uncorrected"): 2,
    }
    expected = {(f"torch_gpu_{name}", "cuda:0", f"GPU-{A}", *more): value for (name, *more), value in values.items()}
    assert series(single.collector()) == expected


def test_the_real_names() -> None:
    """Every function and constant that is asked for exists in nvidia-ml-py, and each metric of the catalogue has a question."""
    names = {name for question in QUESTIONS for call in question.calls for name in call}
    assert {name for name in names if not hasattr(pynvml, name)} == set()
    declared = {spec for spec in CATALOGUE.values() if spec.name.startswith("torch_gpu_")} - {GPU_INFO}
    assert {question.spec for question in QUESTIONS} == declared


def test_devices_in_use_are_found_by_uuid(three: Scene) -> None:
    """Each name has the values of its own GPU, whatever the order of CUDA and of the driver; others are not shown."""
    assert series(three.collector()) == {}
    three.driver.gpus[0].celsius, three.driver.gpus[2].celsius = 40, 80
    three.devices = used(_0=C, _1=A)
    temperatures = {key[1:]: value for key, value in series(three.collector()).items() if key[0] == "torch_gpu_temperature_celsius"}
    assert temperatures == {("cuda:0", f"GPU-{C}"): 80, ("cuda:1", f"GPU-{A}"): 40}


def test_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG device has memory and a UUID with its own prefix; values that it refuses are absent."""
    names = ["UtilizationRates", "PowerUsage", "Temperature", "TemperatureV", "ClockInfo", "TotalEnergyConsumption"]
    errors = {f"nvmlDeviceGet{name}": NOT_SUPPORTED for name in [*names, "ViolationStatus", "TotalEccErrors"]}
    part, other = FakeGpu(f"MIG-{B}", used=5, errors=errors), FakeGpu(f"MIG-{C}")
    driver = FakeDriver([FakeGpu(f"GPU-{A}"), part, other]).install(monkeypatch)
    assert series(Scene(driver, used(_0=B)).collector()) == {(MEMORY, "cuda:0", f"MIG-{B}"): 5}


FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": "torch_gpu_utilization_ratio",
    "nvmlDeviceGetPowerUsage": "torch_gpu_power_watts",
    "nvmlDeviceGetClockInfo": "torch_gpu_sm_clock_hertz",
    "nvmlDeviceGetTotalEnergyConsumption": "torch_gpu_energy_joules_total",
    "nvmlDeviceGetViolationStatus": "torch_gpu_throttled_seconds_total",
    "nvmlDeviceGetTotalEccErrors": "torch_gpu_ecc_errors_total",
}
EVERYTHING = (
    *FUNCTIONS, *(f"nvmlDeviceGet{name}" for name in ("Temperature", "TemperatureV", "MemoryInfo", "MemoryInfo_v2")),
)  # fmt: skip
REFUSALS = {
    NOT_SUPPORTED, INVALID, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_DEPRECATED,
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_that_is_refused(single: Scene, function: str) -> None:
    """A value that a device, a driver or an older package does not have is absent, and all others are shown."""
    everything = series(single.collector())
    rest = {key: value for key, value in everything.items() if key[0] != FUNCTIONS[function]}
    assert len(rest) < len(everything)
    for code in (*REFUSALS, UNKNOWN):
        single.driver.gpus[0].errors = {function: code}
        assert series(single.collector()) == rest
    single.driver.gpus[0].errors = {}
    single.module = older(function)
    assert series(single.collector()) == rest
    single.module = pynvml
    single.driver.lack(function)
    assert series(single.collector()) == rest


def test_memory_of_older_drivers(single: Scene) -> None:
    """Without the second version of the call the first is used, which counts the driver's reserve as used."""
    key = (MEMORY, "cuda:0", f"GPU-{A}")
    assert series(single.collector())[key] == 3 * 2**30
    for errors in ({"nvmlDeviceGetMemoryInfo_v2": code} for code in REFUSALS):
        single.driver.gpus[0].errors = errors
        assert series(single.collector())[key] == 3 * 2**30 + 600 * 2**20
    single.driver.gpus[0].errors = {}
    single.module = older("nvmlMemory_v2")
    assert series(single.collector())[key] == 3 * 2**30 + 600 * 2**20
    single.driver.gpus[0].errors = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    assert key not in series(single.collector())


def test_no_nvml(single: Scene) -> None:
    """Without library, driver or permission nothing is shown and nothing fails; it is tried again once a minute."""
    single.driver.errors["nvmlInitWithFlags"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    collector = single.collector()
    assert series(collector) == {}
    single.driver.errors.clear()
    single.now += 59.9
    assert series(collector) == {}
    assert single.driver.calls == ["nvmlInitWithFlags"]
    single.now += 0.2
    assert len(series(collector)) == 13


def without(everything: dict[tuple[str, ...], float], uuid: str) -> dict[tuple[str, ...], float]:
    """Return the series of all other GPUs."""
    rest = {key: value for key, value in everything.items() if key[2] != f"GPU-{uuid}"}
    assert len(rest) == len(everything) - 13
    return rest


def test_a_lost_gpu_leaves_the_others(three: Scene) -> None:
    """All values of a lost GPU are absent and the others' stay; it is back as soon as it answers."""
    three.devices = used(_0=A, _1=B, _2=C)
    collector = three.collector()
    before = series(collector)
    lost = three.driver.gpus[1]
    lost.errors = {"nvmlDeviceGetPowerUsage": LOST}
    for _ in range(3):
        assert series(collector) == without(before, B)
    lost.errors = {}
    assert series(collector) == before
    assert three.driver.calls.count("nvmlInitWithFlags") == 1


def test_a_gpu_that_answers_nothing_is_lost(three: Scene) -> None:
    """A GPU that answers nothing is lost; its handle is looked up again each time, since it may be stale."""
    three.devices = used(_0=A, _1=B)
    collector = three.collector()
    before = series(collector)
    three.driver.gpus[1].errors = dict.fromkeys(EVERYTHING, UNKNOWN)
    assert series(collector) == without(before, B)
    three.driver.gpus[1].uuid = "GPU-another"
    for _ in range(2):
        assert series(collector) == without(before, B)
    three.driver.gpus[1].errors, three.driver.gpus[1].uuid = {}, f"GPU-{B}"
    assert [series(collector), series(collector)] == [before, before]


def test_all_gpus_lost(three: Scene) -> None:
    """If no GPU answers the collection fails and closes NVML; one GPU that returns is enough for the next one."""
    three.devices = used(_0=A, _1=B, _3=A.replace("a", "f"))
    collector = three.collector()
    before = series(collector)
    for gpu in three.driver.gpus:
        gpu.lost = LOST
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            collector.collect()
        assert three.driver.opened == 0
    three.driver.gpus[0].lost = 0
    assert series(collector) == without(before, B)


def counters(collector: GpuCollector, uuid: str) -> tuple[float, ...]:
    """Return energy in joules, seconds held down by power and corrected errors of a GPU."""
    shown = {(key[0], *key[3:]): value for key, value in series(collector).items() if key[2] == f"GPU-{uuid}"}
    names = (("energy_joules_total",), ("throttled_seconds_total", "power"), ("ecc_errors_total", "corrected"))
    return tuple(shown[f"torch_gpu_{name}", *label] for name, *label in names if (f"torch_gpu_{name}", *label) in shown)


def test_counters_of_a_gpu_that_comes_back(three: Scene) -> None:
    """Counters continue by what they gained meanwhile, or from 0 after a reset; they never fall and count nothing twice."""
    three.devices = used(_0=A, _1=B)
    collector, gpu = three.collector(), three.driver.gpus[1]

    def at(joules: int, seconds: int, errors: int) -> tuple[float, ...]:
        gpu.lost, gpu.millijoules = 0, joules * 1000
        gpu.nanoseconds[pynvml.NVML_PERF_POLICY_POWER], gpu.ecc[0, 0] = seconds * 10**9, errors
        return counters(collector, B)

    def lose() -> None:
        gpu.lost = LOST
        assert counters(collector, B) == ()

    assert at(1000, 10, 7) == (1000, 10, 7)
    assert at(1001, 11, 7) == (1001, 11, 7)
    lose()
    assert at(1005, 11, 8) == (1005, 11, 8)
    lose()
    lose()
    assert at(3, 1, 0) == (1008, 12, 8)
    assert at(5, 2, 1) == (1010, 13, 9)
    assert at(4, 2, 1) == (1010, 13, 9)
    assert at(6, 2, 1) == (1012, 13, 9)
    gpu.errors = {"nvmlDeviceGetTotalEnergyConsumption": UNKNOWN}
    assert at(7, 3, 1) == (14, 9)
    gpu.errors = {}
    assert at(8, 3, 1) == (1014, 14, 9)


def test_a_driver_that_goes(single: Scene) -> None:
    """The collection fails while NVML is shut down by others or cannot be opened, and recovers."""
    collector = single.collector()
    before = series(collector)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        collector.collect()
    single.driver.opened, single.driver.errors = 0, {"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
    with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
        collector.collect()
    single.driver.errors.clear()
    assert series(collector) == before


def test_closing_leaves_nvml_to_others(single: Scene) -> None:
    """Neither closing twice nor a failure shuts NVML down for another part of the program; nothing is shown afterwards."""
    pynvml.nvmlInit()
    collector = single.collector()
    single.driver.gpus[0].errors = {"nvmlDeviceGetClockInfo": LOST}
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        collector.collect()
    single.driver.gpus[0].errors = {}
    assert collector.collect()
    assert single.driver.opened == 2
    collector.close()
    collector.close()
    assert single.driver.opened == 1
    assert series(collector) == {}
