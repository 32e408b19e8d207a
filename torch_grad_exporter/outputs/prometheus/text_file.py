"""LastValues: the file with the last metrics of a run, for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_grad_exporter import files
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop


class LastValues(BackgroundLoop):
    """The last metrics of a rank as a file for node_exporter's textfile collector, which serves them when the run is over.

    A thread writes `content` when the run ends, since a file system may hang. It begins at the start, since none can begin at the
    end of a program, and first removes the file of an earlier process of the same run and rank, whose values are outdated.
    """

    def __init__(self, path: Path, content: Callable[[], bytes], guard: Guard) -> None:
        self._path, self._content, self._guard = path, content, guard
        self._removed = False
        super().__init__("textfile", self._remove, guard=guard, last=self._write)
        self.wake()

    def _remove(self) -> None:
        self._removed = True
        if self._path.exists():  # a directory that does not exist yet, or cannot, is reported when there is something to write
            self._path.unlink()

    def _write(self) -> None:
        if not self._removed:  # the run was over before the thread came to it
            self._guard(self._remove)
        files.write(self._path, self._content())


def text_file(directory: str, run: str, rank: int) -> Path:
    """Return the path of the file of a rank."""
    return Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"
