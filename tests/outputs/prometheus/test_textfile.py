"""Text files for the node exporter: their names and their content, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_grad_exporter import files
from torch_grad_exporter.files import NEW, write
from torch_grad_exporter.outputs.prometheus.text_file import text_file

CONTENT = b'# HELP torch_train_state State.\n# TYPE torch_train_state gauge\ntorch_train_state{run="a",rank="0",state="failed"} 1\n'


def test_the_file(tmp_path: Path) -> None:
    """One file with exactly the content lies in a new directory, readable for all, with nothing beside it."""
    path = text_file(str(tmp_path / "new" / "directory"), "exp 1/a", 3)
    write(path, b"old")
    write(path, CONTENT)
    assert [path.name for path in (tmp_path / "new" / "directory").glob("[!.]*")] == ["torch_grad_exporter-exp_1_a-3fc6cfe3-3.prom"]
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Where the file cannot be put, the error is raised and no temporary file stays."""
    path = text_file(str(tmp_path), "a", 0)
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match=r"torch_grad_exporter-a-0\.prom"):
        write(path, CONTENT)
    assert list(tmp_path.glob("[!.]*")) == [path]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_names_are_safe() -> None:
    """For any name of a run the file lies in the directory, and its name is short and plain."""
    for run, start in (("../x", "_x-"), (".", "run-"), ("a\0b\n", "a_b_-"), ("r" * 200, "r" * 150 + "-")):
        name = files.file_name(run, 12, ".json")
        assert name.startswith(start)
        assert name.endswith("-12.json")
        assert len(name) <= 180
        assert Path(name).name == name


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """A temporary file of an hour ago is removed; one of this minute may be another rank's."""
    path = tmp_path / "a.prom"
    write(path, b"first")
    old, new = (tmp_path / NEW / f"{name}.tmp" for name in ("old", "new"))
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    write(path, b"second")
    assert (old.exists(), new.exists(), path.read_bytes()) == (False, True, b"second")
