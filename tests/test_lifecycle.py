"""An exporter's life beside a training: it starts, serves and ends cleanly, and costs only itself where something is wrong."""

from __future__ import annotations

import _thread
import functools
import gc
import logging
import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Perceptron, batch, sgd
from tests.support.programs import Starter
from tests.support.scrape import errors, key, value, values
from tests.support.tools import eventually, get, lasting_threads, threads_of_ours
from tests.support.torch_hooks import all_hooks, global_step_hooks
from torch_grad_exporter import Exporter, start_exporter

STEPS = "torch_train_steps_total"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test ends without a new thread or global hook."""
    threads, hooks = threads_of_ours(), global_step_hooks()
    yield
    gc.collect()
    assert threads_of_ours() <= threads
    assert [hook for hook in global_step_hooks() if hook not in hooks] == []


def start(model: torch.nn.Module, port: int | None = None, **options: object) -> Exporter:
    """Start an exporter that samples every round and by default serves nothing."""
    return start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})


def by_root(model: Perceptron) -> None:
    """Run a backward through the root's output."""
    model(batch()).square().mean().backward()


def by_parts(model: Perceptron) -> None:
    """Run a backward that the root's output does not see."""
    model.second(model.first(batch()).relu()).square().mean().backward()


def train(model: Perceptron, steps: int = 1, backward: Callable[[Perceptron], None] = by_root) -> None:
    """Make plain steps."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def hooks_of(model: torch.nn.Module) -> int:
    """Return the number of hooks that a training of this model runs."""
    return len(all_hooks(model)) - len(global_step_hooks())


# The end


def test_close_is_idempotent() -> None:
    """`close` may be called repeatedly, also after the `with` that did it; afterwards nothing raises or counts."""
    model = Perceptron()
    with start(model, 0) as exporter:
        train(model)
        exporter.close()
        exporter.close()
    exporter.close()
    exporter.observe(loss=1.0)
    exporter.step()
    exporter.step(5)
    assert list(exporter.watch_loader([1, 2])) == [1, 2]
    assert value(exporter, "torch_train_loss") is None
    assert value(exporter, STEPS, optimizer="SGD") == 1


@pytest.mark.parametrize("backward", [by_root, by_parts])
def test_close_within_a_backward(backward: Callable[[Perceptron], None]) -> None:
    """A tensor hook of the user may close the exporter in the middle of a sampled backward."""
    model = Perceptron()
    exporter = start(model)
    train(model, 6, backward)
    handle = model.first.weight.register_hook(lambda _gradient: exporter.close())
    train(model, 1, backward)
    handle.remove()
    assert model.first.weight.grad is not None
    assert hooks_of(model) == 0
    assert errors(exporter) == {}


class Interrupting:
    def remove(self) -> None:
        """Be where the user presses Ctrl-C."""
        raise KeyboardInterrupt


def test_an_interrupted_close_is_complete() -> None:
    """Ctrl-C in the middle of `close` reaches the user, and nothing is left."""
    model = Perceptron()
    exporter = start(model, 0)
    train(model)
    exporter.adopt(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        exporter.close()
    assert hooks_of(model) == 0
    assert exporter.port is None


def test_close_between_backward_and_step() -> None:
    """A sample that was captured when the exporter is closed is counted."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = start(model)
    by_root(model)
    exporter.close()
    optimizer.step()
    by_root(model)
    assert value(exporter, "torch_grad_captures_total", layer="first") == 1
    assert errors(exporter) == {}


# A second start


def test_starting_again_replaces() -> None:
    """A second start on the same model closes the first, and its port can be taken over."""
    model = Perceptron()
    first = start(model, 0)
    train(model, 2)
    hooks, port = hooks_of(model), first.port
    with start(model, port) as second:
        assert second.port == port
        assert (first.port, first.url) == (None, None)
        train(model, 3)
        assert value(second, STEPS, optimizer="SGD") == 3
        assert value(first, STEPS, optimizer="SGD") == 2
        assert hooks_of(model) == hooks > 0
        start(model)  # not kept
        gc.collect()
        third = start(model)
        assert hooks_of(model) == hooks
        third.close()
    assert hooks_of(model) == 0


def test_starting_again_after_the_model_is_gone() -> None:
    """A notebook cell that also makes its model again gets the same port, and nothing of the first is left."""

    def cell(port: int) -> Exporter:
        return start(Perceptron(), port)

    first = cell(0)
    port = first.port
    assert port is not None
    gc.collect()
    before = lasting_threads()
    with cell(port) as second:
        assert second.port == port
        assert first.port is None
        assert eventually(lambda: lasting_threads() == before)


def test_a_late_process_group_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first scrape after a process group was made later than the exporter warns; no other scrape does."""
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), start(Perceptron()) as exporter:
        exporter.collect()
        logged = [len(caplog.records)]
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            for _ in range(2):
                exporter.collect()
                logged.append(sum("the process group came after the exporter" in message for message in caplog.messages))
        finally:
            dist.destroy_process_group()
    assert logged == [0, 1, 1]


def test_an_interrupted_hook_leaves_the_traceback() -> None:
    """Ctrl-C while autograd runs is raised in the first hook behind it; the traceback ends before that, in PyTorch."""
    model = Perceptron()

    def interrupted() -> None:
        with start(model):
            loss = model(batch()).square().mean()
            loss.register_hook(functools.partial(next, iter(_thread.interrupt_main, 0)))
            loss.backward()

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    packages = [frame.frame.f_globals["__name__"].partition(".")[0] for frame in caught.traceback]
    assert (packages[:2], {*packages[2:]}) == (["tests", "tests"], {"torch"})


ANNOUNCED = """
import logging, os, sys, torch
from torch_grad_exporter import start_exporter
exec(sys.argv[1])
with start_exporter(torch.nn.Linear(1, 1), 0) as exporter:
    print(exporter.page_url, exporter.url, exporter.port, repr(exporter).endswith(f" {exporter.page_url}>"))
    port = exporter.port
