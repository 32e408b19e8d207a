from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.tools import PATIENCE, find
from torch_grad_exporter import files
from torch_grad_exporter.files import NEW, write
from torch_grad_exporter.outputs.prometheus.textfile import text_file

CONTENT = b'# HELP torch_train_state State.\n# TYPE torch_train_state gauge\ntorch_train_state{run="a",rank="0",state="failed"} 1\n'


def test_the_file(tmp_path: Path) -> None:
    """One file with exactly the content, readable for all, in a directory that is made, and nothing beside it."""
    path = text_file(str(tmp_path / "new" / "directory"), "exp 1/a", 3)
    write(path, b"old")
    write(path, CONTENT)
    assert [path.name for path in (tmp_path / "new" / "directory").glob("[!.]*")] == ["torch_grad_exporter-exp_1_a-3fc6cfe3-3.prom"]
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.server
def test_promtool_takes_it(tmp_path: Path) -> None:
    """What lies there is what `promtool check metrics` accepts."""
    path = text_file(str(tmp_path), "a", 0)
    write(path, CONTENT)
    subprocess.run([find("promtool"), "check", "metrics"], input=path.read_bytes(), check=True, timeout=PATIENCE)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Where the file cannot be put, the error is raised and no temporary file stays."""
    path = text_file(str(tmp_path), "a", 0)
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match=r"torch_grad_exporter-a-0\.prom"):
        write(path, CONTENT)
    assert list(tmp_path.glob("[!.]*")) == [path]
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize(
    ("run", "start"),
    [("a-1_2.b", "a-1_2.b-"), ("../x", "_x-"), (".", "run-"), ("a\0b\n", "a_b_-"), ("ä😀", "__-"), ("r" * 200, "r" * 150 + "-")],
)
def test_names_are_safe(run: str, start: str) -> None:
    """Whatever a run is called, its file lies in the directory, and its name is short and plain."""
    name = files.file_name(run, 12, ".json")
    assert name.startswith(start)
    assert name.endswith("-12.json")
    assert len(name) <= 180
    assert Path(name).name == name
    assert not name.startswith(".")


def test_names_of_different_runs_differ() -> None:
    """Runs whose names look the same when they are made safe have files of their own."""
    runs = ["a b", "a/b", "a_b", "a:b", "r" * 200, "r" * 199]
    assert len({files.file_name(run, 0, ".json") for run in runs}) == len(runs)


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    """A file that was being written an hour ago is no one's; one of this minute may be another rank's."""
    path = tmp_path / "a.prom"
    write(path, b"first")
    old, new = (tmp_path / NEW / f"{name}.tmp" for name in ("old", "new"))
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    write(path, b"second")
    assert (old.exists(), new.exists(), path.read_bytes()) == (False, True, b"second")
