"""What the user drops is freed while an exporter is attached, and `close()` leaves nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.capture.attached_model import WAYS, Attached, attach, build, by_parts, by_root
from tests.support.models import batch, sgd
from tests.support.scrape import errors, value, values
from tests.support.tools import threads_of_ours
from tests.support.torch_hooks import all_hooks, global_step_hooks
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(params=["root", "by_user"])
def attached(request: pytest.FixtureRequest) -> Iterator[Attached]:
    """Return an attached model, trained in one of the ways."""
    model = attach(request.param)
    with model.exporter:
        yield model


# Nothing is held


def alive(references: Sequence[weakref.ref[object]]) -> list[object]:
    """Return what has not been freed."""
    gc.collect()
    return [found for reference in references if (found := reference()) is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attached", "moment"),
    [*(("root", moment) for moment in ("stepped", "forward", "backward", "failed backward")), ("by_user", "backward")],
    indirect=["attached"],
)
def test_the_model_and_its_optimizer_can_go(attached: Attached, moment: str) -> None:
    """What the user drops is freed while the exporter is attached, whatever it was doing, and a scrape still works."""
    attached.optimizer.zero_grad()
    if moment == "forward":
        attached.model(batch())
    elif moment == "backward":
        WAYS[attached.way](attached.model, batch())
    elif moment == "failed backward":

        def fail(_gradient: torch.Tensor) -> None:
            raise RuntimeError("the user's own")

        handle = attached.model[0].weight.register_hook(fail)
        with contextlib.suppress(RuntimeError):
            WAYS[attached.way](attached.model, batch())
        handle.remove()
        del handle, fail
    references: list[weakref.ref[object]] = [
        weakref.ref(attached.optimizer),
        *(weakref.ref(module) for module in attached.model.modules()),
        *(weakref.ref(parameter) for parameter in attached.model.parameters()),
    ]
    exporter = attached.exporter
    attached.model = attached.optimizer = None  # type: ignore[assignment]
    assert alive(references) == []
    assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 6
    assert errors(exporter) == {}


def test_gradients_and_graphs_are_not_kept(attached: Attached) -> None:
    """After `zero_grad` no gradient lives on, and no output that the user drops."""
    attached.step()
    out = attached.model(batch())
    gone = [weakref.ref(out), *(weakref.ref(p.grad) for p in attached.model.parameters())]
    attached.optimizer.zero_grad()
    del out
    assert alive(gone) == []


# Nothing is left


def module_tables(model: torch.nn.Module) -> list[dict[str, list[object]]]:
    """Return all tables of hooks of each module."""
    return [{name: [*table.values()] for name, table in vars(m).items() if "_hooks" in name} for m in model.modules()]


def state_of_torch() -> dict[str, object]:
    """Return what is global in torch."""
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "cuda": torch.cuda.is_initialized(),
    }


def state_of_process() -> dict[str, object]:
    """Return what a library could leave behind in a process, but for what belongs to torch."""
    root = logging.getLogger()
    ours = logging.getLogger("torch_grad_exporter")
    return {
        "environment": dict(os.environ),
        "logging": [(list(log.handlers), log.level, log.propagate, log.disabled, list(log.filters)) for log in (root, ours)],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()),
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "path": (list(sys.path), list(sys.meta_path), Path.cwd()),
        "switch interval": sys.getswitchinterval(),
        "streams": (sys.stdout, sys.stderr),
    }


def open_files() -> list[str]:
    """Return what this process has open: files, sockets, pipes."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(one.readlink()).partition("[")[0])
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_close_leaves_nothing(attached: Attached) -> None:
    """After `close()` models and process are as if there had been no exporter, and already before it torch is."""
    attached.exporter.close()
    registered = atexit._ncallbacks()  # private: there is no other list of what runs at the end
    files, torches, process = open_files(), state_of_torch(), state_of_process()
    step_hooks = global_step_hooks()
    fresh = build()

    second = attach(attached.way, 0, moments=True, weights=True)
    assert threads_of_ours()
    assert all_hooks(second.model, second.optimizer) != step_hooks
    assert state_of_torch() == torches
    assert state_of_process() == process
    port = second.exporter.port
    second.exporter.close()

    assert all_hooks(second.model, second.optimizer) == step_hooks
    assert module_tables(second.model) == module_tables(fresh)
    assert [list(vars(m)) for m in second.model.modules()] == [list(vars(m)) for m in fresh.modules()]
    assert not threads_of_ours()
    assert atexit._ncallbacks() == registered  # private: as above
    assert (state_of_torch(), state_of_process()) == (torches, process)
    assert open_files() == files
    assert port not in [c.laddr.port for c in psutil.Process().net_connections("tcp")]
    for _ in range(3):
        second.step()
    assert value(second.exporter, "torch_train_steps_total", optimizer="SGD") == 6


def test_random_numbers_are_the_users(attached: Attached) -> None:
    """Neither a start, nor scrapes, nor `close()` draws from a random generator of the process."""

    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002 - the process' own

    model = build()
    before = states()
    with start_exporter(model, 0, addr="127.0.0.1", every=1) as exporter:
        values(exporter)
    values(attached.exporter)
    attached.exporter.close()
    assert states() == before


@pytest.mark.slow
def test_many_starts_and_closes_grow_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Ten more starts on one model leave no object, hook, thread or file more."""
    caplog.set_level(logging.CRITICAL, "torch_grad_exporter")  # pytest keeps the lines that say where each serves
    model = build()
    optimizer = sgd(model)

    def cycle() -> None:
        with start_exporter(model, 0, addr="127.0.0.1", every=1) as exporter:
            for backward in (by_root, by_parts):
                optimizer.zero_grad()
                backward(model, torch.ones(5, 6))
                optimizer.step()
            values(exporter)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(4):
        cycle()
    before, files = objects(), open_files()
    for _ in range(10):
        cycle()
    assert objects() - before < 10  # less than one for each
    assert open_files() == files
    assert not threads_of_ours()
    assert all_hooks(model, optimizer) == global_step_hooks() == []
