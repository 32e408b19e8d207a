"""GPUs through NVML: which ones, their values in base units, and what happens where something is missing or lost."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pynvml
import pytest
import torch

from tests.support.catalogue import CATALOGUE
from tests.support.collected import series
from tests.support.fake_nvml import FakeDriver, FakeGpu, older
from tests.support.tools import PATIENCE
from torch_grad_exporter.collectors.exporter import EXPORTER_COLLECTOR_SUCCESS
from torch_grad_exporter.collectors.gpu import QUESTIONS, GpuCollector
from torch_grad_exporter.collectors.host import HOST_CPU
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import scalar
from torch_grad_exporter.resources.cuda_visible_devices import Installed, visible
from torch_grad_exporter.resources.devices import DeviceStatistics
from torch_grad_exporter.resources.nvml import find_nvml

A, B, C = (f"{letter * 8}-8ff3-c2dc-3b0d-fafd804516ae" for letter in "abc")
MEMORY = "torch_gpu_memory_used_bytes"

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN


def used(**uuids: str | None) -> tuple[DeviceStatistics, ...]:
    """What the training thread publishes of devices in use, by their index."""
    return tuple(DeviceStatistics(f"cuda:{name[1:]}", *[0] * 10, uuid) for name, uuid in uuids.items())


@dataclass
class Scene:
    """A collector with a made driver, devices in use, environment and clock."""

    driver: FakeDriver
    devices: tuple[DeviceStatistics, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    now: float = 1000.0
    module: ModuleType | None = pynvml

    def collector(self, **more: int) -> GpuCollector:
        return GpuCollector(
            lambda: self.devices, nvml=lambda: self.module, environment=self.environment, clock=lambda: self.now, **more
        )

    def shown(self, **more: int) -> dict[str, str]:
        """The devices with their UUIDs."""
        return {key[1]: key[2] for key in series(self.collector(**more)) if key[0] == MEMORY}


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """One GPU that CUDA uses."""
    return Scene(FakeDriver([FakeGpu(f"GPU-{A}")]).install(monkeypatch), used(_0=A))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Three GPUs of one model that are not in use yet."""
    return Scene(FakeDriver([FakeGpu(f"GPU-{uuid}") for uuid in (A, B, C)]).install(monkeypatch))


def test_every_value(one: Scene) -> None:
    """All values of a GPU, in base units, with its name in PyTorch and its UUID as NVML prints it."""
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
    assert series(one.collector()) == expected


def test_the_real_names() -> None:
    """Every function and constant that is asked for exists in nvidia-ml-py, and so do the metrics of the catalogue."""
    names = {name for question in QUESTIONS for call in question.calls for name in call}
    assert {name for name in names if not hasattr(pynvml, name)} == set()
    declared = {spec for spec in CATALOGUE.values() if spec.name.startswith("torch_gpu_")}
    assert {question.spec for question in QUESTIONS} == declared


def test_devices_in_use_are_found_by_uuid(three: Scene) -> None:
    """Whatever the order of CUDA and of the driver, each name carries the values of its own GPU."""
    three.driver.gpus[0].celsius, three.driver.gpus[2].celsius = 40, 80
    three.devices, three.environment = used(_0=C, _1=A), {"CUDA_VISIBLE_DEVICES": "1"}
    found = series(three.collector())
    temperatures = {key[1:]: value for key, value in found.items() if key[0] == "torch_gpu_temperature_celsius"}
    assert temperatures == {("cuda:0", f"GPU-{C}"): 80, ("cuda:1", f"GPU-{A}"): 40}


def test_labels_do_not_depend_on_order(three: Scene) -> None:
    """The order in which the devices are published changes no series."""
    three.devices = used(_2=A, _0=B)
    first = series(three.collector())
    three.devices = used(_0=B, _2=A)
    assert series(three.collector()) == first


def test_only_cudas_own_devices(three: Scene) -> None:
    """A device without a UUID, or of another kind, is none that NVML knows; a UUID that it does not know is absent."""
    three.devices = (*used(_0=None, _1=B, _2=A.replace("a", "f")), DeviceStatistics("xpu:0", *[0] * 10, C))
    assert three.shown() == {"cuda:1": f"GPU-{B}"}


