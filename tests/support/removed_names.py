"""Trains without a private name of PyTorch: run as a program with names as arguments, it prints one JSON object.

Each argument is hidden in a fork of its own while the package is imported, which is when it looks names up, and restored before
the training, since PyTorch itself needs most of them. A name of a C type cannot be deleted; there `None` shadows it in a subclass.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.utils  # before the names are hidden, as anything of torch may need them
import torch.distributed.device_mesh

STEPS = 12
NOTHING = object()


@contextlib.contextmanager
def hidden(path: str) -> Iterator[None]:
    """Hide what is at a path, or at several that are joined by `+`, within the block."""
    first, _, others = path.partition("+")
    if others:
        with hidden(first), hidden(others):
            yield
        return
    parent, name = path.rpartition(".")[::2]
    if parent == "torch.nn.Module":
        with hidden_of_modules(name):
            yield
        return
    owner: Any = sys.modules.get(parent) or torch
    for part in parent.split(".")[1:] if owner is torch else ():
        owner = getattr(owner, part)
    kept = vars(owner).get(name, NOTHING) if hasattr(owner, "__dict__") else NOTHING
    if kept is NOTHING:
        setattr(owner, name, None)
    else:
        delattr(owner, name)
    try:
        yield
    finally:
        delattr(owner, name) if kept is NOTHING else setattr(owner, name, kept)


@contextlib.contextmanager
def hidden_of_modules(name: str) -> Iterator[None]:
    """Let new modules have no attribute of that name within the block."""
    make: Callable[..., None] = torch.nn.Module.__init__

    def without(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        del self.__dict__[name]

    torch.nn.Module.__init__ = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__init__ = make  # type: ignore[method-assign]


def trained() -> dict[str, object]:
    """Return what the exporter shows of a small training, beside what is true of it."""
    package: Any = importlib.import_module("torch_grad_exporter")
    actions: Any = importlib.import_module("torch_grad_exporter.actions")
    scrape: Any = importlib.import_module("tests.support.scrape")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_grad_exporter").addHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.ConvTranspose1d(1, 2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with package.start_exporter(model, port=None, every=1, collectors={"host": False, "process": False}) as exporter:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(5, 1, 4)).square().mean().backward()
            optimizer.step()
        norm = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None) ** 0.5
        found = scrape.values(exporter)
        actions.Clipper(model, actions.MaxNorm(float(norm) / 2))()
        halved = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None) ** 0.5
        again = package.start_exporter(torch.nn.Linear(2, 2), port=None, collectors={"host": False, "process": False})
        again.close()
        shown = {
            "norm": found[scrape.key("torch_grad_global_norm")],
            "steps": found[scrape.key("torch_train_steps_total", optimizer="SGD")],
            "backwards": found[scrape.key("torch_train_backward_passes_total")],
            "mode": scrape.mode(exporter),
            "errors": sum(scrape.errors(exporter).values()),
        }
    return {**shown, "true_norm": float(norm), "clipped_norm": float(halved), "said": said}


def in_a_fork(path: str) -> dict[str, object]:
    """Return the report of a training without the names at the path."""
    source, sink = os.pipe()
    if os.fork() == 0:
        try:
            with hidden(path) if path else contextlib.nullcontext():
                importlib.import_module("torch_grad_exporter").start_exporter  # noqa: B018 - imports all of it
            report: dict[str, object] = trained()
        except BaseException:  # noqa: BLE001 - the test reports it
            report = {"raised": traceback.format_exc()}
        with os.fdopen(sink, "w") as pipe:
            json.dump(report, pipe)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        found: dict[str, object] = json.load(pipe)
    os.wait()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({path: in_a_fork(path) for path in sys.argv[1:]}, sys.stdout)
