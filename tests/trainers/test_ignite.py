"""The handler for Ignite: start, reported values and end, in runs of real trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch.nn.functional import mse_loss

from tests.support.scrape import value
from tests.trainers.adapters import batches, engine_of, network
from tests.trainers.training import ending_of
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.integrations.ignite import GradExporterHandler
from torch_grad_exporter.integrations.session import running_exporter


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


def test_a_second_run_and_a_resume() -> None:
    """Epoch and step continue in a second run and after a checkpoint."""
    model = network()
    handler = quick(model, gradient_accumulation_steps=2)
    trainer = engine_of(model, gradient_accumulation_steps=2)
    handler.attach(trainer)
    names = ("torch_train_epoch", "torch_grad_sample_step")
    seen = Seen(trainer, handler, *names)
    trainer.run(batches(), max_epochs=2)
    assert [seen.last[name] for name in names] == [2, 8]
    trainer.run(batches(), max_epochs=2)
    assert seen.last["torch_grad_sample_step"] == 16

    resumed = engine_of(model)
    other = quick(model)
    other.attach(resumed)
    seen = Seen(resumed, other, *names)
    resumed.load_state_dict({"iteration": 16, "max_epochs": 3, "epoch_length": 8})
    resumed.run(batches())
    assert [seen.last[name] for name in names] == [3, 24]


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


def test_a_terminated_run() -> None:
    """A run that skips its end ends the exporter."""
    model = network()
    handler, trainer = quick(model), engine_of(model)
    handler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.terminate(skip_completed=True))
    trainer.run(batches())
    assert running_exporter(model) is None


@pytest.mark.parametrize("log_values", [True, False])
def test_the_trainers_metrics_are_shown(log_values: bool) -> None:
    """The exporter shows the numbers among the trainer's metrics after each epoch, without its own; or none of them."""
    model = network()
    with start_exporter(model, port=None) as exporter:
        trainer = engine_of(model)
        metrics = {"reward": 2.5, "average": torch.tensor(0.5), "matrix": torch.ones(2, 2)}
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(metrics))
        GradExporterHandler(model, exporter, log=True, log_every=2, log_values=log_values).attach(trainer)
        trainer.run(batches())
        shown = exporter.values("^torch_train_value/")
    assert shown == ({"torch_train_value/reward": 2.5, "torch_train_value/average": 0.5} if log_values else {})


def test_wrong_arguments_raise() -> None:
    """A wrong number of iterations raises at once."""
    with pytest.raises(ValueError, match=r"log_every=0.*at least 1"):
        quick(network(), log_every=0)
