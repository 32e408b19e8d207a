"""What every integration does with an exporter, tried without a framework."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.session import Session, running_exporter


def step(model: torch.nn.Module, session: Session, **told: float | None) -> None:
    """A step, of which the session is told."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    session.observe(**told)
    optimizer.step()


def test_starts_tells_and_ends() -> None:
    """One fit after the other: each has an exporter of its own, of the same run, whose steps go on."""
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
    """One that the user has started is told, whether it is given or found, and is not ended; steps that it has seen count once."""
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


def test_added_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The second of two is told nothing: tokens are counted once, and the log says what to remove."""
    model = torch.nn.Linear(3, 2)
    one, other = Session("First", options={"port": None}), Session("Second", options={"port": None})
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        one.begin(model)
        other.begin(model)
    assert "Second: First tells this exporter" in caplog.text
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
    """Stands for a framework's."""


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("gone", [False, True], ids=["another trainer", "session gone"])
def test_a_training_that_has_broken_off(tmp_path: Path, caplog: pytest.LogCaptureFixture, users: bool, gone: bool) -> None:
    """The next session on the model ends what that one had started, as broken off, and takes over what the user has."""
    model, trainer = torch.nn.Linear(3, 2), Trainer()
    mine = start_exporter(model, port=None) if users else None
    first = Session("First", options=None if users else {"port": None})
    first.begin(model, trainer=None if gone else trainer)
    broken = first.exporter
    assert broken is not None
    if gone:
        del first
    second = Session("Second", options={"port": None})
    other = None if gone else Trainer()
    second.begin(model, trainer=other)
    exporter = second.exporter
    assert exporter is not None
    assert exporter is (mine or running_exporter(model))
    assert (exporter is broken) == users
    step(model, second, tokens=5)
    if not gone:
        assert not first.telling
        first.observe(tokens=100)
        first.end()
    assert value(exporter, "torch_train_tokens_total") == 5
    second.end()
    assert running_exporter(model) is mine
    if mine is not None:
        mine.close()
    else:
        broken.save(tmp_path / "saved.json")
        status = json.loads((tmp_path / "saved.json").read_text())["status"]
        assert (status["state"], status["ended_by"]) == ("failed", "TrainingBrokeOff")
    assert "tells this exporter" not in caplog.text


def test_one_training_told_by_two(caplog: pytest.LogCaptureFixture) -> None:
    """Two callbacks of one trainer, or two of different frameworks around one training: the second leaves it to the first."""
    model, trainer = torch.nn.Linear(3, 2), Trainer()
    first, second = Session("First", options={"port": None}), Session("Second", options={"port": None})
    first.begin(model, trainer=trainer)
    exporter = first.exporter
    for another in (trainer, torch.nn.Identity(), None):
        caplog.clear()
        second.begin(model, trainer=another)
        assert "Second: First tells this exporter" in caplog.text
        assert first.telling
        assert not second.telling
        assert running_exporter(model) is exporter
    first.end()


def test_options_are_checked_before_there_is_a_model() -> None:
    """A value that is wrong by itself raises; one that only the model decides does not yet."""
    with pytest.raises(ValueError, match="every"):
        Session("Callback", options={"every": -1}).check_options()
    with pytest.raises(TypeError, match="optimizers"):
        Session("Callback", options={"optimizers": 3}).check_options()
    Session("Callback", options={"include": "nothing", "port": None}).check_options()


def test_wrong_arguments() -> None:
    """Both an exporter and options, or what is no exporter: the error says what to do."""
    both = pytest.raises(TypeError, match=r"Callback\(exporter=..., port=...\).*not both")
    with start_exporter(torch.nn.Linear(1, 1), port=None) as exporter, both:
        Session("Callback", exporter, {"port": 9100})
    with pytest.raises(TypeError, match="expected what start_exporter returned"):
        Session("Callback", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Callback\(model, prot=...\): no option of start_exporter; docs/options.md"):
        Session("Callback", options={"prot": 9100, "model": None, "every": 1})
    with pytest.raises(TypeError, match=r"log=3.*expected True, False or a regular expression"):
        Session("Callback", log=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no regular expression"):
        Session("Callback", log="(")


def test_stops() -> None:
    """`Stop()` is seen by the session."""
    model, session = torch.nn.Linear(3, 2), Session("Callback", options={"port": None})
    session.begin(model)
    assert isinstance(session.exporter, Exporter)
    session.exporter.on(lambda m: True, Stop())
    assert not session.should_stop or session.exporter.should_stop

    def stopped() -> bool:
        step(model, session)
        return session.should_stop

    assert eventually(stopped)
    session.end()
    assert not session.should_stop


def test_what_is_logged() -> None:
    """Nothing unless asked for; the usual values; or those that a regular expression chooses."""
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
    assert any(name.startswith("torch_grad_norm/") for name in found[True])
    assert not any("collector" in name for name in found[True])
    assert found["^torch_train_steps"] == {"torch_train_steps_total/SGD"}


def test_what_fails_at_an_event(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once and counted, as `integration`, and goes no further; an interrupt does."""
    model, session = torch.nn.Linear(3, 2), Session("Callback", options={"port": None})

    def fails(error: BaseException) -> None:
        raise error

    session.during(fails, ValueError())  # no training is told of: nothing is done
    for _ in range(2):
        assert session.found(fails, ValueError("strange")) is None
    assert caplog.text.count("Callback: what the trainer knows could not be found") == 1
    assert session.found(lambda: 3) == 3
    session.begin(model)
    assert session.telling
    exporter = session.exporter
    assert exporter is not None
    for _ in range(20):
        session.during(fails, ValueError("broken"))
    assert value(exporter, "torch_grad_exporter_errors_total", source="integration") == 20
    assert caplog.text.count("integration failed; training goes on") == 1
    with pytest.raises(KeyboardInterrupt):
        session.during(fails, KeyboardInterrupt())
    session.end()
    assert not session.telling


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_is_logged(own: bool) -> None:
    """It is told where the model returns none; where it does, each step's own stays."""

    class Returns(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:  # type: ignore[override]
            loss = super().forward(inputs).square().mean()
            return {"loss": loss} if own else loss

    model, session = Returns(3, 2), Session("Callback", options={"port": None})
    session.logged_loss(1.0)  # no training is told of
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
