"""After a loss or a norm that is out of line the next steps are sampled, so that their layers show."""

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
@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e6])
def test_an_odd_value_brings_samples(name: str, odd: float) -> None:
    """A loss or a norm that is not finite, or a spike, makes the next steps sampled ones; their bad layers are counted."""
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
    """A loss that falls and a norm that wavers bring no sample."""
    model = Perceptron()
    with start_exporter(model, None, every=INTERVAL) as exporter:
        loop = Loop(exporter, model)
        for number in range(200):
            loop.step(loss=2.0 * 0.99**number, grad_norm=1.0 + 0.5 * math.sin(number))
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
