"""False alarms: `python -m benchmarks.alarms`, eleven minutes.

The demo trains as it should, at the default settings and with each step sampled, beside a real Prometheus with the rules, the
`for` and the intervals that are shipped. No alert may fire; pending ones are listed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.fleet_prometheus import FILES, Prometheus, prometheus, seconds_until

RULES = record.ROOT / "dashboards" / "prometheus"
INTERVAL = 15.0
"""Seconds between two scrapes, as shipped."""
MINUTES = 10.0
DEMO = (
    "import signal, sys; from torch_grad_exporter.cli.main import main; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)
"""The demo, which ends by an interrupt, also where this program was started in the background."""
RUNS = {"defaults": ["--every", "auto"], "each step sampled": ["--every", "1"]}


@contextlib.contextmanager
def demo(arguments: Sequence[str], name: str, folder: Path) -> Iterator[None]:
    """A demo that trains without end, found in the folder."""
    command = [sys.executable, "-c", DEMO, "demo", "--port", "0", *arguments]
    environment = {
        "TORCH_GRAD_EXPORTER_SD_DIR": str(folder),
        "TORCH_GRAD_EXPORTER_RUN": name,
        "TORCH_GRAD_EXPORTER_ADDR": "127.0.0.1",
    }
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, **environment}}
    with subprocess.Popen(command, **quiet) as process:  # noqa: S603 - ourselves
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def alarms(server: Prometheus, minutes: float) -> list[list[record.Cell]]:
    """Each alert that was pending or fired: of which run, how it was, and for how many evaluations."""
    now = time.time()
    found = server.get("query_range", query="ALERTS", start=f"{now - 60 * minutes}", end=f"{now}", step=f"{INTERVAL}")["result"]
    return [
        [series["metric"]["alertname"], series["metric"].get("run", ""), series["metric"]["alertstate"], len(series["values"])]
        for series in found
    ]


def measure(minutes: float) -> tuple[list[list[record.Cell]], int]:
    """Trains for so long; what was pending or fired, and how many rules were evaluated."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (files := Path(folder, "sd")).mkdir()
        rules = [RULES / "*.rules.yml", RULES / "*.alerts.yml"]
        server = stack.enter_context(prometheus(Path(folder, "prometheus"), FILES.format(files), INTERVAL, rules))
        with contextlib.ExitStack() as demos:
            for name, arguments in RUNS.items():
                demos.enter_context(demo(arguments, name, files))
            seconds_until(lambda: server.up() == len(RUNS))
            time.sleep(60 * minutes)
        # They have ended well: what comes of that is an alarm, too.
        time.sleep(4 * INTERVAL)
        groups = server.get("rules")["groups"]
        count = sum(len(group["rules"]) for group in groups)
        assert all(rule["health"] == "ok" for group in groups for rule in group["rules"]), "a rule fails"  # noqa: S101
        return alarms(server, minutes + 2), count


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes `results/alarms.json`, or `alarms-trial.json` if it was shorter than usual."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alarms", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    chosen = parser.parse_args(arguments)
    rows, rules = measure(chosen.minutes)
    fired = sum(row[2] == "firing" for row in rows)
    made = record.table(
        f"Alerts in {chosen.minutes:g} minutes of healthy training, and a minute after its end",
        ["alert", "run", "state", "evaluations"],
        rows or [["none", "", "", 0]],
        [
            f"{rules} rules, all healthy, with the shipped thresholds and `for`, a scrape each {INTERVAL:g} s.",
            f"Bar: none fires; {fired} did.",
        ],
    )
    for row in (made["title"], made["columns"], *made["rows"], *made["notes"]):
        print(row if isinstance(row, str) else " | ".join(map(str, row)))
    print(f"written to {record.save('alarms' if chosen.minutes >= MINUTES else 'alarms-trial', {'tables': [made]})}")
    return 1 if fired else 0


if __name__ == "__main__":
    sys.exit(main())
