"""However a program ends, it ends as it would without the exporter: with the same status, output and traceback, without a wait.

Each program is run twice, in a process of its own, with the exporter and without. The processes are forked off one that has
imported torch, and then run the program as `python program.py` would.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.programs import Program, Starter
from torch_grad_exporter import start_exporter

ADDED_SECONDS = 60.0
"""Seconds that the end of a program may take longer with the exporter on a busy machine; what hangs takes ten minutes."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")

# The same end


LOOP = """
import contextlib, os, signal, sys, threading, time
import torch

torch.manual_seed(0)
watched, way = (*sys.argv[1:], "")[:2]
if watched == "watched":
    from torch_grad_exporter import start_exporter
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
exporter = start_exporter(model, 0, addr="127.0.0.1", every=1) if watched == "watched" else None
print(0 if exporter is None else exporter.port, flush=True)

def step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

def in_backward(action):
    model[0].weight.register_hook(lambda gradient: action())

def fail():
    raise ValueError("wrong")

BEFORE
with exporter if exporter is not None and way == "with" else contextlib.nullcontext():
    for number in range(20):
        step(torch.randn(5, 6))
        if number == 10:
            print("ends at", time.monotonic(), flush=True)
            HERE
print("done", sum(float(parameter.detach().sum()) for parameter in model.parameters()))
"""


def program(here: str = "pass", before: str = "") -> str:
    """The training loop with something in the middle of it."""
    return LOOP.replace("BEFORE", textwrap.dedent(before)).replace("HERE", here)


KILL = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)"

OUTLIVED = """
    if os.fork() == 0:
        sys.exit(7)
    atexit.register(step, torch.randn(5, 6))
    threading.Timer(0.9, print, ("late",)).start()
    """

