"""The job's store, in all its forms, with hosts that are stopped and killed, and in real jobs."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.distributed.identity import Identity
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError, connected, run_name
from torch_grad_exporter.torch_compat import replicas

TWO_RANKS = Identity(rank=1, world_size=2)

HOST = """
import datetime, time
import torch.distributed as dist
patience = datetime.timedelta(seconds=120)
stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, use_libuv=libuv) for libuv in (False, True)]
print(*(store.port for store in stores), flush=True)
time.sleep(1000)
"""


@dataclass(frozen=True)
class Host:
    """A process that hosts two stores: their ports, without and with libuv."""

    process: subprocess.Popen[str]
    ports: tuple[int, int]


@contextlib.contextmanager
def hosting() -> Iterator[Host]:
    """Start a host, and kill it at the end."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first, second = map(int, process.stdout.readline().split())
            yield Host(process, (first, second))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """One for several tests, which leave it running."""
    with hosting() as running:
        yield running


def tcp(*, libuv: bool = True) -> dist.TCPStore:
    """Return a store that this process hosts."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=dt.timedelta(seconds=PATIENCE), use_libuv=libuv)


def ours(store: dist.Store) -> JobStore:
    """Return our client of a process group with this store."""
    group = dist.PrefixStore("0/", dist.PrefixStore("default_pg", store))
    return JobStore(lambda: connected({}, group=lambda: group))


def agents(port: int) -> JobStore:
    """Return our client of a store that torchrun's agent would host there."""
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return JobStore(lambda: connected(environment))


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "tcp": lambda _: tcp(),
    "tcp without libuv": lambda _: tcp(libuv=False),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 2),
    "hash": lambda _: dist.HashStore(),
}


def unclonable(store: dist.Store) -> JobStore:
    """Return our client of a store of torch 2.6, which cannot be cloned."""
    group = types.SimpleNamespace(_underlying_non_prefix_store=store)
    return JobStore(lambda: connected({}, group=lambda: group))


@pytest.mark.parametrize("client", [ours, unclonable])
@pytest.mark.parametrize("kind", STORES)
def test_values_are_shared_until_removed(kind: str, client: Callable[[dist.Store], JobStore], tmp_path: Path) -> None:
    """All clients agree on the first value; bytes that one publishes another collects, until they are removed."""
    store = STORES[kind](tmp_path)
    first, second = client(store), client(store)
    assert [
        first.agree("run", "a", seconds=PATIENCE),
        second.agree("run", "b", seconds=PATIENCE),
        first.agree("run", "c", seconds=PATIENCE),
    ] == ["a", "a", "a"]
    value = b"\x00\xff{}\n"
    first.publish("x", value, seconds=PATIENCE)
    first.publish("y", b"", seconds=PATIENCE)
    assert second.collect(["x", "y", "z"], seconds=PATIENCE) == {"x": value, "y": b""}
    first.publish("x", b"new", seconds=PATIENCE)
    first.remove("y", seconds=PATIENCE)
    first.remove("never there", seconds=PATIENCE)
    assert second.collect(["x", "y", "z"], seconds=PATIENCE) == {"x": b"new"}
    first.close()
    assert second.collect(["x"], seconds=PATIENCE) == {"x": b"new"}
    second.close()


@pytest.mark.parametrize("libuv", [True, False])
def test_nothing_waits_behind_the_training(*, libuv: bool) -> None:
    """Our question is answered while the training waits for a key on its own connection, which outlives ours."""
    store = tcp(libuv=libuv)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("late")))
    waiting.start()
    client = ours(store)
    assert client.agree("run", "a", seconds=PATIENCE / 2) == "a"
    client.close()
    assert waiting.is_alive()
    other = replicas.own_connection(store, PATIENCE)
    other.set("late", "1")
    waiting.join(PATIENCE)
    assert found == [b"1"]


@pytest.mark.process
@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("met", [True, False], ids=["connected", "not yet connected"])
def test_a_stopped_host(*, libuv: bool, met: bool, host: Host) -> None:
    """A question fails after its time, the next one without waiting; the first one is answered when the host goes on."""
    client, question = agents(host.ports[libuv]), f"{libuv} {met}"
    if met:
        assert client.agree(f"before {question}", "a", seconds=PATIENCE) == "a"
    with stopped(host):
        with pytest.raises(StoreError, match=r"did not answer within 0\.5 s"):
            client.agree(question, "b", seconds=0.5)
        with pytest.raises(StoreError, match="earlier question"):
            client.publish(question, b"", seconds=PATIENCE)
    assert eventually(lambda: answers(client))
    assert client.agree(question, "c", seconds=PATIENCE) == "b"
    client.close()


@contextlib.contextmanager
def stopped(host: Host) -> Iterator[None]:
    """Stop all threads of the host meanwhile."""
    host.process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{host.process.pid}/task")
    # Which takes its time: until then it still answers.
    assert not tasks.exists() or eventually(lambda: all(_state(task) == "T" for task in tasks.iterdir()))
    try:
        yield
    finally:
        host.process.send_signal(signal.SIGCONT)


