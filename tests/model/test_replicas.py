"""Two ranks: which of them shows the layers of a model, however the copies were made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Perceptron, batch
from tests.support.ranks import of_ranks
from tests.support.scrape import errors, values
from torch_grad_exporter import Exporter, start_exporter

STEPS = 5


class Outer(torch.nn.Module):
    """A framework's module around a model, which calls its parts."""

    def __init__(self, inner: Perceptron) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.second(self.inner.first(x).relu())


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[Exporter]:
    """Start an exporter on the model, without a server."""
    with start_exporter(model, None, every=1, run="replicas", collectors={"host": False, "process": False}) as exporter:
        yield exporter


def train(model: torch.nn.Module) -> None:
    """Train for some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


@contextmanager
def wrapped_later() -> Iterator[Exporter]:
    """The model is trained alone before it is wrapped."""
    model = Perceptron()
    with watching(model) as exporter:
        with torch.no_grad():
            model(batch())
        train(model)
        train(DistributedDataParallel(model))
        yield exporter


@contextmanager
def parts_called() -> Iterator[Exporter]:
    """The forward of the model never runs; the wrapper is around the caller of its parts."""
    model = Perceptron()
    with watching(model) as exporter:
        train(DistributedDataParallel(Outer(model)))
        yield exporter


@contextmanager
def composed() -> Iterator[Exporter]:
    """The model is replicated in place, without a wrapper."""
    model = Perceptron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(model)
    with watching(model) as exporter:
        train(model)
        yield exporter


@contextmanager
def two_models() -> Iterator[Exporter]:
    """One model is wrapped, the other belongs to each rank."""
    both = torch.nn.ModuleDict({"wrapped": Perceptron(), "own": Perceptron()})
    wrapped = DistributedDataParallel(both["wrapped"])
    with start_exporter(dict(both.items()), None, every=1, run="replicas") as exporter:
        optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (wrapped(batch()).square().mean() + both["own"](batch()).square().mean()).backward()
            optimizer.step()
        yield exporter


@contextmanager
def by_themselves() -> Iterator[Exporter]:
    """Nothing is reduced."""
    model = Perceptron()
    with watching(model) as exporter:
        train(model)
        yield exporter


CASES: dict[str, Callable[[], object]] = {
    "wrapped_later": wrapped_later,
    "parts_called": parts_called,
    "composed": composed,
    "two_models": two_models,
    "by_themselves": by_themselves,
}


def layers_of_cases(_rank: int) -> dict[str, set[str]]:
    """Return the layers that this rank shows in each case."""
    found: dict[str, set[str]] = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        with case() as exporter:  # type: ignore[attr-defined]
            found[name] = {dict(labels)["layer"] for metric, labels in values(exporter) if metric == "torch_grad_norm"}
            assert errors(exporter) == {}, name
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def shown() -> list[dict[str, set[str]]]:
    """Return the layers that each case shows, by rank."""
    return of_ranks(layers_of_cases)


LAYERS = {"first", "second"}


@pytest.mark.process
@pytest.mark.parametrize("case", ["wrapped_later", "parts_called", "composed"])
def test_a_copy_is_shown_by_rank_0_only(shown: list[dict[str, set[str]]], case: str) -> None:
    """Rank 0 shows a replicated model, and rank 1 does not."""
    assert [ranks[case] for ranks in shown] == [LAYERS, set()]


@pytest.mark.process
def test_a_model_of_its_own_is_shown_by_both_ranks(shown: list[dict[str, set[str]]]) -> None:
    """Both ranks show a model that nothing reduces."""
    assert [ranks["by_themselves"] for ranks in shown] == [LAYERS, LAYERS]


@pytest.mark.process
def test_of_two_models_only_the_wrapped_is_a_copy(shown: list[dict[str, set[str]]]) -> None:
    """A wrapped model says nothing about another model of the exporter."""
    own, wrapped = ({f"{model}.{layer}" for layer in LAYERS} for model in ("own", "wrapped"))
    assert [ranks["two_models"] for ranks in shown] == [own | wrapped, own]
