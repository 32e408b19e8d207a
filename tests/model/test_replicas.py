"""Two ranks: which of them shows a model's layers, however the copies came about and whenever that is seen."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Perceptron, batch
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, mode, values
from torch_grad_exporter import Exporter, start_exporter

STEPS = 5


class Outer(torch.nn.Module):
    """What a framework puts around a model, to call its parts as it likes."""

    def __init__(self, inner: Perceptron) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.second(self.inner.first(x).relu())


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[Exporter]:
    """An exporter on the model, without a server."""
    with start_exporter(model, None, every=1, run="replicas", collectors={"host": False, "process": False}) as exporter:
        yield exporter


def train(model: torch.nn.Module) -> None:
    """Some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


# Each gives the exporter after some training.


@contextmanager
def wrapped_later() -> Iterator[Exporter]:
    """The model ran by itself before it was wrapped: without gradients, with them, and for some steps."""
    model = Perceptron()
    with watching(model) as exporter:
        with torch.no_grad():
            model(batch())
        train(model)
        train(DistributedDataParallel(model))
        yield exporter


@contextmanager
def alone_at_the_end() -> Iterator[Exporter]:
    """The model is trained within its wrapper, and then goes on without it."""
    model = Perceptron()
    with watching(model) as exporter:
        train(DistributedDataParallel(model))
        with torch.no_grad():
            model(batch())
        train(model)
        yield exporter


@contextmanager
def parts_called() -> Iterator[Exporter]:
    """The model's own forward never runs; the wrapper is around what calls its parts."""
    model = Perceptron()
    with watching(model) as exporter:
        train(DistributedDataParallel(Outer(model)))
        assert mode(exporter) == "parameter"
        yield exporter


@contextmanager
def composed() -> Iterator[Exporter]:
    """The model is replicated in place, with nothing around it."""
    model = Perceptron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(model)
    with watching(model) as exporter:
        train(model)
        yield exporter


@contextmanager
def in_evaluation_mode() -> Iterator[Exporter]:
    """Trained with `model.eval()`, as when batch normalisation is to stand still."""
    model = Perceptron().eval()
    with watching(model) as exporter:
        train(DistributedDataParallel(model).eval())
        yield exporter


@contextmanager
def two_models() -> Iterator[Exporter]:
    """One is wrapped, the other is each rank's own."""
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
    """Nothing reduces anything: ranks may train what they like."""
    model = Perceptron()
    with watching(model) as exporter:
        train(model)
        yield exporter


@contextmanager
def evaluated_by_themselves() -> Iterator[Exporter]:
    """As `in_evaluation_mode`, and nothing reduces."""
    model = Perceptron().eval()
    with watching(model) as exporter:
        train(model)
        yield exporter


@contextmanager
def parts_by_themselves() -> Iterator[Exporter]:
    """Nor is there a wrapper anywhere around parts that are called."""
    model = Perceptron()
    with watching(model) as exporter:
        train(Outer(model))
        assert mode(exporter) == "parameter"
        yield exporter


CASES: dict[str, Callable[[], object]] = {
    "wrapped_later": wrapped_later,
    "alone_at_the_end": alone_at_the_end,
    "parts_called": parts_called,
    "composed": composed,
    "in_evaluation_mode": in_evaluation_mode,
    "two_models": two_models,
    "by_themselves": by_themselves,
    "evaluated_by_themselves": evaluated_by_themselves,
    "parts_by_themselves": parts_by_themselves,
}


def rank_main(rank: int, folder: str) -> None:
    """Writes down the layers that this rank shows in each case."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, set[str]] = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        with case() as exporter:  # type: ignore[attr-defined]
            found[name] = {dict(labels)["layer"] for metric, labels in values(exporter) if metric == "torch_grad_norm"}
            assert errors(exporter) == {}, name
        dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, set[str]]]:
    """By rank, the layers that each case shows."""
    folder = tmp_path_factory.mktemp("replicas")
    run_ranks(rank_main, str(folder))
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(2)]  # noqa: S301 - our own


LAYERS = {"first", "second"}


@pytest.mark.parametrize("case", ["wrapped_later", "alone_at_the_end", "parts_called", "composed", "in_evaluation_mode"])
def test_one_of_two_copies_is_shown(shown: list[dict[str, set[str]]], case: str) -> None:
    """By rank 0."""
    assert [ranks[case] for ranks in shown] == [LAYERS, set()]


@pytest.mark.parametrize("case", ["by_themselves", "evaluated_by_themselves", "parts_by_themselves"])
def test_what_is_no_copy_is_shown(shown: list[dict[str, set[str]]], case: str) -> None:
    """By both."""
    assert [ranks[case] for ranks in shown] == [LAYERS, LAYERS]


def test_each_model_is_looked_at(shown: list[dict[str, set[str]]]) -> None:
    """One that is wrapped says nothing of another."""
    own, wrapped = ({f"{model}.{layer}" for layer in LAYERS} for model in ("own", "wrapped"))
    assert [ranks["two_models"] for ranks in shown] == [own | wrapped, own]
