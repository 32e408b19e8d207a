"""Conformance of the callbacks: what each promises, in trainings by the framework's own trainer."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.harness import Way
from tests.support.scrape import errors, key, value, values
from tests.trainers.adapters import (
    BATCHES,
    EPOCHS,
    FRAMEWORKS,
    Framework,
    Ignite,
    Lightning,
    LightningByParts,
    MMEngine,
    Transformers,
)
from tests.trainers.training import AMPLE, QUICK, Broken, Training, compared, ending_of
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.session import running_exporter

OPTIONS: dict[str, dict[str, Any]] = {
    "limit": {"limit": 0.05},
    "accumulate": {"accumulate": 4, "limit": 0.05},
    "evaluated": {"evaluated": True, "accumulate": 2},
    "bf16": {"bf16": True},
}


def name_of(framework: Framework) -> str:
    """Return the name of a framework in the names of tests."""
    return type(framework).__name__


each = pytest.mark.parametrize("framework", FRAMEWORKS, ids=name_of)


@pytest.fixture(autouse=True)
def without_torchvision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision from MMEngine, since it may be built for another torch."""
    if isinstance(request.getfixturevalue("framework"), MMEngine):
        monkeypatch.setitem(sys.modules, "torchvision", None)


def trained(run: Training, framework: Framework, folder: Path, **options: Any) -> None:
    """Train with the callback, or without."""
    model = framework.model()
    more = {"gradient_accumulation_steps": options.get("accumulate", 1)} if isinstance(framework, Ignite) else {}
    with run.called_back(model, partial(framework.callback, model), **more) as callbacks:
        framework.train(model, callbacks, folder, lambda *told: run.told.append(told), **options)
    assert running_exporter(model) is None


@pytest.mark.parametrize(
    ("framework", "option"),
    [(framework, option) for framework in FRAMEWORKS for option in framework.options],
    ids=[f"{name_of(framework)}-{option}" for framework in FRAMEWORKS for option in framework.options],
)
def test_numbers(framework: Framework, option: str, tmp_path: Path) -> None:
    """All numbers are those of the record, and training ends in the same bits."""
    run = compared(partial(trained, framework=framework, folder=tmp_path, **OPTIONS[option]))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


@pytest.mark.parametrize("framework", [FRAMEWORKS[0], Transformers(), Ignite()], ids=name_of)
def test_at_defaults(framework: Framework, tmp_path: Path) -> None:
    """At the default options each value belongs to the step that it names."""
    train = partial(trained, framework=framework, folder=tmp_path, epochs=25, limit=0.05)
    assert len(compared(train, Way.DEFAULTS, between=3, **AMPLE).samples) > 2


