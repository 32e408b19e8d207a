"""`close()` leaves no hook behind, after any number of rounds and in the middle of one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.capture.scenes import COUNTED, DURATION, REGIMES, STEPS, Loop
from tests.support.models import batch
from tests.support.scrape import OFF, errors, value
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
@pytest.mark.parametrize(("regime", "rounds"), [("sampled", 0), ("sampled", 1), ("sampled", 20), ("counted", 20), ("counted", 300)])
@pytest.mark.parametrize("moment", ["step", "forward", "backward", "accumulation"])
def test_at_a_moment_of_a_round(moment: str, rounds: int, regime: str) -> None:
    """Closed after a step, a forward, a backward or the first of two, it leaves the hooks that were there; the loop goes on."""
    loop, before = hooked()
    exporter = start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime])
    for _ in range(rounds):
        loop.step()
    if moment != "step":
        loop.optimizer.zero_grad()
        loss = loop.model(batch()).square().mean()
    if moment in ("backward", "accumulation"):
        loss.backward()
    thread = threading.Thread(target=exporter.close)
    thread.start()
    thread.join()
    exporter.close()
    assert all_hooks(loop.model, loop.optimizer) == before
    if moment == "step":
        loop.backward()
    elif moment == "forward":
        loss.backward()
    elif moment == "accumulation":
        loop.add()
    loop.optimizer.step()
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}
    if rounds > 1:
        assert value(exporter, STEPS, optimizer="SGD") == rounds
        assert value(exporter, f"{DURATION}_count") == rounds - 1


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


def on_another_thread(exporter: Exporter) -> threading.Thread:
    """Close on another thread, which ends at once or waits for the step."""
    thread = threading.Thread(target=exporter.close)
    thread.start()
    thread.join(0.2)
    return thread


@pytest.mark.parametrize("close", [Exporter.close, on_another_thread])
@pytest.mark.parametrize("kind", ["own", "all"])
def test_within_a_hook_of_a_step(kind: str, close: Callable[[Exporter], threading.Thread | None]) -> None:
    """`close()` while the user's hooks of a step are called, of its optimizer or of all, raises nothing into the loop."""
    loop, before = hooked()
    exporter = start_exporter(loop.model, port=None, collectors=OFF, every=1)
    calls, closing = [], []

    def act(*_given: object) -> None:
        calls.append(kind)
        if len(calls) == 4:
            closing.append(close(exporter))

    register = register_optimizer_step_pre_hook if kind == "all" else loop.optimizer.register_step_pre_hook
    handles = [register(act), register(mark)]
    for _ in range(8):
        loop.step()
    for handle in handles:
        handle.remove()
    exporter.close()  # which does not wait for another thread's
    for thread in filter(None, closing):
        thread.join()
    assert len(calls) == 8
    with start_exporter(loop.model, port=None, collectors=OFF):
        pass  # removes what had to be left within the step
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporter) == {}
