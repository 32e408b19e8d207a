"""How long a rank waits for the others' gradients: a rank that is slow on purpose, and one that waits for it."""

from __future__ import annotations

import contextlib
import datetime as dt
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.matrix.distributed import Checkpointed
from tests.support.models import Perceptron
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

SLOW = 0.1
"""Seconds that rank 1 sleeps in each step."""
WARM = 4
"""Steps before what is measured: in the first ones the wrapper gathers the sizes of its buckets in the forward."""
STEPS = 6

KINDS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, object]]] = {
    "plain": (Perceptron, {}),
    "views": (Perceptron, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "static graph": (Perceptron, {"static_graph": True}),
    "unused parameters": (Perceptron, {"find_unused_parameters": True}),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), {}),
    "no_sync": (Perceptron, {}),
    "each backward reduces": (Perceptron, {}),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), {}),
    "alone": (Perceptron, {}),
}


def train(kind: str, rank: int, every: int = 1) -> dict[str, object]:
    """Some steps; what the wait and its count came to after the first ones and in the end."""
    make, options = KINDS[kind]
    model = make()
    wrapped = model if kind == "alone" else DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = ("torch_train_gradient_wait_seconds_total", "torch_train_gradient_waits_total")
    found = []
    collectors = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
    with start_exporter(wrapped, port=None, every=every, collectors=collectors) as exporter:
        for step in range(WARM + STEPS):
            if step == WARM:
                found.append([value(exporter, name) for name in names])
            optimizer.zero_grad()
            for part in range(2):
                later = kind == "no_sync" and part == 0
                with wrapped.no_sync() if later else contextlib.nullcontext():
                    loss = wrapped(torch.ones(5, 6)).square().mean()
                    time.sleep(SLOW * rank * (part == 1))
                    if later or part == 1 or kind == "each backward reduces":
                        loss.backward()
            optimizer.step()
        found.append([value(exporter, name) for name in names])
        phases = {phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) for phase in ("backward", "outside")}
        return {"found": found, "errors": errors(exporter), "phases": phases}


def rank_main(rank: int, folder: str) -> None:
    """One of the ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", timeout=dt.timedelta(seconds=120), rank=rank, world_size=2
    )
    found = {kind: train(kind, rank) for kind in KINDS}
    found["seldom sampled"] = train("plain", rank, every=1000)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[list[float | None]]]]]:
    """What both ranks wrote down."""
    folder = tmp_path_factory.mktemp("waits")
    run_ranks(rank_main, str(folder))
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]  # noqa: S301 - written above


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("alone", "reentrant checkpoint")])
def test_the_fast_rank_waits(kind: str, found: list[dict[str, dict[str, list[list[float | None]]]]]) -> None:
    """The rank that is not slow waits for about as long as the other one sleeps; that one does not wait; each round counts once."""
    waited = []
    for mine in found:
        assert mine[kind]["errors"] == {}
        (before, rounds_before), (after, rounds_after) = mine[kind]["found"]
        assert rounds_after - rounds_before == STEPS
        waited.append((after - before) / STEPS)
    fast, slow = waited
    assert 0.6 * SLOW < fast < 2 * SLOW
    assert slow < 0.4 * SLOW


def test_where_it_cannot_be_known(found: list[dict[str, dict[str, list[list[float | None]]]]]) -> None:
    """With a reentrant checkpoint no round is counted, and without other ranks there is no such metric."""
    for mine in found:
        assert mine["reentrant checkpoint"]["found"][-1] == [0.0, 0.0]
        assert mine["alone"]["found"][-1] == [None, None]


@pytest.mark.parametrize("kind", ["plain", "seldom sampled"])
def test_the_wait_is_part_of_the_backward(kind: str, found: list[dict[str, dict[str, dict[str, float]]]]) -> None:
    """On steps that are sampled and on others: the fast rank spends it there, and the slow one sleeps outside of all phases."""
    fast, slow = (mine[kind]["phases"] for mine in found)
    slept = SLOW * (STEPS + WARM)
    assert fast["backward"] > 0.6 * slept
    assert fast["outside"] < 0.3 * slept
    assert slow["outside"] > 0.9 * slept
    assert slow["backward"] < 0.4 * slept