@each
def test_reported_values(framework: Framework, tmp_path: Path) -> None:
    """Steps, samples, loss, epoch and learning rate are right after each step, and the run has finished in the end."""
    model, shown, kept = framework.model(), [], []
    more = {"gradient_accumulation_steps": 2} if isinstance(framework, Ignite) else {}
    callback = framework.callback(model, **QUICK, **more)

    def look(step: int, loss: float) -> None:
        kept.append(callback.exporter)
        shown.append((step, loss, values(callback.exporter)))

    framework.train(model, [callback], tmp_path, look, accumulate=2)
    assert [step for step, *_ in shown] == list(range(1, BATCHES + 1))
    for step, loss, scrape in shown:
        assert scrape[key("torch_train_steps_total", optimizer="AdamW")] == step
        assert scrape[key("torch_grad_sample_step")] == step
        assert scrape[key("torch_train_samples_total")] == 8 * step
        assert scrape[key("torch_train_loss")] == pytest.approx(loss, rel=1e-5)
        assert scrape[key("torch_train_epoch")] == framework.epoch(step, BATCHES // 2)
        assert scrape[key("torch_train_learning_rate", optimizer="AdamW", group="0")] == 0.01
        assert scrape[key("torch_train_state", state="training")] == 1
    assert callback.exporter is None
    assert ending_of(kept[0], tmp_path) == ("finished", None)


class Fails:
    """Keeps the exporters of a callback, and raises once at the third step."""

    def __init__(self, callback: Any, error: BaseException) -> None:
        self._callback, self._errors = callback, [error]
        self.exporters: list[Any] = []

    def __call__(self, step: int, loss: float) -> None:
        if self._callback.exporter not in self.exporters:
            self.exporters.append(self._callback.exporter)
        if step == 3 and self._errors:
            raise self._errors.pop()


@each
@pytest.mark.parametrize("error", [Broken("secret"), KeyboardInterrupt()], ids=["broken", "interrupted"])
def test_failures(framework: Framework, error: BaseException, tmp_path: Path) -> None:
    """The state is failed with the exception's name, Ctrl-C is finished, and the next training goes on with the run."""
    model = framework.model()
    callback = framework.callback(model, **QUICK)
    fails, failed = Fails(callback, error), isinstance(error, Broken)
    around = contextlib.nullcontext() if framework.sees_failures else callback
    with pytest.raises(Broken if failed else framework.interrupted), around:
        framework.train(model, [callback], tmp_path, fails)
    assert ending_of(fails.exporters[0], tmp_path) == (("failed", "Broken") if failed else ("finished", None))
    assert running_exporter(model) is None
    framework.train(model, [callback], tmp_path, fails)
    assert ending_of(fails.exporters[1], tmp_path) == ("finished", None)
    assert fails.exporters[0].run == fails.exporters[1].run


@pytest.mark.parametrize("framework", [one for one in FRAMEWORKS if not one.sees_failures], ids=name_of)
def test_failures_without_a_with(framework: Framework, tmp_path: Path) -> None:
    """Without a `with` the next training marks the unfinished one as failed."""
    model = framework.model()
    callback = framework.callback(model, **QUICK)
    fails = Fails(callback, Broken())
    with pytest.raises(Broken):
        framework.train(model, [callback], tmp_path, fails)
    assert running_exporter(model) is fails.exporters[0]
    framework.train(model, [callback], tmp_path, fails)
    assert [ending_of(one, tmp_path) for one in fails.exporters] == [("failed", "TrainingInterrupted"), ("finished", None)]
    assert fails.exporters[0].run == fails.exporters[1].run


@each
def test_stop(framework: Framework, tmp_path: Path) -> None:
    """`Stop()` ends the training, and the exporter with it."""
    model, steps = framework.model(), []
    callback = framework.callback(model, **QUICK)

    def look(step: int, loss: float) -> None:
        if not steps:
            callback.exporter.on(lambda m: m.mean("torch_train_steps_total", samples=1) >= 3, Stop())
        steps.append(step)

    framework.train(model, [callback], tmp_path, look, epochs=100_000)
    assert 3 <= steps[-1] < 100_000 * BATCHES
    assert running_exporter(model) is None


@each
def test_what_is_logged(framework: Framework, tmp_path: Path) -> None:
    """The framework's loggers get the values of each step that they log, those that were asked for."""

    def logged(log: bool | str) -> dict[int, dict[str, float]]:
        model = framework.model()
        more = {"log_every": 3} if isinstance(framework, Ignite) else {}
        callback = framework.callback(model, log=log, **QUICK, **more)
        norms.clear()

        def look(step: int, loss: float) -> None:
            norms[step] = value(callback.exporter, "torch_grad_global_norm")

        found: dict[int, dict[str, float]] = {}
        for step, given in framework.train(model, [callback], tmp_path, look, log_every=3):
            ours = {name: float(value) for name, value in given.items() if name.startswith("torch_")}
            found.setdefault(step, {}).update(ours)
        return {step: ours for step, ours in found.items() if ours}

    norms: dict[int, float | None] = {}
    assert logged(False) == {}
    expected = {step: {"torch_grad_global_norm": norms[step]} for step in framework.logged_steps}
    assert logged("^torch_grad_global_norm$") == expected
    every = logged(True)
    assert {step: {"torch_grad_global_norm": ours["torch_grad_global_norm"]} for step, ours in every.items()} == expected
    for ours in every.values():
        assert "torch_train_skipped_steps_total" in ours
        assert any(name.startswith("torch_grad_norm/") for name in ours)


@each
def test_the_users_exporter(framework: Framework, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user's exporter is found and continues; a second callback is logged and reports nothing."""
    model = framework.model()
    with start_exporter(model, **QUICK) as exporter, caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        callback = framework.callback(model)
        framework.train(model, [callback, framework.callback(model)], tmp_path)
        assert value(exporter, "torch_train_steps_total", optimizer="AdamW") == EPOCHS * BATCHES
        assert value(exporter, "torch_train_samples_total") == EPOCHS * BATCHES * 4
        assert value(exporter, "torch_train_epoch") == framework.epoch(EPOCHS * BATCHES, BATCHES)
        assert running_exporter(model) is exporter
        assert caplog.text.count("remove one of them") == 1
        framework.train(model, [framework.callback(model, exporter)], tmp_path)
        assert value(exporter, "torch_train_samples_total") == 2 * EPOCHS * BATCHES * 4
        assert running_exporter(model) is exporter


@pytest.mark.parametrize("framework", [LightningByParts(), Transformers(), MMEngine(), Ignite()], ids=name_of)
def test_a_callback_added_twice(framework: Framework, tmp_path: Path) -> None:
    """The same callback twice raises."""
    model = framework.model()
    callback = framework.callback(model, **QUICK)
    with pytest.raises(ValueError, match=r"twice; \w+ it once|attached to the trainer already"):
        framework.train(model, [callback, callback], tmp_path)


@each
def test_wrong_arguments_raise(framework: Framework, tmp_path: Path) -> None:
    """Wrong arguments raise where the callback is made or when training begins."""
    model = framework.model()
    for wrong, message in (
        ({"prot": 9100}, r"\(prot=...\): not an option of start_exporter"),
        ({"log": 3}, "expected True, False or a regular expression"),
        ({"log_values": 3}, r"log_values=3.*True or False"),
    ):
        with pytest.raises(TypeError, match=framework.kind.__name__ + ".*" + message if "log" not in wrong else message):
            framework.callback(model, **wrong)
    if isinstance(framework, Lightning | Transformers):  # their trainers pickle callbacks
        assert isinstance(pickle.loads(pickle.dumps(framework.callback(model))), framework.kind)  # noqa: S301 - our own
    with pytest.raises(ValueError, match="every"):
        framework.train(model, [framework.callback(model, port=None, every=-1)], tmp_path)
