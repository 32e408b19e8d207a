"""The job's own key-value store, used so that the training never waits for it.

The agent of torchrun has one, and so has every default process group. The exporter uses a connection of its own: on one that is
shared, an operation of the training would wait behind it. torch puts no limit on the time that a host which is stopped (SIGSTOP) or
unreachable takes to answer. So all operations run in one daemon thread, and a caller waits for a limited time. While the thread is
stuck, every request fails at once; it goes on when the host does. A broken connection is not made again: the job ends with its
store.

Every failure is a `StoreError`. No operation waits for another rank.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_grad_exporter.distributed.identity import Identity, new_run_name
from torch_grad_exporter.errors import say
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.torch_compat import replicas

logger = logging.getLogger("torch_grad_exporter")

PREFIX = "torch_grad_exporter/"  # of all our keys
START_SECONDS = 5.0  # how long the start of an exporter waits for the store, at most, in all
SECONDS = 2.0  # how long anything else waits for an answer, at most
_ABSENT = "\x00absent"  # a value that no key has

_T = TypeVar("_T")


# A `torch.distributed.Store`, which not every build has. `compare_set`, `set` and `delete_key` never wait for a key.
Connection = Any

_Call = tuple[Future[Any], Callable[[Connection], Any]]


class StoreError(RuntimeError):
    """There is no store, or it does not answer."""


class NoStoreError(StoreError):
    """There is no store yet: the process group may come."""


class GoneError(StoreError):
    """The connection has ended, and is not made again."""


class JobStore:
    """A connection to the store, made at the first request; if that fails, the next one tries again. Thread-safe."""

    def __init__(self, connect: Callable[[], Connection] | None = None) -> None:
        self._connect = connect or functools.partial(connected, os.environ)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Reentrant: a signal handler may close while its own thread is in a request.
        self._lock = threading.RLock()
        self._thread: BackgroundThread | None = None
        self._connection: Connection = None
        self._stuck: Future[Any] | None = None
        self._over = ""

    def agree(self, key: str, value: str, *, seconds: float = SECONDS) -> str:
        """Return the value that the first rank proposed, the same for all ranks."""
        agreed: bytes = self._ask(lambda store: store.compare_set(PREFIX + key, "", value), seconds)
        return agreed.decode()

    def publish(self, key: str, value: bytes, *, seconds: float = SECONDS) -> None:
        """Set a key, for `collect` of other ranks."""
        self._ask(lambda store: store.set(PREFIX + key, value), seconds)

    def collect(self, keys: Iterable[str], *, seconds: float = SECONDS) -> dict[str, bytes]:
        """Return the values of those keys that are there."""
        wanted = tuple(keys)

        def read(store: Connection) -> dict[str, bytes]:
            # Not `get`, which waits for a key; nor after `check`: the key may be gone by then.
            values = {key: store.compare_set(PREFIX + key, _ABSENT, _ABSENT) for key in wanted}
            return {key: value for key, value in values.items() if value != _ABSENT.encode()}

        return self._ask(read, seconds)

    def remove(self, key: str, *, seconds: float = SECONDS) -> None:
        """Remove a key, if it is there. Called at the end, when the store's host may have ended first."""

        def delete(store: Connection) -> None:
            _knock(store)  # torch would write pages about a host that is gone
            store.delete_key(PREFIX + key)

        self._ask(delete, seconds)

    def close(self, seconds: float = SECONDS) -> None:
        """End the connection and its thread; wait for what is under way. Idempotent, from any thread, never raises."""
        with self._lock:
            self._over = self._over or "closed"
            thread = self._thread
            self._calls.put(None)
        # At the end of the program as well: a thread that returns from torch into an interpreter that ends, aborts it.
        if thread is not None:
            thread.join(seconds)

    def after_fork_in_child(self) -> None:
        """Leave the parent's connection. It is not even freed: a file's store would count this as a rank that ended."""
        _inherited.append(self._connection)
        self._lock, self._thread, self._over = threading.RLock(), None, "of another process"

    def _ask(self, question: Callable[[Connection], _T], seconds: float) -> _T:
        """Return the answer. Raises `StoreError` for whatever fails."""
        future: Future[_T] = Future()
        with self._lock:
            if self._over:
                raise GoneError(f"the connection to the job's store is {self._over}")
            if self._stuck is not None and not self._stuck.done():
                raise StoreError("the job's store has not answered an earlier question yet")
            self._stuck = None
            if self._thread is None:
                thread = BackgroundThread("store", self._work)
                try:
                    thread.start()
                except RuntimeError as error:  # no thread can be started
                    raise StoreError(str(error)) from error
                self._thread = thread
            self._calls.put((future, question))
        try:
            return future.result(seconds)
        except TimeoutError:
            if not future.cancel():
                self._stuck = future
            raise StoreError(f"the job's store did not answer within {seconds:g} s") from None

    def _work(self) -> None:
        """Answer requests in their order, in the thread, without those whose caller no longer waits."""
        while (call := self._calls.get()) is not None:
            future, question = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._answer(question))
                except StoreError as error:  # raised again in the caller
                    future.set_exception(error)
            del call, future, question
        self._connection = None

    def _answer(self, question: Callable[[Connection], _T]) -> _T:
        try:
            if self._connection is None:
                self._connection = self._connect()
            return question(self._connection)
        except StoreError:
            raise
        except Exception as error:
            if self._connection is not None and isinstance(error, _broken()):
                self._over = "broken"
            # torch appends a trace of its own code.
            raise StoreError(f"the job's store failed: {str(error).partition(chr(10))[0]}") from error


