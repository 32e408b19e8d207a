"""A real Prometheus for `benchmarks.fleet`, which knows the ranks from a folder or an address, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import record

JOB = "training"
PATIENCE = 600.0
"""Seconds that anything is waited for."""

CONFIGURATION = """
global: {{scrape_interval: {interval}ms, scrape_timeout: {interval}ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: {job}
    honor_labels: true
    {discovery}
"""
FILES = "file_sd_configs: [{{files: ['{}/*.json']}}]"
HTTP = "http_sd_configs: [{{url: '{}', refresh_interval: 5s}}]"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a Prometheus says of itself at one moment. Memory in bytes, times in seconds, the rest are counts."""

    at: float
    resident: float
    cpu: float
    series: float
    samples: float
    file_reads: float
    file_seconds: float

    def cpu_since(self, other: Reading) -> float:
        """Processors taken in the mean since the other reading."""
        return (self.cpu - other.cpu) / (self.at - other.at)

    def samples_since(self, other: Reading) -> float:
        """Samples taken in a second in the mean since the other reading."""
        return (self.samples - other.samples) / (self.at - other.at)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus at that address, with its data in that folder."""

    url: str
    data: Path

    def reading(self) -> Reading:
        """What it says of itself just now; of what it has not done yet it says nothing."""
        own = self._own()
        return Reading(
            at=time.monotonic(),
            resident=own["process_resident_memory_bytes"],
            cpu=own["process_cpu_seconds_total"],
            series=own["prometheus_tsdb_head_series"],
            samples=own.get("prometheus_tsdb_head_samples_appended_total", 0.0),
            file_reads=own.get("prometheus_sd_file_scan_duration_seconds_count", 0.0),
            file_seconds=own.get("prometheus_sd_file_scan_duration_seconds_sum", 0.0),
        )

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:  # noqa: S310 - our own
                return bool(answer.status == 200)
        except OSError:
            return False

    def up(self) -> int:
        """The ranks that it could scrape last."""
        return int(self.value(f'sum(up{{job="{JOB}"}})'))

    def down(self) -> int:
        """The ranks that it knows and could not scrape."""
        return int(self.value(f'count(up{{job="{JOB}"}} == 0)'))

    def value(self, expression: str) -> float:
        """The value of an expression that yields one series, 0 if it yields none."""
        rows = self.get("query", query=expression)["result"]
        return float(rows[0]["value"][1]) if rows else 0.0

    def at_rest(self, seconds: float = 1.5) -> bool:
        """Whether it reads no file for so long."""
        before = self.reading().file_reads
        time.sleep(seconds)
        return self.reading().file_reads == before

    def all_of(self, expression: str, seconds: float) -> NDArray[np.float64]:
        """The samples of all series that were taken in the last seconds."""
        rows = self.get("query", query=f"{expression}[{max(1, round(seconds))}s]")["result"]
        return np.array([float(value) for series in rows for _, value in series["values"]])

    def get(self, path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON
        """The data that the interface for queries answers with."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:  # noqa: S310 - our own
            return json.load(answer)["data"]

    def seconds_for(self, expression: str) -> float:
        """How long a query takes, the best of three."""
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            self.get("query", query=expression)
            taken.append(time.perf_counter() - start)
        return min(taken)

    def bytes_per_sample(self) -> float:
        """Of a block that is written now with all there is, its chunks alone."""
        samples = self.reading().samples
        address = f"{self.url}/api/v1/admin/tsdb/snapshot"
        with urllib.request.urlopen(urllib.request.Request(address, method="POST"), timeout=PATIENCE) as answer:  # noqa: S310
            place = self.data / "snapshots" / json.load(answer)["data"]["name"]
        written: int = sum(path.stat().st_size for path in place.glob("*/chunks/*"))
        return written / samples

    def _own(self) -> Mapping[str, float]:
        """Its own metrics by name, of several series their sum."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:  # noqa: S310 - our own
            text = answer.read().decode()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums


@contextlib.contextmanager
def prometheus(folder: Path, discovery: str, interval: float, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Runs one with its files in `folder`; `interval` between scrapes in seconds. Raises RuntimeError if it does not come up.

    `rules`: files, or patterns of their names.
    """
    folder.mkdir()
    configuration = folder / "prometheus.yml"
    text = CONFIGURATION.format(interval=round(1000 * interval), job=JOB, discovery=discovery, rules=", ".join(map(str, rules)))
    configuration.write_text(text, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = [f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}", "--web.enable-admin-api"]
    command = [_program(), *options, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as process:  # noqa: S603 - found below
        try:
            server = Prometheus(f"http://127.0.0.1:{port}", folder / "data")
            seconds_until(server.ready)
            yield server
        finally:
            process.terminate()


def seconds_until(condition: Callable[[], bool], patience: float = PATIENCE) -> float:
    """How long it takes until that is so. Raises RuntimeError if it does not come about."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > patience:
            raise RuntimeError(f"still not so after {patience:g} s")
        time.sleep(0.05)
    return time.monotonic() - start


def _program() -> str:
    local = record.ROOT / ".tools" / "usr" / "bin" / "prometheus"
    path = str(local) if local.exists() else shutil.which("prometheus")
    if path is None:
        raise RuntimeError("prometheus is missing: run `make tools`")
    return path