@pytest.mark.parametrize("refusal", [NOT_SUPPORTED, INVALID], ids=["not supported", "invalid argument"])
def test_mig(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    """A MIG device has a UUID with a prefix of its own; it has memory, and what it refuses is absent, in either way.

    Of several that are visible CUDA shows the first.
    """
    names = ["UtilizationRates", "PowerUsage", "Temperature", "TemperatureV", "ClockInfo", "TotalEnergyConsumption"]
    errors = {f"nvmlDeviceGet{name}": refusal for name in [*names, "ViolationStatus", "TotalEccErrors"]}
    part = FakeGpu(f"MIG-{B}", listed=False, used=5, errors=errors)
    other = FakeGpu(f"MIG-{C}", listed=False)
    driver = FakeDriver([FakeGpu(f"GPU-{A}", partitioned=True), part, other]).install(monkeypatch)
    expected = {(MEMORY, "cuda:0", f"MIG-{B}"): 5}
    assert series(Scene(driver, used(_0=B)).collector()) == expected
    assert series(Scene(driver, environment={"CUDA_VISIBLE_DEVICES": f"MIG-{B},MIG-{C}"}).collector()) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [A, B, C]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [C, A]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [B]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,2"}, [B]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": f"GPU-{B},GPU-{A}"}, [B, A]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-a"}, [C, A]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-dead,GPU-a"}, [B]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}, [B]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-bb"}, []),
        ({"CUDA_VISIBLE_DEVICES": f"MIG-{A}"}, []),
    ],
)
def test_before_cuda_is_initialised(three: Scene, environment: Mapping[str, str], expected: list[str]) -> None:
    """The GPUs that CUDA will show, in its order."""
    three.environment |= environment
    assert three.shown() == {f"cuda:{index}": f"GPU-{uuid}" for index, uuid in enumerate(expected)}


