"""A thousand ranks before one Prometheus: `python -m benchmarks.fleet`, a quarter of an hour.

The ranks are served from one thread of this process, each at a port of its own; what they show was recorded from a real job
of two ranks (`fleet_job`), values that change included. A real Prometheus finds them by a folder with one file per rank, and
says itself how long scrapes took and what it needs. Three fleets: replicated gradients, of which rank 0 alone shows layers;
sharded ones, of which each rank shows its part of a sixth as many layers; and a tenth as many such ranks with all layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.fleet_run import Case, measure, one_each, together, ways
from benchmarks.fleet_tables import complaints, tables

RANKS, LAYERS, SECONDS, INTERVAL = 1000, 300, 120.0, 5.0


def cases(ranks: int, layers: int) -> list[Case]:
    """The three fleets."""
    fewer, few = max(1, layers // 6), max(1, ranks // 10)
    return [Case(ranks, layers, sharded=False), Case(ranks, fewer, sharded=True), Case(few, layers, sharded=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the fleets and writes `results/fleet.json`, or `fleet-trial.json` if they were smaller or shorter than usual."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for which each fleet is measured")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="between two scrapes of a rank, in seconds")
    chosen = parser.parse_args(arguments)
    first, *more = cases(chosen.ranks, chosen.layers)
    outcomes = [measure(first, one_each, chosen.seconds, chosen.interval)]
    outcomes += [measure(case, together, chosen.seconds, chosen.interval) for case in more]
    found = ways(first, chosen.interval)
    made = tables(outcomes, found, chosen.interval)
    for table in made:
        for row in (table["title"], table["columns"], *table["rows"], *table["notes"]):
            print(row if isinstance(row, str) else " | ".join(map(str, row)))
    usual = chosen.ranks >= RANKS and chosen.layers >= LAYERS and chosen.seconds >= SECONDS
    print(f"written to {record.save('fleet' if usual else 'fleet-trial', {'tables': made})}")
    wrong = complaints(outcomes)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
