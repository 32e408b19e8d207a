"""Files and lists from which Prometheus learns of the ranks: their content and their life."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.distributed.discovery import (
    STALE_SECONDS,
    TOUCH_SECONDS,
    Discovery,
    RankList,
    ScrapeTarget,
    TargetFile,
    address,
)
from torch_grad_exporter.distributed.store import JobStore, StoreError


def target(rank: int = 0, port: int = 9100, **more: object) -> ScrapeTarget:
    """Return a rank's target."""
    about = {"run": "r 1", "local_rank": rank, "host": "h", "labels": {}} | more
    return ScrapeTarget(address=f"10.0.0.1:{port}", rank=rank, **about)  # type: ignore[arg-type]


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
        ("10.1.2.3", "gateway", ["10.9.9.9"], "10.8.8.8", "", "gateway:9100"),
        ("", "fd00::2", ["10.9.9.9"], "10.8.8.8", "", "[fd00::2]:9100"),
        ("", "", ["127.0.1.1", "10.9.9.9"], "10.8.8.8", "", "node7:9100"),
        ("0.0.0.0", "", ["127.0.1.1", "::1", "fe80::1%eth0"], "10.8.8.8", "", "10.8.8.8:9100"),  # noqa: S104
        ("", "", ["127.0.1.1"], "", "", "node7:9100"),
        ("", "", ["10.9.9.9"], "10.8.8.8", "10.0.0.1", "10.8.8.8:9100"),
    ],
    ids=["given", "given IPv6", "advertised", "advertised IPv6", "name is known", "name is loopback", "no route", "in a pod"],
)
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


# The file


def test_the_file_of_a_rank(tmp_path: Path) -> None:
    """A rank has one readable file with a list of one group, in a folder that is made; a clean end removes it."""
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
    """While a rank runs its file is touched, and comes back when it was removed."""
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


def test_the_file_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    """A file with this rank's address, left by a killed run, is removed; others stay."""
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


def test_a_file_is_never_half_written(tmp_path: Path) -> None:
    """Whoever reads the file while it is written again and again finds the whole of it, each time."""
    path = tmp_path / "never"
    found: set[int] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            (group,) = json.loads(path.read_bytes())
            found.add(len(group["labels"]["padding"]))

    with ThreadPoolExecutor(1) as pool:
        for number in range(30):
            file = TargetFile(str(tmp_path), target(port=9200 + number, labels={"padding": "x" * 200_000}))
            file.refresh()
            if number == 0:
                path = file.path
                reader = pool.submit(read)
        assert eventually(lambda: bool(found) or reader.done())
        over.set()
        reader.result()
    assert found == {200_000}


@pytest.mark.parametrize("port", [9100, 9200], ids=["same port", "another port"])
def test_a_restarted_rank(port: int, tmp_path: Path) -> None:
    """A restarted rank takes over the file, and the process before it neither touches nor removes it."""
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

    def compare_set(self, key: str, expected_value: str, _desired_value: str) -> bytes:
        return self._values().get(key, expected_value.encode())

    def set(self, key: str, value: bytes) -> None:
        self._values()[key] = value

    def delete_key(self, key: str) -> bool:
        return self._values().pop(key, None) is not None

    def _values(self) -> dict[str, bytes]:
        if self.error is not None:
            raise self.error
        return self.values


@contextlib.contextmanager
def client(shared: Remembered) -> Iterator[JobStore]:
    """Return our client of the store."""
    store = JobStore(lambda: shared)
    yield store
    store.close()


def test_rank_0_lists_all() -> None:
    """Rank 0 lists itself at once and the other ranks once it has read them, until they end; others list themselves."""
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
    """A store that fails leaves the last list as it was, and an entry that is not a group is left out."""
    shared = Remembered()
    with client(shared) as store:
        first = RankList(store, target(0), 3)
        RankList(store, target(1), 3).refresh()
        shared.values["torch_grad_exporter/target/2"] = b"\xff{"
        first.refresh()
        expected = [target(0).group(), target(1).group()]
        assert first.groups() == expected
        shared.error = OSError("down")
        with pytest.raises(StoreError, match="down"):
            first.refresh()
        first.close()
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


@pytest.mark.process
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
