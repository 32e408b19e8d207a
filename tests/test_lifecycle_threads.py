"""Background threads: signals and forks, and that no thread imports a module."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.otlp_receiver import GrpcReceiver, HttpReceiver
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundLoop, BackgroundThread, ThreadTime

LONG = 3600.0
"""A pause, in seconds, that no test waits for."""


@dataclass
class Gate:
    """Blocks each thread that enters until it is opened."""

    inside: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.inside.set()
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Return a gate that is opened at the end."""
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def loop(gate: Gate) -> Iterator[BackgroundLoop]:
    """Return a loop without pauses that hangs in its first call, at the gate; it has ended when the test has."""
    made = BackgroundLoop("test", gate, pause=0.0, guard=Guard([].append))
    made.start()
    assert gate.inside.wait(PATIENCE)
    yield made
    gate.opened.set()
    assert made.close(PATIENCE)
    assert not [thread for thread in threading.enumerate() if thread.name == "torch-grad-exporter-test"]


def test_closing_from_a_signal_handler(loop: BackgroundLoop, gate: Gate) -> None:
    """Signal handlers that wake and close at any moment, also within the same call, block no thread."""
    closed = list[bool]()

    def handler(*_: object) -> None:
        loop.wake()
        closed.append(loop.close(0.0))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        while len(closed) < 300:  # from one bytecode to the next of these three
            loop.wake()
            loop.stop()
            assert not loop.join(0.0002)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert not any(closed)
    gate.opened.set()
    assert loop.join(PATIENCE)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child(loop: BackgroundLoop, gate: Gate) -> None:
    """A forked child neither starts, wakes, stops nor waits for the parent's threads, which go on."""
    unstarted = BackgroundThread("child", functools.partial(os._exit, 1))
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        loop.wake()
        unstarted.start()
        right = not loop.running and loop.close(LONG) and loop.join() and not unstarted.running and unstarted.join()
        os._exit(0 if right and threading.active_count() == 1 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    assert (loop.running, loop.stopping) == (True, False)


IMPORTS = """
import sys, threading, urllib.request, torch
from torch_grad_exporter import start_exporter

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
print("closed", flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("protocol", ["http/protobuf", pytest.param("grpc", marks=pytest.mark.full)])
def test_no_background_thread_imports_a_module(protocol: str, tmp_path: Path) -> None:
    """No thread of the exporter imports a module, since a fork in the middle of an import leaves the child with half of it."""
    with GrpcReceiver() if protocol == "grpc" else HttpReceiver() as receiver:
        command = [sys.executable, "-c", textwrap.dedent(IMPORTS), receiver.endpoint, protocol, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert eventually(lambda: receiver.latest("torch_train_steps_total") == 8 or process.poll() is not None)
            said, _ = process.communicate("go\n", PATIENCE)
    assert said.splitlines() == ["trained", "closed"]


def test_cpu_time_of_threads_is_counted() -> None:
    """What a thread spends is counted at its end, and that of a loop after each iteration; waiting costs nothing."""

    def busy(seconds: float = 0.05) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    before = THREAD_TIME.seconds
    thread = BackgroundThread("busy", busy)
    thread.start()
    assert thread.join(PATIENCE)
    assert THREAD_TIME.seconds - before >= 0.05
    loop, before = BackgroundLoop("busy", busy, guard=Guard(lambda _: None)), THREAD_TIME.seconds
    loop.start()
    loop.wake()
    assert eventually(lambda: THREAD_TIME.seconds - before >= 0.05)
    assert loop.close(PATIENCE)


def test_the_share_of_threads_is_of_the_last_minute() -> None:
    """Each thread notes what it spent since its last note; the share forgets what was a minute ago."""
    now = 0.0
    spent = iter([0.5, 0.75])
    threads = ThreadTime(lambda: now, lambda: next(spent))
    threads.note()
    now = 50.0
    threads.note()
    assert threads.seconds == 0.75
    assert threads.share == 0.75 / 50
    for now in (65.0, 80.0, 95.0, 110.0):  # noqa: B007 - the clock
        assert threads.seconds == 0.75
    assert threads.share == 0.0
