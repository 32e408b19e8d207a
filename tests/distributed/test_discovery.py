"""Files and lists from which Prometheus learns of the ranks: their content, their life, and a real Prometheus that reads them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.real_prometheus import Prometheus
from tests.support.tools import FOREVER, PATIENCE, eventually, find
from torch_grad_exporter.distributed.discovery import (
    FEW,
    STALE_SECONDS,
    TOUCH_SECONDS,
    Discovery,
    RankList,
    Target,
    TargetFile,
    address,
)
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError, connected
from torch_grad_exporter.outputs.http.listener import open_listener


def target(rank: int = 0, port: int = 9100, **more: object) -> Target:
    """A rank's."""
    about = {"run": "r 1", "local_rank": rank, "host": "h", "labels": {}} | more
    return Target(address=f"10.0.0.1:{port}", rank=rank, **about)  # type: ignore[arg-type]


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_group() -> None:
    """A group has one target and the labels run, rank, local_rank and host, with the user's; the scheme only where it is https."""
    assert target(3, labels={"team": "a", "rank": "mine"}).group() == {
        "targets": ["10.0.0.1:9100"],
        "labels": {"team": "a", "run": "r 1", "rank": "3", "local_rank": "3", "host": "h"},
    }
    assert target(scheme="https").group()["labels"]["__scheme__"] == "https"  # type: ignore[index]


@pytest.mark.parametrize(
    ("addr", "advertise", "resolved", "route", "pod", "expected"),
    [
        ("10.1.2.3", "", ["10.9.9.9"], "10.8.8.8", "", "10.1.2.3:9100"),
        ("fd00::1", "", [], "", "", "[fd00::1]:9100"),
        ("127.0.0.1", "", ["10.9.9.9"], "10.8.8.8", "", "127.0.0.1:9100"),
        ("10.1.2.3", "gateway", ["10.9.9.9"], "10.8.8.8", "", "gateway:9100"),
        ("", "fd00::2", ["10.9.9.9"], "10.8.8.8", "", "[fd00::2]:9100"),
        ("", "[fd00::2]", ["10.9.9.9"], "10.8.8.8", "", "[fd00::2]:9100"),
        ("", "", ["127.0.1.1", "10.9.9.9"], "10.8.8.8", "", "node7:9100"),
        ("0.0.0.0", "", ["127.0.1.1", "::1", "fe80::1%eth0"], "10.8.8.8", "", "10.8.8.8:9100"),  # noqa: S104
        ("::", "", [], "fd00::3", "", "[fd00::3]:9100"),
        ("", "", ["127.0.1.1"], "", "", "node7:9100"),
        ("", "", ["10.9.9.9"], "10.8.8.8", "10.0.0.1", "10.8.8.8:9100"),
    ],
    ids=[
        "listens on one", "on one of IPv6", "on loopback", "advertised", "advertised IPv6", "with brackets", "name is known",
        "name is loopback", "name is unknown, IPv6", "no route", "in a pod",
    ],
)  # fmt: skip
def test_the_address(*, addr: str, advertise: str, resolved: list[str], route: str, pod: str, expected: str) -> None:
    """An address under which Prometheus reaches this rank is found, as far as this host can know."""
    found = address(
        addr,
        9100,
        advertise,
        hostname=lambda: "node7",
        resolve=lambda _: resolved,
        route=lambda: route,
        environment={"KUBERNETES_SERVICE_HOST": pod},
    )
    assert found == expected


def test_the_address_of_this_host() -> None:
    """On the host of the tests an address is found as well, and it is none of loopback unless there is nothing else."""
    host, _, port = address("", 9101).rpartition(":")
    assert port == "9101"
    assert host


# The file


