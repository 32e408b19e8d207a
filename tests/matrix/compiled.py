"""`torch.compile`: what is compiled, how, and whether the exporter came before or after.

Each run starts and ends without compiled code. How many graphs, graph breaks and recompilations it took counts as state, so
that a run beside the exporter must have taken as many as one without.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from tests.matrix.harness import AFTER, CUMULATIVE, UNSEEN, Run, regime
from tests.support.models import Perceptron, batch, sgd
from tests.support.torch_versions import enable_compiled_autograd, need, recompiled

EAGER = "aot_eager"
"""The backend that traces and partitions as every one does, and runs what it got without compiling it."""

STEPS = 6


@functools.cache
def cache_directory() -> str:
    """Where inductor keeps what it compiled, until this process ends."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    return directory.name


def need_compiler() -> None:
    """Skips the test where inductor has no C++ compiler to call; a CI machine must have one."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("inductor needs a C++ compiler (g++, clang++ or $CXX)")


@contextlib.contextmanager
def dynamo(backend: str = EAGER) -> Iterator[None]:
    """A scene in which nothing was compiled before, and of which nothing stays."""
    if backend == "inductor":
        need_compiler()
    # One compile thread: inductor's worker processes would outlive the test.
    chosen = {"TORCHINDUCTOR_CACHE_DIR": cache_directory(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with mock.patch.dict(os.environ, chosen), warnings.catch_warnings():
        # Parts of torch that the compiler imports, or inlines, warn of each other.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    torch.compiler.reset()
    clear_compilation_metrics()
    counters.clear()


def compilations() -> dict[str, int]:
    """How often dynamo compiled since the scene began, how often it had to again, and where it broke a graph."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompilations": sum(map(recompiled, get_compilation_metrics())),
        "backwards": counters["compiled_autograd"]["captures"],
    }


@contextlib.contextmanager
def compiling(run: Run, backend: str = EAGER) -> Iterator[None]:
    """A scene of dynamo, whose compilations become part of what the run leaves."""
    with dynamo(backend):
        yield
        run.state.append(torch.tensor(list(compilations().values())))


@regime(how=["compiled, then watched", "watched, then compiled", "in place, then watched", "watched, then in place"])
def compiled_root(run: Run, how: str) -> None:
    """`torch.compile(model)` or `model.compile()`, the exporter on the model itself, started before or after."""
    with compiling(run), contextlib.ExitStack() as stack:
        model = compiled = Perceptron()
        optimizer = sgd(model)
        if how.startswith("watched"):
            stack.enter_context(run.watching(model, optimizer))
        if "in place" in how:
            model.compile(backend=EAGER)
        else:
            compiled = torch.compile(model, backend=EAGER)
        if how.endswith("watched"):
            stack.enter_context(run.watching(model, optimizer))
        run.train(compiled, optimizer, STEPS, of=model, clip=0.5, factor=10)


@regime()
def compiled_and_watched(run: Run) -> None:
    """The exporter on what `torch.compile` returned; its layers have the names that they have in the model."""
    with compiling(run):
        model = Perceptron()
        optimizer = sgd(model)
        compiled = torch.compile(model, backend=EAGER, fullgraph=True)
        with run.watching(model, optimizer, watched=compiled):
            run.train(compiled, optimizer, STEPS, of=model, clip=0.5, factor=10)


def settled(run: Run, step: int) -> None:
    """Compares the gauges of a round once capture has found its rung.

    A root whose hooks are traced announces no backward. The first round is therefore not seen; its step makes capture hook
    the parameters' nodes, and the second backward is seen there. Whatever adds up lacks that one round.
    """
    if step >= 1:
        without = (*CUMULATIVE, "torch_train_backward_passes_total", "torch_grad_clipped_steps_total")
        run.check(without=without, optional=["torch_grad_clip_coefficient"] if step < 3 else ())  # as a limit it has to repeat


