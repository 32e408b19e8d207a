"""The walk through a loss that does not fall prints what the page shows, cell by cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.docs.test_explain_doc import printed
from tests.support.tools import REPOSITORY

PAGE = REPOSITORY / "docs" / "loss-does-not-fall.md"


def cells(page: Path) -> list[tuple[str, str]]:
    """Each example with the output that follows it, empty where none does."""
    found = re.findall(r"^```(python|text)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shown = [(kind, text) for kind, text in found]
    return [
        (text, shown[place + 1][1] if place + 1 < len(shown) and shown[place + 1][0] == "text" else "")
        for place, (kind, text) in enumerate(shown)
        if kind == "python"
    ]


def test_each_cell_prints_what_the_page_shows() -> None:
    """From the first to the last, in one program; the loss falls in the end, and the NaN has a place."""
    names: dict[str, Any] = {}
    found = cells(PAGE)
    assert len(found) == 8
    for text, shown in found:
        assert printed(text, names).rstrip() == shown.rstrip()