def test_the_file_of_a_rank(tmp_path: Path) -> None:
    """One file in a directory that is made, readable for all, with a list of one group; a clean end removes it."""
    file = TargetFile(str(tmp_path / "sd"), target(3))
    assert not file.path.exists()
    file.refresh()
    assert [path.name for path in (tmp_path / "sd").glob("[!.]*")] == [file.path.name]
    assert file.path.suffix == ".json"
    assert json.loads(file.path.read_bytes()) == [target(3).group()]
    assert file.path.stat().st_mode & 0o777 == 0o644
    file.close()
    file.close()
    assert list((tmp_path / "sd").glob("[!.]*")) == []


def test_a_file_is_kept_fresh(tmp_path: Path) -> None:
    """As long as a rank runs its file is young; one that was removed comes back; the age that means stale is much longer."""
    clock = Clock()
    file = TargetFile(str(tmp_path), target(), clock=clock)
    file.refresh()
    os.utime(file.path, (1.0, 1.0))
    clock.now += TOUCH_SECONDS - 1
    file.refresh()
    assert file.path.stat().st_mtime == 1.0
    clock.now += 1
    file.refresh()
    assert time.time() - file.path.stat().st_mtime < 60
    file.path.unlink()
    clock.now += TOUCH_SECONDS
    file.refresh()
    assert json.loads(file.path.read_bytes()) == [target().group()]
    file.close()
    assert not file.path.exists()
    assert STALE_SECONDS > 2 * (TOUCH_SECONDS + 300)


def test_who_had_this_address_is_gone(tmp_path: Path) -> None:
    """The file that a killed run left would show a later one, at the same port, as alive: it is removed; others stay."""
    gone, elsewhere, alive, mine = (
        TargetFile(str(tmp_path), one)
        for one in (target(run="gone"), target(run="elsewhere", host="another"), target(run="alive", port=9101), target())
    )
    for file in (gone, elsewhere, alive):
        file.refresh()
    (tmp_path / "nobody's.json").write_text("[{]")
    mine.refresh()
    left = {file.name for file in tmp_path.glob("*.json")}
    assert left == {elsewhere.path.name, alive.path.name, "nobody's.json", mine.path.name}


def test_among_many_only_stale_ones_are_read(tmp_path: Path) -> None:
    """A thousand ranks that start at once do not read each other's files; what a killed run left is found once it is stale."""
    for number in range(FEW):
        (tmp_path / f"{number}.json").write_text("[]")
    gone, clock = TargetFile(str(tmp_path), target(run="gone")), Clock()
    gone.refresh()
    mine = TargetFile(str(tmp_path), target(), clock=clock)
    mine.refresh()
    assert gone.path.exists()
    os.utime(gone.path, (0, 0))
    clock.now += TOUCH_SECONDS
    mine.refresh()
    assert not gone.path.exists()


def test_a_name_that_is_free_again(tmp_path: Path) -> None:
    """Of two jobs with one name the later one has the file; once that is dead for long the other one takes it back."""
    clock = Clock()
    first = TargetFile(str(tmp_path), target(), clock=clock)
    first.refresh()
    TargetFile(str(tmp_path), target(port=9999)).refresh()
    clock.now += TOUCH_SECONDS
    first.refresh()
    assert b"9999" in first.path.read_bytes()
    os.utime(first.path, (0, 0))
    clock.now += TOUCH_SECONDS
    first.refresh()
    assert b"9999" not in first.path.read_bytes()


@pytest.mark.parametrize("port", [9100, 9200], ids=["same port", "another port"])
def test_a_restarted_rank(port: int, tmp_path: Path) -> None:
    """A restarted rank takes over the file, and the process before it neither touches nor removes it any more."""
    clock = Clock()
    before, after = TargetFile(str(tmp_path), target(), clock=clock), TargetFile(str(tmp_path), target(port=port))
    before.refresh()
    after.refresh()
    assert before.path == after.path
    then = round(time.time()) - 100.0
    os.utime(after.path, (then, then))
    clock.now += TOUCH_SECONDS
    before.refresh()
    before.close()
    assert after.path.stat().st_mtime == then
    assert json.loads(after.path.read_bytes()) == [target(port=port).group()]
    after.close()
    assert not after.path.exists()


