"""What is counted and told beside the training, seen from outside: failures in a row, observed norms, several optimizers."""

from __future__ import annotations

import json
import logging
import math
import random
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, key, value, values
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter

QUIET = dict.fromkeys(("host", "process", "container", "gpu", "cuda_memory"), False)
"""Collectors that ask the machine."""

CAPTURES = "torch_grad_exporter_captures_total"
NORM = "torch_grad_global_norm"
COEFFICIENT = "torch_grad_clip_coefficient"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def started(model: torch.nn.Module | Mapping[str, torch.nn.Module], **options: Any) -> Exporter:  # noqa: ANN401 - as `start_exporter` has them
    """An exporter without a server that samples every round."""
    return start_exporter(model, None, **{"every": 1, "collectors": QUIET, **options})


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Clears, and runs one backward of the loss times the scale."""
    model.zero_grad()
    (model(batch()).square().mean() * scale).backward()


def norm(parameters: Any) -> float:  # noqa: ANN401 - what has gradients
    """The norm of the gradients as they are now."""
    return math.hypot(*(float(one.grad.double().norm()) for one in parameters if one.grad is not None))


def outcomes(exporter: Exporter, **labels: str) -> dict[str, float]:
    """The steps with a gradient that is not finite, by what became of them."""
    names = ("stepped", "skipped", "unknown")
    found = {one: value(exporter, "torch_grad_nonfinite_steps_total", outcome=one, **labels) for one in names}
    return {name: number for name, number in found.items() if number}


# Failures in a row


def switched_off(caplog: pytest.LogCaptureFixture) -> int:
    """How many lines say that something is switched off."""
    return sum("switched off" in record.getMessage() for record in caplog.records)


class Output(dict[str, torch.Tensor]):
    """What a model returns; looking for a loss in it fails as long as `broken` is set."""

    broken = False

    def get(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - as a dictionary has it
        if self.broken and name == "loss":
            raise OSError("injected")
        return super().get(name, *arguments)


class Telling(Perceptron):
    """A model that returns its loss."""

    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        out = super().forward(x)
        return Output(out=out, loss=out.square().mean())


class Rounds:
    """Rounds of such a model."""

    def __init__(self) -> None:
        self.model = Telling()
        self._optimizer = sgd(self.model)

    def run(self, number: int, *, broken: bool) -> None:
        """So many rounds, in all of which an output that is looked at fails, or in none."""
        Output.broken = broken
        try:
            for _ in range(number):
                self._optimizer.zero_grad()
                self.model(batch())["loss"].backward()
                self._optimizer.step()
        finally:
            Output.broken = False


def test_a_hook_that_fails_nine_times_in_a_row_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Nine failures, a success and nine failures are 18, of which one line tells, and the hook still does its work."""
    rounds = Rounds()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), started(rounds.model) as exporter:
        rounds.run(9, broken=True)
        assert errors(exporter) == {"forward_hook": 9}
        assert value(exporter, "torch_train_loss") is None
        rounds.run(1, broken=False)
        rounds.run(9, broken=True)
        assert errors(exporter) == {"forward_hook": 18}
        assert switched_off(caplog) == 0
        before = value(exporter, "torch_train_loss")
        rounds.run(1, broken=False)
        assert value(exporter, "torch_train_loss") not in (None, before)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert value(exporter, CAPTURES) == 20


def test_a_hook_that_fails_ten_times_in_a_row_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """The tenth failure in a row is the last one; a line says so, and rounds are counted as before."""
    rounds = Rounds()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), started(rounds.model) as exporter:
        rounds.run(1, broken=False)
        loss = value(exporter, "torch_train_loss")
        rounds.run(9, broken=True)
        assert switched_off(caplog) == 0
        rounds.run(11, broken=True)
        rounds.run(3, broken=False)
        assert errors(exporter) == {"forward_hook": 10}
        assert switched_off(caplog) == 1
        assert value(exporter, "torch_train_loss") == loss
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 24


class Treacherous(torch.nn.Parameter):
    """A parameter whose `.grad` raises when the exporter looks at it, as long as `broken` is set."""

    broken = False

    @property  # type: ignore[override]
    def grad(self) -> torch.Tensor | None:
        if self.broken and any("torch_grad_exporter/" in frame.filename for frame in traceback.extract_stack()[:-1]):
            raise OSError("injected")
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, given: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, given)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)  # type: ignore[attr-defined]


