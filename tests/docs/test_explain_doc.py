"""The examples of docs/explain.md and docs/record.md print what the pages show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.test_commands import blocks
from tests.support.tools import REPOSITORY
from torch_grad_exporter.inspection.explain import Verdict

EXPLAIN, RECORD = (REPOSITORY / "docs" / name for name in ("explain.md", "record.md"))


def printed(text: str, names: dict[str, Any]) -> str:
    """What an example prints, as a program of the name `train.py`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "train.py", "exec"), names)  # noqa: S102 - what a user copies
    return out.getvalue()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same weights each time, in which the ReLU is not dead."""
    torch.manual_seed(0)


@pytest.mark.parametrize("page", [EXPLAIN, RECORD], ids=lambda page: page.name)
def test_the_first_example_prints_what_the_page_shows(page: Path) -> None:
    """Line by line, with the lines of the program that it names."""
    shown = blocks(page, "text")[0]
    assert printed(blocks(page, "python")[0], {}).split("\n") == shown.split("\n")


def test_the_second_example_goes_on_from_the_first() -> None:
    """It shows the shape of an output and a gradient that is not zero."""
    names: dict[str, Any] = {}
    first, second = blocks(EXPLAIN, "python")
    printed(first, names)
    assert re.fullmatch(r"torch.Size\(\[4, 16\]\) tensor\(0\.\d+\)\n", printed(second, names))


def test_every_verdict_is_on_the_page() -> None:
    """The table has a line for each, and no other."""
    listed = re.findall(r"^\| `(\w+)` \|", EXPLAIN.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [str(one) for one in Verdict]
