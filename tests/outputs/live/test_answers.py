"""The page's answers where a test chooses what was recorded: numbers that are not finite, names, new records, slow scrapes."""

from __future__ import annotations

import contextlib
import json
import math
from urllib.parse import quote

import numpy as np
import pytest

from tests.outputs.live.support import NOW, Made, decoded, family, held

import tests.support.properties  # isort: skip  # noqa: F401 - the profile
from torch_grad_exporter.collectors.gradients import GRAD_DEAD_RATIO, GRAD_GLOBAL_NORM, GRAD_NORM
from torch_grad_exporter.collectors.training import TRAIN_LEARNING_RATE, TRAIN_LOSS, TRAIN_LOSS_NONFINITE, TRAIN_STATE, TRAIN_STEPS
from torch_grad_exporter.errors import BusyError
from torch_grad_exporter.outputs.live.history import QUANTITIES
from torch_grad_exporter.outputs.live.step_rows import SCALARS

HOSTILE = ["<img src=x onerror=alert(1)>", "a/b?c&d=e#f+g%2F h", "lone \ud800", '"\\\n\0', ""]

TRAINING = [family(TRAIN_STATE, {("training",): 1.0})]


# The JSON


def test_nonfinite_numbers_are_strings() -> None:
    """NaN and infinities of metrics and of the history are strings, and absent numbers are null."""
    made = Made(
        families=[
            family(TRAIN_LOSS, math.nan),
            family(GRAD_GLOBAL_NORM, {("a",): math.inf}),
            family(TRAIN_LEARNING_RATE, {("a", "0"): -math.inf}),
            family(GRAD_NORM, {("a",): math.inf, ("b",): math.nan}),
        ],
        rows=np.array([[math.inf, math.nan, 0.5, -math.inf], [1.0, 2.0, 3.0, 4.0]]),
        scalars=(math.inf, math.nan, 3.0, -math.inf, 1e-7),
    ).record()
    status = made.json("status")
    assert (status["loss"], status["global_norm"], status["learning_rate"]) == ("NaN", "Infinity", "-Infinity")
    assert status["learning_rates"] == {"a": "-Infinity"}
    assert (status["clip_coefficient"], status["epoch"], status["samples_per_second"]) == (None, None, None)
    run = made.json("run")
    assert [run[name] for name in SCALARS] == [["Infinity"], [None], [3.0], ["Infinity"], [1e-7]]
    assert run["nonfinite"] == {"loss": [0], "step_seconds": [0]}
    layer = made.json("layer?name=a")
    assert (layer["norm"], layer["units"], layer["distribution"]) == ("Infinity", None, None)
    assert [layer["recent"][name] for name in QUANTITIES] == [["Infinity"], [None], [0.5], ["Infinity"]]
    assert layer["whole"]["nonfinite"] == layer["recent"]["nonfinite"] == {"norm": [0], "zscore": [0]}
    assert made.json("layer?name=b")["norm"] == "NaN"
    assert math.isinf(decoded(made.json("layers?quantity=zscore"))[0, 0])
    assert math.isnan(decoded(made.json("layers?quantity=zero_ratio"))[0, 0])


def test_a_layer_may_have_any_name() -> None:
    """Markup, separators of addresses and half of a surrogate pair come back unchanged in all answers."""
    for name in HOSTILE:
        made = Made(names=["first", name], families=[family(GRAD_DEAD_RATIO, {(name,): 1.0})]).record()
        assert made.json("layers")["layers"] == ["first", name]
        assert set(made.json("saved")["layer"]) == {"first", name}
        [problem] = made.json("status")["problems"]
        assert (problem["layer"], name in problem["text"]) == (name, True)
        with contextlib.suppress(UnicodeEncodeError):  # half of a pair has no address
            assert made.json(f"layer?name={quote(name, safe='')}")["layer"] == name
        assert made.ask("/api/v1/layers").body.isascii()