# The list


class Remembered:
    """A store that is a dictionary, and may fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        if self.error is not None:
            raise self.error
        return self.values.get(key, expected_value.encode())

    def set(self, key: str, value: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.values[key] = value

    def delete_key(self, key: str) -> bool:
        if self.error is not None:
            raise self.error
        return self.values.pop(key, None) is not None


@contextlib.contextmanager
def client(shared: Remembered) -> Iterator[JobStore]:
    """Our client of it."""
    store = JobStore(lambda: shared)
    yield store
    store.close()


def test_rank_0_lists_all() -> None:
    """Rank 0 lists itself at once, and the others when it has read them; a rank that ended is gone; the others list themselves."""
    shared = Remembered()
    with client(shared) as store:
        ranks = [RankList(store, target(rank, 9100 + rank), 12) for rank in range(12)]
        assert ranks[0].groups() == [target(0).group()]
        for rank in reversed(ranks):
            rank.refresh()
        assert ranks[0].groups() == [target(rank, 9100 + rank).group() for rank in range(12)]
        assert ranks[2].groups() == [target(2, 9102).group()]
        ranks[1].close()
        assert len(ranks[0].groups()) == 12
        ranks[0].refresh()
        assert ranks[0].groups() == [target(rank, 9100 + rank).group() for rank in range(12) if rank != 1]
        for rank in ranks:
            rank.close()
    assert shared.values == {}


def test_a_list_that_cannot_be_read() -> None:
    """A store that fails leaves the last list as it was, one that is not there yet is no failure; what is no group is left out."""
    shared = Remembered()
    with client(shared) as store, client(shared) as other:
        first = RankList(store, target(0), 3)
        shared.error = NoStoreError()
        first.refresh()
        shared.error = None
        RankList(other, target(1), 3).refresh()
        shared.values["torch_grad_exporter/target/2"] = b"\xff{"
        first.refresh()
        expected = [target(0).group(), target(1).group()]
        assert first.groups() == expected
        shared.error = OSError("down")
        with pytest.raises(StoreError, match="down"):
            first.refresh()
        first.close()
        assert first.groups() == expected
        shared.values["torch_grad_exporter/target/2"] = b'["no", "group"]'
        shared.error = None
        first.refresh()
        assert first.groups() == expected


# The threads


def test_a_life(tmp_path: Path) -> None:
    """Both entries come soon after the start and are gone after the end; the answer of `/sd` is the list as JSON."""
    errors: list[BaseException] = []
    shared = Remembered()
    with client(shared) as store:
        file, ranks = TargetFile(str(tmp_path), target()), RankList(store, target(), 2)
        discovery = Discovery(target(), file=file, ranks=ranks, on_error=errors.append, interval=0.01)
        discovery.start()
        RankList(store, target(1), 2).refresh()
        assert eventually(lambda: json.loads(discovery.body()) == [target().group(), target(1).group()])
        assert eventually(file.path.exists)
        discovery.close(PATIENCE)
        discovery.close()
        assert list(tmp_path.glob("[!.]*")) == []
        assert list(shared.values) == ["torch_grad_exporter/target/1"]
    assert errors == []
    assert not [thread for thread in threading.enumerate() if thread.name == "torch-grad-exporter-discovery"]


def test_nothing_to_do() -> None:
    """Without a folder and a store there is no thread, and the list has this process alone."""
    discovery = Discovery(target(), on_error=lambda error: pytest.fail(str(error)))
    threads = threading.active_count()
    discovery.start()
    assert threading.active_count() == threads
    assert json.loads(discovery.body()) == [target().group()]
    discovery.close()


def test_a_failure_costs_only_itself(tmp_path: Path) -> None:
    """A directory that cannot be written is told each time, and the store's entry is there all the same."""
    (tmp_path / "sd").touch()
    errors: list[BaseException] = []
    shared = Remembered()
    with client(shared) as store:
        file, ranks = TargetFile(str(tmp_path / "sd"), target()), RankList(store, target(), 1)
        discovery = Discovery(target(), file=file, ranks=ranks, on_error=errors.append, interval=60)
        discovery.start()
        assert eventually(lambda: bool(shared.values))
        discovery.close()
    assert [type(error) for error in errors] == [NotADirectoryError]


