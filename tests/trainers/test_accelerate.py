"""Accelerate: a prepared loop in one process and in two, with a loader that is watched before or after it is prepared."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.support.ranks import run_ranks
from tests.support.scrape import value
from tests.trainers.training import Training, compared, reset_accelerate

BATCHES = 16


def loader(batches: int = BATCHES) -> DataLoader[Any]:
    """Return batches of four, shuffled with a seed."""
    data = TensorDataset(torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(1)))
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def accelerator(**options: Any) -> Accelerator:
    """Return an accelerator after a reset of Accelerate's state."""
    reset_accelerate()
    return Accelerator(cpu=True, **options)


def prepared(
    run: Training,
    *,
    watched: str = "",
    limit: float | None = None,
    batches: int = BATCHES,
    epochs: int = 2,
    skipped: int = 0,
    dispatched: bool = False,
    **options: Any,
) -> None:
    """Train; `watched`: whether the loader is watched, before or after `prepare`."""
    accelerate = accelerator(**options, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatched or None))
    torch.manual_seed(0)
    bare = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
    with run.watching(bare, ranks="all"):
        given = run.loader(loader(batches)) if watched == "before" else loader(batches)
        model, optimizer, given = accelerate.prepare(bare, optimizer, given)
        assert isinstance(given, DataLoader)
        given = run.loader(given) if watched == "after" else given
        for epoch in range(epochs):
            given.set_epoch(epoch)
            for (batch,) in skip_first_batches(given, skipped) if skipped else given:
                with accelerate.accumulate(model):
                    accelerate.backward(mse_loss(model(batch), batch))
                    if accelerate.sync_gradients and limit is not None:
                        accelerate.clip_grad_norm_(model.parameters(), limit)
                    optimizer.step()
                    optimizer.zero_grad()
                run.told.append((len(given), tuple(batch.shape), float(batch.sum()), accelerate.sync_gradients))


@pytest.mark.parametrize("watched", ["before", "after"])
def test_watched_loader(watched: str) -> None:
    """A loader gives the same batches if it is watched before or after `prepare`; waits are counted after it."""
    run = compared(partial(prepared, watched=watched))
    assert len(run.told) == 2 * BATCHES
    assert run.exporter is not None
    seconds = value(run.exporter, "torch_train_phase_seconds_total", phase="data")
    assert (seconds or 0) > 0 if watched == "after" else seconds is None


def test_accumulation_and_clipping() -> None:
    """Numbers are right for rounds of four batches, and of two at the end of an epoch."""
    compared(partial(prepared, gradient_accumulation_steps=4, limit=0.05))
    compared(partial(prepared, gradient_accumulation_steps=4, batches=10, epochs=3))


def _rank(rank: int, folder: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
    import tests.trainers  # noqa: F401, PLC0415 - what it sets in a process

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = compared(partial(prepared, **options), between=0, **settings)
    each = 2 * BATCHES // 2
    assert len(run.told) == each, f"{len(run.told)} batches on rank {rank}, not {each}"
    assert all(kept[0] == BATCHES // 2 for kept in run.told)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {"watched": "before", "dispatched": True},
        {"watched": "after"},
        {"gradient_accumulation_steps": 3, "limit": 0.05},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_two_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each rank trains on its half of the batches and shows the reduced gradient."""
    lenient = {"gauges": True} if "limit" in options else {}
    run_ranks(_rank, tmp_path, options, lenient)
