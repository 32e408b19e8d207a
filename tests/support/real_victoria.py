"""A real VictoriaMetrics for tests: it takes OTLP over HTTP and says what it has stored."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import serving
from tests.support.tools import PATIENCE, find, get

AROUND_NOW = 300.0
"""Seconds before and after now that `stored` looks at."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series as it is stored: its labels with `__name__`, and its samples, oldest first, with Unix time in seconds."""

    labels: dict[str, str]
    samples: list[tuple[float, float]]

    @property
    def values(self) -> list[float]:
        """The samples without their times."""
        return [value for _, value in self.samples]


class Victoria:
    """A running VictoriaMetrics. `endpoint`: for OTLP over HTTP, the whole URL."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self.endpoint = f"{self._base}/opentelemetry/v1/metrics"

    def push(self, body: bytes) -> tuple[int, bytes]:
        """Sends an `ExportMetricsServiceRequest`; the status and the content of the answer."""
        request = urllib.request.Request(self.endpoint, body, {"Content-Type": "application/x-protobuf"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.read()

    def stored(self, selector: str = '{__name__!=""}') -> list[Series]:
        """The series that a selector chooses, with every sample that was taken."""
        self.flush()
        now = time.time()
        window = {"start": str(now - AROUND_NOW), "end": str(now + AROUND_NOW)}
        return [_series(json.loads(line)) for line in self._get("/api/v1/export", **{"match[]": selector}, **window).splitlines()]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The value of an expression, by series."""
        self.flush()
        later = str(time.time() + 1)  # Without a time it is the beginning of this second.
        found = json.loads(self._get("/api/v1/query", query=expression, time=later))["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def own(self, name: str) -> float:
        """One of VictoriaMetrics' metrics of itself, by name and labels as it shows them; 0 if it does not."""
        lines = (line.rpartition(" ") for line in self._get("/metrics").splitlines())
        return next((float(value) for series, _, value in lines if series == name), 0.0)

    def flush(self) -> None:
        """Lets what has been taken be seen, which otherwise takes seconds, and longer where all cores are busy."""
        self._get("/internal/force_flush")

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return self._get("/health") == "OK"
        return False

    def _get(self, path: str, **parameters: str) -> str:
        return get(f"{self._base}{path}?{urllib.parse.urlencode(parameters)}")


def _series(found: dict[str, list[float]]) -> Series:
    """A series from a line of an export, which has times in milliseconds, and infinities as texts."""
    samples = zip(found["timestamps"], found["values"], strict=True)
    return Series(dict(found["metric"]), sorted((at / 1000, float(value)) for at, value in samples))


@contextlib.contextmanager
def victoria(directory: Path, *options: str) -> Iterator[Victoria]:
    """Runs a VictoriaMetrics with its data in the directory; queries see what is there, which otherwise takes 30 seconds."""

    def command(port: int) -> list[str | Path]:
        own = [f"-storageDataPath={directory}", f"-httpListenAddr=127.0.0.1:{port}", "-search.latencyOffset=0s"]
        return [find("victoria-metrics"), *own, "-loggerLevel=ERROR", *options]

    with serving("victoria-metrics", command, lambda port: Victoria(port).is_up(), directory) as port:
        yield Victoria(port)


@contextlib.contextmanager
def flushing(store: Victoria, every: float) -> Iterator[None]:
    """Seconds within which new samples can be queried."""
    over = threading.Event()

    def flush() -> None:
        while not over.wait(every):
            with contextlib.suppress(OSError):
                store.flush()

    thread = threading.Thread(target=flush, name="flushing")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