def test_an_entry_that_hangs() -> None:
    """Closing waits for what hangs no longer than it may."""
    over = threading.Event()

    class Hangs(Remembered):
        def set(self, key: str, value: bytes) -> None:
            over.wait(FOREVER)

    def is_bounded() -> bool:
        discovery = Discovery(target(), ranks=RankList(store, target(), 2), on_error=errors.append)
        discovery.start()
        start = time.monotonic()
        discovery.close(0.2)
        waited = time.monotonic() - start
        assert json.loads(discovery.body()) == [target().group()]
        assert waited >= 0.2
        return waited < 0.7

    errors: list[BaseException] = []
    with client(Hangs()) as store:
        assert eventually(is_bounded)
        over.set()


def test_a_folder_that_hangs_holds_up_no_list() -> None:
    """A network file system may hang for hours; the list of the ranks comes from elsewhere."""
    over = threading.Event()

    class Hangs(TargetFile):
        def refresh(self) -> None:
            over.wait(FOREVER)

    shared = Remembered()
    with client(shared) as store:
        file, ranks = Hangs("nowhere", target()), RankList(store, target(), 2)
        discovery = Discovery(target(), file=file, ranks=ranks, on_error=lambda error: pytest.fail(str(error)))
        discovery.start()
        assert eventually(lambda: bool(shared.values))
        over.set()
        discovery.close(0.2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child(tmp_path: Path) -> None:
    """A child that closes its copy leaves the parent's entries alone."""
    discovery = Discovery(target(), file=TargetFile(str(tmp_path), target()), on_error=lambda error: None, interval=0.01)
    discovery.start()
    assert eventually(lambda: bool(list(tmp_path.glob("*.json"))))
    child = os.fork()
    if child == 0:
        discovery.after_fork_in_child()
        discovery.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.glob("*.json"))) == 1
    discovery.close(PATIENCE)
    assert list(tmp_path.glob("[!.]*")) == []


# Real ranks

RANK = """
import sys, time
import torch.distributed as dist
from torch_grad_exporter.distributed.discovery import Discovery, RankList, Target, TargetFile
from torch_grad_exporter.distributed.store import JobStore, connected
port, rank = int(sys.argv[2]), int(sys.argv[3])
theirs = dist.TCPStore("127.0.0.1", port, is_master=False)
mine = Target(address=f"10.0.0.1:{9100 + rank}", run="r 1", rank=rank, local_rank=rank, host="h")
store = JobStore(lambda: connected({}, group=lambda: theirs))
discovery = Discovery(mine, file=TargetFile(sys.argv[1], mine), ranks=RankList(store, mine, 3), on_error=print, interval=0.05)
discovery.start()
sys.stdin.readline()
discovery.close(120)
store.close()
"""