start_exporter(torch.nn.Linear(1, 1), port - int(os.environ.get("LOCAL_RANK", 0))).close()  # the same port again
"""

LOGGER = 'logging.getLogger("torch_grad_exporter")'


@pytest.mark.process
@pytest.mark.parametrize(
    ("setup", "served", "noted"),
    [
        ("", "", ""),
        ("logging.basicConfig()", "INFO:torch_grad_exporter:", "WARNING:torch_grad_exporter:"),
        (f"{LOGGER}.setLevel(logging.WARNING)", None, ""),
        (f"{LOGGER}.setLevel(logging.ERROR)", None, None),
        ("logging.getLogger().setLevel(logging.ERROR)", None, None),
        ("logging.disable()", None, None),
        (f"{LOGGER}.addHandler(logging.NullHandler())", None, None),
        ("os.environ.update(RANK='1', LOCAL_RANK='1', WORLD_SIZE='2', TORCH_GRAD_EXPORTER_RUN='two')", None, None),
    ],
    ids=["plain", "basicConfig", "WARNING", "ERROR", "root", "disabled", "handler", "rank 1"],
)
def test_the_address_is_the_first_line(starter: Starter, setup: str, served: str | None, noted: str | None) -> None:
    """The page is named first, how to keep an unread run last, as the program's logging asks; further ranks are silent."""
    program = starter.start(ANNOUNCED, setup)
    assert program.wait() == 0, program.err.read_text()
    page, url, port, in_repr = program.out.read_text().split()
    assert (page, url, in_repr) == (f"http://localhost:{port}/", f"http://localhost:{port}/metrics", "True")
    lines = program.err.read_text().splitlines()
    if served is not None:
        assert lines.pop().startswith(f"{served}torch_grad_exporter: nothing has read the metrics of this run; exporter.save(path)")
    expected = [] if served is None else [f"{served}torch_grad_exporter: serving {page} (metrics at /metrics)"]
    assert lines[: len(expected)] == expected
    note = f"{noted}torch_grad_exporter: metrics on port {port} are readable by every host that can"
    assert [line[: len(note)] for line in lines[len(expected) :]] == ([] if noted is None else [note]), lines


OPEN = """
import logging, os, torch
from torch_grad_exporter import start_exporter
os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCH_GRAD_EXPORTER_RUN="two ranks")
for addr, rank in (("", "0"), ("::", "0"), ("127.0.0.1", "0"), ("", "1")):
    if os.fork() == 0:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        said, handler = [], logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("torch_grad_exporter").addHandler(handler)
        ports = []
        for _ in range(2):
            with start_exporter(torch.nn.Linear(1, 1), 0, addr=addr) as exporter:
                ports.append(exporter.port)
        lines = [line for line in said if "readable by every host" in line]
        print(repr(addr), rank, len(lines), all(f" {ports[0]} " in line for line in lines), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_an_open_port_is_logged_once(starter: Starter) -> None:
    """One line says that all can read the metrics, if so: with the port, once in a process, on one rank of a host."""
    program = starter.start(OPEN)
    assert program.wait() == 0
    lines = ["'' 0 1", "'::' 0 1", "'127.0.0.1' 0 0", "'' 1 0"]
    assert program.out.read_text().splitlines() == [f"{line} True" for line in lines]


def test_a_value_arrives_while_the_loop_stands_still() -> None:
    """The last step before a hang is on `/metrics` without another step."""
    model = Perceptron()
    with start(model, 0) as exporter:
        train(model, 5)
        assert eventually(lambda: re.search(rf"^{STEPS}{{.*}} 5(\.0)?$", get(exporter.url), re.MULTILINE) is not None)
        assert re.search(r"^torch_grad_captures_total{.*first.*} 5(\.0)?$", get(exporter.url), re.MULTILINE)


def test_wrong_values_cost_only_themselves() -> None:
    """What `observe` cannot take does not raise; values beside it, later ones, samples and scrapes are complete."""
    model = Perceptron()
    with start(model, 0) as exporter:
        exporter.observe(loss="abc", epoch=3)  # type: ignore[arg-type]
        exporter.observe(loss=None, tokens=5)
        exporter.observe(loss=torch.ones(0))
        train(model, 3)
        exporter.observe(loss=0.5)
        assert eventually(lambda: "torch_train_loss{" in get(exporter.url))
        shown = values(exporter)
        assert shown[key("torch_train_loss")] == 0.5
        assert shown[key("torch_train_epoch")] == 3
        assert shown[key("torch_train_tokens_total")] == 5
        assert shown[key("torch_grad_captures_total", layer="first")] == 3
        assert sum(errors(exporter).values()) >= 1
