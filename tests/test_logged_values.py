"""`exporter.log`: numbers of the loop by name, everywhere where the exporter's own numbers are."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.loops import train
from tests.support.tools import eventually, get
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.outputs.live.fetch import loaded
from torch_grad_exporter.outputs.live.saved import Lines, logged
from torch_grad_exporter.store.logged_values import NAMES, LoggedCall, LoggedValues
from torch_grad_exporter.store.records import Inspected

VALUE, NONFINITE, DROPPED = (f"torch_train_value{end}" for end in ("", "_nonfinite_total", "_names_dropped"))


def test_values_are_exact() -> None:
    """Numbers of all kinds and tensors on the CPU are in the next scrape, of each name the last one."""
    given: dict[str, Any] = {
        "int": 3, "bool": True, "float": 0.1, "numpy": np.float32(0.1), "numpy int": np.int64(-4), "zero": torch.tensor(0.0),
        "half": torch.tensor(1.5, dtype=torch.bfloat16), "one element": torch.full((1, 1), 2.0),
        "with a graph": torch.ones((), requires_grad=True) * 5, "parameter": torch.nn.Parameter(torch.tensor(7.0)),
    }  # fmt: skip
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        exporter.log(dict.fromkeys(given, -1.0))
        exporter.log(given)
        values = exporter.values(f"^{VALUE}/")
    numbers = {name: value.item() if isinstance(value, torch.Tensor) else float(value) for name, value in given.items()}
    assert values == {f"{VALUE}/{name}": value for name, value in numbers.items()}


def test_a_value_is_that_of_its_time() -> None:
    """A tensor that is written to right after the call, as a running sum, does not change what was logged."""
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        exporter.log({"sum": (total := torch.tensor(1.0))})
        total += 1
        assert exporter.values("sum") == {f"{VALUE}/sum": 1.0, f"{NONFINITE}/sum": 0.0}


def on_the_page(exporter: Exporter) -> dict[str, list[float]]:
    """Return the values that the page has, by name."""
    values: dict[str, list[float]] = json.loads(get(f"{exporter.page_url}api/v1/values?view=recent"))["values"]
    return values


def test_names_are_labels() -> None:
    """Any name is on `/metrics` as it was given."""
    names = ["train/reward", "eval loss", "größe", 'a "quote"', "back\\slash", "line\nbreak", "名前", "__proto__"]
    with start_exporter(torch.nn.Linear(4, 2), port=0, addr="127.0.0.1", linger=0) as exporter:
        exporter.log({name: place for place, name in enumerate(names)})
        families = {family.name: family for family in text_string_to_metric_families(get(exporter.url))}
        assert eventually(lambda: [*on_the_page(exporter)] == names)
    assert {sample.labels["name"]: sample.value for sample in families[VALUE].samples} == {n: i for i, n in enumerate(names)}


def test_nonfinite_values_are_counted() -> None:
    """NaN and Inf are shown as they are, and counted by name."""
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        for value in (math.nan, torch.tensor(math.inf), 1.0, -math.inf):
            exporter.log({"kl": value, "reward": 2.0})
        values = exporter.values("torch_train_value")
    assert values == {f"{VALUE}/kl": -math.inf, f"{NONFINITE}/kl": 3, f"{VALUE}/reward": 2, f"{NONFINITE}/reward": 0, DROPPED: 0}


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([("reward", 1.0)], TypeError, "mapping"),
    ({3: 1.0}, TypeError, "expected a name"),
    ({"": 1.0}, ValueError, "1 to 200 characters"),
    ({"n" * 201: 1.0}, ValueError, "1 to 200 characters"),
    ({"reward": "1"}, TypeError, "'reward'.*got str"),
    ({"reward": None}, TypeError, "'reward'.*got NoneType"),
    ({"reward": 1 + 2j}, TypeError, "got complex"),
    ({"reward": torch.tensor(1 + 2j)}, TypeError, "'reward'"),
    ({"reward": torch.ones(3)}, ValueError, r"'reward'.*shape \(3,\)"),
    ({"reward": 10**400}, ValueError, "'reward'.*too large"),
    ({"reward": torch.ones((), dtype=torch.complex64)}, TypeError, "'reward'"),
]


@pytest.mark.parametrize(("values", "error", "text"), WRONG)
def test_wrong_values(values: object, error: type[Exception], text: str) -> None:
    """The first call raises the error; later ones count it, take the other values, and the loop goes on."""
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        with pytest.raises(error, match=text):
            exporter.log(values)
        exporter.log({"right": 1.0})
        exporter.log({**values, "right": 2.0} if isinstance(values, dict) else values)
        errors = exporter.values("errors_total/log$")
        expected = 2.0 if isinstance(values, dict) else 1.0
        assert exporter.values(f"{VALUE}/") == {f"{VALUE}/right": expected}
    assert [*errors.values()] == [1]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError)])
def test_wrong_steps(step: object, error: type[Exception]) -> None:
    """A step is a whole number from 0 on."""
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter, pytest.raises(error, match="step="):
        exporter.log({"reward": 1.0}, step=step)


def test_names_are_bounded() -> None:
    """The first 200 names are shown, and how many more there were."""
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        for call in range(3):
            exporter.log({f"name {number}": number + call for number in range(NAMES + 50)})
        values = exporter.values("torch_train_value")
    assert values.pop(DROPPED) == 50
    assert values == {f"{VALUE}/name {n}": n + 2 for n in range(NAMES)} | {f"{NONFINITE}/name {n}": 0 for n in range(NAMES)}


def take(values: LoggedValues, at: float, **numbers: float) -> None:
    """Take a call at this time."""
    values.take(Inspected("log", 0, (), LoggedCall(at, int(at), numbers)), ())


def test_stale_names_end() -> None:
    """A name ends an hour after its last value, a rarer one after twice its interval, and gives its place to others."""
    values = LoggedValues()
    for at in (0.0, 10_000.0):
        take(values, at, rare=at)
    take(values, 11_000.0, **{f"name {number}": 1.0 for number in range(NAMES)})
    assert values.snapshot(14_500.0)[1] == 1
    assert values.snapshot(14_600.1)[0] == {"rare": (10_000.0, 0)}
    take(values, 14_601.0, **{f"name {NAMES - 1}": 2.0})
    assert values.snapshot(30_000.1) == ({}, 0)


def test_memory_is_bounded() -> None:
    """Names beyond the bound, and rows that are never taken, stop growing."""
    values = LoggedValues()
    for call in range(30_000):
        take(values, float(call), **{f"name {call}": 1.0})
    shown, dropped = values.snapshot(29_999.0)
    assert (len(shown), len(values.rows())) == (NAMES, 600)
    assert dropped <= 10_000


def test_threads() -> None:
    """Calls of several threads are all counted, beside a training."""
    model = torch.nn.Linear(4, 2)
    with start_exporter(model, port=None) as exporter:
        exporter.log({"first": 1.0})

        def run(name: str) -> None:
            for _ in range(500):
                exporter.log({name: math.nan, "shared": torch.tensor(math.nan)})

        threads = [threading.Thread(target=run, args=(f"thread {number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        train(model, steps=50)
        for thread in threads:
            thread.join()
        values = exporter.values(f"^{NONFINITE}/(thread|shared)")
    assert values == {f"{NONFINITE}/shared": 2000, **{f"{NONFINITE}/thread {number}": 500 for number in range(4)}}


def test_a_condition_reads_them() -> None:
    """`exporter.on` acts on a logged value."""
    events: list[Any] = []
    with start_exporter(torch.nn.Linear(4, 2), port=None) as exporter:
        exporter.log({"kl": 0.1})
        exporter.on(lambda m: m.last(VALUE, name="kl") > 5, events.append, name="KL too large")
        exporter.log({"kl": 9.0})
        assert eventually(lambda: bool(events))
    assert (events[0].name, [*events[0].values.values()]) == ("KL too large", [9.0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a saved run that has logged two values, one at each second step and one with a NaN."""
    model = torch.nn.Linear(4, 2)
    with start_exporter(model, port=None, run="logged") as exporter:
        for number in range(20):
            train(model)
            exporter.log({"train/reward": number / 2})
            if number % 2:
                exporter.log({"eval/loss": math.nan if number == 9 else float(number)}, step=number + 1)
        path = tmp_path / "run.json.gz"
        assert eventually(lambda: len(values_of(exporter, path).steps) == 20)
    return path