def test_ranks_that_end_and_that_are_killed(tmp_path: Path) -> None:
    """Of two ranks the one that ends takes its file and its entry back; the one that is killed leaves both, for `up` to be 0."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = JobStore(lambda: connected({}, group=lambda: host))
    first = RankList(store, target(0), 3)

    def listed() -> list[str]:
        first.refresh()
        return [group["labels"]["rank"] for group in first.groups()]  # type: ignore[index]

    command = [sys.executable, "-c", RANK, str(tmp_path), str(host.port)]
    ranks = [subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE) for rank in (1, 2)]
    assert eventually(lambda: listed() == ["0", "1", "2"])
    assert eventually(lambda: len(list(tmp_path.glob("*.json"))) == 2)
    ranks[1].send_signal(signal.SIGKILL)
    ranks[0].communicate(b"\n", timeout=PATIENCE)
    ranks[1].communicate(timeout=PATIENCE)
    assert ranks[0].returncode == 0
    assert listed() == ["0", "2"]
    (left,) = tmp_path.glob("[!.]*")
    assert json.loads(left.read_bytes()) == [target(2, 9102).group()]
    store.close()


# A real Prometheus

CONFIGURATION = """
scrape_configs:
  - job_name: files
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
  - job_name: list
    honor_labels: true
    http_sd_configs: [{{url: "http://127.0.0.1:{port}/sd", refresh_interval: 1s}}]
"""


@contextlib.contextmanager
def listing(discovery: Discovery) -> Iterator[int]:
    """A server of its list, and its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = discovery.body()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def known(prometheus: Prometheus, job: str) -> set[tuple[str, ...]]:
    """The targets that it knows: address with scheme, run, rank, local rank, host."""
    with contextlib.suppress(OSError):
        data = prometheus.get("/api/v1/targets", state="active")
        assert isinstance(data, dict)
        return {
            (one["scrapeUrl"], *(one["labels"][name] for name in ("run", "rank", "local_rank", "host")))
            for one in data["activeTargets"]
            if one["scrapePool"] == job
        }
    return set()


@pytest.mark.server
def test_a_real_prometheus(tmp_path: Path) -> None:
    """Prometheus knows all ranks from files and list, never sees a part of a file that is rewritten 200 times, forgets a rank."""
    folder, log = tmp_path / "sd", tmp_path / "log"
    folder.mkdir()
    shared = Remembered()
    with client(shared) as store, contextlib.ExitStack() as stack:
        targets = [target(0), target(1, 9101, scheme="https")]
        all_ranks = [RankList(store, one, 2) for one in targets]
        for ranks in (*all_ranks, all_ranks[0]):
            ranks.refresh()
        answering = Discovery(target(), ranks=all_ranks[0], on_error=print)
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(CONFIGURATION.format(folder=folder, port=stack.enter_context(listing(answering))))
        subprocess.run(
            [find("promtool"), "check", "config", configuration], check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL
        )
        with contextlib.closing(open_listener("127.0.0.1", (0,))) as listener:
            port = listener.getsockname()[1]
        options = [
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        output = stack.enter_context(log.open("wb"))
        process = stack.enter_context(subprocess.Popen([find("prometheus"), *options], stdout=output, stderr=output))
        stack.callback(process.terminate)
        prometheus = Prometheus(port)
        files = [TargetFile(str(folder), one) for one in targets]
        for file in files:
            file.refresh()
        expected = {
            ("http://10.0.0.1:9100/metrics", "r 1", "0", "0", "h"),
            ("https://10.0.0.1:9101/metrics", "r 1", "1", "1", "h"),
        }
        for job in ("files", "list"):
            assert eventually(lambda job=job: known(prometheus, job) == expected), log.read_text()  # type: ignore[misc]
        for turn in range(200):
            moved = TargetFile(str(folder), target(0, 9200 + turn, labels={"padding": "x" * 20_000}))
            moved.refresh()
            time.sleep(0.005)  # Prometheus is to read in between.
        assert complaints(log) == []
        files[0].close()
        files[1].close()
        assert eventually(lambda: {one[0] for one in known(prometheus, "files")} == {"http://10.0.0.1:9399/metrics"})
    assert "Server is ready" in log.read_text()
    # It may list a file and open it after it was removed.
    assert [line for line in complaints(log) if "no such file" not in line] == []


def complaints(log: Path) -> list[str]:
    """What it says against the files that it reads."""
    found = ("error reading file", "unmarshal", "level=error")
    return [line for line in log.read_text().splitlines() if any(part in line.lower() for part in found)]
