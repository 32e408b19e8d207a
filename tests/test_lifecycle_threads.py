"""Background threads: wakes, failures, ends and forks, and that no thread imports a module."""

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
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop, BackgroundThread

LONG = 3600.0
"""A pause, in seconds, that no test waits for."""


@dataclass
class Work:
    """A call that is counted; `calls` is released once a call."""

    during: Callable[[], object] = lambda: None
    count: int = 0
    calls: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self) -> None:
        self.count += 1
        self.calls.release()
        self.during()

    def wait(self, times: int = 1) -> None:
        """Wait for this many further calls."""
        for _ in range(times):
            assert self.calls.acquire(timeout=PATIENCE)


@dataclass
class Gate:
    """Blocks each thread that enters until it is opened."""

    inside: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.inside.set()
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def failures() -> list[Exception]:
    """Return what guards have caught."""
    return []


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Return a gate that is opened at the end."""
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def loop(failures: list[Exception]) -> Iterator[Callable[..., BackgroundLoop]]:
    """Return a function that makes loops; each has ended when the test has."""
    made: list[BackgroundLoop] = []

    def make(*work: Callable[[], object], **options: object) -> BackgroundLoop:
        made.append(BackgroundLoop("test", *work, **{"guard": Guard(failures.append), **options}))  # type: ignore[arg-type]
        return made[-1]

    before = named("torch-grad-exporter-test")
    yield make
    for background in made:
        assert background.close(PATIENCE)
    assert named("torch-grad-exporter-test") == before


def named(name: str) -> list[threading.Thread]:
    """Return the running threads of that name."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_closing_from_a_signal_handler(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """Signal handlers that wake and close at any moment, also within the same call, block no thread."""
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


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child(loop: Callable[..., BackgroundLoop], gate: Gate) -> None:
    """A forked child neither starts, wakes, stops nor waits for the parent's threads, which go on."""
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
