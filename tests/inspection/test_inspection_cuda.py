"""On a GPU: times of layers are those of the GPU, activations those of float64, and nothing waits. Needs CUDA (`-m cuda`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.capture.test_cuda import nothing_waits
from tests.inspection.layer_times_scenes import Layer
from tests.inspection.test_activations import DIMS, Kept, agree, convnet, shown
from tests.support.scrape import errors, value, values
from torch_grad_exporter import start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]

CYCLES = 5_000_000
"""Some milliseconds, far more than the rest of a layer takes."""


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


def spin(cycles: int) -> None:
    """Keep the device busy."""
    torch.cuda._sleep(cycles)  # private: nothing public keeps a device busy without work


class Spinning:
    """A clock that a layer moves by keeping the device busy."""

    def takes(self, units: float) -> None:
        """Take this long."""
        spin(int(units * CYCLES))


def layer(units: float, **options: bool) -> Layer:
    """Return a layer that spins in its forward, and twice as long in its backward."""
    return Layer(Spinning(), units, **options)


def test_each_layer_has_the_time_of_the_gpu() -> None:
    """Layers that spin for 1, 2 and 4 units have these times; what has no parameters is in no time."""
    model = nn.Sequential(layer(1), layer(8, owns=False), nn.Sequential(layer(2), nn.ReLU(inplace=True), layer(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    x = torch.randn(3, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()  # libraries initialise themselves, and kernels are loaded
    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        step()
        with nothing_waits():
            for _ in range(8):
                step()
        for _ in range(3):
            torch.cuda.synchronize()
            step()
        found = values(exporter)
        mean = {}
        for (metric, labels), seconds in found.items():
            if metric == "torch_layer_seconds_total":
                mean[dict(labels)["layer"], dict(labels)["pass"]] = seconds / found["torch_layer_timed_steps_total", labels]
        unit = mean["0", "forward"]
        expected = {(layer, "forward"): times * unit for layer, times in {"0": 1, "2.0": 2, "2.2": 4}.items()}
        expected |= {(layer, "backward"): 2 * seconds for (layer, _), seconds in expected.items()}
        assert mean == pytest.approx(expected, rel=0.15)
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="layers") == 0
        assert errors(exporter) == {}


def test_activations_are_those_of_float64() -> None:
    """On a GPU activations agree with the same float64 reference as on the CPU."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = Kept(model, DIMS)
    with start_exporter(model, None, every=1, activations=True) as exporter:
        for _ in range(3):
            kept.clear()
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        exporter.close()
        for name in DIMS:
            agree(shown(exporter, name), kept.reference(name), 1e-4)
        assert errors(exporter) == {}


def test_a_captured_step_disturbs_nothing() -> None:
    """A sampled step that is captured is not timed, and its hooks are not part of the graph."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(5, 4)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                optimizer.zero_grad()
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = step()
        graph.replay()  # its capture computes nothing
        before = loss.item()
        for _ in range(50):
            graph.replay()
        assert loss.item() < before
        for _ in range(4):
            optimizer.zero_grad()
            step()
            torch.cuda.synchronize()
        assert (value(exporter, "torch_layer_timed_steps_total", **{"layer": "0", "pass": "backward"}) or 0) >= 4
        assert errors(exporter) == {}
