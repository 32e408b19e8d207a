"""The handler for Ignite: start, reported values and end, in runs of real trainers."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from torch.nn.functional import mse_loss

from tests.matrix.harness import Way
from tests.support.scrape import errors, value
from tests.trainers.training import Training, compared, ending_of
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.ignite import GradExporterHandler
from torch_grad_exporter.integrations.session import running_exporter

BATCHES = 8


def network() -> torch.nn.Sequential:
    """Return two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))


def batches(count: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs that are their own targets."""
    numbers = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(1))
    return [(batch, batch) for batch in numbers]


def trainer_of(model: torch.nn.Module, **options: Any) -> Engine:
    """Return one of Ignite's trainers."""
    return create_supervised_trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), mse_loss, **options)


def by_ignites_own(run: Training, *, evaluated: bool = False, **options: Any) -> None:
    """Train two epochs by `create_supervised_trainer`, optionally with evaluations."""
    model = network()
    handler_options = {name: options[name] for name in options if name == "gradient_accumulation_steps"}
    trainer = trainer_of(model, **options)
    if evaluated:
        evaluator = create_supervised_evaluator(model, {"missed": Loss(mse_loss)})

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate() -> None:
            evaluator.run(batches(3))
            run.told.append(evaluator.state.metrics["missed"])
            model.train()

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: run.told.append(trainer.state.output))
    with run.called_back(model, partial(GradExporterHandler, model, **handler_options)) as handlers:
        for handler in handlers:
            handler.attach(trainer)
        trainer.run(batches(), max_epochs=2)
    assert running_exporter(model) is None


