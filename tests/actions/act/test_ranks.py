"""Jobs of two ranks that train together: what changes the training happens after the same step on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.scrape import errors
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import ScaleLearningRate, Stop


def _rank(rank: int, folder: str) -> None:
    """Halves the learning rate when rank 0 wants it, and stops when rank 1 does; notes each step's learning rate."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()  # waits for the other rank
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])

    with start_exporter(model, None, run="two ranks") as exporter:
        exporter.on(lambda m: rank == 0 and len(rates) > 20, ScaleLearningRate(0.5))
        exporter.on(lambda m: rank == 1 and rates[-1:] == [0.05], Stop())

        def stopped() -> bool:
            step()
            return exporter.should_stop

        assert eventually(stopped)
        assert "action" not in errors(exporter)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rates))
    dist.barrier()
    dist.destroy_process_group()


def test_both_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """Each has one cause alone; all learning rates of all steps are the same on both, and none takes a step more."""
    run_ranks(_rank, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert sorted(set(first)) == [0.05, 0.1]
    assert len(first) > 20


@pytest.mark.parametrize("action", [Stop(), ScaleLearningRate(0.5)], ids=repr)
def test_without_a_store_it_is_refused(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job of several ranks that share no store `on` raises and says what to do; an action in the background is taken."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with start_exporter(torch.nn.Linear(2, 1), None, run="no store") as exporter:
        with pytest.raises(
            RuntimeError, match=r"all 2 ranks .* there is none: .*use torchrun, or call it after init_process_group"
        ):
            exporter.on("LossSpike", action)
        exporter.on("LossSpike", print)
        assert not exporter.should_stop