def values_of(exporter: Exporter, path: Path) -> Lines:
    """Save the run, and return its logged values."""
    exporter.save(path)
    return logged(loaded(str(path), None), "recent")


def test_a_saved_run_has_each_step(run: Path) -> None:
    """A saved run has the values of each step, and where one was not finite."""
    for view in ("recent", "whole"):
        lines = logged(loaded(str(run), None), view)
        assert lines.steps.tolist() == [*range(1, 21)]
        assert lines.values["train/reward"].tolist() == [number / 2 for number in range(20)]
        expected = [math.nan if number % 2 == 0 or number == 9 else number for number in range(20)]
        np.testing.assert_array_equal(lines.values["eval/loss"], expected)
        assert np.flatnonzero(lines.nonfinite["eval/loss"]).tolist() == [9]


def test_plot_and_check(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plot --value` draws a panel more, and refuses unknown names; `check --max` judges a value."""
    sizes = []
    for number, values in enumerate(([], ["--value", "train/reward", "--value", "eval/loss"])):
        out = tmp_path / f"{number}.png"
        assert cli.main(["plot", str(run), "--out", str(out), *values]) == 0
        sizes.append(out.read_bytes()[20:24])  # the height, in the header of a PNG
    assert int.from_bytes(sizes[0]) < int.from_bytes(sizes[1])
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "x.png"), "--value", "reward"]) == 2
    assert "--value reward: no such value; there is train/reward, eval/loss" in capsys.readouterr().err
    limit = 'torch_train_value{name="train/reward"}='
    assert [cli.main(["check", str(run), "--max", f"{limit}{most}"]) for most in (10, 9)] == [0, 1]


def test_nothing_after_the_end() -> None:
    """After `close` a call does nothing, whatever it is given."""
    exporter = start_exporter(torch.nn.Linear(4, 2), port=None)
    exporter.close()
    exporter.log({"reward": "wrong"})
