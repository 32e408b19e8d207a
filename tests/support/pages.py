"""The examples of the documentation: its blocks of code, and a page of them as one program."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import Starter
from tests.support.tools import REPOSITORY

DOCS = REPOSITORY / "docs"
CELL = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```python\n(?P<code>.*?)^```"
    r"(?:\n+prints)?(?:\n+```text\n(?P<printed>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)

PROGRAM = """
import contextlib, io, json, os, sys

os.chdir(os.path.dirname(sys.argv[0]))
names = {"__name__": "__main__"}
for code in json.load(open("cells.json")):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "train.py", "exec"), names)
    with open("printed", "a") as file:
        file.write(json.dumps(out.getvalue()) + "\\n")
"""


@dataclass(frozen=True)
class Cell:
    """An example, what the page says that it prints, and why it is not run, if it is not."""

    code: str
    printed: str
    reason: str


def text_of(page: str, section: str = "") -> str:
    """Return the text of a page, or of one of its sections of the second level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if section:
        (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return text


def blocks(page: Path, *languages: str, section: str = "") -> list[str]:
    """Return the blocks of code in these languages, of a page or of one of its sections of the second level."""
    text = text_of(str(page), section)  # DOCS / page is page where that is absolute
    return [code for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if language in languages]


def cells(page: str, section: str = "") -> list[Cell]:
    """Return the examples in Python of a page or a section, in order."""
    found = CELL.finditer(text_of(page, section))
    return [Cell(cell["code"], cell["printed"] or "", cell["reason"] or "") for cell in found]


def run_page(starter: Starter, page: str, section: str = "", *, folder: Path, before: str = "") -> None:
    """Run the examples of a page one after the other in a process that knows nothing else, and compare what they print."""
    program = [Cell(before, "", ""), *(cell for cell in cells(page, section) if not cell.reason)]
    (folder / "cells.json").write_text(json.dumps([cell.code for cell in program]))
    (folder / "page.py").write_text(PROGRAM)
    done = starter.start_file(folder / "page.py", variables={"TORCH_GRAD_EXPORTER_ADDR": "127.0.0.1"})
    status, errors = done.wait(), done.err.read_text()
    assert (status, "Traceback" in errors) == (0, False), errors
    printed = [json.loads(line) for line in (folder / "printed").read_text().splitlines()]
    for cell, text in zip(program, printed, strict=True):
        assert not cell.printed or text.rstrip() == cell.printed.rstrip(), f"{cell.code}\nprinted\n{text}"
