"""Measures what single things cost and writes `results/costs_*.json`. About 13 minutes; shorter are trials, kept as `*-trial.json`.

Exits with status 0 whatever was found: bars are judged by who reads the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import record
from benchmarks.costs import observe, page, push, sample, scrape, steps

Tables = record.Table | list[record.Table]

WHAT: dict[str, tuple[Callable[[float], Tables], float]] = {
    "sample": (sample.measure, 8.0),
    "steps": (steps.measure, 20.0),
    "scrape": (scrape.measure, 4.0),
    "push": (push.measure, 4.0),
    "page": (page.measure, 2.0),
    "observe": (observe.measure, 5.0),
}
"""What can be measured, and for how many seconds per case unless said otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for and writes it, beside what was measured before of the rest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], help="all of them if none is named")
    parser.add_argument("--seconds", type=float, help="per case; the longer the narrower the intervals")
    chosen = parser.parse_args(arguments)
    for name in chosen.what or WHAT:
        action, usual = WHAT[name]
        print(f"{name} ...", flush=True)
        found = action(chosen.seconds or usual)
        tables = found if isinstance(found, list) else [found]
        for table in tables:
            print(_text(table), flush=True)
        trial = "-trial" if chosen.seconds is not None and chosen.seconds < usual else ""
        print(f"written to {record.save(f'costs_{name}{trial}', {'tables': tables})}")
    return 0


def _text(table: record.Table) -> str:
    rows = [" | ".join(str(cell) for cell in row) for row in (table["columns"], *table["rows"])]
    return "\n".join(["", table["title"], *rows, *(f"- {note}" for note in table["notes"])])


if __name__ == "__main__":
    sys.exit(main())
