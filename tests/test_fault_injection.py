"""Faults where the exporter calls PyTorch, the system or the user's code: training ends the same, and failures are counted.

The places are recorded, not listed: a profile function sees each call that a function of the package makes into a library. Then
each of them in turn raises, beside a training without an exporter whose parameters must stay equal in every bit.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import inspect
import itertools
import logging
import math
import os
import pathlib
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, ClassVar

import psutil
import pynvml
import pytest
import torch
import torch.distributed as dist

import torch_grad_exporter
from tests.support.models import Perceptron, sgd
from tests.support.record import gradients_of, norm
from tests.support.scrape import OFF, Key, errors, key, value, values
from tests.support.tools import eventually, get, lasting_threads
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, MaxNorm

PACKAGE = pathlib.Path(torch_grad_exporter.__file__).parent
LIBRARIES = (
    "torch", "numpy", "psutil", "pynvml", "socket", "_socket", "os", "posix", "_io", "io", "pathlib", "time", "json", "zlib",
)  # fmt: skip
FLAGS = (
    "is_compiling", "is_tracing", "_is_tracing", "is_scripting", "is_available", "is_initialized", "set_eval_frame", "__exit__",
)  # fmt: skip
"""Functions that only read or set a flag; they are called outside of what is guarded."""

Site = tuple[str, str]
"""A file or folder of the package, and what it calls."""


class InjectedError(Exception):
    """The fault."""


class Boundary:
    """A profile function that records the calls into libraries, or calls `fault` at the chosen ones, once."""

    def __init__(self) -> None:
        self.seen: Counter[Site] = Counter()
        self.rooms: dict[CodeType, str | None] = {}
        self.chosen: Callable[[Site], bool] = lambda _site: False
        self.fault: Callable[[], None] = lambda: None
        self.raised = 0

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        if event not in ("call", "c_call"):
            return
        caller = frame if event == "c_call" else frame.f_back
        if caller is None or (room := self.room_of(caller.f_code)) is None:
            return
        if event == "call":
            library, name = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        else:
            owner = getattr(called, "__self__", None)
            library = getattr(called, "__module__", None) or (owner if inspect.isclass(owner) else type(owner)).__module__
            name = str(getattr(called, "__qualname__", called))
        if library.split(".")[0] not in LIBRARIES or name.rpartition(".")[2] in FLAGS:
            return
        if library.startswith("numpy") and (name[0] == "_" or "errstate" in name):
            return
        site = (room, f"{library}.{name}")
        self.seen[site] += 1
        if self.chosen(site):
            self.raised += 1
            self.fault()

    def room_of(self, code: CodeType) -> str | None:
        """The file or folder of the package that the code is in, if it is."""
        if code not in self.rooms:
            path = pathlib.Path(code.co_filename)
            self.rooms[code] = path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else None
        return self.rooms[code]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What this thread calls within the block is seen, until a fault is raised."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


# Trainings


@dataclass
class Scene:
    """A training; `step` makes one step of it and returns the norm of its gradients, if there is one to compare."""

    model: torch.nn.Module
    step: Callable[[Exporter | None, int], float | None]
    options: dict[str, Any] = field(default_factory=dict)


@functools.cache
def inputs() -> torch.Tensor:
    """The same inputs each time."""
    return torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(1))


def full_norm(model: torch.nn.Module) -> float:
    """The norm over all gradients, in float64."""
    return norm(gradients_of(model).values())


def observed() -> Scene:
    """Two optimizers, clipping, values, steps with numbers, a loader, a consumer of values and all collectors."""
    model = Perceptron()
    optimizers = torch.optim.SGD(model.first.parameters(), lr=0.05), torch.optim.Adam(model.second.parameters(), lr=0.01)
    loader: list[Iterator[torch.Tensor]] = []

    def step(exporter: Exporter | None, number: int) -> None:
        if exporter is not None and not loader:
            loader.append(iter(exporter.watch_loader(inputs()[i % 12] for i in range(100_000))))
        x = next(loader[0]) if exporter is not None else inputs()[number % 12]
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if exporter is not None:
            exporter.observe(loss=loss, grad_norm=total, samples=5, tokens=torch.tensor(7), epoch=1, grad_divisor=1)
        for optimizer in optimizers:
            optimizer.step()
        if exporter is not None:
            exporter.step(number)

    return Scene(model, step, {"moments": True, "weights": True, "activations": True, "layer_times": True, "collectors": {}})


def plain() -> Scene:
    """One optimizer; each sixth step is left out."""
    model = Perceptron()
    optimizer = sgd(model)

    def step(_exporter: Exporter | None, number: int) -> float | None:
        optimizer.zero_grad()
        model(inputs()[number % 12]).square().mean().backward()
        if number % 6 == 5:
            return None
        optimizer.step()
        return full_norm(model)

    return Scene(model, step)


def by_hand() -> Scene:
    """The loop writes the gradients itself."""
    model = Perceptron()
    optimizer = sgd(model)
    parameters = list(model.parameters())

    def step(_exporter: Exporter | None, number: int) -> float:
        gradients = torch.autograd.grad(model(inputs()[number % 12]).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return full_norm(model)

    return Scene(model, step)


class Assorted(torch.nn.Module):
    """Layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 4, sparse=True)
        self.up = torch.nn.ConvTranspose1d(4, 6, 3)
        self.narrow = torch.nn.Linear(6, 2).bfloat16()
        self.large = torch.nn.Linear(2, 40_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.tokens(x.abs().mul(10).long() % 7).mT).relu().mean(2)
        return self.large(self.narrow(x.bfloat16()).float())


