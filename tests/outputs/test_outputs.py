"""The start and the end of a run as others see it: entries for discovery, the last scrape, the text file."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.models import Perceptron
from tests.support.programs import Starter
from tests.support.scrape import errors
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.outputs import outputs as outputs_module
from torch_grad_exporter.outputs.outputs import CLOSE_SECONDS


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for what is under way, however slow the machine is just now."""
    monkeypatch.setattr(outputs_module, "CLOSE_SECONDS", PATIENCE)


def started(**options: object) -> Exporter:
    """An exporter on loopback, of a run with a name."""
    return start_exporter(Perceptron(), 0, **{"addr": "127.0.0.1", "run": "a run", **options})  # type: ignore[arg-type]


def get(exporter: Exporter, path: str) -> bytes:
    """What is served."""
    assert exporter.port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=PATIENCE) as answer:
        return answer.read()  # type: ignore[no-any-return]


def entries(folder: Path) -> list[dict[str, object]]:
    """What Prometheus reads there."""
    return [entry for file in folder.glob("*.json") for entry in json.loads(file.read_text())]


def test_the_file_is_there_as_long_as_the_run(tmp_path: Path) -> None:
    """It names the port in use and who this is, and is gone after a clean end."""
    with started(sd_dir=tmp_path / "sd", rank=3, labels={"team": "x"}, advertise="node-7") as exporter:
        assert eventually(lambda: bool(entries(tmp_path / "sd")))
        (entry,) = entries(tmp_path / "sd")
        assert entry["targets"] == [f"node-7:{exporter.port}"]
        labels = entry["labels"]
        assert isinstance(labels, dict)
        assert {name: labels[name] for name in ("run", "rank", "local_rank", "team")} == {
            "run": "a run", "rank": "3", "local_rank": "0", "team": "x",
        }  # fmt: skip
        assert [entry] == json.loads(get(exporter, "/sd"))
        assert errors(exporter) == {}
    assert entries(tmp_path / "sd") == []


def test_a_failed_run_leaves_its_file(tmp_path: Path) -> None:
    """An exception that leaves the `with` has ended the run: its target stays, so that `up` is 0."""
    with pytest.raises(ZeroDivisionError), started(sd_dir=tmp_path):  # noqa: PT012 - what is in it is the run
        assert eventually(lambda: bool(entries(tmp_path)))
        raise ZeroDivisionError
    assert len(entries(tmp_path)) == 1


def test_a_name_service_that_hangs_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start waits a second for this host's own address; then its name has to do."""
    over, known = threading.Event(), socket.getaddrinfo

    def hang(host: object, *arguments: object, **options: object) -> object:
        return known(host, *arguments, **options) if host != socket.gethostname() else over.wait(FOREVER)  # type: ignore[arg-type]

    def seconds() -> float:
        start = time.monotonic()
        with start_exporter(Perceptron(), 0, run="a run") as exporter:
            took = time.monotonic() - start
            assert json.loads(exporter._outputs._announcement.body())[0]["targets"] == [f"{socket.gethostname()}:{exporter.port}"]  # type: ignore[union-attr]
        return took

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    assert eventually(lambda: seconds() < 3)
    over.set()


@pytest.mark.parametrize(
    ("status", "state"), [(None, "finished"), (0, "finished"), (1, "failed"), (143, "failed"), ("no data", "failed")]
)
def test_an_exit_tells_how_it_went(status: int | str | None, state: str, tmp_path: Path) -> None:
    """`sys.exit` out of the `with` is the end that its status says: after a success the target is taken back."""
    with pytest.raises(SystemExit), started(sd_dir=tmp_path / "sd", textfile_dir=tmp_path):  # noqa: PT012 - what is in it is the run
        assert eventually(lambda: bool(entries(tmp_path / "sd")))
        sys.exit(status)
    assert bool(entries(tmp_path / "sd")) is (state == "failed")
    (file,) = tmp_path.glob("*.prom")
    assert f'state="{state}"}} 1' in file.read_text()


def test_a_folder_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    """The training goes on, and so does serving."""
    (tmp_path / "file").touch()
    with started(sd_dir=tmp_path / "file" / "sd", textfile_dir=tmp_path / "file") as exporter:
        assert eventually(lambda: "discovery" in errors(exporter))
        assert b"torch_train_info" in get(exporter, "/metrics")
        counted = exporter._errors
    assert counted.counts()["textfile"] == 1