@regime()
def compiled_forward_and_backward(run: Run) -> None:
    """A function that runs forward and backward is compiled; dynamo breaks the graph at the backward, as without us."""
    with compiling(run):
        model = Perceptron()
        optimizer = sgd(model)

        @torch.compile(backend=EAGER)
        def forward_and_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * 10
            loss.backward()
            return loss.detach()

        with run.watching(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                run.losses.append(forward_and_backward(batch()).clone())
                run.passed()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                run.step(optimizer)
                settled(run, step)


@regime()
def compiled_backward(run: Run) -> None:
    """Dynamo traces the backward, too: no hook runs, and gradients are read at the step."""
    need(2, 11, "tracing of backwards by dynamo")
    with compiling(run), torch._dynamo.config.patch(trace_autograd_ops=True):
        model = Perceptron()

        @torch.compile(backend=EAGER, fullgraph=True)
        def forward_and_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * 10
            loss.backward()
            return loss.detach()

        # Two rounds on each of the rungs `output` and `parameter`, neither of which sees anything.
        for _ in run.rounds(model, STEPS, since=4, without=(*CUMULATIVE, *UNSEEN)):
            run.losses.append(forward_and_backward(batch()).clone())
            run.passed()


@regime(whole=[True, False])
def compiled_autograd(run: Run, whole: bool) -> None:
    """Under compiled autograd no hook of a parameter runs: gradients are read at the step, after clipping.

    A backward that is compiled alone is compiled once more: the first time it had the hook on the model's output.
    """
    with compiling(run) if whole else dynamo(), torch._dynamo.config.patch(compiled_autograd=whole):
        model = Perceptron()
        optimizer = sgd(model)

        def forward_and_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * 10
            with contextlib.nullcontext() if whole else enable_compiled_autograd(torch.compile(backend=EAGER)):
                loss.backward()
            return loss.detach()

        call = torch.compile(forward_and_backward, backend=EAGER) if whole else forward_and_backward
        with run.watching(model, optimizer):
            for step in range(STEPS + 2):
                optimizer.zero_grad()
                run.losses.append(call(batch()).clone())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                run.passed()
                run.step(optimizer)
                if step >= 4:  # as above
                    run.check(without=(*CUMULATIVE, *UNSEEN))
            run.shows(1, "torch_grad_exporter_capture_mode", mode="optimizer")


@regime(told=[False, True])
def compiled_training_step(run: Run, told: bool) -> None:
    """Clearing, forward, backward and step in one compiled function.

    All hooks of the module and of the optimizer are traced away, so that nothing is shown, unless the loop calls
    `exporter.step()`.
    """
    with compiling(run):
        model = Perceptron()
        optimizer = sgd(model)

        @torch.compile(backend=EAGER)
        def training_step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * 10
            loss.backward()
            optimizer.step()
            return loss.detach()

        with run.watching(model, optimizer):
            for step in range(STEPS):
                run.losses.append(training_step(batch()).clone())
                run.passed()
                run.stepping()
                if told:
                    run.stepped()
                    settled(run, step)
                else:
                    run.shows(None, "torch_grad_norm", layer="first")
                    run.shows(None, "torch_grad_global_norm")
                    run.shows(0, "torch_train_skipped_steps_total")


@regime(told=[False, True])
def compiled_optimizer(run: Run, told: bool) -> None:
    """`torch.compile(optimizer.step)` traces the hooks of the step away: nothing is unknown if the loop calls `exporter.step()`."""
    with compiling(run):
        model = Perceptron()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = torch.compile(optimizer.step, backend=EAGER)
        with run.watching(model, optimizer):
            for _ in range(STEPS):
                optimizer.zero_grad()
                run.backward(model(batch()).square().mean() * 10)
                if told:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                run.stepping()
                step()
                if told:
                    run.stepped()
                    run.check()
        # After `close`: where no step is seen, the last sample is open until the next backward. What is read or counted at a step
        # is unknown, and the first two rounds might have been passes of one step: their samples are not shown.
        unknown = (*CUMULATIVE, *AFTER, "torch_train_steps_total", "torch_grad_sample_step", "torch_grad_clipped_steps_total")
        run.check(without=() if told else unknown)


@regime(stance=[False, True])
def compiled_and_eager_in_turn(run: Run, stance: bool) -> None:
    """Every other step is eager, by calling the model itself or by `torch.compiler.set_stance`."""
    if stance:
        need(2, 6, "torch.compiler.set_stance")
    with compiling(run):
        model = Perceptron()
        compiled = torch.compile(model, backend=EAGER)
        for step in run.rounds(model, STEPS):
            eager = step % 2
            with torch.compiler.set_stance("force_eager") if stance and eager else contextlib.nullcontext():
                run.backward((model if eager and not stance else compiled)(batch()).square().mean() * 10)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@regime(mode=["default", "reduce-overhead"])
def inductor(run: Run, mode: str) -> None:
    """The backend that compiles to C++; on a CPU the mode for CUDA graphs changes nothing."""
    with compiling(run, "inductor"):
        model = Perceptron()
        optimizer = sgd(model)
        compiled = torch.compile(model, mode=mode)
        with run.watching(model, optimizer):
            run.train(compiled, optimizer, STEPS, of=model, clip=0.5, factor=10)