def assorted() -> Scene:
    """Layers of many kinds, rounds of two backwards, NaN and Inf, layers that are frozen, replaced and added."""
    model = Assorted()
    optimizer = sgd(model)

    def step(_exporter: Exporter | None, number: int) -> None:
        factor = {5: 1e38, 6: math.nan, 7: math.inf}.get(number % 12, 1e-3)
        for _ in range(2):
            (model(inputs()[number % 12]).square().mean() * factor).backward()
        if factor == 1e-3:
            optimizer.step()
        optimizer.zero_grad()
        model.up.requires_grad_(number % 12 != 3)
        if number % 12 == 8:
            model.large = torch.nn.Linear(2, 4 + number % 24)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return Scene(model, step, {"moments": True, "nan_origin": "always"})


def clipping() -> Scene:
    """The exporter clips, to a limit that leaves every bit as it is."""
    scene = plain()
    scene.options = {"clip": MaxNorm(1e9), "dry_run": [AutoClip(), AGC()]}
    return scene


def replicated() -> Scene:
    """DDP in a job of one rank, whose own gradients are measured, too."""
    model = torch.nn.parallel.DistributedDataParallel(Perceptron())
    optimizer = sgd(model)

    def step(exporter: Exporter | None, number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(inputs()[number % 12]).square().mean().backward()
        model(inputs()[number % 12]).square().mean().backward()
        optimizer.step()
        if exporter is not None:
            exporter.observe(samples=10)

    return Scene(model, step, {"local_norm": True})


SCENES: dict[str, Callable[[], Scene]] = {
    scene.__name__: scene for scene in (observed, plain, by_hand, assorted, clipping, replicated)
}


class Pair:
    """A training with an exporter beside the same one without."""

    made: ClassVar[list[Exporter]] = []

    def __init__(self, name: str, boundary: Boundary) -> None:
        self.boundary = boundary
        torch.manual_seed(0)
        self.watched = SCENES[name]()
        torch.manual_seed(0)
        self.bare = SCENES[name]()
        self.hooks = len(all_hooks(self.watched.model))
        options: dict[str, Any] = {"every": 1, "collectors": OFF, **self.watched.options}
        self.exporter = start_exporter(self.watched.model, None, **options)
        self.made.append(self.exporter)
        self.number = 0

    def step(self, *, seen: bool = True) -> float | None:
        """One step of both; returns the norm of the gradients. `seen`: by the boundary."""
        torch.manual_seed(self.number)
        with self.boundary.watching() if seen else contextlib.nullcontext():
            measured = self.watched.step(self.exporter, self.number)
            self.exporter.collect()
        torch.manual_seed(self.number)
        self.bare.step(None, self.number)
        self.number += 1
        assert identical(self.watched.model, self.bare.model)
        return measured

    def close(self) -> None:
        """Ends the exporter, and asserts that it has left no hook."""
        self.exporter.close()
        assert len(all_hooks(self.watched.model)) == self.hooks


def identical(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether all bits of the parameters are the same."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p.detach().view(torch.uint8), q.detach().view(torch.uint8)) for p, q in pairs)


def lines_of(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often the failure of each source was logged."""
    return Counter(message.partition(" failed")[0] for message in caplog.messages if "training goes on" in message)


def inject(error: type[Exception] = InjectedError) -> None:
    """Raise the fault."""
    raise error("injected")


@pytest.fixture(autouse=True)
def _clean(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Keep the log, and assert that no thread is left."""
    before = lasting_threads()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        yield
    while Pair.made:
        Pair.made.pop().close()
    assert eventually(lambda: lasting_threads() == before)


@pytest.fixture
def _one_rank(tmp_path: pathlib.Path) -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PROGRESS = ("torch_train_steps_total", "torch_train_backward_passes_total", "torch_grad_exporter_captures_total")
FAILURES = ("torch_grad_exporter_errors_total", "torch_grad_exporter_captures_skipped_total")


def totals(shown: dict[Key, float], names: tuple[str, ...]) -> tuple[float, ...]:
    """The sums of all series of each name."""
    return tuple(sum(number for (name, _), number in shown.items() if name == wanted) for wanted in names)


def recorded(name: str, steps: int = 24) -> tuple[list[Site], list[tuple[float, ...]]]:
    """The calls into libraries in a training without faults, and its progress in each step of a period of twelve."""
    pair, progress = Pair(name, Boundary()), [(0.0,) * len(PROGRESS)]
    for _ in range(steps):
        pair.step()
        progress.append(totals(values(pair.exporter), PROGRESS))
    pair.close()
    assert errors(pair.exporter) == {}
    made = [tuple(b - a for a, b in itertools.pairwise(column)) for column in zip(*progress, strict=True)]
    return sorted(pair.boundary.seen), list(zip(*made, strict=True))[-12:]


@pytest.mark.slow
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.full) for name in SCENES if name != "plain")])
def test_each_call_into_a_library_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever call fails, training is the same in every bit, and the failure is counted or the sample is right."""
    everywhere, progress = recorded(name)
    usual = everywhere if name == "plain" else recorded("plain")[0]
    share = 4 if name == "plain" else 10  # of the calls that all trainings make, each tries others
    sites = [*sorted({*everywhere} - {*usual}), *sorted({*everywhere} & {*usual})[len(name) % share :: share]]
    assert len(sites) > 10
    boundary, silent, unmet = Boundary(), [], []
    pair = Pair(name, boundary)
    for number, site in enumerate(sites):
        boundary.raised, boundary.chosen = 0, site.__eq__
        boundary.fault = functools.partial(inject, MemoryError if number % 2 else InjectedError)
        after = values(pair.exporter)
        for _ in range(7):
            before, measured, after = after, pair.step(), values(pair.exporter)
            if boundary.raised:
                break
        else:
            unmet.append(site)
        boundary.chosen = lambda _site: False
        if boundary.raised and totals(before, FAILURES) == totals(after, FAILURES):
            made = tuple(b - a for a, b in zip(totals(before, PROGRESS), totals(after, PROGRESS), strict=True))
            norm_right = measured is None or after[key("torch_grad_global_norm")] == pytest.approx(measured, rel=1e-5)
            if made != progress[(pair.number - 1) % 12] or not norm_right:
                silent.append((site, made, progress[(pair.number - 1) % 12], norm_right))
        pair.step(seen=False)
    pair.close()
    assert silent == []
    assert len(unmet) < len(sites) / 3
    assert set(lines_of(caplog).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("plain", 4), pytest.param("observed", 4, marks=pytest.mark.full)])
def test_a_library_function_that_always_fails(name: str, share: int, caplog: pytest.LogCaptureFixture) -> None:
    """A function that fails in each step costs training nothing; each source is logged once, and `close` works."""
    sites, _ = recorded(name, 12)
    off = 0
    for called in sorted({called for _, called in sites})[::share]:
        caplog.clear()
        boundary = Boundary()
        pair = Pair(name, boundary)
        boundary.chosen, boundary.fault = (lambda site, called=called: site[1] == called), inject
        for _ in range(14):
            pair.step()
        pair.close()
        assert set(lines_of(caplog).values()) <= {1}, called
        off += "switched off" in caplog.text
    assert off


class HandlerError(Exception):
    """What a signal handler of the user raises."""


@pytest.mark.slow
def test_a_signal_handler_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """What a handler raises in the middle of the exporter's work reaches the user's loop and is not counted."""

    def handle(*_: object) -> None:
        raise HandlerError

    sites, _ = recorded("plain", 12)
    boundary, unheard = Boundary(), []
    pair = Pair("plain", boundary)
    boundary.fault = functools.partial(signal.raise_signal, signal.SIGUSR1)
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        for site in sites[::6]:
            boundary.raised, boundary.chosen, heard = 0, site.__eq__, 0
            for _ in range(6):
                try:
                    pair.step()
                except HandlerError:
                    heard += 1
                if boundary.raised:
                    break
            boundary.chosen = lambda _site: False
            if heard != boundary.raised:
                unheard.append(site)
            torch.set_grad_enabled(True)  # the handler may have been called where it was off
            pair.bare.model.load_state_dict(pair.watched.model.state_dict())
            pair.step(seen=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert unheard == []
    assert errors(pair.exporter) == {}
    assert caplog.messages == []


# The start


@pytest.mark.slow
def test_each_call_fails_at_the_start() -> None:
    """A start in which a call fails raises or goes on; neither leaves a hook, a thread or a socket."""
    recorder = Boundary()
    with recorder.watching():
        start_exporter(Perceptron(), 0, addr="127.0.0.1").close()
    harmless = ("_socket.", "socket.", "torch.optim.optimizer.register")  # which do not fail once they have all arguments
    sites = [site for site in {site[1]: site for site in recorder.seen}.values() if not site[1].startswith(harmless)]
    assert len(sites) > 20
    raised = 0
    for site in sites:
        boundary, model, threads, hooks = Boundary(), Perceptron(), lasting_threads(), len(all_hooks(Perceptron()))
        boundary.chosen, boundary.fault = site.__eq__, inject
        try:
            with boundary.watching():
                exporter = start_exporter(model, 0, addr="127.0.0.1")
            with exporter:
                train(model, 2)
        except InjectedError:
            pass
        raised += boundary.raised
        assert len(all_hooks(model)) == hooks, site
        assert eventually(lambda threads=threads: lasting_threads() == threads), site
    assert raised > len(sites) / 2
    gc.collect()  # a socket that was not closed would warn now


def train(model: torch.nn.Module, steps: int, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """Plain steps."""
    optimizer = sgd(model)
    for number in range(steps):
        optimizer.zero_grad()
        (forward or model)(inputs()[number % 12]).square().mean().backward()
        optimizer.step()


# The system


def failing(patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> list[str]:  # noqa: ANN401 - a module or a class
    """Let a function raise where the package calls it, at whatever depth; returns the calls."""
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def double(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the original
        frame: FrameType | None = sys._getframe(1)  # private: the public `inspect.stack` reads source files
        while frame is not None and not pathlib.Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return original(*arguments, **options)
        calls.append(name)
        raise error

    patch.setattr(owner, name, double)
    return calls


FULL = OSError(errno.ENOSPC, "No space left on device")
SYSTEM: dict[str, tuple[Any, tuple[str, ...], Exception]] = {
    "processes": (psutil.Process, ("memory_info", "cpu_times", "num_fds", "oneshot", "memory_full_info"), psutil.AccessDenied()),
    "machine": (
        psutil,
        ("virtual_memory", "cpu_percent", "cpu_times", "net_io_counters", "disk_io_counters"),
        RuntimeError("gone"),
    ),
    "driver": (pynvml, ("nvmlInit", "nvmlInitWithFlags", "nvmlDeviceGetCount"), RuntimeError("no driver")),
    "renames": (os, ("replace", "rename", "fsync"), FULL),
    "files": (pathlib.Path, ("open", "write_text", "write_bytes", "mkdir"), FULL),
    "answers": (socket.socket, ("send", "sendall", "sendmsg", "recv", "accept"), OSError(errno.EMFILE, "Too many open files")),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", SYSTEM)
def test_the_system_fails(broken: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """While processes, files or sockets fail, training is the same; afterwards the exporter serves all of it."""
    owner, names, error = SYSTEM[broken]
    torch.manual_seed(0)
    model, bare = Perceptron(), Perceptron()
    bare.load_state_dict(model.state_dict())
    with start_exporter(model, 0, addr="127.0.0.1", every=1, sd_dir=tmp_path, textfile_dir=tmp_path) as exporter:
        with pytest.MonkeyPatch.context() as patch:
            calls = [failing(patch, owner, name, error) for name in names if hasattr(owner, name)]
            train(model, 10)
            with contextlib.suppress(OSError):
                exporter.save(tmp_path / "saved")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", exporter.port or 0)) as client:
                client.settimeout(0.1)
                client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            exporter.collect()
            assert any(calls) or broken == "driver" or eventually(lambda: any(calls))
        train(bare, 10)
        assert identical(model, bare)
        assert value(exporter, "torch_grad_exporter_captures_total") == 10
        assert eventually(lambda: "torch_grad_norm{" in get(exporter.url))
    assert set(lines_of(caplog).values()) <= {1}
    assert threading.active_count() < 20


@pytest.mark.parametrize("name", ["bind", "listen"])
def test_no_socket_at_the_start(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where no port can be opened training is watched all the same, and a line says that nothing is served."""
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, socket.socket, name, PermissionError("no"))
        exporter = start_exporter(model := Perceptron(), 0, addr="127.0.0.1", every=1)
    train(model, 3)
    exporter.close()
    assert exporter.port is None
    assert value(exporter, "torch_grad_exporter_captures_total") == 3
    assert len([message for message in caplog.messages if "no metrics are served" in message]) == 1


