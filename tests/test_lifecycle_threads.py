"""The background threads: what starts, wakes and ends them, what a failure costs, and what is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.otlp_receiver import GrpcReceiver, HttpReceiver
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.errors import LIMIT, Guard
from torch_grad_exporter.lifecycle import BackgroundLoop, BackgroundThread

LONG = 3600.0
"""A pause, in seconds, that no test waits for."""


@dataclass
class Work:
    """Counts its calls and does, in each, what it is told; `calls` is released once a call."""

    during: Callable[[], object] = lambda: None
    count: int = 0
    calls: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self) -> None:
        self.count += 1
        self.calls.release()
        self.during()

    def wait(self, times: int = 1) -> None:
        """Until there were so many further calls."""
        for _ in range(times):
            assert self.calls.acquire(timeout=PATIENCE)


@dataclass
class Gate:
    """Blocks each thread that comes in until it is opened."""

    inside: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.inside.set()
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def failures() -> list[Exception]:
    """What guards have caught."""
    return []


@pytest.fixture
def gate() -> Iterator[Gate]:
    """One that is open at the end."""
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def loop(failures: list[Exception]) -> Iterator[Callable[..., BackgroundLoop]]:
    """Makes loops whose failures are kept, and that have ended when the test has."""
    made: list[BackgroundLoop] = []

    def make(*work: Callable[[], object], **options: object) -> BackgroundLoop:
        made.append(BackgroundLoop("test", *work, **{"guard": Guard(failures.append), **options}))  # type: ignore[arg-type]
        return made[-1]

    before = named("torch-grad-exporter-test")
    yield make
    for one in made:
        assert one.close(PATIENCE)
    assert named("torch-grad-exporter-test") == before


def named(name: str) -> list[threading.Thread]:
    """The threads of that name that run."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_the_thread_is_a_daemon_with_a_name(gate: Gate) -> None:
    """A thread is a daemon, is named after its role, runs its body once, and is running until that has ended."""
    thread = BackgroundThread("body", gate)
    assert (thread.running, thread.join(0)) == (False, True)
    thread.start()
    assert gate.inside.wait(PATIENCE)
    assert [one.daemon for one in named("torch-grad-exporter-body")] == [True]
    assert (thread.running, thread.join(0.01)) == (True, False)
    gate.opened.set()
    assert thread.join(PATIENCE)
    assert (thread.running, named("torch-grad-exporter-body")) == (False, [])