def test_visible_devices_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lists mean what PyTorch's own reading of the variable makes of them."""
    uuids = [f"GPU-{uuid}" for uuid in (A, B, C, A[:4] + "ffff" + A[8:])]
    entries = ["0", "1", "2", "3", "4", "-1", "", " 1", "2x", "x2", "+3", *uuids, "GPU-b", "GPU-c", "GPU-a", "GPU-aaaaf", "GPU-x"]
    rng = random.Random(7)
    seen = set()
    for _ in range(3000):
        listed = ",".join(rng.choices(entries[:11] if rng.random() < 0.5 else entries, k=rng.randint(1, 4)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        parsed = torch.cuda._parse_visible_devices()
        if parsed and isinstance(parsed[0], str):
            parsed = torch.cuda._transform_uuid_to_ordinals(parsed, uuids)
        expected = []
        for ordinal in parsed:
            if ordinal >= len(uuids):
                break
            expected.append(uuids[ordinal])
        found = visible({"CUDA_VISIBLE_DEVICES": listed}, [Installed(uuid, "same") for uuid in uuids])
        assert found == tuple(expected), listed
        seen.add(found)
    assert len(seen) > 20


def test_indices_of_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the fastest first, so with different GPUs an index says nothing until CUDA tells or is told to keep the order."""
    driver = FakeDriver([FakeGpu(f"GPU-{A}", "NVIDIA T400"), FakeGpu(f"GPU-{B}")]).install(monkeypatch)
    scene = Scene(driver)
    assert scene.shown() == {}
    scene.environment["CUDA_VISIBLE_DEVICES"] = "1"
    assert scene.shown() == {}
    scene.environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert scene.shown() == {"cuda:0": f"GPU-{B}"}
    scene.environment = {"CUDA_VISIBLE_DEVICES": f"GPU-{B},GPU-{A}"}
    assert scene.shown() == {"cuda:0": f"GPU-{B}", "cuda:1": f"GPU-{A}"}
    scene.environment, scene.devices = {}, used(_0=B)
    assert scene.shown() == {"cuda:0": f"GPU-{B}"}


def test_a_partitioned_gpu(three: Scene) -> None:
    """CUDA shows a MIG device in the place of a GPU that is cut into some: until it tells which, there is none."""
    three.driver.gpus[1].partitioned = True
    assert three.shown() == {}
    three.environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{B}"
    assert three.shown() == {}
    three.environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{C}"
    assert three.shown() == {"cuda:0": f"GPU-{C}"}


def test_a_gpu_that_others_have(three: Scene) -> None:
    """One that this process may not use is not counted, as CUDA does not."""
    three.driver.gpus[0].errors = {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_NO_PERMISSION}
    assert three.shown() == {"cuda:0": f"GPU-{B}", "cuda:1": f"GPU-{C}"}


def test_several_processes_on_the_host(three: Scene) -> None:
    """Before CUDA tells, each rank shows the visible device of its own number, or the only one there is."""
    assert three.shown(local_rank=1, local_world_size=3) == {"cuda:1": f"GPU-{B}"}
    assert three.shown(local_rank=3, local_world_size=4) == {}
    three.environment["CUDA_VISIBLE_DEVICES"] = "2"
    assert three.shown(local_rank=1, local_world_size=3) == {"cuda:0": f"GPU-{C}"}
    three.devices = used(_0=C, _1=A)
    assert len(three.shown(local_rank=1, local_world_size=3)) == 2


FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": "torch_gpu_utilization_ratio",
    "nvmlDeviceGetPowerUsage": "torch_gpu_power_watts",
    "nvmlDeviceGetClockInfo": "torch_gpu_sm_clock_hertz",
    "nvmlDeviceGetTotalEnergyConsumption": "torch_gpu_energy_joules_total",
    "nvmlDeviceGetViolationStatus": "torch_gpu_throttled_seconds_total",
    "nvmlDeviceGetTotalEccErrors": "torch_gpu_ecc_errors_total",
}
EVERYTHING = (
    *FUNCTIONS,
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
)
REFUSALS = {
    NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_DEPRECATED,
    INVALID,
}
FAILURES = {UNKNOWN, pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_IRQ_ISSUE, pynvml.NVML_ERROR_RESET_REQUIRED}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_that_is_refused(one: Scene, function: str) -> None:
    """Whichever way a device, a driver or an older package fails to tell one value: it is absent, and all the others are there."""
    everything = series(one.collector())
    rest = {key: value for key, value in everything.items() if key[0] != FUNCTIONS[function]}
    assert len(rest) < len(everything)
    for code in REFUSALS | FAILURES:
        one.driver.gpus[0].errors = {function: code}
        assert series(one.collector()) == rest
    one.driver.gpus[0].errors = {}
    one.module = older(function)
    assert series(one.collector()) == rest
    one.module = pynvml
    one.driver.missing = {function}
    pynvml._nvmlGetFunctionPointer_cache.clear()
    assert series(one.collector()) == rest


def test_a_constant_that_is_not_there(one: Scene) -> None:
    """A reason that an older package does not know is absent, and the other reasons are there."""
    one.module = older("NVML_PERF_POLICY_RELIABILITY")
    assert {key[3] for key in series(one.collector()) if "throttled" in key[0]} == {"power", "thermal", "sync_boost", "board_limit"}


def test_temperature_has_two_functions(one: Scene) -> None:
    """Where the old one is gone the new one answers; without both it is absent."""
    one.driver.missing = {"nvmlDeviceGetTemperature"}
    assert series(one.collector())["torch_gpu_temperature_celsius", "cuda:0", f"GPU-{A}"] == 61
    one.driver.missing |= {"nvmlDeviceGetTemperatureV"}
    pynvml._nvmlGetFunctionPointer_cache.clear()
    assert not any("celsius" in key[0] for key in series(one.collector()))


def test_memory_of_older_drivers(one: Scene) -> None:
    """Without the second version of the call the first one answers, which counts the driver's reserve as used."""
    key = (MEMORY, "cuda:0", f"GPU-{A}")
    assert series(one.collector())[key] == 3 * 2**30
    for errors in ({"nvmlDeviceGetMemoryInfo_v2": code} for code in REFUSALS):
        one.driver.gpus[0].errors = errors
        assert series(one.collector())[key] == 3 * 2**30 + 600 * 2**20
    one.driver.gpus[0].errors = {}
    one.module = older("nvmlMemory_v2")
    assert series(one.collector())[key] == 3 * 2**30 + 600 * 2**20
    one.driver.gpus[0].errors = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    assert key not in series(one.collector())


@pytest.mark.parametrize("code", FAILURES)
def test_memory_that_cannot_be_told(one: Scene, code: int) -> None:
    """A failure is no older driver: there is no value, rather than one that has the driver's reserve in it."""
    everything = series(one.collector())
    one.driver.gpus[0].errors = {"nvmlDeviceGetMemoryInfo_v2": code}
    assert series(one.collector()) == {key: value for key, value in everything.items() if key[0] != MEMORY}


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_no_nvml(one: Scene, code: int) -> None:
    """Without library, driver or permission nothing is shown and nothing fails; it is tried again once a minute."""
    one.driver.errors["nvmlInitWithFlags"] = code
    collector = one.collector()
    assert series(collector) == {}
    one.driver.errors.clear()
    one.now += 59.9
    assert series(collector) == {}
    assert one.driver.calls == ["nvmlInitWithFlags"]
    one.now += 0.2
    assert len(series(collector)) == 13


def test_no_package(one: Scene) -> None:
    """Without nvidia-ml-py nothing is shown; and once it can be imported, everything."""
    one.module = None
    collector = one.collector()
    assert series(collector) == {}
    one.module, one.now = pynvml, one.now + 61
    assert len(series(collector)) == 13


def test_finding_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is nvidia-ml-py's, and `None` where it is not installed."""
    assert find_nvml() is pynvml
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_nvml() is None


def test_a_gpu_that_is_lost(one: Scene) -> None:
    """The collection fails and gives NVML back; the next one opens it anew, and shows everything when the GPU is back."""
    collector = one.collector()
    before = series(collector)
    one.driver.gpus[0].errors = {"nvmlDeviceGetPowerUsage": LOST}
    for _ in range(3):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            collector.collect()
        assert one.driver.opened == 0
    one.driver.gpus[0].errors = {}
    assert series(collector) == before
    assert one.driver.opened == 1


def without(everything: dict[tuple[str, ...], float], uuid: str) -> dict[tuple[str, ...], float]:
    """The series of all other GPUs."""
    rest = {key: value for key, value in everything.items() if key[2] != f"GPU-{uuid}"}
    assert len(rest) == len(everything) - 13
    return rest


@pytest.mark.parametrize("first", [*EVERYTHING, None])
def test_a_lost_gpu_leaves_the_others(three: Scene, first: str | None) -> None:
    """Whichever question finds out, all its values are absent and the others' stay; it is back as soon as it answers."""
    three.devices = used(_0=A, _1=B, _2=C)
    collector = three.collector()
    before = series(collector)
    lost = three.driver.gpus[1]
    if first is None:
        lost.lost = LOST
    else:
        # Of a pair of functions the second one is asked only where the first one is refused.
        pairs = {"nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature", "nvmlDeviceGetMemoryInfo": "nvmlDeviceGetMemoryInfo_v2"}
        lost.errors = {first: LOST, **({pairs[first]: NOT_SUPPORTED} if first in pairs else {})}
    for _ in range(3):
        assert series(collector) == without(before, B)
    lost.lost, lost.errors = 0, {}
    assert series(collector) == before
    assert three.driver.calls.count("nvmlInitWithFlags") == 1


def test_a_gpu_that_answers_nothing_is_lost(three: Scene) -> None:
    """Also where no single code says so. Its handle, which may be stale, is not used again: it is looked up each time."""
    three.devices = used(_0=A, _1=B)
    collector = three.collector()
    before = series(collector)
    three.driver.gpus[1].errors = dict.fromkeys(EVERYTHING, UNKNOWN)
    assert series(collector) == without(before, B)
    three.driver.gpus[1].uuid = "GPU-another"
    three.driver.calls.clear()
    for _ in range(2):
        assert series(collector) == without(before, B)
    assert three.driver.calls.count("nvmlDeviceGetHandleByUUID") == 4  # Under the prefix of a GPU and that of a MIG device.
    three.driver.gpus[1].errors, three.driver.gpus[1].uuid = {}, f"GPU-{B}"
    three.driver.calls.clear()
    assert [series(collector), series(collector)] == [before, before]
    assert three.driver.calls.count("nvmlDeviceGetHandleByUUID") == 1


def test_all_gpus_lost(three: Scene) -> None:
    """When none answers any more the collection fails and gives NVML back; one that returns is enough for the next one."""
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


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_driver_that_goes_is_no_lost_gpu(three: Scene, function: str, code: int) -> None:
    """What says that NVML itself has gone fails and opens it anew, whichever GPU was asked, and though another has answered."""
    three.devices = used(_0=A, _1=B)
    collector = three.collector()
    before = series(collector)
    three.driver.gpus[1].errors = {function: code}
    with pytest.raises(pynvml.NVMLError):
        collector.collect()
    assert three.driver.opened == 0
    three.driver.gpus[1].errors = {}
    assert series(collector) == before
    assert three.driver.opened == 1


def counters(collector: GpuCollector, uuid: str) -> tuple[float, ...]:
    """Energy in joules, seconds held down by power and corrected errors of a GPU."""
    shown = {(key[0], *key[3:]): value for key, value in series(collector).items() if key[2] == f"GPU-{uuid}"}
    names = (("energy_joules_total",), ("throttled_seconds_total", "power"), ("ecc_errors_total", "corrected"))
    return tuple(shown[f"torch_gpu_{name}", *label] for name, *label in names if (f"torch_gpu_{name}", *label) in shown)


@pytest.mark.parametrize("others", [True, False])
def test_counters_of_a_gpu_that_comes_back(three: Scene, others: bool) -> None:
    """They go on: by what they have gained meanwhile, or from 0 after a reset; never back, and nothing twice."""
    three.devices = used(_0=A, _1=B) if others else used(_1=B)
    collector, gpu = three.collector(), three.driver.gpus[1]

    def at(joules: int, seconds: int, errors: int) -> tuple[float, ...]:
        gpu.lost, gpu.millijoules = 0, joules * 1000
        gpu.nanoseconds[pynvml.NVML_PERF_POLICY_POWER], gpu.ecc[0, 0] = seconds * 10**9, errors
        return counters(collector, B)

    def lose() -> None:
        gpu.lost = LOST
        if others:
            assert counters(collector, B) == ()
        else:
            with pytest.raises(pynvml.NVMLError_GpuIsLost):
                collector.collect()

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


def test_a_gpu_that_is_silent_before_cuda_is_initialised(three: Scene) -> None:
    """Which name the others then have is not certain, but for those that are visible by their whole UUID; nothing fails."""
    collector = three.collector()
    for code in (LOST, UNKNOWN):
        three.driver.gpus[1].lost = code
        three.environment.clear()
        assert series(collector) == {}
        three.environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        assert series(collector) == {}
        three.environment["CUDA_VISIBLE_DEVICES"] = "GPU-c"
        assert series(collector) == {}
        three.environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{C},GPU-{A},GPU-{B}"
        assert {key[1:3] for key in series(collector)} == {("cuda:0", f"GPU-{C}"), ("cuda:1", f"GPU-{A}")}
        three.driver.gpus[1].lost = 0
        assert {key[1] for key in series(collector)} == {"cuda:0", "cuda:1", "cuda:2"}


def test_gpus_that_are_all_silent_before_cuda_is_initialised(three: Scene) -> None:
    """That is a failure; where the driver says that it has gone, one GPU is enough."""
    collector = three.collector()
    for gpu in three.driver.gpus:
        gpu.lost = LOST
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        collector.collect()
    for gpu in three.driver.gpus:
        gpu.lost = 0
    three.driver.gpus[1].lost = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        collector.collect()
    assert three.driver.opened == 0
    three.driver.gpus[1].lost = 0
    assert len(series(collector)) == 3 * 13


def test_a_driver_that_goes(one: Scene) -> None:
    """So it is when another part of the program has shut NVML down, or when it cannot be opened again."""
    collector = one.collector()
    before = series(collector)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        collector.collect()
    one.driver.opened, one.driver.errors = 0, {"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
    with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
        collector.collect()
    one.driver.errors.clear()
    assert series(collector) == before


def test_a_device_that_has_gone(one: Scene) -> None:
    """A handle that no question fits any more, as of a MIG device that was taken apart, is given up and looked for again."""
    collector = one.collector()
    series(collector)
    one.driver.gpus[0].errors = dict.fromkeys(EVERYTHING, INVALID)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        collector.collect()
    one.driver.gpus[:] = []
    assert series(collector) == {}


def test_a_lost_gpu_costs_only_this_collector(one: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A scrape shows the failure, logs it once and has everything else."""

    class Other:
        def collect(self) -> list[Any]:
            return [scalar(HOST_CPU, 0.5)]

    errors = ErrorLog(())
    scrape = Scrape({"gpu": one.collector(), "host": Other()}, errors, lambda: None)
    one.driver.gpus[0].errors = {"nvmlDeviceGetUtilizationRates": LOST}

    def success() -> dict[str, float]:
        families = {family.spec: family for family in scrape()}
        assert families[HOST_CPU].values[0] == 0.5
        family = families[EXPORTER_COLLECTOR_SUCCESS]
        return {row[0]: value for row, value in zip(family.labels.rows, family.values, strict=True)}

    with caplog.at_level(logging.WARNING):
        assert [success()["gpu"], success()["gpu"]] == [0, 0]
    assert sum("GPU is lost" in record.getMessage() or "GpuIsLost" in record.getMessage() for record in caplog.records) == 1
    one.driver.gpus[0].errors = {}
    assert success() == {"gpu": 1, "host": 1}
    assert errors.counts() == {"collector_gpu": 2}


def test_devices_are_looked_up_once(three: Scene) -> None:
    """While the same devices are used their handles are kept; when others are, or the environment is set, they are looked up."""
    collector = three.collector()

    def lookups() -> int:
        three.driver.calls.clear()
        collector.collect()
        return sum("Handle" in call for call in three.driver.calls)

    assert [lookups(), lookups(), lookups()] == [6, 0, 0]
    three.environment["CUDA_VISIBLE_DEVICES"] = "1"
    assert [lookups(), lookups()] == [4, 0]
    three.devices = used(_0=B)
    assert [lookups(), lookups()] == [1, 0]
    three.devices = used(_0=B, _1=C)
    assert [lookups(), lookups()] == [2, 0]
    assert "nvmlInitWithFlags" not in three.driver.calls


def test_two_scrapes_at_once(one: Scene) -> None:
    """Threads that collect together all see the same, while one in five collections fails underneath them."""
    expected = series(one.collector())
    one.driver.opened = 0
    collector = one.collector()
    failing = iter(range(10**9))

    def lose(name: str) -> None:
        if name == "nvmlDeviceGetClockInfo" and next(failing) % 5 == 0:
            one.driver.gpus[0].errors = {name: LOST}
        elif name == "nvmlInitWithFlags":
            one.driver.gpus[0].errors = {}

    one.driver.before = lose

    def collect(_: int) -> dict[tuple[str, ...], float] | None:
        try:
            return series(collector)
        except pynvml.NVMLError_GpuIsLost:
            return None

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(collect, range(200)))
    assert found.count(None) == 40
    assert all(one == expected for one in found if one is not None)
    collector.close()
    assert one.driver.opened == 0


def test_close(one: Scene) -> None:
    """Closing gives NVML back, also twice; nothing is shown and nothing opened afterwards."""
    collector = one.collector()
    collector.collect()
    assert one.driver.opened == 1
    collector.close()
    collector.close()
    assert one.driver.opened == 0
    assert series(collector) == {}
    assert one.driver.opened == 0


def test_close_after_others_have(one: Scene) -> None:
    """Closing does not fail where another part of the program has shut NVML down."""
    collector = one.collector()
    collector.collect()
    pynvml.nvmlShutdown()
    collector.close()
    assert one.driver.calls[-1] == "nvmlShutdown"


def test_close_during_a_collection(one: Scene) -> None:
    """Closing does not wait for a collection that hangs; that one gives NVML back when it ends."""
    inside, go_on = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "nvmlDeviceGetPowerUsage":
            inside.set()
            go_on.wait(PATIENCE)

    one.driver.before = hang
    collector = one.collector()
    thread = threading.Thread(target=collector.collect)
    thread.start()
    assert inside.wait(PATIENCE)
    collector.close()
    assert one.driver.opened == 1
    go_on.set()
    thread.join(PATIENCE)
    assert one.driver.opened == 0


def test_nvml_of_others_stays_open(one: Scene) -> None:
    """Closing, or a failure, does not shut NVML down for another part of the program that uses it."""
    pynvml.nvmlInit()
    collector = one.collector()
    one.driver.gpus[0].errors = {"nvmlDeviceGetClockInfo": LOST}
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        collector.collect()
    collector.close()
    assert pynvml.nvmlDeviceGetCount() == 1


def test_labels_stay_the_same_objects(one: Scene) -> None:
    """While the devices stay, so do the label rows: outputs prepare their text once."""
    collector = one.collector()
    first, second = collector.collect(), collector.collect()
    assert all(a.labels is b.labels for a, b in zip(first, second, strict=True))
    assert [family.spec.name for family in first if len(family.labels)] == [family.spec.name for family in first]