def test_readings_that_fail_now_and_then_go_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of 40 rounds every other gradient cannot be read: all failures are counted, nothing is switched off, the rest is sampled."""
    model = Perceptron()
    model.first.weight = Treacherous(model.first.weight.data)
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), started(model) as exporter:
        for step in range(40):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            monkeypatch.setattr(Treacherous, "broken", step % 2 == 1)
            loss.backward()
            monkeypatch.setattr(Treacherous, "broken", False)
            optimizer.step()
        assert sum(errors(exporter).values()) >= 20
        assert switched_off(caplog) == 0
        assert value(exporter, "torch_grad_captures_total", layer="second") == 20
        assert value(exporter, "torch_grad_sample_step") == 39


def test_a_collector_that_fails_nine_times_in_a_row_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a collector, too, only ten failures in a row are too many; from then on a scrape leaves it out, and counts no failure."""
    scrapes: list[bool] = []
    real = psutil.Process.num_threads

    def threads(process: psutil.Process) -> int:
        if scrapes[-1]:
            raise ZeroDivisionError
        return real(process)

    monkeypatch.setattr(psutil.Process, "num_threads", threads)
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        exporter = started(Perceptron(), collectors={**QUIET, "process": True})

        def succeeds(*, broken: bool) -> Mapping[Any, float]:
            scrapes.append(broken)
            return values(exporter)

        success = key("torch_grad_exporter_collector_success", collector="process")
        seconds = key("torch_grad_exporter_collector_duration_seconds", collector="process")
        for broken in (*[True] * 9, False, *[True] * 9, False):
            assert succeeds(broken=broken)[success] == (not broken)
        assert errors(exporter) == {"collector_process": 18}
        assert switched_off(caplog) == 0
        for _ in range(10):
            assert seconds in succeeds(broken=True)
        assert switched_off(caplog) == 1
        for _ in range(3):
            assert seconds not in succeeds(broken=False)  # it is tried again in a minute
        assert errors(exporter) == {"collector_process": 28}
        exporter.close()


# Norms that the user observes


def test_steps_that_were_not_finite_stay_counted_when_a_norm_is_observed() -> None:
    """What samples counted before the first observed norm is still there after it, and both add up from then on."""
    model = Perceptron()
    optimizer = sgd(model)
    with started(model, every=2) as exporter:

        def step(scale: float, observed: float | None = None) -> None:
            backward(model, scale)
            if observed is not None:
                exporter.observe(grad_norm=observed)
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
            optimizer.step()

        for scale in (1.0, 1.0, math.nan, 1.0):
            step(scale)
        captures = value(exporter, CAPTURES)
        before = outcomes(exporter)
        while not before:
            step(math.nan)
            before = outcomes(exporter)
        step(1.0, observed=1.0)
        assert outcomes(exporter) == before
        assert value(exporter, NORM) == 1.0
        for _ in range(2):  # one is sampled, and one is not
            step(math.nan, observed=math.nan)
        assert outcomes(exporter) == {"stepped": before["stepped"] + 2}
        for _ in range(2):
            step(1.0, observed=2.0)
        assert outcomes(exporter) == {"stepped": before["stepped"] + 2}
        assert (value(exporter, CAPTURES) or 0) > (captures or 0)
        assert not errors(exporter)


def test_a_negative_norm_is_none() -> None:
    """DeepSpeed says -1 where a norm is not finite: that is shown as NaN, counted with its step, and enters no histogram."""
    model = Perceptron()
    optimizer = sgd(model)
    with started(model, every=1000) as exporter:
        for given in (1.0, 2.0, -1.0):
            backward(model)
            exporter.observe(grad_norm=given)
            optimizer.step()
        assert math.isnan(value(exporter, NORM) or 0.0)
        assert outcomes(exporter) == {"stepped": 1}
        assert value(exporter, f"{NORM}_distribution_count") == 2
        assert value(exporter, f"{NORM}_distribution_sum") == pytest.approx(3.0)
        backward(model)
        exporter.observe(grad_norm=4.0)
        optimizer.step()
        assert value(exporter, NORM) == 4.0
        assert outcomes(exporter) == {"stepped": 1}


# Several optimizers


