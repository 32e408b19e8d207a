"""After a loss or a norm that is not finite the next steps are sampled, so that their layers show."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.models import Perceptron, batch
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, value
from tests.support.tools import eventually
from tests.support.torch_versions import fully_shard, need
from torch_grad_exporter import Exporter, start_exporter

INTERVAL = 4096
"""So long that no step of a test is sampled by itself, but for the first."""
SAMPLES = "torch_grad_exporter_captures_total"


class Loop:
    """A training whose gradients and reported values are chosen."""

    def __init__(self, exporter: Exporter, model: torch.nn.Module) -> None:
        self.exporter, self.model, self.factor = exporter, model, 1.0
        self.optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * self.factor)

    def step(self, **observed: float) -> None:
        """Make a step, and report values."""
        self.optimizer.zero_grad()
        self.model(batch()).square().mean().backward()
        self.optimizer.step()
        self.exporter.observe(**observed)

    def samples(self, **observed: float) -> float | None:
        """Return how many steps were sampled, after a further one if values are given."""
        if observed:
            self.step(**observed)
        return value(self.exporter, SAMPLES)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_an_odd_value_brings_samples(name: str, odd: float) -> None:
    """A loss or a norm that is not finite makes the next steps sampled ones; their bad layers are counted."""
    model = Perceptron()
    with start_exporter(model, None, every=INTERVAL) as exporter:
        loop = Loop(exporter, model)
        for number in range(40):
            loop.step(**{name: 1.0 + 0.01 * (number % 5)})
        assert loop.samples() == 1
        loop.factor = math.nan
        loop.step(**{name: odd})

        def bad_layers_are_known() -> bool:
            loop.step(**{name: 1.0})
            return bool(value(exporter, "torch_grad_nonfinite_elements_total", layer="first", kind="nan"))

        assert eventually(bad_layers_are_known)
        assert eventually(lambda: loop.samples(**{name: 1.0}) == 5)  # the first one, and four after the value


def test_ordinary_values_bring_none() -> None:
    """A loss that falls, a norm that wavers, and a burst of both bring no sample: of a burst they would be too many."""
    model = Perceptron()
    with start_exporter(model, None, every=INTERVAL) as exporter:
        loop = Loop(exporter, model)
        for number in range(200):
            burst = 1e6 if number in range(120, 125) else 1.0
            loop.step(loss=burst * 2.0 * 0.99**number, grad_norm=burst * (1.0 + 0.5 * math.sin(number)))
            value(exporter, SAMPLES)  # the worker has taken all values
        assert loop.samples() == 1


def test_a_lasting_fault_brings_few_samples() -> None:
    """A loss that stays NaN brings samples once in half a minute, not at each step."""
    model = Perceptron()
    with start_exporter(model, None, every=INTERVAL) as exporter:
        loop = Loop(exporter, model)
        loop.step(loss=math.nan)
        assert eventually(lambda: loop.samples(loss=math.nan) == 5)
        for _ in range(100):
            loop.step(loss=math.nan)
        assert loop.samples() == 5


class Inner(torch.nn.Module):
    """A model that is trained by a method, and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 4)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.first(x).square().mean()


def test_a_model_that_is_never_called_is_sampled_as_well() -> None:
    """Where no forward of the root is seen, samples follow a NaN like elsewhere, and steps are only counted again later."""
    model = Inner()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with start_exporter(model, None, every=INTERVAL, collectors=OFF) as exporter:

        def samples(loss: float) -> float | None:
            optimizer.zero_grad()
            model.loss(batch()).backward()
            optimizer.step()
            exporter.observe(loss=loss)
            return value(exporter, SAMPLES)

        before = [samples(1.0) for _ in range(20)][-1] or 0
        samples(math.nan)
        assert eventually(lambda: samples(1.0) == before + 4)
        for _ in range(20):
            assert samples(1.0) == before + 4


def samples_of_shards(rank: int) -> float | None:
    """Train a sharded model whose loss is NaN on one rank; return the samples of this rank."""
    model = Perceptron()
    fully_shard(model)
    with start_exporter(model, None, every=INTERVAL, collectors=OFF) as exporter:
        loop = Loop(exporter, model)
        for number in range(20):
            loop.step(loss=math.nan if rank == 0 and number == 5 else 1.0)
            value(exporter, SAMPLES)  # the worker has taken all values
        return loop.samples()


@pytest.mark.process
def test_ranks_of_a_sharded_model_sample_the_same_steps() -> None:
    """Where ranks have parts of a gradient, a NaN that one of them sees brings no samples: its parts would have no others."""
    need(2, 7, "FSDP2 on a CPU")
    assert of_ranks(samples_of_shards) == [1, 1]