# The user's code


class Hostile(torch.Tensor):
    """A value that raises whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, *_arguments: object, **_options: object) -> object:
        raise InjectedError("injected")


class HostileLoader:
    """A loader of two batches whose length and attributes raise."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __len__(self) -> int:
        raise InjectedError("injected")


USERS: dict[str, Callable[[Exporter], object]] = {
    "a tensor": lambda exporter: exporter.observe(loss=torch.ones(1).as_subclass(Hostile)),
    "no value": lambda exporter: exporter.observe(loss="abc"),
    "a step": lambda exporter: exporter.step("abc"),  # type: ignore[arg-type]
    "a loader": lambda exporter: sum(batch for batch in exporter.watch_loader(HostileLoader())),
    "a condition": lambda exporter: exporter.on(lambda _values: inject(), lambda _event: None),
    "an action": lambda exporter: exporter.on(lambda _values: True, lambda _event: inject()),
}


@pytest.mark.slow
@pytest.mark.parametrize("users", USERS)
def test_code_of_the_user_fails(users: str, caplog: pytest.LogCaptureFixture) -> None:
    """What values, loaders, conditions and callbacks of the user raise is counted, logged once, and stops no sample."""
    model = Perceptron()
    with start_exporter(model, None, every=1, collectors=OFF) as exporter:
        for number in range(3):
            if number == 0 or users not in ("a condition", "an action"):  # each of which fails by itself
                USERS[users](exporter)
            train(model, 1)
        if users != "a loader":
            assert eventually(lambda: sum(errors(exporter).values()) > 0)
        assert value(exporter, "torch_grad_exporter_captures_total") == 3 or users == "a step"  # which ends what is known of steps
        exporter.observe(loss=0.5)
        assert value(exporter, "torch_train_loss") == 0.5
    assert set(lines_of(caplog).values()) <= {1}


class HostileOutput(dict[str, torch.Tensor]):
    """An output that raises when its loss is looked for."""

    def get(self, *_arguments: object) -> object:
        raise InjectedError("injected")


def test_an_output_that_raises() -> None:
    """An output whose loss raises does so neither in the model's forward nor in the backward."""

    class Model(Perceptron):
        def forward(self, x: torch.Tensor) -> object:  # type: ignore[override]
            return HostileOutput(out=super().forward(x))

    model = Model()
    with start_exporter(model, None, every=1, collectors=OFF) as exporter:
        train(model, 3, lambda x: model(x)["out"])
        assert set(errors(exporter)) == {"forward_hook"}
        assert value(exporter, "torch_grad_captures_total", layer="first") == 3
