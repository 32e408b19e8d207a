"""How long a rank waits for the gradients of the others.

Both ranks note when their backwards begin and end by a shared clock, and all bounds are made from that.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.matrix.distributed import Checkpointed
from tests.support.models import Perceptron
from tests.support.ranks import PATIENCE, run_ranks
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

SLOW = 0.15
"""Seconds that rank 1 sleeps in each step."""
WARM = 3
"""Steps before what is measured: in the first ones the wrapper gathers the sizes of its buckets in the forward."""
STEPS = 4

KINDS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, object]]] = {
    "plain": (Perceptron, {}),
    "views": (Perceptron, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "static graph": (Perceptron, {"static_graph": True}),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), {}),
    "no_sync": (Perceptron, {}),
    "each backward reduces": (Perceptron, {}),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), {}),
    "alone": (Perceptron, {}),
}


@dataclass
class Step:
    """The begin, last gradient and end of the reducing backwards of a step, and the wait and its count after it."""

    began: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    wait: float | None = None
    rounds: float | None = None

    @property
    def seconds(self) -> float:
        """Return how long the backwards took."""
        return sum(self.ended) - sum(self.began)

    def waits_for(self, other: Step) -> float:
        """Return how long this rank was idle, at least, before the other one began."""
        return sum(max(0.0, theirs - mine) for mine, theirs in zip(self.done, other.began, strict=True))


@dataclass
class Found:
    """The record of one rank: steps, phases, elapsed time and failures."""

    steps: list[Step]
    phases: dict[str, float | None]
    elapsed: float
    errors: dict[str, float]


WAIT, WAITS = "torch_train_gradient_wait_seconds_total", "torch_train_gradient_waits_total"
Ranks = list[dict[str, Found]]


def train(kind: str, rank: int, every: int = 1) -> Found:
    """Train for some steps."""
    make, options = KINDS[kind]
    model = make()
    wrapped = model if kind == "alone" else DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0.0

    def note(_: torch.Tensor) -> None:
        nonlocal done
        done = time.monotonic()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    steps = []
    start = time.monotonic()
    collectors = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
    with start_exporter(wrapped, port=None, every=every, collectors=collectors) as exporter:
        for _ in range(WARM + STEPS):
            steps.append(step := Step())
            optimizer.zero_grad()
            for part in range(2):
                later = kind == "no_sync" and part == 0
                with wrapped.no_sync() if later else contextlib.nullcontext():
                    loss = wrapped(torch.ones(5, 6)).square().mean()
                    time.sleep(SLOW * rank * (part == 1))
                    if later:
                        loss.backward()
                    elif part == 1 or kind == "each backward reduces":
                        step.began.append(time.monotonic())
                        loss.backward()
                        step.ended.append(time.monotonic())
                        step.done.append(done)
            optimizer.step()
            step.wait, step.rounds = value(exporter, WAIT), value(exporter, WAITS)
        phases = {phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) for phase in ("backward", "outside")}
        return Found(steps, phases, time.monotonic() - start, errors(exporter))


def rank_main(rank: int, folder: str) -> None:
    """Run one of the ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", timeout=dt.timedelta(seconds=PATIENCE), rank=rank, world_size=2
    )
    found = {kind: train(kind, rank) for kind in KINDS}
    found["seldom sampled"] = train("plain", rank, every=1000)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return the records of both ranks."""
    folder = tmp_path_factory.mktemp("waits")
    run_ranks(rank_main, str(folder))
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]  # noqa: S301 - written above


@pytest.mark.process
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("alone", "reentrant checkpoint")])
def test_the_fast_rank_waits(kind: str, found: Ranks) -> None:
    """The fast rank waits while the slow one sleeps, the slow one waits at most its own backward, and each round counts once."""
    fast, slow = (mine[kind] for mine in found)
    missed = []
    for rank in (fast, slow):
        assert rank.errors == {}
        for before, step in itertools.pairwise(rank.steps[WARM - 1 :]):
            assert (step.rounds or 0.0) - (before.rounds or 0.0) == 1
            assert 0 <= waited(before, step) <= step.seconds
    for (before, step), other in zip(itertools.pairwise(fast.steps[WARM - 1 :]), slow.steps[WARM:], strict=True):
        missed.append(step.waits_for(other) - waited(before, step))
    assert statistics.median(missed) < 0.5 * SLOW  # between the last gradient and the clock of the wait it may be held up
    assert statistics.median(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True)) > 0.5 * SLOW


def waited(before: Step, step: Step) -> float:
    """Return the wait that was counted in a step."""
    return (step.wait or 0.0) - (before.wait or 0.0)


def test_where_it_cannot_be_known(found: Ranks) -> None:
    """With a reentrant checkpoint no round is counted, and without other ranks the metric is absent."""
    for mine in found:
        for kind, expected in (("reentrant checkpoint", 0.0), ("alone", None)):
            last = mine[kind].steps[-1]
            assert (last.wait, last.rounds) == (expected, expected)


@pytest.mark.parametrize("kind", ["plain", "seldom sampled"])
def test_the_wait_is_part_of_the_backward(kind: str, found: Ranks) -> None:
    """The fast rank spends the wait in the phase `backward`, and the slow one sleeps outside of the phases."""
    fast, slow = (mine[kind] for mine in found)
    waits = sum(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True))
    slept = SLOW * (STEPS + WARM)
    assert waits > 0.5 * slept
    assert (fast.phases["backward"] or 0.0) >= waits
    assert (fast.phases["outside"] or 0.0) <= fast.elapsed - waits
    assert (slow.phases["outside"] or 0.0) >= 0.9 * slept
    assert (slow.phases["backward"] or 0.0) <= sum(step.seconds for step in slow.steps)
