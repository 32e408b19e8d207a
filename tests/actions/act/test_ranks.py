"""Jobs of several ranks that train together: actions that change the training happen after the same step on all ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.actions.freeze.test_freeze import faint, start
from tests.support.ranks import run_ranks
from tests.support.scrape import errors
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze, Stop


def _rank(rank: int, folder: str) -> None:
    """Train until a layer is frozen and the job is stopped, and write what happened after which step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    net = faint()
    layer = net[1].linear
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1)
    history: list[tuple[bool, bool]] = []

    def done() -> bool:
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        wrapped(torch.randn(3, 4)).square().mean().backward()  # waits for the other rank
        optimizer.step()
        assert torch.equal(before, layer.weight) == (bool(history) and history[-1][0])
        history.append((not layer.weight.requires_grad, exporter.should_stop))
        time.sleep(0.01)  # leaves the cores to others
        return all(history[-1])

    with start(wrapped, run="two ranks", every=1 + rank) as exporter:
        exporter.on(Freeze(1e-3, after=12, revive=None))
        exporter.on(lambda m: rank == 1, Stop())
        assert eventually(done)
        assert "action" not in errors(exporter)
        record = history, [parameter.tolist() for parameter in net.parameters()]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.process
def test_all_ranks_act_after_the_same_step(tmp_path: Path) -> None:
    """A stop with its cause on one rank, and a layer with small norms, take effect after the same step on all ranks."""
    run_ranks(_rank, str(tmp_path))
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in range(2))
    assert first == second


def test_without_a_store_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks share no store, `on` refuses an action between steps with the fix, and takes one in the background."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with start_exporter(torch.nn.Linear(2, 1), None, run="no store") as exporter:
        with pytest.raises(RuntimeError, match=r"all 2 ranks .* there is none: .*use torchrun, or call it after init_process"):
            exporter.on("LossSpike", Stop())
        exporter.on("LossSpike", print)
        assert not exporter.should_stop