def test_critical_problems_stay_as_earlier_ones() -> None:
    """NaN losses are a problem for five minutes, and an earlier one with its step from then on."""
    made = Made(families=[*TRAINING, family(TRAIN_STEPS, {("a",): 40.0, ("b",): 20.0}), family(TRAIN_LOSS_NONFINITE, 6.0)]).record()
    made.live.remember()
    status = made.json("status")
    assert ([problem["alert"] for problem in status["problems"]], status["earlier"]) == (["TrainingNonFiniteLoss"], [])
    assert (status["nonfinite_losses"], status["optimizers"]) == (6, 2)
    for _ in range(30):
        made.now += 15
        made.live.remember()
    status = made.json("status")
    [earlier] = status["earlier"]
    assert (status["problems"], earlier["alert"], earlier["first"]) == ([], "TrainingNonFiniteLoss", 40)
    assert "NaN or Inf 6 times" in earlier["text"]


def test_the_end_and_the_other_ranks_are_shown() -> None:
    """The status has the time, the exception and the rates of the first end, and the address of each other rank."""
    groups = [
        {"targets": [f"node{rank}:9100"], "labels": {"rank": str(rank), "host": f"node{rank}", **scheme}}
        for rank, scheme in enumerate([{}, {"__scheme__": "https"}, {}])
    ]
    made = Made(targets=json.dumps(groups).encode())
    for count in range(0, 130, 10):
        made.families = [*TRAINING, family(TRAIN_STEPS, {("a",): 5.0 * count})]
        made.now = NOW + count
        assert made.json("status")["ended"] is None
    made.live.end("ValueError")
    made.now += 30
    made.live.end()
    status = made.json("status")
    assert (status["ended"], status["ended_by"]) == (NOW + 120, "ValueError")
    assert (status["steps_per_second"], status["step"]) == (pytest.approx(5.0), 600)
    assert status["ranks"] == [
        {"rank": 1, "host": "node1", "url": "https://node1:9100/"},
        {"rank": 2, "host": "node2", "url": "http://node2:9100/"},
    ]


@pytest.mark.slow
def test_ends_are_written_down_once() -> None:
    """However often a run is judged between its end and the last judgement, problems begin once and end with the latter."""
    made = Made(families=[*TRAINING, family(TRAIN_STEPS, 4.0), family(TRAIN_LOSS_NONFINITE, 1.0)]).record()
    made.live.remember()
    made.families = [family(TRAIN_STATE, {("failed",): 1.0}), *made.families[1:]]
    made.live.end("ValueError")
    for _ in range(2):
        made.now += 15
        made.live.everything(fresh=True)
    made.live.conclude()
    made.live.remember()
    assert [(event.name.rpartition(".")[2], event.attributes["alert"]) for event in made.journal.take()] == [
        ("start", "TrainingNonFiniteLoss"), ("start", "TrainingFailed"), ("end", "TrainingNonFiniteLoss"),
    ]  # fmt: skip


def test_incremental_answers_make_the_whole() -> None:
    """A page that asks for new records only has the same in the end as one that asks once."""
    made, have, since, stride = Made(names=["x"]), {"recent": [], "whole": []}, 0, 0
    for records in [1, 3, 600, 1, 5, 1190, 700]:
        made.record(records)
        recent = made.json(f"run?view=recent&since={since}")
        have["recent"] = [*(have["recent"] if recent["first"] == since else []), *recent["steps"]]
        since = recent["first"] + len(recent["steps"])
        whole = made.json(f"run?view=whole&since={max(len(have['whole']) - 1, 0)}&stride={stride}")
        have["whole"], stride = [*have["whole"][: whole["first"]], *whole["steps"]], whole["stride"]
    for view in ("recent", "whole"):
        answer = made.json(f"run?view={view}")
        assert have[view][-len(answer["steps"]) :] == answer["steps"]
        assert len(answer["steps"]) >= 480
    assert have["whole"] == made.json("run?view=whole")["steps"]


# Scrapes that are shared, fail or hang


@pytest.mark.slow
def test_a_hanging_scrape_shows_the_one_before() -> None:
    """While a scrape hangs, viewers get the values before; without any they are refused, and records are still served."""
    made = Made(families=[family(TRAIN_LOSS, 7.0)]).record()
    made.json("status")
    made.now += 60
    with held(made):
        assert made.json("status")["loss"] == 7.0
    new = Made().record()
    with held(new):
        with pytest.raises(BusyError):
            new.json("status")
        assert new.json("run")["steps"] == [1]
