"""Jobs of several ranks that train together: actions that change the training happen after the same step on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.actions.freeze.test_freeze import faint, start
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze, ScaleLearningRate, Stop

REVIVE = 12

Record = tuple[list[tuple[float, bool]], list[object], dict[str, float], float | None]
"""The learning rate and whether the layer is frozen, after each step; the parameters; errors; and refused actions `Stop`."""


def _rank(rank: int, folder: str) -> None:
    """Train with actions that have their causes on different ranks, and write what happened after which step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=3)
    net = faint()
    layer = net[1].linear
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1)
    history: list[tuple[float, bool]] = []

    def step() -> None:
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        wrapped(torch.randn(3, 4)).square().mean().backward()  # waits for the other ranks
        optimizer.step()
        assert torch.equal(before, layer.weight) == (bool(history) and history[-1][1])
        history.append((optimizer.param_groups[0]["lr"], not layer.weight.requires_grad))

    def thawed_and_scaled() -> bool:
        step()
        return any(frozen for _, frozen in history) and not history[-1][1] and history[-1][0] < 2e-5

    def stopped() -> bool:
        step()
        return exporter.should_stop

    with start(wrapped, run="three ranks", every=1 + rank) as exporter:
        exporter.on(Freeze(1e-3, after=12, revive=REVIVE))
        exporter.on(lambda m: rank == 0 and len(history) > 20, ScaleLearningRate(0.5))
        wrong = "torch_grad_global_nrm" if rank == 2 else "torch_grad_global_norm"
        exporter.on(lambda m: m.last(wrong) >= 0 and rank == 1, ScaleLearningRate(0.25))
        exporter.on(lambda m: rank == 0, Stop() if rank == 0 else ScaleLearningRate(100))
        assert eventually(thawed_and_scaled)
        assert not exporter.should_stop
        exporter.on(lambda m: rank == 1, Stop())
        assert eventually(stopped)
        refused = value(exporter, "torch_grad_exporter_actions_total", action="Stop", result="refused")
        record: Record = history, [parameter.tolist() for parameter in net.parameters()], errors(exporter), refused
    (Path(folder) / f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """What the three ranks of one job wrote."""
    folder = tmp_path_factory.mktemp("job")
    run_ranks(_rank, str(folder), ranks=3)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.process
def test_all_ranks_act_after_the_same_step(records: list[Record]) -> None:
    """Each action has a cause on one rank alone, and rates, frozen layers, parameters and the last step are the same on all."""
    (history, parameters, *_), *others = records
    assert [record[:2] for record in others] == [[history, parameters]] * 2
    rates = sorted({rate for rate, _ in history})
    assert rates[0] == pytest.approx(1e-4 / 8)
    assert rates[-1] == 1e-4
    assert len(history) > 20


def test_ranks_freeze_by_norms_together(records: list[Record]) -> None:
    """Though each rank samples other steps, all freeze the layer after the same step and train it again 12 steps later."""
    frozen = [frozen for _, frozen in records[0][0]]
    first = frozen.index(True)
    assert frozen[first : first + REVIVE + 1] == [True] * REVIVE + [False]


def test_a_wrong_condition_does_not_exclude_a_rank(records: list[Record]) -> None:
    """A rank whose condition asks for an unknown metric counts that error, and acts when another rank has the cause."""
    assert records[2][2] == {"action": 1}
    assert records[1][2] == {}


def test_different_actions_on_ranks_are_refused(records: list[Record]) -> None:
    """Where ranks gave `on` different actions at the same place, none acts, and the rank with the cause counts a refusal."""
    assert records[0][3] == 1
    assert records[0][2] == {"action": 1}


@pytest.mark.parametrize("action", [Stop(), ScaleLearningRate(0.5)], ids=repr)
def test_without_a_store_it_is_refused(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks share no store, `on` refuses an action between steps with the fix, and takes one in the background."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with start_exporter(torch.nn.Linear(2, 1), None, run="no store") as exporter:
        with pytest.raises(RuntimeError, match=r"all 2 ranks .* there is none: .*use torchrun, or call it after init_process"):
            exporter.on("LossSpike", action)
        exporter.on("LossSpike", print)
        assert not exporter.should_stop
