"""Attaching within a process: when, to what, by which names; and that a failure of it costs the training nothing."""

from __future__ import annotations

import gc
import logging
import signal
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.scrape import value
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter import Exporter
from torch_grad_exporter.errors import PREFIX
from torch_grad_exporter.integrations.attach import Attachment

pytestmark = pytest.mark.process


class Listener:
    """The lines of an attachment, and the exporters that it has had."""

    made: ClassVar[list[Listener]] = []

    def __init__(self, **options: object) -> None:
        self.lines: list[str] = []
        self.exporters: list[Exporter] = []
        self.asked = 0
        self._options = options
        self.log = logging.Logger("listener")  # noqa: LOG001 - one for each
        self.log.addFilter(lambda record: self.lines.append(record.getMessage().removeprefix(PREFIX)))
        self.attachment = Attachment(self)
        self.attachment.arm()
        self.made.append(self)

    def options(self) -> dict[str, object]:
        self.asked += 1
        return {"port": None, "every": 1, **self._options}

    def attached(self, exporter: Exporter) -> None:
        self.exporters.append(exporter)

    def replaced(self, exporter: Exporter) -> None:
        exporter.end(None)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train a step."""
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def trained(steps: int = 1) -> torch.nn.Linear:
    """Return a layer after some steps."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model


def a_forward_alone_is_not_a_training() -> None:
    """Neither a model nor a forward without gradients attaches, the first forward of a training does; the end leaves nothing."""
    listener, model = Listener(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert not listener.exporters
    assert listener.asked == 0
    step(model, optimizer)
    assert listener.asked == 1
    assert listener.lines == ["watching Linear, trained by SGD"]
    assert value(listener.exporters[0], "torch_train_steps_total", optimizer="SGD") == 1
    gone = weakref.ref(model)
    listener.exporters[0].close()
    assert not global_step_hooks()
    del model, optimizer
    gc.collect()
    assert gone() is None


def a_loop_without_an_optimizer_is_not_watched() -> None:
    """A loop that updates its parameters itself is left alone, and the reason says what to call."""
    listener, model = Listener(), torch.nn.Linear(3, 2)
    assert "never trained" in listener.attachment.why_not()
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    assert not listener.exporters
    assert "no optimizer of PyTorch; use start_exporter" in listener.attachment.why_not()


def a_later_optimizer_is_watched() -> None:
    """A second model is watched from its second step on, in the same run, and a tensor outside all modules is not."""
    listener = Listener()
    first, second, alpha = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2), torch.zeros(1, requires_grad=True)
    optimizer, other = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam([alpha])
    for _ in range(2):
        step(first, optimizer)
        alpha.grad = torch.ones(1)
        other.step()
    assert len(listener.exporters) == 1
    del other
    later = torch.optim.AdamW(second.parameters(), lr=0.1)
    for _ in range(2):
        step(second, later)
        step(first, optimizer)
    before, after = listener.exporters
    assert "Linear (Linear), Linear-2 (Linear), trained by" in listener.lines[1]
    assert before.run == after.run
    assert value(after, "torch_train_steps_total", optimizer="AdamW") == 1


def an_earlier_model_in_a_cycle_is_not_watched() -> None:
    """A model that waits for the garbage collector is not watched with the next."""
    listener = Listener()
    for _ in range(2):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.trainer = {"model": model, "optimizer": optimizer}
        step(model, optimizer)
        step(model, optimizer)
    assert listener.lines == ["watching Linear, trained by SGD", "from now on watching Linear, trained by SGD"]


def a_failure_leaves_the_training_alone() -> None:
    """A failure to attach is logged once, the training runs on, and no hook is left."""
    listener = Listener()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_objects", lambda: 1 / 0)
        trained(2)
    assert listener.lines == ["nothing is watched: ZeroDivisionError: division by zero"]
    assert listener.attachment.given_up
    assert not global_step_hooks()


def a_wrong_option_leaves_the_training_alone() -> None:
    """A pattern that matches no layer is logged once the model exists, and nothing is watched."""
    listener = Listener(include="nothing")
    trained()
    assert not listener.exporters
    assert listener.lines[0].startswith("nothing is watched: ValueError: include='nothing': matches none")
    assert not global_step_hooks()


class Odd(torch.nn.Linear):
    """A module whose `parameters` is for something else."""

    def parameters(self, group: str) -> list[str]:  # type: ignore[override]
        return [group]


class Lazy:
    """A proxy that fails when it is asked for anything."""

    asked = 0

    def __getattribute__(self, name: str) -> object:
        Lazy.asked += 1
        raise RuntimeError(name)


class Pair:
    """Two networks as attributes."""

    def __init__(self) -> None:
        self.left, self.right = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)


def odd_objects_are_left_out() -> None:
    """Beside an odd module, half an optimizer, a dead reference and a lazy proxy, the models are watched."""
    listener, odd, broken = Listener(), Odd(3, 2), torch.optim.SGD.__new__(torch.optim.SGD)
    broken.param_groups = 3  # type: ignore[assignment]

    def train() -> None:
        lazy, dead = Lazy(), weakref.proxy(Pair())
        pair = Pair()
        odd(torch.ones(2, 3))
        optimizer = torch.optim.SGD([*pair.left.parameters(), *pair.right.parameters()], lr=0.1)
        pair.left(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        del lazy, dead

    train()
    assert listener.lines == ["watching Linear (Linear), Linear-2 (Linear), trained by SGD"]
    assert Lazy.asked == 0


class TimedOut(Exception):
    """Of the script's own alarm."""


def an_alarm_of_the_script_reaches_it() -> None:
    """An exception of a signal handler during the search reaches the script, and the next forward searches again."""

    def rings(*_: object) -> None:
        raise TimedOut

    listener = Listener()
    signal.signal(signal.SIGUSR1, rings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_objects", lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(TimedOut):
            trained()
    assert not listener.attachment.given_up
    model = trained()
    assert listener.exporters[0].watches([model])


SCENES = (
    a_forward_alone_is_not_a_training, a_loop_without_an_optimizer_is_not_watched, a_later_optimizer_is_watched,
    an_earlier_model_in_a_cycle_is_not_watched, a_failure_leaves_the_training_alone, a_wrong_option_leaves_the_training_alone,
    odd_objects_are_left_out, an_alarm_of_the_script_reaches_it,
)  # fmt: skip


def _run(_rank: int, folder: str) -> None:
    """Run all scenes, and write the failure of each."""
    for scene in SCENES:
        try:
            scene()
        except BaseException:  # noqa: BLE001 - also a failed assertion
            (Path(folder) / scene.__name__).write_text(traceback.format_exc())
        for listener in Listener.made:
            listener.attachment.disarm()
            for exporter in listener.exporters:
                exporter.close()
        Listener.made.clear()
        gc.collect()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the failures of a process in which no other model or optimizer is alive."""
    folder = tmp_path_factory.mktemp("scenes")
    run_ranks(_run, str(folder), ranks=1)
    return folder


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_attach(scene: Callable[[], None], failures: Path) -> None:
    """Each scene holds."""
    failure = failures / scene.__name__
    assert not failure.exists(), failure.read_text()
