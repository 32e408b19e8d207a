"""The start and the end of a run as others see it: entries for discovery, the last scrape, the text file."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.models import Perceptron
from tests.support.programs import Starter
from tests.support.scrape import errors
from tests.support.tools import FOREVER, PATIENCE, eventually, get
from torch_grad_exporter import Exporter, start_exporter


def started(**options: object) -> Exporter:
    """Start an exporter on loopback, of a run with a name."""
    return start_exporter(Perceptron(), 0, **{"addr": "127.0.0.1", "run": "a run", **options})  # type: ignore[arg-type]


def text_file(folder: Path) -> Path:
    """Return the text file that the end leaves, once it is there: on a busy machine the end does not wait for it."""
    assert eventually(lambda: bool([*folder.glob("*.prom")]))
    (file,) = folder.glob("*.prom")
    return file


def entries(folder: Path) -> list[dict[str, object]]:
    """Return what Prometheus reads in the folder."""
    return [entry for file in folder.glob("*.json") for entry in json.loads(file.read_text())]


def test_the_file_is_there_as_long_as_the_run(tmp_path: Path) -> None:
    """The discovery file names the port and the run, and is removed at a clean end."""
    with started(sd_dir=tmp_path / "sd", rank=3, labels={"team": "x"}, advertise="node-7") as exporter:
        assert eventually(lambda: bool(entries(tmp_path / "sd")))
        (entry,) = entries(tmp_path / "sd")
        assert entry["targets"] == [f"node-7:{exporter.port}"]
        labels = entry["labels"]
        assert isinstance(labels, dict)
        assert {name: labels[name] for name in ("run", "rank", "local_rank", "team")} == {
            "run": "a run", "rank": "3", "local_rank": "0", "team": "x",
        }  # fmt: skip
        assert [entry] == json.loads(get(f"{exporter.page_url}sd"))
        assert errors(exporter) == {}
    assert eventually(lambda: entries(tmp_path / "sd") == [])


@pytest.mark.slow
def test_a_hanging_name_service_delays_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start does not wait for a name service that hangs, and the host is known by its name."""
    over, known = threading.Event(), socket.getaddrinfo

    def hang(host: object, *arguments: object, **options: object) -> object:
        return known(host, *arguments, **options) if host != socket.gethostname() else over.wait(FOREVER)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with start_exporter(Perceptron(), 0, run="a run") as exporter:
            (entry,) = json.loads(get(f"{exporter.page_url}sd"))
            assert entry["targets"] == [f"{socket.gethostname()}:{exporter.port}"]
    finally:
        over.set()


PROGRAM = """
import os, sys, time, torch
from torch_grad_exporter import start_exporter
model = torch.nn.Linear(2, 2)
exporter = start_exporter(model, 0, addr="127.0.0.1", sd_dir=sys.argv[1], run="ending")
while not any(name.endswith(".json") for name in os.listdir(sys.argv[1])):
    time.sleep(0.01)
"""


@pytest.mark.process
@pytest.mark.parametrize(("ending", "status", "stays"), [("sys.exit(3)", 3, False), ("raise ValueError", 1, True)])
def test_what_is_left_when_the_process_ends(starter: Starter, ending: str, status: int, stays: bool, tmp_path: Path) -> None:
    """Without `with`, a program that ends removes its file; one ended by an exception leaves it."""
    assert starter.start(PROGRAM + ending, str(tmp_path)).wait() == status
    assert len(entries(tmp_path)) == stays


def test_the_text_file_has_the_last_values(tmp_path: Path) -> None:
    """The text file appears at the end, which waits as long as it may for a scrape, and a new run of the same rank removes it."""
    with started(textfile_dir=tmp_path, rank=1, linger=0.5):
        assert list(tmp_path.glob("[!.]*")) == []
        start = time.monotonic()
    assert time.monotonic() - start >= 0.5
    file = text_file(tmp_path)
    text = file.read_text()
    assert 'torch_train_state{run="a run",rank="1",state="finished"} 1.0\n' in text
    assert "torch_grad_captures_total{" in text
    assert file.stat().st_mode & 0o777 == 0o644
    with started(textfile_dir=tmp_path, rank=1):
        assert eventually(lambda: not file.exists())
    assert eventually(file.exists)


@pytest.mark.slow
def test_a_hanging_file_system_delays_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end does not wait for a text file on a file server that hangs."""
    inside, over, replace = threading.Event(), threading.Event(), os.replace

    def hang(source: object, target: object, **options: object) -> None:
        if str(target).endswith(".prom"):
            inside.set()
            over.wait(FOREVER)
        replace(source, target, **options)  # type: ignore[arg-type]

    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, hang)
    exporter = started(textfile_dir=tmp_path)
    closing = threading.Thread(target=exporter.close)
    closing.start()
    try:
        assert inside.wait(PATIENCE)
        closing.join(PATIENCE)
        assert not closing.is_alive()
    finally:
        over.set()


class Interrupting(logging.Handler):
    """Sends Ctrl-C to the main thread when a line is logged, as a user does who reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        self.lines.append(record.getMessage())
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()