def _state(task: Path) -> str:
    """Return a thread's state by its letter, as the kernel shows it."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def answers(client: JobStore) -> bool:
    """Return whether the store answers at all."""
    try:
        client.collect([], seconds=PATIENCE)
    except StoreError:
        return False
    return True


def named(name: str) -> list[threading.Thread]:
    """Return the threads of that name."""
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.process
def test_a_killed_host(capfd: pytest.CaptureFixture[str]) -> None:
    """Every question fails with its cause, and torch writes nothing into the training's log."""
    with hosting() as host:
        ending, running = ([agents(port) for port in host.ports] for _ in range(2))
        for client in (*ending, *running):
            client.agree("run", "a", seconds=PATIENCE)
        host.process.kill()
        host.process.wait()
        for client in ending:
            with pytest.raises(StoreError, match="Connection refused"):
                client.remove("x", seconds=PATIENCE)
        assert capfd.readouterr().err == ""
        for client in running:
            with pytest.raises(StoreError, match="failed"):
                client.agree("run", "b", seconds=PATIENCE)
        for client in (*ending, *running):
            with pytest.raises(StoreError, match="broken"):
                client.publish("x", b"", seconds=PATIENCE)
            client.close()


def test_a_group_that_comes_late() -> None:
    """Without a process group there is no store; once there is one, there is."""
    groups: list[dist.Store] = []
    client = JobStore(lambda: connected({}, group=lambda: groups[0] if groups else None))
    with pytest.raises(NoStoreError, match="no process group yet"):
        client.agree("run", "a", seconds=PATIENCE)
    groups.append(dist.HashStore())
    assert client.agree("run", "a", seconds=PATIENCE) == "a"
    client.close()


def test_many_threads() -> None:
    """Questions from several threads at once get their own answers."""
    client = ours(tcp())
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(20):
            client.publish(f"{number}", b"%d" % turn, seconds=PATIENCE)
            found = client.collect([f"{number}", "none"], seconds=PATIENCE)
            if found != {f"{number}": b"%d" % turn}:
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    client.close()
    assert not wrong


def test_closing() -> None:
    """Closing ends the thread, may be done twice, and later questions fail; a client that asked nothing has no thread."""
    JobStore(lambda: pytest.fail("nothing was asked")).close()
    client = ours(dist.HashStore())
    client.publish("x", b"", seconds=PATIENCE)
    assert len(named("torch-grad-exporter-store")) == 1
    client.close(PATIENCE)
    client.close()
    assert not named("torch-grad-exporter-store")
    with pytest.raises(StoreError, match="closed"):
        client.publish("x", b"", seconds=PATIENCE)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child(tmp_path: Path) -> None:
    """A forked child cannot use the connection and does not count as a rank that ended; the parent's goes on."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    client = ours(store)
    client.publish("x", b"1", seconds=PATIENCE)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            client.after_fork_in_child()
            try:
                client.publish("x", b"2", seconds=PATIENCE)
            except StoreError:
                client.close()
                del client
                status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert client.collect(["x"], seconds=PATIENCE) == {"x": b"1"}
    client.close()
    assert (tmp_path / "store").exists()  # which the last rank to end removes


# The run's name


def test_chosen_and_launchers_names() -> None:
    """The user's name wins over the launcher's name; for either, and for a single process, no store is asked."""
    nobody = JobStore(lambda: pytest.fail("asked"))
    assert run_name(Identity(world_size=2, run="slurm"), "mine", nobody) == "mine"
    assert run_name(Identity(world_size=2, run="slurm"), "", nobody) == "slurm"
    assert run_name(Identity(), "", nobody, now=lambda: 0.0).startswith("19700101-000000-")


def test_a_name_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Where ranks cannot agree, one line says so and what to do."""
    client = JobStore(lambda: connected({}, group=lambda: None))
    name = run_name(TWO_RANKS, "", client, now=lambda: 0.0)
    ((_, level, line),) = caplog.record_tuples
    assert level == logging.WARNING
    assert line.splitlines() == [line]
    assert name in line
    assert "pass run= or TORCH_GRAD_EXPORTER_RUN, or start the exporter after init_process_group" in line
    client.close()


# Real jobs

ELASTIC = """
import datetime, json, os, pathlib, sys, time
import torch, torch.distributed as dist
from torch_grad_exporter.distributed.identity import identity
from torch_grad_exporter.distributed.store import JobStore, run_name

def say(**what):
    pathlib.Path(sys.argv[1], f"{what['attempt']}-{what['rank']}").write_text(json.dumps(what))

who, attempt = identity(os.environ), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = JobStore()
early = run_name(who, "", store, seconds=120)
# The agent's store still has the addresses of the ranks that have ended; torch itself would sometimes connect to them.
agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
group = dist.PrefixStore(f"attempt {attempt}", agents)
dist.init_process_group("gloo", store=group, rank=who.rank, world_size=who.world_size, timeout=datetime.timedelta(seconds=120))
late = JobStore()
assert late.agree("run", "another", seconds=120) == early
say(attempt=attempt, rank=who.rank, size=who.world_size, local=who.local_rank, name=early)
dist.barrier()
store.close(); late.close()
if attempt == 0:
    sys.exit(1)
"""


def said(folder: Path) -> dict[str, dict[str, object]]:
    """Return what the ranks said, by attempt and rank."""
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.process
def test_torchrun_restarts(tmp_path: Path) -> None:
    """Under torchrun the ranks agree before there is a process group, and a restart of all of them keeps the name."""
    script, folder = tmp_path / "rank.py", tmp_path / "said"
    folder.mkdir()
    script.write_text(ELASTIC)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run([*run, *rendezvous, script, folder], check=False, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = said(folder)
    assert {name: (one["size"], one["local"]) for name, one in found.items()} == {
        f"{attempt}-{rank}": (2, rank) for attempt in range(2) for rank in range(2)
    }
    assert len({one["name"] for one in found.values()}) == 1