ENDINGS: dict[str, tuple[int, str]] = {
    "at its end": (0, program()),
    "by SIGTERM": (-signal.SIGTERM, program(KILL)),
    "by SIGTERM in the backward, with a handler that exits": (
        3, program(f"in_backward(lambda: exec({KILL!r}))", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"),
    ),
    "by SIGINT in the backward": (-signal.SIGINT, program("in_backward(lambda: signal.raise_signal(signal.SIGINT))")),
    "by an exception in the backward": (1, program("in_backward(fail)")),
    # With a hook on the model PyTorch goes another way through its own code, so there is one without the exporter, too.
    "by an exception in the forward": (
        1, program("model[1].register_forward_hook(lambda *_: fail())", "model.register_forward_hook(lambda *_: None)"),
    ),
    "by sys.exit": (5, program("sys.exit(5)")),
    "by os._exit": (4, program("os._exit(4)")),
    "with what goes on after it": (0, program(f"exec(textwrap.dedent({OUTLIVED!r}))", "import atexit, textwrap")),
}  # fmt: skip
OFTEN = ("by SIGTERM", "by SIGINT in the backward", "by an exception in the backward", "with what goes on after it")
CASES = [
    *(pytest.param(name, "left", id=name, marks=() if name in OFTEN else pytest.mark.full) for name in ENDINGS),
    *(
        pytest.param(name, "with", id=f"{name}, in a with", marks=() if "exception" in name else pytest.mark.full)
        for name in ("at its end", "by SIGINT in the backward", "by an exception in the backward", "by sys.exit")
    ),
]


@dataclass(frozen=True)
class End:
    """What is left of a program, and how long its end took."""

    status: int
    out: list[str]
    err: str
    seconds: float


OURS = re.compile(
    r"^torch_grad_exporter: (serving http://127\.0\.0\.1:\d+/ \(|nothing has read the metrics of this run; ).*\n", re.MULTILINE
)
"""What the exporter says of itself where nothing is wrong, which is all that it may add to a program's errors."""


def end_of(one: Program) -> End:
    """Waits for the end of a program. Left out are the port, its first line, numbers of processes, and `OURS`."""
    status = one.wait()
    _, *lines = one.out.read_text().splitlines()
    began = next(float(line.split()[-1]) for line in lines if line.startswith("ends at"))
    assert one.ended is not None
    err = re.sub(r"(pid|Thread-)([^\d\n]{0,5})\d+", r"\1\2", OURS.sub("", one.err.read_text()))
    return End(status, [line for line in lines if not line.startswith("ends at")], err, one.ended - began)


@pytest.fixture(scope="module")
def bare(starter: Starter) -> Callable[[str], End]:
    """How a program ends without the exporter."""
    return functools.cache(lambda text: end_of(starter.start(text, "bare")))


def check(bare: End, watched: End) -> None:
    """Assert that a program with the exporter has ended like the one without."""
    assert (watched.status, watched.out, watched.err) == (bare.status, bare.out, bare.err)
    assert watched.seconds < 2 * bare.seconds + ADDED_SECONDS


@pytest.mark.process
@pytest.mark.parametrize(("ending", "way"), CASES)
def test_a_program_ends_the_same(starter: Starter, bare: Callable[[str], End], ending: str, way: str) -> None:
    """Status, traceback and output are the same, with the exporter as a context or never closed."""
    status, text = ENDINGS[ending]
    assert bare(text).status == status
    check(bare(text), end_of(starter.start(text, "watched", way)))


WORKER_DIES = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        if number == 12:
            time.sleep(0.5)  # until then the loop waits for this one
            print("ends at", time.monotonic(), flush=True)
            os._exit(7)
        return torch.ones(6)

for x in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
    step(x)
"""


@pytest.mark.process
def test_a_worker_that_dies(starter: Starter, bare: Callable[[str], End]) -> None:
    """`os._exit` in a fork-started DataLoader's worker raises the same error in the training, from the same place."""
    text = program(before=WORKER_DIES).replace("watched, way", "import torch.utils.data\nwatched, way")
    assert bare(text).status == 1
    assert "DataLoader worker (pid" in bare(text).err
    check(bare(text), end_of(starter.start(text, "watched")))


# Signals in the exporter's code


ALARMS = """
def stop(number, frame):
    raise TimeoutError("time is up")

signal.signal(signal.SIGALRM, stop)
heard = 0
for trial in range(100):
    torch.set_grad_enabled(True)  # which the one before may have left off, in the middle of the optimizer's step
    give_up_at = time.monotonic() + 0.5
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002 + trial * 0.0001)
        while time.monotonic() < give_up_at:
            step(torch.randn(5, 6))
            if exporter is not None:
                exporter.observe(loss=1.0, grad_norm=2.0)
    except (TimeoutError, RuntimeError):
        heard += 1
print("heard", heard, flush=True)
optimizer.zero_grad()
if exporter is not None:
    torch.set_grad_enabled(True)
    steps = "torch_train_steps_total/SGD"
    before = exporter.values(steps)[steps]
    for _ in range(20):
        step(torch.randn(5, 6))
    print("counted", int(exporter.values(steps)[steps] - before), flush=True)
"""


@pytest.mark.process
def test_what_a_handler_raises_passes(starter: Starter) -> None:
    """Of 100 alarms whose handler raises, many of them within the exporter's hooks, the loop hears all but a few.

    What is raised while Python frees an object is lost to every program.
    """
    end = end_of(starter.start(program(before=ALARMS), "watched"))
    assert end.status == 0
    assert "training goes on" not in end.err
    assert next(int(line.split()[1]) for line in end.out if line.startswith("heard")) >= 97
    assert "counted 20" in end.out  # what was raised ended no count


@pytest.mark.process
def test_signals_at_any_moment(starter: Starter) -> None:
    """A signal from outside, wherever it hits the loop, our hooks and `close` included, ends it as it should."""
    text = program("", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))").replace("range(20)", "range(1_000_000)")
    for number, status, delay in (
        (signal.SIGINT, -signal.SIGINT, 0.0),
        (signal.SIGINT, -signal.SIGINT, 0.017),
        (signal.SIGTERM, 3, 0.007),
    ):
        one = starter.start(text, "watched", "with")
        one.line(1)
        time.sleep(delay)
        os.kill(one.pid, number)
        assert one.wait() == status
        err = OURS.sub("", one.err.read_text())
        assert "failed" not in err
        assert err.strip().endswith("KeyboardInterrupt") if number == signal.SIGINT else err == ""


