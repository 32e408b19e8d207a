"""The pictures of the dashboards follow Grafana's rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scripts.gallery import fields, tables, units
from scripts.gallery.asking import Range, Series
from scripts.gallery.page import draw
from tests.support.grafana import dashboards

Json = dict[str, Any]
BOARDS: dict[str, Json] = dashboards()


def series(values: list[float], ref: str = "A", times: list[float] | None = None, **labels: str) -> Series:
    """Return a series with a value for each second or at the given times."""
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
    """A number has three figures and the scale of its unit."""
    assert units.written(value, unit, decimals) == text


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
    """An override changes only the query, name or pattern that it matches."""
    first, second, rank = (fields.config(PANEL, *one) for one in (("A", "x"), ("B", "x"), ("A", "Rank")))
    assert (first["unit"], second["unit"]) == ("s", "short")
    assert first["custom.lineStyle"] == {"fill": "solid"}
    assert (first.get("custom.width"), rank["custom.width"]) == (None, 70)
    assert rank["noValue"] == "-"


def test_values_are_mapped() -> None:
    """A value has its mapped word and colour, or the colour of its threshold."""
    own = fields.defaults(PANEL)
    assert fields.shown(3.0, own) == fields.Shown("Training", fields.COLORS["green"])
    assert fields.shown(math.nan, own).text == "None"
    assert fields.shown(1.0, own) == fields.Shown("1 s", fields.COLORS["red"])
    assert fields.shown(0.5, own).color == fields.COLORS["green"]


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
    """Queries are joined by their common labels; columns are named and ordered, and rows sorted."""
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


@pytest.mark.full
@pytest.mark.parametrize("board", sorted(BOARDS))
def test_dashboard_with_data_is_drawn(board: str, tmp_path: Path) -> None:
    """A dashboard is drawn with gaps, NaN and single points."""

    def ask(panel: Json, _points: int) -> list[Series]:
        refs = [target["refId"] for target in panel["targets"]]
        labels = {"run": "a", "layer": "b.1", "rank": "0", "host": "h", "le": "0.5"}
        first = [series([1.0, 2.0, 3.0], ref, [0.0, 1.0, 9.0], **labels, name="0.5") for ref in refs]
        return [*first, series([math.nan, 5.0], refs[0], **(labels | {"le": "+Inf", "run": "b"}), name="+Inf")]

    assert draw(BOARDS[board], ask, Range(0.0, 60.0), {"run": "a"}).save(tmp_path / "x.png") < 250_000