def scrape_like_prometheus(exporter: Exporter, times: int = 2, pause: float = 2.0) -> None:
    """Scrape as Prometheus does, this many seconds apart."""
    for number in range(times):
        time.sleep(pause * bool(number))
        get(exporter.url, X_Prometheus_Scrape_Timeout_Seconds="1")


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_and_nothing_else() -> None:
    """An end that a scraper is to see says so in one line; Ctrl-C then ends the wait, and is raised nowhere."""
    log, handler = logging.getLogger("torch_grad_exporter"), Interrupting()
    with started() as exporter:
        scrape_like_prometheus(exporter)
        log.addHandler(handler)
    log.removeHandler(handler)
    (line,) = handler.lines
    assert re.search(r"waiting up to \d s .*Ctrl-C", line)


@pytest.mark.parametrize("scrapes", [0, 1])
def test_an_end_that_nobody_awaits_does_not_wait(scrapes: int, caplog: pytest.LogCaptureFixture) -> None:
    """After one scrape or none, or after many by people, the end waits for nothing."""
    with started() as exporter:
        for _ in range(3):
            get(exporter.url)
        scrape_like_prometheus(exporter, scrapes)
    assert "waiting" not in caplog.text


@pytest.mark.parametrize(("read", "saved"), [("", False), ("metrics", False), ("page", False), ("", True)])
def test_a_run_that_nobody_saw_says_how_to_keep_it(
    read: str, saved: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end says how to keep a run, in one line, unless its metrics or its page were read or its history is saved."""
    caplog.set_level(logging.INFO, "torch_grad_exporter")
    with started() as exporter:
        if read:
            get(exporter.url if read == "metrics" else exporter.page_url)
        if saved:
            exporter.save(tmp_path / "run.json")
    assert caplog.text.count("exporter.save(path) keeps") == (not read and not saved)


@pytest.mark.slow
def test_a_signal_handler_ends_a_run_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where a signal's handler exits, little time may be left, so that the end waits for no scrape."""
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit), started() as exporter:  # noqa: PT012 - what is in it is the run
            scrape_like_prometheus(exporter)
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "waiting" not in caplog.text


def test_failed_ranks_and_ctrl_c_do_not_linger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rank of several and an interrupted run do not linger; Ctrl-C is a clean end, which removes the discovery file."""
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(RuntimeError), started(linger=FOREVER):
        raise RuntimeError
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), started(linger=FOREVER, sd_dir=tmp_path / "sd"):  # noqa: PT012 - what is in it is the run
        assert eventually(lambda: bool(entries(tmp_path / "sd")))
        raise KeyboardInterrupt
    assert eventually(lambda: entries(tmp_path / "sd") == [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_taken_port_leads_to_a_later_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose port is taken serves at a later one, which no other rank of the host tries."""
    for variable, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(variable, str(value))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with start_exporter(Perceptron(), first, addr="127.0.0.1", linger=0) as exporter:
            assert exporter.port in range(first + ranks, first + 64 * ranks, ranks)
            assert "torch_train_info" in get(exporter.url)


def test_unwritable_folders_cost_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folders that cannot be made are named in a line each, without a traceback, and counted; the exporter goes on serving."""
    (tmp_path / "file").touch()
    with started(sd_dir=tmp_path / "file" / "sd", textfile_dir=tmp_path / "file" / "prom") as exporter:
        assert eventually(lambda: errors(exporter) == {"discovery": 1})
        assert "torch_train_info" in get(exporter.url)
    assert eventually(lambda: errors(exporter) == {"discovery": 1, "textfile": 1})
    failed = [record for record in caplog.records if "failed" in record.getMessage()]
    assert len(failed) == 2
    for record in failed:
        assert str(tmp_path / "file") in record.getMessage()
        assert record.exc_info is None


@pytest.mark.parametrize(("umask", "warned"), [(0o077, True), (0o022, False)])
def test_new_folders_keep_the_umask(umask: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that others cannot enter, as the umask asks, is named once: Prometheus may be another user."""
    before = os.umask(umask)
    try:
        for _ in range(2):
            with started(textfile_dir=tmp_path / "new" / "prom"):
                pass
            assert text_file(tmp_path / "new" / "prom").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask
    lines = [line for line in caplog.messages if "is closed to other users" in line]
    assert len(lines) == warned
    assert all(f"the new folder {tmp_path / 'new'} " in line for line in lines)