def test_closing_in_a_handler_during_close() -> None:
    """A handler may close the exporter while its own thread is closing it; neither waits for the other."""
    closed: list[str] = []

    class Handle:
        def remove(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def close(*_: object) -> None:
        exporter.close()
        closed.append("in the handler")

    exporter = start_exporter(torch.nn.Linear(1, 1), 0, addr="127.0.0.1")
    exporter.adopt(Handle())
    before = signal.signal(signal.SIGUSR1, close)
    try:
        exporter.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert closed == ["in the handler"]


# Scrapes under way at the end


HANGS = """
import psutil
psutil.Process.num_threads = lambda self: time.sleep(600)
"""

CONDITION = """
if exporter is not None:
    exporter.on(lambda values: time.sleep(600), print)
"""

ASKED = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


def client(port: int, said: bytes) -> socket.socket:
    """A client that has said something, and reads nothing."""
    one = socket.create_connection(("127.0.0.1", port))
    one.sendall(said)
    return one


SCRAPES: dict[str, tuple[str, str, bytes]] = {
    "a collector and a condition that hang": ("pass", HANGS + CONDITION, ASKED),
    "a client in the middle of its request": ("fail()", "", ASKED[:-2]),
}


@pytest.mark.process
@pytest.mark.parametrize(
    "scrape", [pytest.param(name, marks=pytest.mark.full if name.startswith("a client") else []) for name in SCRAPES]
)
def test_an_end_beside_a_scrape(starter: Starter, bare: Callable[[str], End], scrape: str, tmp_path: Path) -> None:
    """Whatever a client, a collector or the worker is at, the program ends at once, as without the exporter."""
    here, before, said = SCRAPES[scrape]
    go = tmp_path / "go"
    # As an argument, so that it has one end without the exporter.
    text = program(here, before + "while exporter is not None and not os.path.exists(sys.argv[3]): time.sleep(0.01)\n")

    one = starter.start(text, "watched", "left", str(go))
    with client(one.port(), said):
        time.sleep(0.2)  # it is under way by then
        go.touch()
        watched = end_of(one)
    assert watched.status == bare(text).status
    assert bare(text).err in watched.err  # the exporter may log what it did not finish
    assert watched.seconds < 2 * bare(text).seconds + ADDED_SECONDS


# Ports


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


INHERIT = """
import socket, subprocess

def open_of(fds):
    return sum(one.startswith(("socket:", "anon_inode:")) for one in fds)

def fds():
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.exists(path)]

client = socket.create_connection(("127.0.0.1", exporter.port))
time.sleep(0.1)
shell, seen, redirected = "/bin/sh", sys.argv[-1], f"ls -l /proc/self/fd | sed 's/.* //' > {sys.argv[-1]}"
for close in (True, False):
    subprocess.run([shell, "-c", redirected], check=True, close_fds=close)
    print("run", open_of(open(seen).read().split()), flush=True)
os.posix_spawn(shell, [shell, "-c", redirected], os.environ)
os.wait()
print("posix_spawn", open_of(open(seen).read().split()), flush=True)
os.spawnv(os.P_WAIT, shell, [shell, "-c", redirected])
print("spawnv", open_of(open(seen).read().split()), flush=True)
client.close()
if os.fork() == 0:
    print("fork", open_of(fds()), flush=True)
    os._exit(0)
os.wait()
print("itself", open_of(fds()) >= 4, flush=True)
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").exists(), reason="there is no /proc")
def test_no_child_inherits_sockets(starter: Starter, tmp_path: Path) -> None:
    """No child process, spawned or forked, has a socket or a poll of the exporter."""
    end = end_of(starter.start(program(before=INHERIT), "watched", "left", str(tmp_path / "seen")))
    assert (end.status, end.err) == (0, "")
    assert end.out[:6] == ["run 0", "run 0", "posix_spawn 0", "spawnv 0", "fork 0", "itself True"]


FORKED = """
import psutil
asked, go, real = threading.Event(), threading.Event(), psutil.Process.num_threads

def slow(process):
    asked.set()
    go.wait(600)
    return real(process)

psutil.Process.num_threads = slow
asked.wait(600)
child = os.fork()
if child == 0:
    psutil.Process.num_threads = real
    step(torch.randn(5, 6))
    exporter.observe(loss=1.0)
    exporter.step()
    exporter.collect()
    exporter.close()
    print("child", os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
while "child" not in open("/proc/self/fd/1").read():
    time.sleep(0.01)
go.set()
"""


@pytest.mark.process
def test_a_fork_in_the_middle_of_a_scrape(starter: Starter) -> None:
    """A forked child trains, collects and closes without waiting for locks that it inherited; the client gets a whole answer."""
    one = starter.start(program(before=FORKED), "watched")
    port = one.port()
    with client(port, ASKED) as asking:
        child = int(one.line(1).split()[1])
        try:
            answer = b"".join(iter(lambda: asking.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 200 OK")
            length = int(answer.partition(b"Content-Length: ")[2].partition(b"\r")[0])
            assert len(answer.partition(b"\r\n\r\n")[2]) == length > 0
            assert end_of(one).err == ""
            assert runs(child)
            with socket.create_server(("127.0.0.1", port)):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