def clipping_step(run: Training, *, scaled: bool = False) -> None:
    """Train by a step function that clips."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 if scaled else 1.0, enabled=scaled)

    def step(engine: Engine, batch: Any) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss * (torch.inf if scaled and engine.state.iteration in (3, 6) else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.detach()}

    trainer = Engine(step)
    with run.called_back(model, partial(GradExporterHandler, model, grad_scaler=scaler)) as handlers:
        for handler in handlers:
            handler.attach(trainer)
        trainer.run(batches(), max_epochs=2)
    run.told.append(trainer.state.output["loss"].item())


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"evaluated": True}], ids=["plain", "accumulated", "evaluated"]
)
def test_numbers(options: dict[str, Any]) -> None:
    """All numbers are those of the record, and training ends in the same bits."""
    run = compared(partial(by_ignites_own, **options))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


def test_clipping() -> None:
    """Numbers are right with a step function that clips, also at the default options."""
    compared(clipping_step)
    compared(clipping_step, Way.DEFAULTS, between=3)


def quick(model: torch.nn.Module, **options: Any) -> GradExporterHandler:
    """Return a handler that samples each step and serves nothing."""
    return GradExporterHandler(model, port=None, every=1, **options)


class Kept:
    """Keeps the exporter of a run after its end."""

    exporter: Exporter

    def __init__(self, trainer: Engine, handler: GradExporterHandler) -> None:
        def keep() -> None:
            assert handler.exporter is not None
            self.exporter = handler.exporter

        trainer.add_event_handler(Events.STARTED, keep)


class Seen:
    """What a scrape showed in the last iteration."""

    def __init__(self, trainer: Engine, handler: GradExporterHandler, *names: str, **labels: str) -> None:
        self.last: dict[str, float | None] = {}
        self.all: list[dict[str, float | None]] = []

        def look() -> None:
            assert handler.exporter is not None
            self.last = {name: value(handler.exporter, name, **labels) for name in names}
            self.all.append(self.last)

        trainer.add_event_handler(Events.ITERATION_COMPLETED, look)


def test_reported_values() -> None:
    """Loss, epoch and samples are right, also in a second run and after a checkpoint."""
    model = network()
    handler = quick(model, gradient_accumulation_steps=2)
    trainer = trainer_of(model, gradient_accumulation_steps=2)
    handler.attach(trainer)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    names = ("torch_train_loss", "torch_train_epoch", "torch_train_samples_total", "torch_grad_sample_step")
    seen = Seen(trainer, handler, *names)
    trainer.run(batches(), max_epochs=2)
    assert seen.last["torch_train_loss"] == pytest.approx(sum(losses[-2:]) / 2, rel=1e-6)
    assert [seen.last[name] for name in names[1:]] == [2, 16 * 4, 8]
    trainer.run(batches(), max_epochs=2)
    assert seen.last["torch_grad_sample_step"] == 16

    resumed = trainer_of(model)
    other = quick(model)
    other.attach(resumed)
    seen = Seen(resumed, other, *names)
    resumed.load_state_dict({"iteration": 16, "max_epochs": 3, "epoch_length": 8})
    resumed.run(batches())
    assert [seen.last[name] for name in ("torch_train_epoch", "torch_grad_sample_step")] == [3, 24]


def test_failures(tmp_path: Path) -> None:
    """An exception of a step reaches the script, and the run has failed with it."""

    def step(engine: Engine, batch: Any) -> None:
        mse_loss(model(batch[0]), batch[1]).backward()
        if engine.state.iteration == 3:
            raise KeyError("broken")

    model = network()
    trainer, handler = Engine(step), quick(model)
    handler.attach(trainer)
    kept = Kept(trainer, handler)
    with pytest.raises(KeyError, match="broken"):
        trainer.run(batches())
    assert ending_of(kept.exporter, tmp_path) == ("failed", "KeyError")
    assert running_exporter(model) is None


@pytest.mark.parametrize("goes_on", [True, False])
def test_failures_that_are_handled(tmp_path: Path, goes_on: bool) -> None:
    """If another handler takes the exception, the run has failed only if training ends."""

    def step(engine: Engine, batch: Any) -> None:
        mse_loss(model(batch[0]), batch[1]).backward()
        if engine.state.iteration == 3:
            raise KeyError("broken")

    model = network()
    trainer, handler = Engine(step), quick(model)
    handler.attach(trainer)
    kept = Kept(trainer, handler)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None if goes_on else trainer.terminate())
    trainer.run(batches(), max_epochs=2)
    assert ending_of(kept.exporter, tmp_path) == (("finished", None) if goes_on else ("failed", "KeyError"))
    assert running_exporter(model) is None


def test_stops() -> None:
    """`Stop()` terminates the trainer, and the exporter ends with it."""
    model = network()
    handler = quick(model)
    trainer = trainer_of(model)
    handler.attach(trainer)

    @trainer.on(Events.STARTED)
    def stop_at_once() -> None:
        assert handler.exporter is not None
        handler.exporter.on(lambda m: True, Stop())

    trainer.run(batches(), max_epochs=1_000_000, epoch_length=BATCHES)
    assert trainer.state.epoch < 1_000_000
    assert running_exporter(model) is None

    trainer = trainer_of(model)
    handler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.terminate(skip_completed=True))
    trainer.run(batches())
    assert running_exporter(model) is None


def test_what_is_logged() -> None:
    """Ignite's loggers find norms among the trainer's metrics."""
    model = network()
    handler, trainer = quick(model, log="^torch_grad_norm/", log_every=5), trainer_of(model)
    handler.attach(trainer)
    logged: list[set[str]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: logged.append(set(trainer.state.metrics)))
    trainer.run(batches())
    assert logged[3:5] == [set(), {"torch_grad_norm/0", "torch_grad_norm/2"}]


@pytest.mark.parametrize("log_values", [True, False])
def test_the_trainers_metrics_are_shown(log_values: bool) -> None:
    """The exporter shows the numbers among the trainer's metrics after each epoch, without its own; or none of them."""
    model = network()
    with start_exporter(model, port=None) as exporter:
        trainer = trainer_of(model)
        metrics = {"reward": 2.5, "average": torch.tensor(0.5), "matrix": torch.ones(2, 2)}
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(metrics))
        GradExporterHandler(model, exporter, log=True, log_every=2, log_values=log_values).attach(trainer)
        trainer.run(batches())
        shown = exporter.values("^torch_train_value/")
    assert shown == ({"torch_train_value/reward": 2.5, "torch_train_value/average": 0.5} if log_values else {})


def test_the_users_exporter(caplog: pytest.LogCaptureFixture) -> None:
    """The user's exporter continues; a second handler is logged, and the same one twice raises."""
    model = network()
    with start_exporter(model, port=None) as exporter, caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        trainer = trainer_of(model)
        handler = GradExporterHandler(model, exporter)
        handler.attach(trainer)
        quick(model).attach(trainer)
        with pytest.raises(ValueError, match="attached to the trainer already"):
            handler.attach(trainer)
        trainer.run(batches(), max_epochs=2)
        assert value(exporter, "torch_train_epoch") == 2
        assert running_exporter(model) is exporter
    assert "remove one of them" in caplog.text


def test_wrong_arguments_raise() -> None:
    """Wrong arguments raise at once, or when the run begins."""
    with pytest.raises(ValueError, match=r"log_every=0.*at least 1"):
        quick(network(), log_every=0)
    with pytest.raises(TypeError, match=r"GradExporterHandler\(prot=...\)"):
        GradExporterHandler(network(), prot=9100)
    model = network()
    trainer = trainer_of(model)
    GradExporterHandler(model, port=-1).attach(trainer)
    with pytest.raises(ValueError, match="port"):
        trainer.run(batches())