class Towers(torch.nn.Module):
    """Three stacks of layers that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3))) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.one(x), 10 * self.two(x), 0.01 * self.three(x)))


def test_an_optimizer_that_is_new_does_not_change_what_another_one_was_clipped_by() -> None:
    """All norms are measured again, of the old one's and of the new one's: the first's are cut, the second's are not."""
    model = Towers()
    old, new = torch.optim.SGD(model.one.parameters(), 0.01), torch.optim.Adam(model.three.parameters(), 0.01)
    with started({"one": model.one, "two": model.two, "three": model.three}) as exporter:
        for step in range(7):
            backward(model)
            mine, others = norm(model.one.parameters()), norm(model.three.parameters())
            torch.nn.utils.clip_grad_norm_(model.one[0].parameters(), 1e-3)
            after = norm(model.one.parameters())
            old.step()
            if step < 4:
                continue
            new.step()
            backward(model)  # a round is over when the next one begins
            assert value(exporter, NORM, optimizer="SGD") == pytest.approx(mine, rel=1e-5)
            assert value(exporter, COEFFICIENT, optimizer="SGD") == pytest.approx(after / mine, rel=1e-4)
            assert value(exporter, "torch_grad_global_norm_after_clip", optimizer="SGD") == pytest.approx(after, rel=1e-4)
            assert value(exporter, NORM, optimizer="Adam") == pytest.approx(others, rel=1e-5)
            assert value(exporter, COEFFICIENT, optimizer="Adam") == pytest.approx(1.0)
            old.step()
            new.step()
        assert not errors(exporter)


# What is observed and counted


def test_what_was_counted_does_not_fall() -> None:
    """Numbers of samples and tokens that are negative or not finite are left out, and what is there stays."""
    with started(Perceptron()) as exporter:
        for given in (5.0, -3.0, math.nan, math.inf, 2.0):
            exporter.observe(samples=given, tokens=10 * given)
        assert value(exporter, "torch_train_samples_total") == 7
        assert value(exporter, "torch_train_tokens_total") == 70


@pytest.mark.parametrize(("positive", "judged_as_it_is"), [(40, True), (127, True), (128, False), (150, False)])
def test_a_loss_is_judged_by_its_logarithm_if_128_before_it_were_positive(positive: int, judged_as_it_is: bool) -> None:
    """A loss of 90 among losses that vary by factors around 1 is a spike where they are taken as they are, and only there."""
    generator = random.Random(0)
    with started(Perceptron()) as exporter:

        def spikes(losses: Iterable[float]) -> float:
            for loss in losses:
                exporter.observe(loss=loss)
            return value(exporter, "torch_train_loss_spikes_total") or 0.0

        usual = [generator.lognormvariate(0.0, 1.0) for _ in range(200 + positive)]
        before = spikes([*usual[:200], -1.0, *usual[200:]])
        assert spikes([90.0]) - before == judged_as_it_is
        assert value(exporter, "torch_train_loss") == 90.0


def only_counted(exporter: Exporter) -> bool:
    """Whether most rounds are only counted."""
    return (value(exporter, "torch_grad_exporter_timing_interval_steps") or 0) > 4


def test_the_overhead_of_rounds_that_are_only_counted_is_part_of_the_ratio() -> None:
    """As long as there were fewer than a thousand steps, the ratio is all that was spent after the first over all of their time."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = started(model, every=4096, overhead_budget=0.0001)
    backward(model)
    optimizer.step()
    first = value(exporter, "torch_grad_exporter_overhead_seconds_total") or 0.0
    assert first > 0
    for _ in range(600):
        backward(model)
        optimizer.step()
    assert only_counted(exporter)
    exporter.close()
    spent = (value(exporter, "torch_grad_exporter_overhead_seconds_total") or 0.0) - first
    trained = value(exporter, "torch_train_step_duration_seconds_sum") or 0.0
    assert value(exporter, "torch_train_step_duration_seconds_count") == 600
    assert value(exporter, "torch_grad_exporter_overhead_ratio") == pytest.approx(spent / trained)


def test_an_evaluation_shows_where_rounds_were_only_counted() -> None:
    """When no step has come for a second, forwards are looked at again: the state is that of an evaluation, then of training."""
    model = Perceptron()
    optimizer = sgd(model)
    state = "torch_train_state"
    with started(model, every=4096, overhead_budget=0.0001) as exporter:
        for _ in range(400):
            backward(model)
            optimizer.step()
        assert only_counted(exporter)
        model.eval()

        def evaluates() -> bool:
            with torch.no_grad():
                model(batch())
            return value(exporter, state, state="evaluating") == 1

        assert eventually(evaluates)
        model.train()
        for _ in range(3):
            backward(model)
            optimizer.step()
        assert value(exporter, state, state="training") == 1
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 403
        assert not errors(exporter)


# The end


def test_the_last_round_of_a_run_that_was_not_closed_is_counted(tmp_path: Path) -> None:
    """What was captured and has not stepped when the run is closed is in the last values, and in the history that is saved."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = started(model)
    for _ in range(3):
        backward(model)
        optimizer.step()
    backward(model, math.nan)
    exporter.close()
    assert outcomes(exporter) == {"unknown": 1}
    assert value(exporter, "torch_grad_captures_total", layer="first") == 4
    exporter.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["status"]["samples"] == 4
    assert saved["status"]["state"] == "finished"
    optimizer.step()
    assert outcomes(exporter) == {"unknown": 1}
