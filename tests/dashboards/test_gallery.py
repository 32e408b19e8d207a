"""The rules by which the pictures of the dashboards are drawn: those that Grafana has, checked by hand."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.gallery import fields, grids, tables, units
from scripts.gallery.asking import Range, Series, name
from scripts.gallery.canvas import Canvas, fitted, width, wrapped
from scripts.gallery.charts import with_gaps
from scripts.gallery.page import UNIT, WIDE, draw, place
from scripts.gallery.tiles import share
from tests.support.grafana import dashboards, each_panel

Json = dict[str, Any]
BOARDS: dict[str, Json] = dashboards()


def series(values: list[float], ref: str = "A", times: list[float] | None = None, **labels: str) -> Series:
    """One with a value for each second, or at these times."""
    return Series(ref, labels.get("name", "x"), labels, times or [float(at) for at in range(len(values))], values)


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (1234.0, "short", None, "1.23 K"),
        (0.0123, "short", None, "0.0123"),
        (0.0, "short", None, "0"),
        (5.0, "short", 0, "5"),
        (0.25, "percentunit", 0, "25%"),
        (0.0167, "percentunit", None, "1.67%"),
        (0.0025, "s", None, "2.5 ms"),
        (90.0, "s", None, "1.5 min"),
        (0.0, "s", None, "0 s"),
        (3 * 2.0**30, "bytes", None, "3 GiB"),
        (1.5e6, "Bps", None, "1.5 MB/s"),
        (0.00012, "sci", 2, "1.20e-4"),
        (3770.0, "sci", 2, "3.77e+3"),
        (5.25, "count:steps/s", None, "5.25 steps/s"),
        (6400.0, "count:tokens/s", None, "6.4 K tokens/s"),
        (1980e6, "hertz", None, "1.98 GHz"),
        (0.0, "watt", None, "0 W"),
        (61.0, "celsius", None, "61 °C"),
        (1884.0, "locale", None, "1,884"),
        (math.nan, "short", None, "NaN"),
        (math.inf, "s", None, "∞"),
    ],
)
def test_units(value: float, unit: str, decimals: int | None, text: str) -> None:
    """A number is written in three figures, scaled as its unit is."""
    assert units.written(value, unit, decimals) == text


def test_moments_are_told_by_how_long_ago() -> None:
    """In words, of milliseconds of Unix time."""
    assert units.written(1000 * (time.time() - 130), "dateTimeFromNow") == "2 minutes ago"
    assert [units.ago(seconds) for seconds in (3, 70, 7200)] == ["a few seconds ago", "a minute ago", "2 hours ago"]


def test_every_unit_of_the_dashboards_is_written() -> None:
    """None of them is written as a plain number by mistake."""
    known = {"short", "none", *units.PLAIN, *units.SCALES, *units.SUFFIXES}
    used = {fields.defaults(panel)["unit"] for board in BOARDS.values() for panel in each_panel(board)}
    assert {unit for unit in used if not unit.startswith("count:")} <= known


def test_a_legend_names_labels() -> None:
    """What is absent leaves no gap."""
    assert name("{{run}} {{optimizer}} before", {"run": "a"}) == "a before"
    assert name("__auto", {}) == "Value"


PANEL: Json = {
    "fieldConfig": {
        "defaults": {
            "unit": "s",
            "custom": {"lineStyle": {"fill": "solid"}},
            "mappings": [
                {"type": "value", "options": {"3": {"text": "Training", "color": "green"}}},
                {"type": "special", "options": {"match": "null+nan", "result": {"text": "None", "color": "transparent"}}},
            ],
            "thresholds": {"steps": [{"color": "green", "value": None}, {"color": "red", "value": 1}]},
        },
        "overrides": [
            {"matcher": {"id": "byFrameRefID", "options": "B"}, "properties": [{"id": "unit", "value": "short"}]},
            {"matcher": {"id": "byName", "options": "Rank"}, "properties": [{"id": "custom.width", "value": 70}]},
            {"matcher": {"id": "byRegexp", "options": "/.*/"}, "properties": [{"id": "noValue", "value": "-"}]},
        ],
    },
    "options": {},
}


def test_overrides_are_merged() -> None:
    """Defaults for all, those of a query for its series, those of a name or pattern for its column; `custom` by dotted names."""
    first, second, rank = (fields.config(PANEL, *one) for one in (("A", "x"), ("B", "x"), ("A", "Rank")))
    assert (first["unit"], second["unit"]) == ("s", "short")
    assert first["custom.lineStyle"] == {"fill": "solid"}
    assert (first.get("custom.width"), rank["custom.width"]) == (None, 70)
    assert rank["noValue"] == "-"


def test_values_are_mapped() -> None:
    """To a word and a colour; else the number with the colour of the highest threshold that it reaches."""
    own = fields.defaults(PANEL)
    assert fields.shown(3.0, own) == fields.Shown("Training", fields.COLORS["green"])
    assert fields.shown(math.nan, own).text == "None"
    assert fields.shown(1.0, own) == fields.Shown("1 s", fields.COLORS["red"])
    assert fields.shown(0.5, own).color == fields.COLORS["green"]


def test_colors_have_shades() -> None:
    """Darker and lighter ones of the named ones; each that the dashboards name is known."""
    assert fields.color("dark-orange") < fields.color("orange") < fields.color("light-orange")
    assert fields.color("#123456") == "#123456"


def test_a_run_has_one_color() -> None:
    """By name where the panel says so, else by the order of the lines."""
    by_name = {"color": {"mode": "palette-classic-by-name"}}
    assert fields.line_color(0, series([1.0]), by_name) == fields.line_color(5, series([2.0]), by_name)
    assert [fields.line_color(place, series([1.0]), {}) for place in (0, 1)] == list(fields.PALETTE[:2])
    assert fields.line_color(3, series([1.0]), {"color": {"mode": "fixed", "fixedColor": "red"}}) == fields.COLORS["red"]


def test_cells_are_hidden_as_grafana_hides_them() -> None:
    """Up to 1e-9 where the panel says nothing; the logarithms of norms say something."""
    assert fields.hidden_up_to({"options": {"filterValues": {}}}) == 1e-9
    norms = next(panel for panel in each_panel(BOARDS["layers.json"]) if panel["title"] == "Norm of every layer")
    assert fields.hidden_up_to(norms) < -12


def test_red_is_high() -> None:
    """Grafana turns RdYlBu by itself; `reverse` turns it back."""
    panel: Json = {"options": {"color": {"scheme": "RdYlBu", "reverse": False}}}
    red, _, blue, _ = grids.scheme(panel)(1.0)
    assert red > blue
    panel["options"]["color"]["reverse"] = True
    red, _, blue, _ = grids.scheme(panel)(1.0)
    assert red < blue


def test_buckets_are_taken_apart() -> None:
    """Cumulative counts become those of each bucket, in the order of their bounds."""
    counted = [series([9.0, 9.0], le="+Inf", name="+Inf"), series([2.0, 3.0], le="0.1"), series([7.0, 9.0], le="1")]
    assert [(one.name, list(one.values)) for one in grids.by_buckets(counted)] == [
        ("0.1", [2.0, 3.0]), ("1", [5.0, 6.0]), ("+Inf", [2.0, 0.0]),
    ]  # fmt: skip


def test_states_are_merged() -> None:
    """Equal neighbours are one bar; a gap is none."""
    found = grids.merged(series([1.0, 1.0, 2.0, 2.0], times=[0.0, 2.0, 4.0, 10.0]), 2.0)
    assert found == [(0.0, 4.0, 1.0), (4.0, 2.0, 2.0), (10.0, 2.0, 2.0)]


def test_gaps_break_lines() -> None:
    """A NaN stands where a point is missing."""
    times, values = with_gaps(series([1.0, 2.0, 3.0], times=[0.0, 1.0, 4.0]))
    assert times.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert math.isnan(values[2])


TABLE: Json = {
    "targets": [{"refId": "A"}, {"refId": "B"}],
    "transformations": [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": ["run", "host", "Value #A", "Value #B"]}}},
        {
            "id": "organize",
            "options": {
                "indexByName": {"run": 0, "host": 1, "Value #B": 2, "Value #A": 3},
                "renameByName": {"run": "Run", "host": "Host", "Value #A": "One", "Value #B": "Two"},
            },
        },
    ],
    "options": {"sortBy": [{"displayName": "Run", "desc": False}, {"displayName": "One", "desc": True}]},
}


def test_answers_become_rows() -> None:
    """Joined by the labels that all queries have, other labels added; columns chosen, named and ordered, rows sorted naturally."""
    answers = [
        series([1.0], run="b.10", host="h"), series([2.0], run="b.2", host="h"), series([3.0], "B", run="b.2"),
        series([4.0], "B", run="c"),
    ]  # fmt: skip
    found = tables.table(TABLE, answers)
    assert found.titles == ["Run", "Host", "Two", "One"]
    assert list(found.rows) == [
        {"Run": "b.2", "Host": "h", "One": 2.0, "Two": 3.0}, {"Run": "b.10", "Host": "h", "One": 1.0}, {"Run": "c", "Two": 4.0},
    ]  # fmt: skip
    assert found.refs == {"One": "A", "Two": "B"}


def test_columns_share_what_is_left() -> None:
    """Those with a width have it; the others have equal parts, 150 pixels at least."""
    assert tables.widths([100, None, None], 600) == [100, 250, 250]
    assert tables.widths([500, None], 600) == [500, 150]


def test_bars_end_at_their_limits() -> None:
    """From `min` to `max`, also beyond them."""
    own = {"min": 0, "max": 2}
    assert [share(value, own) for value in (-1.0, 0.5, 3.0, math.nan)] == [0.0, 0.25, 1.0, 0.0]


def test_ranges_have_steps() -> None:
    """As few points as asked for, never closer than scrapes; `$__rate_interval` as Grafana has it."""
    span = Range(0.0, 600.0, scrape=2)
    assert (span.step(1000), span.step(100)) == (2.0, 6.0)
    assert (span.rate_interval(2.0), span.rate_interval(30.0)) == ("8s", "32s")


def test_text_fits() -> None:
    """Cut off or broken into lines."""
    assert fitted("short", 100, 8) == "short"
    assert width(fitted("a very long name of a run", 60, 8), 8) <= 60
    assert all(width(line, 8) <= 80 for line in wrapped("some words that need several lines", 80, 8).split("\n"))


def test_panels_stand_as_in_grafana() -> None:
    """None covers another or leaves the picture; the first screen of the overview ends above 900 pixels."""
    for board in BOARDS.values():
        boxes = [place(panel["gridPos"]) for panel in board["panels"]]
        assert all(box.x >= 0 and box.x + box.w <= WIDE for box in boxes)
        for number, one in enumerate(boxes):
            for other in boxes[number + 1 :]:
                apart = (
                    one.x + one.w <= other.x or other.x + other.w <= one.x or one.y + one.h <= other.y or other.y + other.h <= one.y
                )
                assert apart
    second = [panel for panel in BOARDS["training.json"]["panels"] if panel["type"] == "row"][1]
    assert place(second["gridPos"]).y + UNIT <= 900


@pytest.mark.parametrize("board", sorted(BOARDS))
def test_a_dashboard_without_data_is_drawn(board: str, tmp_path: Path) -> None:
    """Each panel says its sentence, in a PNG of the right size."""
    canvas = draw(BOARDS[board], lambda _panel, _points: [], Range(0.0, 60.0), {})
    assert isinstance(canvas, Canvas)
    assert canvas.save(tmp_path / "x.png") < 250_000
    with Image.open(tmp_path / "x.png") as image:
        assert (image.mode, image.width) == ("P", WIDE)


@pytest.mark.parametrize("board", sorted(BOARDS))
def test_a_dashboard_with_data_is_drawn(board: str, tmp_path: Path) -> None:
    """Of each kind of panel, with lines that have gaps, NaN and one point only."""

    def ask(panel: Json, _points: int) -> list[Series]:
        refs = [target["refId"] for target in panel["targets"]]
        labels = {"run": "a", "layer": "b.1", "rank": "0", "host": "h", "le": "0.5"}
        first = [series([1.0, 2.0, 3.0], ref, [0.0, 1.0, 9.0], **labels, name="0.5") for ref in refs]
        return [*first, series([math.nan, 5.0], refs[0], **(labels | {"le": "+Inf", "run": "b"}), name="+Inf")]

    assert draw(BOARDS[board], ask, Range(0.0, 60.0), {"run": "a"}).save(tmp_path / "x.png") < 250_000