PROGRAM = """
import os, signal, sys, time, torch
from torch_grad_exporter import start_exporter
model = torch.nn.Linear(2, 2)
exporter = start_exporter(model, 0, addr="127.0.0.1", sd_dir=sys.argv[1], run="ending")
while not any(name.endswith(".json") for name in os.listdir(sys.argv[1])):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "stays"),
    [("", False), ("sys.exit(3)", False), ("raise ValueError", True), ("os.kill(os.getpid(), signal.SIGKILL)", True)],
)
def test_what_is_left_when_the_process_ends(starter: Starter, ending: str, stays: bool, tmp_path: Path) -> None:
    """Without `with`: a program that comes to its end takes its file back, one that an exception or a signal ends does not."""
    done = starter.start(textwrap.dedent(PROGRAM) + ending, str(tmp_path)).wait()
    assert done == {"": 0, "sys.exit(3)": 3, "raise ValueError": 1}.get(ending, -signal.SIGKILL)
    assert len(entries(tmp_path)) == stays


def test_the_end_waits_for_one_more_scrape() -> None:
    """With `linger` the next scrape sees the state of the end, and then the port is free at once."""
    exporter = started(linger=FOREVER)
    get(exporter, "/metrics")  # one from before does not count
    port, seen = exporter.port, []
    assert port is not None

    def scrape() -> None:
        for _ in range(2):  # the first may get what was scraped within the second before
            time.sleep(1.1)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request("GET", "/metrics")
            seen.append(connection.getresponse().read().decode())
            connection.close()
            if 'state="finished"} 1.0' in seen[-1]:
                break

    client = threading.Thread(target=scrape)
    start = time.monotonic()
    client.start()
    exporter.close()
    assert time.monotonic() - start >= 1
    client.join()
    assert 'state="finished"} 1.0' in seen[-1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE)


def test_lingering_ends_without_a_scrape() -> None:
    """Where no scrape comes, after the time that was allowed."""

    def seconds() -> float:
        exporter = started(linger=0.5)
        start = time.monotonic()
        exporter.close()
        return time.monotonic() - start

    took: list[float] = []
    assert eventually(lambda: took.append(seconds()) or took[-1] < 3)
    assert min(took) >= 0.5


def test_the_last_values_are_left_for_node_exporter(tmp_path: Path) -> None:
    """The file has what the last scrape had, with the state of the end, readable for all, under the name of run and rank."""
    with started(textfile_dir=tmp_path, rank=1):
        assert list(tmp_path.glob("[!.]*")) == []
    (file,) = tmp_path.glob("*.prom")
    text = file.read_text()
    assert 'torch_train_state{run="a run",rank="1",state="finished"} 1.0\n' in text
    assert "torch_grad_captures_total{" in text
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_system_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a pipe without a reader stands for a file server that is gone: the end comes within two seconds."""
    monkeypatch.setattr(outputs_module, "CLOSE_SECONDS", CLOSE_SECONDS)
    over = threading.Event()

    def seconds() -> float:
        exporter = started(textfile_dir=tmp_path)
        exporter._outputs._renderer.render = lambda *_: over.wait(FOREVER)  # type: ignore[union-attr,method-assign]
        start = time.monotonic()
        exporter.close()
        return time.monotonic() - start

    assert eventually(lambda: seconds() < 2.5)
    over.set()


def test_a_rank_that_fails_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for a rank of several, and a person for what was interrupted: neither lingers, and the text file is there."""
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(RuntimeError), started(linger=FOREVER, textfile_dir=tmp_path):
        raise RuntimeError
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), started(linger=FOREVER):
        raise KeyboardInterrupt
    (file,) = tmp_path.glob("*.prom")
    assert 'state="failed"} 1' in file.read_text()


def test_what_an_earlier_process_left_is_removed(tmp_path: Path) -> None:
    """Its text file of the same run and rank would be shown beside this one's values."""
    with pytest.raises(ValueError, match="no more"), started(textfile_dir=tmp_path):
        raise ValueError("no more")
    (file,) = tmp_path.glob("*.prom")
    with started(textfile_dir=tmp_path):
        assert eventually(lambda: not file.exists())
    assert file.exists()


def test_an_interrupt_is_an_end_on_purpose(tmp_path: Path) -> None:
    """Ctrl-C takes the entry back, and the text file says `finished`."""
    with pytest.raises(KeyboardInterrupt), started(sd_dir=tmp_path / "sd", textfile_dir=tmp_path):  # noqa: PT012 - what is in it is the run
        assert eventually(lambda: bool(entries(tmp_path / "sd")))
        raise KeyboardInterrupt
    assert entries(tmp_path / "sd") == []
    (file,) = tmp_path.glob("*.prom")
    assert 'state="finished"} 1' in file.read_text()


def test_the_text_file_does_not_wait_for_a_scrape(tmp_path: Path) -> None:
    """It is there while the run lingers: a launcher may end the process before that is over."""
    exporter = started(linger=FOREVER, textfile_dir=tmp_path)
    url = exporter.url or ""
    closing = threading.Thread(target=exporter.close)
    closing.start()
    assert eventually(lambda: bool(list(tmp_path.glob("*.prom"))))
    assert closing.is_alive()
    urllib.request.urlopen(url, timeout=PATIENCE).close()
    closing.join(PATIENCE)
    assert not closing.is_alive()
