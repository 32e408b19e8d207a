"""The blocks of code of the documentation."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(page: Path, *languages: str, section: str = "") -> list[str]:
    """Return the blocks of code in these languages, of a page or of one of its sections of the second level."""
    text = page.read_text(encoding="utf-8")
    if section:
        (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]
