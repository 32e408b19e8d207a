"""Dispatch modes and tracers of the user see his operations, and none of the exporter's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import REGIMES, each_regime, watching, whole
from tests.support.models import batch

ROUNDS = 24

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Logged(TorchDispatchMode):
    """A mode that keeps the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def trained(loop: RecordedLoop, mode: TorchDispatchMode | None) -> None:
    """Train one step within a mode. What the test itself computes is outside of it."""
    loop.optimizer.zero_grad()
    with mode or contextlib.nullcontext():
        loop.model(batch()).square().mean().backward()
    loop.norms.append(whole(loop.model))
    with mode or contextlib.nullcontext():
        loop.optimizer.step()
    loop.steps += 1


def logged(loop: RecordedLoop) -> list[str]:
    """Return the operations of a step."""
    mode = Logged()
    trained(loop, mode)
    return mode.names


def counted(loop: RecordedLoop) -> dict[str, dict[Any, int]]:
    """Return the floating point operations of a forward, by module and operation."""
    with FlopCounterMode(display=False) as mode:
        loop.model(batch())
    trained(loop, None)
    return mode.get_flop_counts()


def counted_whole(loop: RecordedLoop) -> int:
    """Return the floating point operations of the forward, backward and step together."""
    mode = FlopCounterMode(display=False)
    trained(loop, mode)
    return mode.get_total_flops()


def traced(loop: RecordedLoop) -> list[str]:
    """Return the operations of a graph that is traced before a step."""
    graph = torch.jit.trace(loop.model, batch(), check_trace=False).inlined_graph
    loop.step()
    return [node.kind() for node in graph.nodes()]


def seen(look: Callable[[RecordedLoop], object], regime: str | None) -> list[object]:
    """Return what is seen in some rounds, watched in a regime or without an exporter; check the exporter's numbers at the end."""
    torch.manual_seed(0)
    loop = RecordedLoop()
    if regime is None:
        for _ in range(4):
            loop.step()
        return [look(loop) for _ in range(ROUNDS)]
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        found = [look(loop) for _ in range(ROUNDS)]
        loop.go_on(regime)
        loop.check(exporter)
    return found


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("look", [logged, counted, counted_whole, traced])
def test_the_user_sees_what_he_sees_without(look: Callable[[RecordedLoop], object], regime: str) -> None:
    """A log of operations, counts of them and a traced graph are those without an exporter, in sampled rounds as well."""
    assert seen(look, regime) == seen(look, None)
