"""A process that serves what another one serves, as it was at one moment, by the same server: a control without a training.

Its clients and its server take the same processor time, but for the rendering; only Python's lock is another one.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Self

from benchmarks import record
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.prometheus.text import Format


class Mirror:
    """The process; `url` is where it serves. A context manager: leaving it ends the process."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.abuse_mirror", url]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=record.ROOT)  # noqa: S603 - ourselves
        self.url = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if not self.url:
            raise RuntimeError("the mirror has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._process.communicate(timeout=60)


@dataclass(frozen=True, slots=True)
class Same:
    """A renderer whose text is always the same."""

    text: bytes

    def render(self, _families: Iterable[Family], _form: Format) -> bytes:
        """The text."""
        return self.text


def main(url: str) -> None:
    """The process: says its address and serves until its input ends."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own server
        text = answer.read()
    server = MetricsServer(
        SimpleNamespace(scrape=list, ended=False, scraped=lambda *_, **__: None),  # type: ignore[arg-type]
        Same(text),  # type: ignore[arg-type]
        ErrorLog(()),
        addr="127.0.0.1",
        ports=(0,),
    )
    print(f"http://127.0.0.1:{server.port}/metrics", flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(sys.argv[1])