def test_where_no_thread_is_to_be_had(loop: Callable[..., BackgroundLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails raises `RuntimeError`, and what was not started is closed at once."""

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = loop(list, pause=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            one.start()
    assert one.close(0)


def test_iterations_come_after_each_pause(loop: Callable[..., BackgroundLoop]) -> None:
    """The pause is asked for before each iteration; the calls of one iteration keep their order."""
    calls = list[str]()
    pauses = [LONG, 0.001, 0.0, 0.0]
    done = Work(lambda: calls.append("done"))
    loop(lambda: calls.append("work"), done, pause=pauses.pop).start()
    done.wait(3)
    assert eventually(lambda: not pauses)
    assert calls == ["work", "done"] * 3


def test_without_a_pause_only_a_wake_begins_an_iteration(loop: Callable[..., BackgroundLoop]) -> None:
    """Each wake that is answered before the next one is an iteration, and there are no others."""
    work = Work()
    one = loop(work)
    one.start()
    for _ in range(3):
        one.wake()
        work.wait()
    assert one.close(PATIENCE)
    assert work.count == 3


def test_a_wake_before_the_start(loop: Callable[..., BackgroundLoop]) -> None:
    """Has the first iteration begin at once, however long the pause is."""
    work = Work()
    one = loop(work, pause=LONG)
    one.wake()
    one.start()
    work.wait()


def test_wakes_during_an_iteration_are_one_more(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """However often it is woken while at work, one iteration at a time runs, and one follows."""
    first, second = Work(gate), Work()
    one = loop(first, second, pause=LONG)
    one.start()
    one.wake()
    assert gate.inside.wait(PATIENCE)
    for _ in range(100):
        one.wake()
    assert (first.count, second.count) == (1, 0)
    gate.opened.set()
    second.wait(2)
    one.wake()
    second.wait()
    assert (first.count, second.count) == (3, 3)


def test_stopping_during_an_iteration(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """The iteration comes to its end, no other begins though one was asked for, and then comes the last call, once."""
    work, last = Work(gate), Work()
    one = loop(work, pause=0.0, last=last)
    one.start()
    assert gate.inside.wait(PATIENCE)
    one.wake()
    assert not one.stopping
    one.stop()
    one.stop()
    assert one.stopping
    assert (one.running, last.count) == (True, 0)
    gate.opened.set()
    assert one.join(PATIENCE)
    assert one.close(0)
    assert (work.count, last.count) == (1, 1)


def test_stopping_before_the_first_iteration(loop: Callable[..., BackgroundLoop]) -> None:
    """One that is stopped before it starts, even if it was woken, only makes its last call."""
    work, last = Work(), Work()
    one = loop(work, pause=0.0, last=last)
    one.wake()
    one.stop()
    one.start()
    assert one.join(PATIENCE)
    assert (work.count, last.count) == (0, 1)


def test_one_that_hangs_is_left_behind(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """Closing waits no longer than it may and says that it has not ended; when the call returns, the thread ends."""
    one = loop(gate, pause=0.0)
    one.start()
    assert gate.inside.wait(PATIENCE)
    assert not one.close(0.01)
    assert not one.close(-1.0)
    gate.opened.set()
    assert one.join(PATIENCE)


def test_a_failure_costs_one_call(loop: Callable[..., BackgroundLoop], failures: list[Exception]) -> None:
    """A call that raises, also twenty times in a row and at the end, costs neither the calls beside it nor later iterations."""

    def fail() -> None:
        raise OSError("no luck")

    beside = Work()
    one = loop(fail, beside, pause=0.0, last=fail)
    one.start()
    beside.wait(2 * LIMIT)
    assert one.close(PATIENCE)
    assert beside.count >= 2 * LIMIT
    assert [type(failure) for failure in failures] == [OSError] * (beside.count + 1)


def test_a_guard_that_gives_up_ends_the_work(loop: Callable[..., BackgroundLoop], failures: list[Exception]) -> None:
    """With a guard that is off after ten failures in a row the loop goes on, and calls nothing any more."""

    def fail() -> None:
        raise OSError("no luck")

    pauses = Work()

    def pause() -> float:
        pauses()
        return 0.0

    work = Work(fail)
    one = loop(work, guard=Guard(failures.append, limit=LIMIT), pause=pause)
    one.start()
    pauses.wait(3 * LIMIT)
    assert one.running
    assert (work.count, len(failures)) == (LIMIT, LIMIT)


def test_closing_from_its_own_thread(loop: Callable[..., BackgroundLoop]) -> None:
    """Work that closes its own loop does not wait for itself, and is the last of it."""
    ended = list[bool]()

    def close() -> None:
        ended.append(one.close(PATIENCE))

    work = Work(close)
    one = loop(work, pause=0.0)
    one.start()
    assert eventually(lambda: not one.running)
    assert (work.count, ended) == (1, [False])


def test_a_thread_does_not_wait_for_itself() -> None:
    """A body that joins its own thread goes on at once."""
    ended = list[bool]()
    thread = BackgroundThread("body", lambda: ended.append(thread.join()))
    thread.start()
    assert thread.join(PATIENCE)
    assert ended == [False]


def test_closing_from_a_signals_handler(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """Handlers that wake and close at any moment, also amid the same call and amid a wait for the end, block no thread."""
    closed = list[bool]()

    def handler(*_: object) -> None:
        one.wake()
        closed.append(one.close(0.0))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        one = loop(gate, pause=0.0)
        one.start()
        assert gate.inside.wait(PATIENCE)
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        while len(closed) < 300:  # from one bytecode to the next of these three
            one.wake()
            one.stop()
            assert not one.join(0.0002)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert not any(closed)
    gate.opened.set()
    assert one.join(PATIENCE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """A child neither starts, wakes, stops nor waits for the parent's threads; in the parent they go on."""
    work = Work(gate)
    unstarted = BackgroundThread("child", functools.partial(os._exit, 1))
    one = loop(work, pause=0.0)
    one.start()
    assert gate.inside.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        one.wake()
        unstarted.start()
        right = not one.running and one.close(LONG) and one.join() and not unstarted.running and unstarted.join()
        os._exit(0 if right and threading.active_count() == 1 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    work.wait(3)
    assert (one.running, one.stopping) == (True, False)


IMPORTS = """
import pathlib, sys, threading, urllib.request, torch
from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs import outputs

outputs.CLOSE_SECONDS = 120.0
endpoint, protocol, folder = sys.argv[1:]
training = threading.current_thread()

class Finder:
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is not training:
            print(threading.current_thread().name, "imports", name, flush=True)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sys.meta_path.insert(0, Finder())
exporter = start_exporter(
    model, 0, addr="127.0.0.1", every=1, weights=True, moments=True, run=protocol,
    otlp_endpoint=endpoint, otlp_protocol=protocol, otlp_interval=0.1, textfile_dir=folder, sd_dir=folder,
)
for _ in range(8):
    loss = model(torch.ones(8, 4)).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    exporter.observe(loss=loss, samples=8)
here = exporter.url.removesuffix("/metrics")
for path in ("/", "/metrics", "/healthz", "/api/v1/status", "/static/page.js"):
    for accepted in ("text/plain", "application/openmetrics-text", "application/vnd.google.protobuf"):
        request = urllib.request.Request(here + path, headers={"Accept": accepted, "Accept-Encoding": "gzip"})
        assert urllib.request.urlopen(request).read()
print("trained", flush=True)
sys.stdin.readline()
exporter.close()
assert [one for one in pathlib.Path(folder).iterdir() if one.suffix == ".prom"]
print("closed", flush=True)
"""


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_no_background_thread_imports_a_module(protocol: str, tmp_path: Path) -> None:
    """Python's import lock is held during a fork, and a module half imported at a fork never comes to its end in the child."""
    with GrpcReceiver() if protocol == "grpc" else HttpReceiver() as receiver:
        command = [sys.executable, "-c", textwrap.dedent(IMPORTS), receiver.endpoint, protocol, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert eventually(lambda: receiver.latest("torch_train_steps_total") == 8 or process.poll() is not None)
            said, _ = process.communicate("go\n", PATIENCE)
    assert said.splitlines() == ["trained", "closed"]
