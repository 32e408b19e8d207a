"""What a server that is left open has to bear, and what the training beside it notices: `python -m benchmarks.abuse`.

Half-open connections, mutated requests, heads of a megabyte, clients that hang up, and 50 scrapes a second. All of it comes
from this machine, over loopback, at a training process of its own. Takes about seven minutes. Exits with status 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import abuse_crowd, abuse_load, abuse_storm, record
from benchmarks.abuse_crowd import Siege
from benchmarks.abuse_storm import Storm
from benchmarks.abuse_victim import State, Victim

PERSISTENT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Found:
    """What one kind of abuse came to: its tables, and what is beyond the bars."""

    tables: list[record.Table]
    complaints: list[str]


def crowd(chosen: argparse.Namespace) -> Found:
    """Half-open connections that stay away when they are let go, and such that come back at once."""
    with Victim() as victim:
        sieges = [abuse_crowd.besiege(victim, persistent_for=seconds) for seconds in (0.0, chosen.persistent)]
    return Found([siege_table(sieges)], [line for siege in sieges for line in abuse_crowd.complaints(siege)])


def storm(chosen: argparse.Namespace) -> Found:
    """Requests that are wrong, too large or broken off."""
    with Victim() as victim:
        storms = [abuse_storm.mutated(victim, chosen.requests), abuse_storm.large(victim)]
    with Victim(label=abuse_storm.LONG_LABEL) as victim:
        storms.append(abuse_storm.resets(victim))
    return Found([storm_table(storms)], [line for storm in storms for line in abuse_storm.complaints(storm)])


def load(chosen: argparse.Namespace) -> Found:
    """Many scrapes beside a training loop."""
    found = abuse_load.run(chosen.rounds, chosen.seconds, chosen.long)
    return Found([abuse_load.table(found)], abuse_load.complaints(found))


KINDS: dict[str, Callable[[argparse.Namespace], Found]] = {"crowd": crowd, "storm": storm, "load": load}


def siege_table(sieges: Sequence[Siege]) -> record.Table:
    """What each crowd met with."""
    columns = (
        "connections", "held at most", "threads", "scrapes beside them", "slowest ms", "all let go after s",
        "descriptors before, after", "clients in memory before, after",
    )  # fmt: skip
    rows: list[list[record.Cell]] = []
    for siege in sieges:
        slowest = round(1e3 * max(siege.scrapes, default=0.0), 1)
        freed = None if siege.freed is None else round(siege.freed, 1)
        held = [_both(siege.before, siege.after, what) for what in ("descriptors", "connections")]
        rows.append([siege.connections, siege.largest, siege.threads, len(siege.scrapes), slowest, freed, *held])
    notes = [
        f"{abuse_crowd.CONNECTIONS} at a time: silent ones, a byte each second, a head without an end.",
        "Second row: who is let go comes back at once for a while; the time until all are let go counts from its end.",
        f"Bars: {abuse_crowd.MAX_THREADS} threads of the exporter, a scrape within {abuse_crowd.MAX_SCRAPE_SECONDS:.0f} s.",
        f"All are let go within {abuse_crowd.MAX_FREED_SECONDS:.0f} s; each thread may remember the client that it saw last.",
    ]
    return record.table("Half-open connections", columns, rows, notes)


def storm_table(storms: Sequence[Storm]) -> record.Table:
    """What became of the requests, and what the process kept of them."""
    columns = ("what", "number", "seconds", "answers", "wrong answers", "threads before, after", "descriptors", "errors counted")
    rows: list[list[record.Cell]] = [
        [
            storm.name,
            storm.tally.requests,
            round(storm.tally.seconds, 1),
            ", ".join(f"{count:,} x {answer}" for answer, count in sorted(storm.tally.answers.items())),
            len(storm.tally.wrong),
            *(_both(storm.before, storm.after, what) for what in ("threads", "descriptors", "errors")),
        ]
        for storm in storms
    ]
    notes = [
        "Several connections at a time, one request each. `none`: no answer to what is not a complete head.",
        "Bars: no answer but those that HTTP has for it, the next scrape right, nothing in the training's log.",
        "No failure is counted, threads and descriptors are those of before.",
    ]
    return record.table("Requests that are wrong, too large or broken off", columns, rows, notes)


def _both(before: State, after: State, what: str) -> str:
    return f"{getattr(before, what)}, {getattr(after, what)}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was chosen on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"any of {', '.join(KINDS)}; all by default")
    parser.add_argument("--requests", type=int, default=abuse_storm.REQUESTS, help="mutated ones (100,000)")
    parser.add_argument("--persistent", type=float, default=PERSISTENT_SECONDS, help="seconds for which a crowd comes back")
    parser.add_argument("--rounds", type=int, default=abuse_load.ROUNDS, help="of stretches with and without scrapes")
    parser.add_argument("--seconds", type=float, default=abuse_load.SECONDS, help="of a stretch")
    parser.add_argument("--long", type=float, default=abuse_load.LONG_SECONDS, help="seconds of the last stretch")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: expected any of {', '.join(KINDS)}")
    return chosen


def complete(chosen: argparse.Namespace) -> bool:
    """Whether nothing is less than usual, so that the results may be published."""
    usual = parsed([])
    names = ("requests", "persistent", "rounds", "seconds", "long")
    return set(chosen.kinds or KINDS) == set(KINDS) and all(getattr(chosen, name) >= getattr(usual, name) for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all kinds one after the other and writes `results/abuse.json`, or `abuse-trial.json` if it was less than usual."""
    chosen = parsed(arguments)
    torch.set_num_threads(1)
    tables, complaints = [], []
    for name in chosen.kinds or KINDS:
        outcome = KINDS[name](chosen)
        tables += outcome.tables
        complaints += outcome.complaints
        for table in outcome.tables:
            print("\n".join(" | ".join(map(str, row)) for row in (table["columns"], *table["rows"])), flush=True)
    print(f"written to {record.save('abuse' if complete(chosen) else 'abuse-trial', {'tables': tables})}")
    print("\n".join(complaints) or "all bars are kept")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
