"""The page's answers where a test chooses what was recorded: numbers that are not finite, names, new records, slow scrapes."""

from __future__ import annotations

import contextlib
import json
import math
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outputs.live.support import NOW, Made, decoded, family, flagged, held

import tests.support.properties  # isort: skip  # noqa: F401 - the profile
from torch_grad_exporter.collectors.gradients import GRAD_DEAD_RATIO, GRAD_GLOBAL_NORM, GRAD_NORM
from torch_grad_exporter.collectors.training import TRAIN_LEARNING_RATE, TRAIN_LOSS, TRAIN_STATE, TRAIN_STEPS
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError
from torch_grad_exporter.outputs.live.history import QUANTITIES
from torch_grad_exporter.outputs.live.live import NONFINITE, encoded
from torch_grad_exporter.outputs.live.rows import SCALARS

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


def test_a_bin_marks_one_nonfinite_record() -> None:
    """A bin with one record that is not finite keeps the value of the others and has a mark in every answer."""
    made = Made(names=["a", "b", "c"]).record(1000)
    for step in range(1000, 1200):
        made.rows, made.scalars = np.full((3, len(QUANTITIES)), 2.0), (float(step % 2), 2.0, 3.0, 4.0, 5.0)
        if step == 1081:
            made.rows[1, 0], made.scalars = math.inf, (math.inf, 2.0, 3.0, 4.0, 5.0)
        made.record()
    run, layers = made.json("run?view=whole"), made.json("layers?view=whole")
    at = 1081 // 2
    assert (run["stride"], layers["stride"], run["nonfinite"]) == (2, 4, {"loss": [at]})
    assert run["loss"][at - 1 : at + 2] == [0.5, 0.0, 0.5]  # of the bin's two losses, 0 and infinity, the finite one
    assert np.argwhere(flagged(layers)).tolist() == [[1081 // 4, 1]]
    np.testing.assert_allclose(decoded(layers)[1081 // 4], 2.0, rtol=1e-3)
    assert made.json("layer?name=b")["whole"]["nonfinite"] == {"norm": [1081 // 4]}
    assert made.json("layer?name=a")["whole"]["nonfinite"] == {}


def test_the_end_is_kept_with_its_rates() -> None:
    """The status has the time, the exception and the rates of the first end."""
    made = Made()
    for count in range(0, 130, 10):
        made.families = [*TRAINING, family(TRAIN_STEPS, {("a",): 5.0 * count})]
        made.now = NOW + count
        status = made.json("status")
        assert (status["ended"], status["ended_by"]) == (None, None)
    made.live.end("ValueError")
    made.now += 30
    made.live.end()
    for _ in range(3):
        status = made.json("status")
        assert (status["ended"], status["ended_by"]) == (NOW + 120, "ValueError")
        assert (status["steps_per_second"], status["step"]) == (pytest.approx(5.0), 600)
        made.now += 30


def test_everything_is_empty_before_a_sample() -> None:
    """A run that has not begun has empty lists and no numbers."""
    made = Made()
    assert made.json("layers")["layers"] == made.json("layers")["times"] == []
    assert made.json("run?view=whole")["loss"] == []
    status = made.json("status")
    assert (status["state"], status["step"], status["samples"], status["problems"], status["loss"]) == (None, None, 0, [], None)
    assert made.json("saved")["layer"] == {}
    made.families, made.now = [family(TRAIN_STATE, {("initialising",): 1.0})], made.now + 1
    status = made.json("status")
    assert (status["state"], status["step"], status["ended"]) == ("initialising", 0, None)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_layer_may_have_any_name(name: str) -> None:
    """Markup, separators of addresses and half of a surrogate pair come back unchanged in all answers."""
    made = Made(names=["first", name], families=[family(GRAD_DEAD_RATIO, {(name,): 1.0})]).record()
    assert made.json("layers")["layers"] == ["first", name]
    assert set(made.json("saved")["layer"]) == {"first", name}
    [problem] = made.json("status")["problems"]
    assert (problem["layer"], name in problem["text"]) == (name, True)
    for safe in ("", "/"):
        with contextlib.suppress(UnicodeEncodeError):  # half of a pair has no address
            assert made.json(f"layer?name={quote(name, safe=safe)}")["layer"] == name
    assert made.ask("/api/v1/layers").body.isascii()


def test_the_other_ranks_are_linked() -> None:
    """The status has the address of each other rank, with its scheme."""
    groups = [
        {"targets": [f"node{rank}:9100"], "labels": {"rank": str(rank), "host": f"node{rank}", **scheme}}
        for rank, scheme in enumerate([{}, {"__scheme__": "https"}, {}])
    ]
    made = Made(targets=json.dumps(groups).encode())
    assert made.json("status")["ranks"] == [
        {"rank": 1, "host": "node1", "url": "https://node1:9100/"},
        {"rank": 2, "host": "node2", "url": "http://node2:9100/"},
    ]


@pytest.mark.slow
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


# Codes

ANY = st.one_of(st.sampled_from([math.nan, math.inf, 0.0, 1e-38, 3e38]), st.floats(2.0**-126, 2.0**127, width=32))


@pytest.mark.slow
@given(rows=st.integers(1, 4).flatmap(lambda wide: st.lists(st.lists(ANY, min_size=wide, max_size=wide), min_size=1, max_size=5)))
def test_codes_are_right_within_half_a_code(rows: list[list[float]]) -> None:
    """NaN, infinity and zero have codes of their own; every other value is right within half a code, log or linear."""
    chosen = np.array(rows, dtype=np.float32)
    for log in (True, False):
        codes, low, high = encoded(chosen, log=log)
        assert codes.dtype == np.uint16
        assert math.isfinite(low)
        assert low < high
        np.testing.assert_array_equal(codes == 0, np.isnan(chosen))
        np.testing.assert_array_equal(codes == NONFINITE, np.isinf(chosen))
        known = np.isfinite(chosen) & ((chosen > 0) | (not log))
        wanted = np.log10(chosen[known].astype(np.float64)) if log else chosen[known].astype(np.float64)
        shown = low + (codes[known].astype(np.float64) - 1) / 65533 * (high - low)
        np.testing.assert_allclose(shown, wanted, atol=(high - low) / 65533 * 0.501, rtol=1e-12)
        if log:
            assert set(codes[chosen == 0].tolist()) <= {1}


# Scrapes that are shared, fail or hang


def test_viewers_share_a_scrape_for_a_second() -> None:
    """A hundred questions within a second cost one scrape, and records cost none."""
    made = Made().record()
    for _ in range(50):
        made.json("layers")
        made.json("run")
    assert made.scrapes == 0
    for _ in range(50):
        made.json("status")
        made.json("layer?name=a")
    assert made.scrapes == 1
    made.now += 1
    made.json("status")
    made.now -= 3600  # a clock that is set back keeps nothing for an hour
    made.json("status")
    assert made.scrapes == 3


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
        with pytest.raises(ScrapeBusyError):
            new.json("status")
        assert new.json("run")["steps"] == [1]
