"""Writes what was measured into `docs/benchmarks.md`, and the plot beside it: `python -m benchmarks.report`.

Between `<!-- results: NAME -->` and `<!-- end -->` everything comes from `results/NAME.json`; the rest of the page is written by
hand. The same results give the same bytes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import plot, record

PAGE = record.ROOT / "docs" / "benchmarks.md"
PLOT = record.ROOT / "docs" / "overhead.svg"
TRIAL = "-trial"
"""How the name of results ends that are shown to who measured them, but not written into the page."""

_PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str, directory: Path = record.RESULTS) -> str:
    """Return the page with every place filled again; where nothing was measured it says so."""

    def filled(place: re.Match[str]) -> str:
        results = record.load(place[2], directory=directory)
        body = "Not measured yet.\n" if results is None else section(results)
        return f"{place[1]}\n{body}\n{place[3]}"

    return _PLACE.sub(filled, text)


def section(results: Mapping[str, Any]) -> str:
    """Where and when, then each table with its notes."""
    parts = [where(results["header"])]
    for table in results["tables"]:
        parts += [f"**{table['title']}**", markdown(table), *("\n".join(f"- {note}" for note in table["notes"]),)]
    return "\n\n".join(part for part in parts if part) + "\n"


def where(header: Mapping[str, Any]) -> str:
    """The head of the results as a sentence."""
    cores = "1 core" if header["cores"] == 1 else f"{header['cores']} cores"
    threads = "1 thread" if header["threads"] == 1 else f"{header['threads']} threads"
    device = f", {header['device']}" if header["device"] else ""
    return (
        f"Measured on {header['date'][:10]} at commit `{header['commit']}`: {header['cpu']}{device}, {cores}, "
        f"{header['memory_gib']} GiB, {header['system']}; Python {header['python']}, PyTorch {header['torch']}, {threads}."
    )


def markdown(table: Mapping[str, Any]) -> str:
    """A table; the first column and text are aligned left, columns of numbers right."""
    rows = table["rows"]
    numbers = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(table["columns"]))]
    lines = [[_escaped(name) for name in table["columns"]], ["---:" if right else "---" for right in numbers]]
    lines += [[_cell(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: record.Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else _escaped(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Fills the page, draws the plot and says which results have no place."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text), encoding="utf-8")
    places = {found[2] for found in _PLACE.finditer(text)}
    for path in sorted(record.RESULTS.glob("*.json")):
        if path.stem not in places and not path.stem.endswith(TRIAL):
            print(f"{path.name} has no place in {PAGE.name}", file=sys.stderr)
    results = record.load("overhead")
    if results is None:
        print("no plot: the overhead has not been measured", file=sys.stderr)
    elif importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    else:
        plot.draw(results["cells"], PLOT)


if __name__ == "__main__":
    main()
