"""Sessions: the part of every integration that works without a framework."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from tests.support.scrape import value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.integrations.session import Session, running_exporter


def step(model: torch.nn.Module, session: Session, **told: float | None) -> None:
    """Train a step and report it to the session."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    session.observe(**told)
    optimizer.step()


def test_each_fit_has_an_exporter() -> None:
    """Each fit has an exporter of its own, of the same run, whose steps go on."""
    model, session = torch.nn.Linear(3, 2), Session("Callback", options={"port": None, "every": 1})
    session.begin(model)
    first = session.exporter
    assert first is not None
    step(model, session, loss=2.5, tokens=7, epoch=None)
    assert value(first, "torch_train_loss") == 2.5
    assert value(first, "torch_train_tokens_total") == 7
    session.end()
    assert session.exporter is None
    assert running_exporter(model) is None
    session.begin(model, step=1)
    second = session.exporter
    assert second is not None
    assert second.run == first.run
    step(model, session)
    assert value(second, "torch_grad_sample_step") == 2
    session.end(RuntimeError("broken"))
    assert running_exporter(model) is None


@pytest.mark.parametrize("given", [False, True])
def test_the_users_exporter_goes_on(given: bool) -> None:
    """An exporter that the user started is used, given or not, and not ended, and its steps count once."""
    model = torch.nn.Linear(3, 2)
    with start_exporter(model, port=None, every=1) as exporter:
        session = Session("Callback", exporter if given else None)
        for fit in range(2):
            session.begin(model, step=fit)
            assert session.exporter is exporter
            step(model, session, loss=fit)
            session.end()
        assert value(exporter, "torch_train_loss") == 1
        assert value(exporter, "torch_grad_sample_step") == 2
        assert running_exporter(torch.nn.DataParallel(model)) is None
        assert running_exporter({"model": model}) is exporter


def test_a_second_session_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The second of two sessions reports nothing, and the log says what to remove."""
    model = torch.nn.Linear(3, 2)
    one, other = Session("First", options={"port": None}), Session("Second", options={"port": None})
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        one.begin(model)
        other.begin(model)
    assert "Second: First reports to this exporter" in caplog.text
    exporter = one.exporter
    assert exporter is not None
    for session in (one, other):
        session.observe(tokens=5)
    assert value(exporter, "torch_train_tokens_total") == 5
    assert not other.should_stop
    assert other.logged() == {}
    other.end()
    assert running_exporter(model) is exporter
    one.end()
    other.begin(model)  # alone now
    assert running_exporter(model) is not None
    other.end()


class Trainer:
    """A stand-in for a framework's trainer."""


@pytest.mark.parametrize(("users", "gone"), [(False, False), (True, False), (False, True)])
def test_an_interrupted_training_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture, users: bool, gone: bool) -> None:
    """The next session on the model ends the interrupted exporter as failed, and takes over the user's."""
    model = torch.nn.Linear(3, 2)
    mine = start_exporter(model, port=None) if users else None
    first = Session("First", options=None if users else {"port": None})
    first.begin(model, trainer=None if gone else Trainer())
    broken = first.exporter
    assert broken is not None
    if gone:
        del first
    second = Session("Second", options={"port": None})
    second.begin(model, trainer=None if gone else Trainer())
    exporter = second.exporter
    assert exporter is not None
    assert exporter is (mine or running_exporter(model))
    step(model, second, tokens=5)
    if not gone:
        assert not first.active
        first.observe(tokens=100)
        first.end()
    assert value(exporter, "torch_train_tokens_total") == 5
    second.end()
    assert running_exporter(model) is mine
    if mine is not None:
        assert exporter is broken
        mine.close()
    else:
        broken.save(tmp_path / "saved.json")
        status = json.loads((tmp_path / "saved.json").read_text())["status"]
        assert (status["state"], status["ended_by"]) == ("failed", "TrainingInterrupted")
    assert "reports to this exporter" not in caplog.text


