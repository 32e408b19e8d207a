"""Dispatch modes and tracers of the user see his operations, and none of the exporter's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import REGIMES, all_regimes, watching, whole
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


@contextlib.contextmanager
def exported(loop: RecordedLoop, regime: str | None) -> Iterator[None]:
    """Watch the loop in a regime, or do not if there is none; check its numbers at the end."""
    torch.manual_seed(0)
    if regime is None:
        for _ in range(4):
            loop.step()
        yield
        return
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        yield
        loop.go_on(regime)
        loop.check(exporter)


def trained(loop: RecordedLoop, mode: TorchDispatchMode | None) -> None:
    """Train one step within a mode. What the test itself computes is outside of it."""
    loop.optimizer.zero_grad()
    with mode or contextlib.nullcontext():
        loop.model(batch()).square().mean().backward()
    loop.norms.append(whole(loop.model))
    with mode or contextlib.nullcontext():
        loop.optimizer.step()
    loop.steps += 1


def logged(regime: str | None) -> list[list[str]]:
    """Return the operations of some steps."""
    loop, found = RecordedLoop(), list[list[str]]()
    with exported(loop, regime):
        for _ in range(ROUNDS):
            mode = Logged()
            trained(loop, mode)
            found.append(mode.names)
    return found


def counted(regime: str | None) -> list[dict[str, dict[Any, int]]]:
    """Return the floating point operations of some steps, by module and operation."""
    loop, found = RecordedLoop(), list[dict[str, dict[Any, int]]]()
    with exported(loop, regime):
        for _ in range(ROUNDS):
            mode = FlopCounterMode(display=False)
            with mode:
                loop.model(batch())
            trained(loop, None)
            found.append(mode.get_flop_counts())
    return found


def traced(regime: str | None) -> list[list[str]]:
    """Return the operations of graphs that are traced between steps."""
    loop, found = RecordedLoop(), list[list[str]]()
    with exported(loop, regime):
        for _ in range(ROUNDS):
            graph = torch.jit.trace(loop.model, batch(), check_trace=False).inlined_graph
            found.append([node.kind() for node in graph.nodes()])
            loop.step()
    return found


def counted_whole(regime: str | None) -> list[int]:
    """Return the floating point operations of the forward, backward and step together."""
    loop, found = RecordedLoop(), list[int]()
    with exported(loop, regime):
        for _ in range(ROUNDS):
            mode = FlopCounterMode(display=False)
            trained(loop, mode)
            found.append(mode.get_total_flops())
    return found


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("look", [logged, counted, counted_whole, traced])
def test_the_user_sees_what_he_sees_without(look: Callable[[str | None], list[Any]], regime: str) -> None:
    """A log of operations, counts of them and a traced graph are those without an exporter, in sampled rounds as well."""
    assert look(regime) == look(None)