_inherited: list[Connection] = []


def _broken() -> tuple[type[Exception], ...]:
    """Return the exceptions of a broken connection."""
    return (ConnectionRefusedError, dist.DistNetworkError) if dist.is_available() else ()


def groups_store() -> Connection:
    """Return the default process group's store, with the group's prefix; None without a group."""
    return replicas.default_store() if dist.is_initialized() else None


def connected(environment: Mapping[str, str], *, group: Callable[[], Connection] = groups_store) -> Connection:
    """Connect to the store of torchrun's agent, else to that of the default process group.

    The agent's store comes first: it is there before the process group is, and it outlives a restart of the ranks.

    Raises:
        NoStoreError: There is neither.
    """
    if not dist.is_available():
        raise NoStoreError("this build of torch has no torch.distributed")
    port = environment.get("MASTER_PORT", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal():
        limit, host = timedelta(seconds=START_SECONDS), environment.get("MASTER_ADDR", "")
        return dist.TCPStore(host, int(port), is_master=False, timeout=limit)  # type: ignore[attr-defined]
    store = group()
    if store is None:
        raise NoStoreError("there is no torchrun, and no process group yet")
    connection: Connection = replicas.own_connection(store, timedelta(seconds=START_SECONDS))
    return connection


def _knock(connection: Connection) -> None:
    """Raise `OSError` if the host of a connection is gone. Not for every request: the host resolves the name of each new client."""
    bare = replicas.without_prefix(connection)
    host, port = getattr(bare, "host", None), getattr(bare, "port", None)
    if host is not None and port is not None:
        socket.create_connection((host, port), timeout=SECONDS).close()


def run_name(
    identity: Identity,
    chosen: str,
    store: JobStore,
    *,
    seconds: float = START_SECONDS,
    now: Callable[[], float] = time.time,
) -> str:
    """Return the run's name: as chosen, else the launcher's, else a new one that all ranks agree on.

    If they cannot agree within `seconds`, this rank has a name of its own, and a warning says so.
    """
    if chosen or identity.run:
        return chosen or identity.run
    name = new_run_name(now())
    if identity.world_size == 1:
        return name
    try:
        return store.agree("run", name, seconds=seconds)
    except StoreError as error:
        message = (
            "this rank's run is called %s, and other ranks' are not: %s; pass run= or TORCH_GRAD_EXPORTER_RUN, or start the "
            "exporter after init_process_group"
        )
        say(logger, logging.WARNING, message, name, error)
        return name
