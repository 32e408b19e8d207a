"""How long the dashboards' queries take: `python -m benchmarks.queries`, six minutes.

Eight ranks with sharded gradients of 300 layers, each of which shows all of them, are scraped by a real Prometheus, with the
recording rules that are shipped; then each query of each panel is asked as a refresh of Grafana does, over as many points as its
default range of one hour has. The ranks are those of `benchmarks.fleet`: recorded from a real job, values that change included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.fleet_job import recordings
from benchmarks.fleet_prometheus import FILES, Prometheus, prometheus, seconds_until
from benchmarks.fleet_run import SPARE, one_each
from benchmarks.fleet_server import Fleet
from dashboards.generate.reading import ALL, PanelQuery, dashboards, interpolated, panels

RULES = record.ROOT / "dashboards" / "prometheus" / "*.rules.yml"
RANKS, LAYERS, SECONDS, INTERVAL = 8, 300, 240.0, 2.0
POINTS = 240
"""Of a range of an hour at a scrape interval of 15 s."""
REFRESHES = 5
BAR = 1.0
"""Seconds that a query may take."""
SHOWN = 10
"""Queries in the table, the slowest ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One query of a panel: the seconds that each refresh took, sorted, and the series that came."""

    query: PanelQuery
    seconds: tuple[float, ...]
    series: int

    @property
    def median(self) -> float:
        """Of the refreshes."""
        return self.seconds[len(self.seconds) // 2]


def asked(server: Prometheus, query: PanelQuery, seconds: float, interval: float) -> Answer:
    """Asks one query as Grafana does, a few times."""
    variables = dict.fromkeys(("job", "run", "rank", "layer"), ALL)
    text = interpolated(query.expr, variables, f"{4 * interval:g}s", span=f"{seconds:g}s", interval=f"{interval:g}s")
    taken: list[float] = []
    for _ in range(REFRESHES):
        now, start = time.time(), time.perf_counter()
        series = server.get("query_range", query=text, start=f"{now - seconds}", end=f"{now}", step=f"{seconds / POINTS}")["result"]
        taken.append(time.perf_counter() - start)
    return Answer(query, tuple(sorted(taken)), len(series))


def measure(ranks: int, layers: int, seconds: float, interval: float) -> tuple[list[Answer], int]:
    """Serves the ranks for so long and asks all queries, the slowest first; and how many series Prometheus had."""
    first, others = recordings(layers, int(seconds / interval) + SPARE, sharded=True)
    queries = [query for dashboard in dashboards().values() for query in panels(dashboard)]
    with tempfile.TemporaryDirectory() as folder, Fleet(first, others, ranks) as fleet:
        (files := Path(folder, "sd")).mkdir()
        one_each(fleet, files)
        with prometheus(Path(folder, "prometheus"), FILES.format(files), interval, [RULES]) as server:
            seconds_until(lambda: server.up() == ranks)
            time.sleep(seconds)
            series = int(server.reading().series)
            answers = [asked(server, query, seconds, interval) for query in queries]
    return sorted(answers, key=lambda answer: -answer.median), series


def table(answers: Sequence[Answer], ranks: int, layers: int, series: int) -> record.Table:
    """The slowest queries."""
    rows: list[list[record.Cell]] = [
        [
            f"{answer.query.dashboard}: {answer.query.panel} ({answer.query.ref})",
            answer.series,
            round(answer.median, 3),
            round(answer.seconds[-1], 3),
        ]
        for answer in answers[:SHOWN]
    ]
    slow = sum(answer.median > BAR for answer in answers)
    whole, half = sum(answer.median for answer in answers), answers[len(answers) // 2].median
    return record.table(
        f"The slowest {len(rows)} of {len(answers)} queries of all dashboards, {layers} layers x {ranks} sharded ranks",
        ["query", "series", "median s", "longest s"],
        rows,
        [
            f"{series:,} series, scraped meanwhile. {POINTS} points each, {REFRESHES} times, all variables at All.",
            f"All queries one after the other take {whole:.1f} s, half of them less than {half:.3f} s each.",
            f"Bar: each below {BAR:g} s; {slow} are not.",
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes `results/queries.json`, or `queries-trial.json` if there was less of it than usual."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queries", description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for which the ranks are scraped before it asks")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="between two scrapes of a rank, in seconds")
    chosen = parser.parse_args(arguments)
    answers, series = measure(chosen.ranks, chosen.layers, chosen.seconds, chosen.interval)
    made = table(answers, chosen.ranks, chosen.layers, series)
    for row in (made["title"], made["columns"], *made["rows"], *made["notes"]):
        print(row if isinstance(row, str) else " | ".join(map(str, row)))
    usual = chosen.ranks >= RANKS and chosen.layers >= LAYERS and chosen.seconds >= SECONDS
    print(f"written to {record.save('queries' if usual else 'queries-trial', {'tables': [made]})}")
    return 1 if answers[0].median > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
