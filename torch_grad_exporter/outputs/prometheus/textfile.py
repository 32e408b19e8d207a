"""The last metrics of a run as a file for node_exporter's textfile collector, which goes on serving them when the run is over.

`node_exporter --collector.textfile.directory=DIRECTORY` reads every `*.prom` there, whoever wrote it, until somebody removes it.
"""

from __future__ import annotations

from pathlib import Path

from torch_grad_exporter import files


class TextFile:
    """The file of one rank of a run; a later run, or a restart, of that name and rank overwrites it."""

    def __init__(self, directory: str, run: str, rank: int) -> None:
        self.path = Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"

    def write(self, content: bytes) -> None:
        """Writes the content, Prometheus' text format 0.0.4 without timestamps, readable for all. Raises `OSError`."""
        files.write(self.path, content)

    def remove(self) -> None:
        """Removes what an earlier process of the same run and rank has left: it speaks of another one. Raises `OSError`."""
        if self.path.exists():  # a folder that is none yet, or cannot be, is told when there is something to write
            self.path.unlink()
