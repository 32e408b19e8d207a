"""`close()` leaves no hook behind, after any number of rounds and in the middle of one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.capture.scenes import COUNTED, OFF, REGIMES, Loop, each_regime
from tests.support.models import batch
from tests.support.scrape import errors
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import Exporter, start_exporter


def mark(*_given: object) -> None:
    """A hook of the user."""


def hooked() -> tuple[Loop, list[object]]:
    """Return a loop with hooks of the user, and all hooks that there are."""
    loop = Loop()
    loop.model.register_forward_hook(mark)
    loop.model.first.weight.register_hook(mark)
    loop.model.second.weight.register_post_accumulate_grad_hook(mark)
    loop.optimizer.register_step_post_hook(mark)
    return loop, all_hooks(loop.model, loop.optimizer)


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("rounds", [0, 1, 5, 20, 300])
def test_after_whole_rounds(rounds: int, regime: str) -> None:
    """After this many rounds `close()` leaves exactly the hooks that were there before."""
    loop, before = hooked()
    exporter = start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime])
    for _ in range(rounds):
        loop.step()
    exporter.close()
    assert all_hooks(loop.model, loop.optimizer) == before
    loop.step()
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("rounds", [0, 1, 20, 300])
@pytest.mark.parametrize("moment", ["forward", "backward", "accumulation"])
def test_within_a_round(moment: str, rounds: int, regime: str) -> None:
    """The same where the exporter is closed after a forward, a backward or the first of two; the loop goes on."""
    loop, before = hooked()
    exporter = start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime])
    for _ in range(rounds):
        loop.step()
    loop.optimizer.zero_grad()
    loss = loop.model(batch()).square().mean()
    if moment != "forward":
        loss.backward()
    exporter.close()
    assert all_hooks(loop.model, loop.optimizer) == before
    if moment == "forward":
        loss.backward()
    elif moment == "accumulation":
        loop.add()
    loop.optimizer.step()
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}


@pytest.mark.slow
def test_with_all_that_adds_hooks() -> None:
    """The same with inspections of inner modules, watched tensors, weights and clipping."""
    loop, before = hooked()
    options = {"activations": True, "layer_times": True, "nan_origin": "always", "weights": True}
    exporter = start_exporter(loop.model, port=None, collectors=OFF, **COUNTED | {"every": 3}, **options)
    for _ in range(20):
        loop.optimizer.zero_grad()
        hidden = loop.model.first(batch())
        exporter.watch("hidden", hidden)
        loop.model.second(hidden.relu()).square().mean().backward()
        loop.optimizer.step()
        loop.step()
    exporter.close()
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}


@pytest.mark.slow
def test_an_exporter_after_another_one() -> None:
    """Ten exporters in a row, some of them for two models, leave nothing."""
    loop, before = hooked()
    other = torch.nn.Linear(6, 3)
    for number in range(10):
        watched = {"one": loop.model, "two": other} if number % 2 else loop.model
        with start_exporter(watched, port=None, collectors=OFF, every=1):
            for _ in range(number):
                loop.step()
        assert all_hooks(loop.model, loop.optimizer) == before
    assert all_hooks(other) == all_hooks(torch.nn.Linear(6, 3))


def closed_within_a_step(kind: str, act: Callable[[Exporter], object]) -> None:
    """Train; in one step a hook of the user, of its optimizer or of all, lets `act` close the exporter, and others follow."""
    loop, before = hooked()
    exporter = start_exporter(loop.model, port=None, collectors=OFF, every=1)
    calls = []

    def close(*_given: object) -> None:
        calls.append(kind)
        if len(calls) == 4:
            act(exporter)

    register = register_optimizer_step_pre_hook if kind == "all" else loop.optimizer.register_step_pre_hook
    handles = [register(close), register(mark)]
    for _ in range(8):
        loop.step()
    for handle in handles:
        handle.remove()
    assert len(calls) == 8
    with start_exporter(loop.model, port=None, collectors=OFF):
        pass  # removes what had to be left within the step
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}


@pytest.mark.parametrize("kind", ["own", "all"])
def test_within_a_hook_of_a_step(kind: str) -> None:
    """`close()` in the user's own hook of a step does not make PyTorch raise into the loop."""
    closed_within_a_step(kind, Exporter.close)


@pytest.mark.parametrize("kind", ["own", "all"])
def test_on_another_thread_during_a_step(kind: str) -> None:
    """`close()` on another thread, while hooks of a step are called, does not make PyTorch raise into the loop."""
    threads = []

    def close(exporter: Exporter) -> None:
        threads.append(threading.Thread(target=exporter.close))
        threads[0].start()
        threads[0].join(0.2)  # it ends at once, or waits for the step

    closed_within_a_step(kind, close)
    threads[0].join()
