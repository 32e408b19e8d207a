"""The tracker for Accelerate: start, reported values and end, in loops that Accelerate has prepared."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.nn.modules.module import _global_forward_pre_hooks

from tests.support.ranks import run_ranks
from tests.support.scrape import key, value, values
from tests.trainers.adapters import Keeps, network
from tests.trainers.test_accelerate import BATCHES, accelerator, loader
from tests.trainers.training import QUICK, ending_of, spent
from torch_grad_exporter import start_exporter
from torch_grad_exporter.integrations.accelerate import GradExporterTracker


def loop(
    trackers: list[Any],
    *,
    bare: torch.nn.Module | None = None,
    epochs: int = 2,
    early: bool = False,
    told: Callable[[Any], dict[str, float]] = lambda loss: {"loss": float(loss)},
    after_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> torch.nn.Module:
    """Train a prepared loop that logs each step; `early`: `init_trackers` comes before `prepare`."""
    accelerate = accelerator(log_with=trackers, **options)
    torch.manual_seed(0)
    bare = network() if bare is None else bare
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
    if early:
        accelerate.init_trackers("run")
    model, optimizer, given = accelerate.prepare(bare, optimizer, loader())
    if not early:
        accelerate.init_trackers("run")
    step = 0
    for _epoch in range(epochs):
        for (batch,) in given:
            with accelerate.accumulate(model):
                accelerate.backward(loss := mse_loss(model(batch), batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerate.sync_gradients:
                step += 1
                accelerate.log({"epoch": _epoch, **told(loss.detach())}, step=step)
                after_step()
    accelerate.end_training()
    return bare


def test_trackers_before_prepare(tmp_path: Path) -> None:
    """Steps, samples, loss and epoch are right if the trackers start before `prepare`."""
    tracker, shown, losses, kept = GradExporterTracker(**QUICK), [], [], []

    def look() -> None:
        assert tracker.exporter is not None
        kept.append(tracker.exporter)
        shown.append(values(tracker.exporter))

    def told(loss: torch.Tensor) -> dict[str, float]:
        losses.append(float(loss))
        return {"train_loss": float(loss)}

    loop([tracker], early=True, told=told, after_step=look)
    for number, scrape in enumerate(shown, start=1):
        assert scrape[key("torch_train_steps_total", optimizer="AdamW")] == number
        assert scrape[key("torch_train_loss")] == pytest.approx(losses[number - 1])
        assert scrape[key("torch_train_epoch")] == (number - 1) // BATCHES
        # It began with the forward of the first batch, whose examples it did not see.
        assert scrape.get(key("torch_train_samples_total"), 0) == 4 * (number - 1)
    assert len(shown) == 2 * BATCHES
    assert tracker.exporter is None
    assert ending_of(kept[0], tmp_path) == ("finished", None)


def test_time_of_checkpoints(tmp_path: Path) -> None:
    """What `save_state` takes is that of a checkpoint, until the next step."""

    def save() -> None:
        exporter = tracker.tracker
        assert exporter is not None
        seen.append(spent(exporter, "checkpoint"))
        if len(seen) == 3:
            found = next(each for each in gc.get_objects() if isinstance(each, Accelerator) and tracker in each.trackers)
            found.register_save_state_pre_hook(lambda *_: time.sleep(0.3))
            found.save_state(tmp_path / "state")

    seen: list[float] = []
    tracker = GradExporterTracker(**QUICK)
    loop([tracker], after_step=save)
    assert seen[2] == 0
    assert seen[-1] == pytest.approx(0.35, abs=0.2)


def test_resumed_training() -> None:
    """`resume` sets the step."""
    numbers: list[float | None] = []
    tracker = GradExporterTracker(**QUICK)
    assert not tracker.should_stop
    tracker.resume(100)
    loop([tracker], epochs=1, after_step=lambda: numbers.append(value(tracker.exporter, "torch_grad_sample_step")))
    assert numbers == [101 + step for step in range(BATCHES)]


@pytest.mark.parametrize("log_values", [True, False])
def test_what_the_loop_logs_is_shown(log_values: bool) -> None:
    """The exporter shows the numbers that the loop logs, or none of them."""
    bare = network()
    with start_exporter(bare, port=None) as exporter:
        values = {"loss": 0.5, "reward": torch.tensor(2.0), "note": "text", "rewards": torch.ones(3)}
        loop([GradExporterTracker(exporter, log_values=log_values)], bare=bare, epochs=1, told=lambda _: values)
        shown = exporter.values("^torch_train_value/")
    expected = {"torch_train_value/loss": 0.5, "torch_train_value/reward": 2.0}
    assert shown.items() >= expected.items() if log_values else shown == {}
    assert not shown.keys() & {"torch_train_value/note", "torch_train_value/rewards"}


def test_compilation_before_the_start() -> None:
    """A tracker that waits for its model is in no compiled graph and in no trace."""
    tracker, model, inputs = GradExporterTracker(**QUICK), network(), torch.ones(2, 6)
    accelerate = accelerator(log_with=tracker)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(lambda batch: model(batch).sum(), fullgraph=True, backend=backend)
    assert compiled(inputs).item() == pytest.approx(model(inputs).sum().item())
    assert len(seen) == 1
    traced = torch.jit.trace(model, inputs)
    assert torch.equal(traced(inputs), model(inputs))
    assert not [node for graph in seen for node in graph.graph.nodes if "gc" in str(node.target)]
    prepared = accelerate.prepare(model)
    accelerate.init_trackers("run")
    prepared(inputs).sum().backward()
    assert tracker.exporter is not None
    tracker.finish()
    torch.compiler.reset()


def test_a_refused_option_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An option that only fails with the model is logged once, and no hook is left."""
    before = len(_global_forward_pre_hooks)
    tracker = GradExporterTracker(include="nothing", **QUICK)
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        loop([tracker], early=True, epochs=1)
    assert caplog.text.count("GradExporterTracker: nothing is watched: ValueError: include='nothing'") == 1
    assert tracker.exporter is None
    assert len(_global_forward_pre_hooks) == before
    with pytest.raises(ValueError, match="every"):
        GradExporterTracker(port=None, every=-1)
    assert len(_global_forward_pre_hooks) == before


def _rank(rank: int, folder: Path) -> None:
    import tests.trainers  # noqa: F401, PLC0415 - what it sets in a process

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tracker, keeps, shown, losses = GradExporterTracker(log="^torch_grad_global_norm$", **QUICK), Keeps(), [], []

    def look() -> None:
        assert tracker.exporter is not None
        shown.append(values(tracker.exporter))

    def told(loss: torch.Tensor) -> dict[str, float]:
        losses.append(float(loss))
        return {"loss": losses[-1]}

    loop([tracker, keeps], told=told, after_step=look, epochs=1)
    if rank == 0:
        assert [scrape[key("torch_train_loss")] for scrape in shown] == pytest.approx(losses)
        assert sum("torch_grad_global_norm" in values for _, values in keeps.logged) == BATCHES // 2
    assert [scrape[key("torch_train_samples_total")] for scrape in shown] == [4 * step for step in range(1, BATCHES // 2 + 1)]
    assert (key("torch_grad_norm", layer="0") in shown[-1]) == (rank == 0)
    norms = torch.tensor([scrape[key("torch_grad_global_norm")] for scrape in shown])
    assert tracker.exporter is None, "`end_training` has ended it on each rank"
    (folder / f"{rank}.json").write_text(json.dumps(norms.tolist()))


def test_two_ranks(tmp_path: Path) -> None:
    """The tracker runs on every rank, and norms are those of the reduced gradients."""
    run_ranks(_rank, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(first) == BATCHES // 2
