"""The comparison of clipping policies: page, picture and script agree."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.actions import references
from tests.support.tools import REPOSITORY

PAGE = REPOSITORY / "docs" / "clipping.md"
PICTURE = REPOSITORY / "docs" / "clipping.png"
SCRIPT = REPOSITORY / "scripts" / "compare_clipping.py"
STEPS = 40


@pytest.fixture(scope="module", name="script")
def _script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def shown(picture: Path) -> dict[str, Any]:
    """Return the numbers that a picture carries."""
    with Image.open(picture) as image:
        found: dict[str, Any] = json.loads(image.text["Description"])  # type: ignore[attr-defined] # of PNG files
    return found


def test_the_page_says_what_the_picture_shows(script: dict[str, Any]) -> None:
    """The table and numbers of the page are those of the run in the picture."""
    text, numbers = PAGE.read_text(encoding="utf-8"), shown(PICTURE)
    table = text.partition("| policy | steps clipped, of ")[2].partition("\n\n")[0]
    rows = {name: int(count) for name, count in re.findall(r"^\| `([^`]+)`[^|]*\| (\d+) \|$", table, re.MULTILINE)}
    assert rows == numbers["clipped"]
    assert [*rows] == [script["CLIPS"], *script["TRIED"]]
    assert table.startswith(f"{numbers['steps']} |")
    assert f"The largest norm is {numbers['largest']}, in the first steps, and the median is {numbers['median']}." in text
    assert PICTURE.stat().st_size < 150_000


@pytest.mark.slow
def test_a_short_run(script: dict[str, Any], tmp_path: Path) -> None:
    """Thresholds and counts of a short run of the script are those of the policies' formulas."""
    seen = script["train"](STEPS)
    known = {
        "MaxNorm(0.5)": references.MaxNorm(0.5), "AutoClip()": references.AutoClip(10, 1000),
        "AutoClip(percentile=90)": references.AutoClip(90, 1000), "ZClip()": references.ZClip(0.97, 2.5, 25),
    }  # fmt: skip
    assert [*seen.thresholds] == [*known]
    for name, reference in known.items():
        expected = [reference.step({"": np.array([norm])}, {})[1][0] for norm in seen.norms]
        assert seen.thresholds[name] == pytest.approx(expected, rel=1e-5)
        assert seen.clipped[name] == sum(norm + 1e-6 > limit for norm, limit in zip(seen.norms, expected, strict=True))
    assert seen.clipped["MaxNorm(1.0)"] == sum(norm > 1 for norm in seen.norms) > 0
    assert len(seen.norms) == STEPS
    assert all(map(math.isfinite, seen.losses))
    assert seen.losses[-1] < seen.losses[0] / 1.5
    script["draw"](seen, tmp_path / "x.png")
    assert shown(tmp_path / "x.png") == {"steps": STEPS, **script["summary"](seen)}
