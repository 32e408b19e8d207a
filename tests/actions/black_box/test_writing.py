"""A black box is there whole or not at all, and folders that cannot be written to harm no training."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.actions.black_box.planted import train
from torch_grad_exporter import load_black_box, start_exporter
from torch_grad_exporter.actions.black_box.box import FORMAT, write

KILLED = """
import pathlib, sys, torch
from torch_grad_exporter.actions.black_box.box import FORMAT, write
content = {"batches": [], "samples": {"norm": torch.rand(1 << 22)}}
about = {**FORMAT, "problem": dict(alert="a", severity="critical", text="t", layer=None, others=[], first_steps="", value=None),
         "step": 1, "found_at_step": 2, "lost": 0, "time": 0.0, "options": {}, "process": {}}
while True:
    write(pathlib.Path(sys.argv[1]), "box", about, content)
"""

FULL = """
import logging, resource, signal, sys, torch
from torch import nn
from torch_grad_exporter import start_exporter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trained = nn.Linear(8, 1)
optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
with start_exporter(trained, None, every=1, black_box=sys.argv[1]) as exporter:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
    for step in range(40):
        trained(torch.full((4, 8), torch.nan if step == 20 else 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exporter.close()
    print("went on,", exporter.values("errors_total/black_box"))
"""


@pytest.mark.process
@pytest.mark.parametrize("file", ["", "content.pt", "about.json"])
def test_a_process_that_is_killed_while_it_writes(file: str, tmp_path: Path) -> None:
    """Each folder is a whole box, or is refused; the next run of the same name removes the rest."""
    folder = tmp_path / "planted-0"
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder])
    try:
        until = time.monotonic() + 100
        while time.monotonic() < until and not (any(folder.glob("1-*")) and any(folder.glob(f".*.part/{file}"))):
            pass  # without a pause: the moment is short
    finally:
        process.kill()
        process.wait()
    boxes, parts = ([*folder.glob(pattern)] for pattern in ("[0-9]*", ".*"))
    assert boxes
    for box in boxes:
        assert load_black_box(box).samples["norm"].shape == (1 << 22,)
    assert len(parts) <= 1
    for part in parts:
        with pytest.raises(FileNotFoundError):
            load_black_box(part)
    train(tmp_path, 24, 20, every=1)
    assert [*folder.glob(".*")] == []


@pytest.mark.process
def test_a_full_disk(tmp_path: Path) -> None:
    """A box that does not fit is counted and logged once, nothing of it is left, and training goes on."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.count("black_box failed; training goes on") == 1, done.stdout
    assert "cannot be written" in done.stdout
    assert "went on, {'torch_grad_exporter_errors_total/black_box': 1.0}" in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that a file has replaced since the start is a failure that is counted."""
    folder = tmp_path / "boxes"
    trained = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    with caplog.at_level(logging.WARNING), start_exporter(trained, None, every=1, black_box=folder) as exporter:
        shutil.rmtree(folder)
        folder.write_text("")
        for _ in range(9):
            trained(torch.full((4, 8), torch.nan)).square().mean().backward()
            optimizer.step()
        assert exporter.problems()
    assert "black_box failed; training goes on" in caplog.text
    assert folder.read_text() == ""


@pytest.mark.parametrize("folder", ["file/boxes", "file"])
def test_a_folder_that_cannot_be_written_to(folder: str, tmp_path: Path) -> None:
    """It is refused at the start, with the argument, the value and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"black_box='.*': cannot be written to: .*; expected a directory"):
        start_exporter(torch.nn.Linear(2, 1), None, black_box=tmp_path / folder)


def test_damaged_boxes(tmp_path: Path) -> None:
    """A damaged box, one of another version, and content that would run code are refused."""
    train(tmp_path, 24, 20, every=1)
    folder = load_black_box(tmp_path).path
    about, content = (folder / "about.json").read_text(), (folder / "content.pt").read_bytes()
    for text in ("{}", "[]", "no json", about.replace('"version": 1', '"version": 2'), about.replace('"alert"', '"other"')):
        (folder / "about.json").write_text(text)
        with pytest.raises(ValueError, match="it is damaged"):
            load_black_box(folder)
    (folder / "about.json").write_text(about)
    (folder / "content.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="it is damaged"):
        load_black_box(folder)
    torch.save({"batches": [Path("evil")], "samples": {}}, folder / "content.pt")
    with pytest.raises(ValueError, match="it is damaged"):
        load_black_box(folder)


@pytest.mark.process
def test_nothing_is_imported_without_it() -> None:
    """An exporter without a black box imports none of its modules."""
    script = (
        "import sys, torch; from torch_grad_exporter import start_exporter; start_exporter(torch.nn.Linear(2, 1), None).close()\n"
        "assert not [name for name in sys.modules if '.black_box' in name]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_of_boxes(tmp_path: Path) -> None:
    """Boxes are numbered, and the name of a problem becomes one of a folder."""
    about = {**FORMAT, "problem": {}}
    for number in (1, 2):
        assert write(tmp_path, "a/b: c", about, {}).name == f"{number}-a_b__c"
