"""A real Prometheus for tests."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import serving
from tests.support.tools import find, get

CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: training
    honor_labels: true
    scrape_protocols: [{protocol}]
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{run: {run}, rank: "0"}}}}]
"""


def histogram_options(*, native: bool = True) -> str:
    """Return what a job of this Prometheus needs to have classic histograms by protobuf, and native ones, as YAML."""
    text = subprocess.run([find("prometheus"), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"version (\d+)\.(\d+)", text)
    assert match is not None
    version = (int(match[1]), int(match[2]))
    classic = "always_scrape_classic_histograms" if version >= (3, 0) else "scrape_classic_histograms"
    return f"{classic}: true" + ("\n    scrape_native_histograms: true" if native and version >= (3, 8) else "")


class Prometheus:
    """A running Prometheus and its query interface."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def value(self, expression: str) -> float:
        """The value of an expression that yields one series; NaN while there is none, so that a test can wait for it."""
        values = [float(value) for _, value in self.query(expression)]
        assert len(values) <= 1, f"{expression} has {len(values)} series"
        return values[0] if values else math.nan

    def get(self, path: str, **parameters: str) -> object:
        return json.loads(get(f"{self._base}{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], str]]:
        data = self.get("/api/v1/query", query=expression)
        assert isinstance(data, dict)
        return [(found["metric"], found["value"][1]) for found in data["result"]]

    def series(self, expression: str, seconds: float, step: float = 1.0) -> list[tuple[dict[str, str], list[tuple[float, str]]]]:
        """The values of an expression over the last seconds, by series."""
        now = time.time()
        data = self.get("/api/v1/query_range", query=expression, start=str(now - seconds), end=str(now), step=str(step))
        assert isinstance(data, dict)
        return [(found["metric"], found["values"]) for found in data["result"]]

    def recorded(self, selector: str, since: float) -> list[tuple[float, float]]:
        """All samples of some series since a Unix time, as they were stored, each its time and its value; in order."""
        seconds = math.ceil(min(time.time() - since, 3600.0))
        data = self.get("/api/v1/query", query=f"{selector}[{seconds}s]")
        assert isinstance(data, dict)
        return sorted((float(at), float(value)) for found in data["result"] for at, value in found["values"] if at >= since)

    def is_ready(self) -> bool:
        """Return whether it answers queries."""
        with contextlib.suppress(OSError):
            get(f"{self._base}/-/ready")
            return True
        return False

    def is_scraping(self) -> bool:
        with contextlib.suppress(OSError):
            return [value for _, value in self.query("up")] == ["1"]
        return False


@contextlib.contextmanager
def prometheus(directory: Path, target: int, protocol: str = "OpenMetricsText1.0.0", run: str = "r1") -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes the target twice a second, with `run` and `rank` as target labels too."""
    with running(directory, CONFIGURATION.format(port=target, protocol=protocol, run=run)) as started:
        yield started


@contextlib.contextmanager
def running(directory: Path, configuration: str, *flags: str) -> Iterator[Prometheus]:
    """Runs a Prometheus with the text of a configuration, and its data in the directory."""
    file = directory / "prometheus.yml"
    file.write_text(configuration)

    def command(port: int) -> list[str | Path]:
        options = [f"--config.file={file}", f"--storage.tsdb.path={directory}", f"--web.listen-address=127.0.0.1:{port}"]
        return [find("prometheus"), *options, "--log.level=error", *flags]

    with serving("prometheus", command, lambda port: Prometheus(port).is_ready(), directory) as port:
        yield Prometheus(port)