def test_wrong_arguments() -> None:
    """Wrong arguments are refused with the fix."""
    both = pytest.raises(TypeError, match=r"Callback\(exporter=..., port=...\).*not both")
    with start_exporter(torch.nn.Linear(1, 1), port=None) as exporter, both:
        Session("Callback", exporter, {"port": 9100})
    with pytest.raises(TypeError, match="expected what start_exporter returned"):
        Session("Callback", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Callback\(model, prot=...\): not an option of start_exporter; docs/options.md"):
        Session("Callback", options={"prot": 9100, "model": None, "every": 1})
    with pytest.raises(ValueError, match="not a regular expression"):
        Session("Callback", log="(")


def test_logged_values() -> None:
    """Nothing is logged unless asked for, else the usual values or those of a pattern."""
    model = torch.nn.Linear(3, 2)
    found = {}
    for log in (False, True, "^torch_train_steps"):
        session = Session("Callback", options={"port": None, "every": 1}, log=log)
        session.begin(model)
        step(model, session)
        found[log] = set(session.logged())
        session.end()
        assert session.logged() == {}
    assert found[False] == set()
    assert {"torch_grad_global_norm", "torch_train_skipped_steps_total"} <= found[True]
    assert found["^torch_train_steps"] == {"torch_train_steps_total/SGD"}


def test_failures_at_an_event(caplog: pytest.LogCaptureFixture) -> None:
    """A failure is logged once, counted as `integration` and contained; an interrupt is not contained."""
    model, session = torch.nn.Linear(3, 2), Session("Callback", options={"port": None})

    def fails(error: BaseException) -> None:
        raise error

    session.during(fails, ValueError())  # no training was reported: nothing is done
    for _ in range(2):
        assert session.before_start(fails, ValueError("strange")) is None
    assert caplog.text.count("Callback: the trainer could not be read") == 1
    assert session.before_start(lambda: 3) == 3
    session.begin(model)
    assert session.active
    exporter = session.exporter
    assert exporter is not None
    for _ in range(20):
        session.during(fails, ValueError("broken"))
    assert value(exporter, "torch_grad_exporter_errors_total", source="integration") == 20
    assert caplog.text.count("integration failed; training goes on") == 1
    with pytest.raises(KeyboardInterrupt):
        session.during(fails, KeyboardInterrupt())
    session.end()
    assert not session.active


@pytest.mark.parametrize("own", [False, True])
def test_a_logged_loss(own: bool) -> None:
    """A logged loss is used where the model returns none, else each step's own stays."""

    class Returns(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:  # type: ignore[override]
            loss = super().forward(inputs).square().mean()
            return {"loss": loss} if own else loss

    model, session = Returns(3, 2), Session("Callback", options={"port": None})
    session.logged_loss(1.0)  # no training was reported
    session.begin(model)
    exporter = session.exporter
    assert exporter is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for logged in (7.0, 8.0, 9.0):
        output = model(torch.ones(2, 3))
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        optimizer.step()
        session.logged_loss(logged)
        assert value(exporter, "torch_train_loss") == pytest.approx(loss.item() if own else logged)
    session.end()


@pytest.mark.parametrize("knows", [True, False])
def test_a_trainer_that_does_not_know_its_step(tmp_path: Path, knows: bool) -> None:
    """Only a trainer that knows its step has none before it: for another one nothing is taken to be recomputed."""
    model, trainer = torch.nn.Linear(3, 2), torch.nn.Identity()
    session = Session("Callback", options={"port": None, "run": "a", "state_dir": tmp_path})
    session.begin(model, trainer=trainer)
    for _ in range(3):
        step(model, session)
    session.end(RuntimeError("broken"))
    session.begin(model, trainer=trainer, knows_step=knows)
    assert session.exporter is not None
    assert value(session.exporter, "torch_train_time_seconds_total", cause="recomputed") == (0 if knows else None)
    session.end()


def test_a_checkpoint_ends_with_the_training() -> None:
    """One that no framework ended does not go on in the exporter that the user has started."""
    model = torch.nn.Linear(3, 2)
    with start_exporter(model, port=None, every=1) as exporter:
        session = Session("Callback", exporter)
        session.begin(model)
        step(model, session)
        session.checkpointing()
        session.end()
        first = value(exporter, "torch_train_time_seconds_total", cause="checkpoint")
        threading.Event().wait(0.05)
        assert value(exporter, "torch_train_time_seconds_total", cause="checkpoint") == first
