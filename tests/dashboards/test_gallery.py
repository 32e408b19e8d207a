"""The pictures of the dashboards follow Grafana's rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scripts.gallery.asking import Range, Series
from scripts.gallery.page import draw
from tests.support.grafana import dashboards

Json = dict[str, Any]
BOARDS: dict[str, Json] = dashboards()


def series(values: list[float], ref: str = "A", times: list[float] | None = None, **labels: str) -> Series:
    """Return a series with a value for each second or at the given times."""
    return Series(ref, labels.get("name", "x"), labels, times or [float(at) for at in range(len(values))], values)


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
