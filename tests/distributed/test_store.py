"""The job's store, in all its forms, with hosts that are stopped and killed, and in real jobs."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.ranks import FORKED, run_ranks
from tests.support.tools import PATIENCE, eventually
from tests.support.torch_versions import need
from torch_grad_exporter.distributed.identity import Identity, identity, process_group
from torch_grad_exporter.distributed.store import JobStore, StoreError, connected, run_name
from torch_grad_exporter.torch_compat import replicas

TWO_RANKS = Identity(rank=1, world_size=2)


@dataclass(frozen=True)
class Host:
    """A process that hosts two stores: their ports, without and with libuv."""

    process: multiprocessing.process.BaseProcess
    ports: tuple[int, int]

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid or 0, number)


def host_main(pipe: multiprocessing.connection.Connection) -> None:
    """Host the stores until the process is killed."""
    stores = [tcp(libuv=libuv) for libuv in (False, True)]
    pipe.send([store.port for store in stores])
    pipe.recv()


@contextlib.contextmanager
def hosting() -> Iterator[Host]:
    """Start a host, and kill it at the end."""
    mine, theirs = FORKED.Pipe()
    process = FORKED.Process(target=host_main, args=(theirs,))
    process.start()
    try:
        first, second = mine.recv()
        yield Host(process, (first, second))
    finally:
        process.kill()
        process.join()


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
    "file": lambda folder: dist.FileStore(str(folder / "store"), 2),
    "hash": lambda _: dist.HashStore(),
}


def unclonable(store: dist.Store) -> JobStore:
    """Return our client of a store of torch 2.6, which cannot be cloned."""
    group = types.SimpleNamespace(_underlying_non_prefix_store=store)
    return JobStore(lambda: connected({}, group=lambda: group))


@pytest.mark.parametrize(("kind", "client"), [*((kind, ours) for kind in STORES), ("tcp", unclonable)])
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


def test_nothing_waits_behind_the_training() -> None:
    """Our question is answered while the training waits for a key on its own connection, which outlives ours."""
    store = tcp()
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
@pytest.mark.parametrize(("libuv", "met"), [(True, True), (False, False)], ids=["connected", "not yet connected"])
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
    host.send(signal.SIGSTOP)
    tasks = Path(f"/proc/{host.process.pid}/task")
    # Which takes its time: until then it still answers.
    assert not tasks.exists() or eventually(lambda: all(_state(task) == "T" for task in tasks.iterdir()))
    try:
        yield
    finally:
        host.send(signal.SIGCONT)


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
        host.process.join()
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


def elastic_main(folder: str) -> None:
    """Run one rank, which agrees on a name before there is a process group and after; the first attempt fails."""
    who, attempt = identity(os.environ, process_group()), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store, late = JobStore(), JobStore()
    early = run_name(who, "", store, seconds=PATIENCE)
    # The agent's store still has the addresses of the ranks that have ended; torch itself would sometimes connect to them.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    group = dist.PrefixStore(f"attempt {attempt}", agent)
    patience = dt.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=group, rank=who.rank, world_size=who.world_size, timeout=patience)
    assert late.agree("run", "another", seconds=PATIENCE) == early
    Path(folder, f"{attempt}-{who.rank}").write_text(json.dumps([who.world_size, who.local_rank, early]))
    dist.barrier()
    store.close()
    late.close()
    if attempt == 0:
        sys.exit(1)


def agent_main(_rank: int, folder: str) -> None:
    """Be torchrun's agent of two ranks that it may restart once."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": "none"}
    config = LaunchConfig(1, 1, 2, max_restarts=1, monitor_interval=0.1, start_method="fork", **rendezvous)
    elastic_launch(config, elastic_main)(folder)


@pytest.mark.process
def test_torchrun_restarts(tmp_path: Path) -> None:
    """Under torchrun the ranks agree before there is a process group, and a restart of all of them keeps the name."""
    need(2, 5, "a store that torchrun shares with its ranks")
    run_ranks(agent_main, str(tmp_path), ranks=1)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    ((*_, name), *_) = found.values()
    assert found == {f"{attempt}-{rank}": [2, rank, name] for attempt in range(2) for rank in range(2)}
