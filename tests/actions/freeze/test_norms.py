"""The windows of norms, compared with all norms in a list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from torch_grad_exporter.actions.freeze.norms import PARTS, SAMPLES, NormReading, Window, Windows

LAYERS = ("a", "b", "c")


Added = Sequence[tuple[float, float | None]]
"""What was added, one after the other: over how many steps, and the norm of a sample in them."""


def _shortest(added: Added, after: int) -> int:
    """Return how many of the last additions are `after` steps and ten samples, 0 if there are none."""
    steps, samples = 0.0, 0
    for number, (span, norm) in enumerate(reversed(added), start=1):
        steps, samples = steps + span, samples + (norm is not None)
        if steps >= after and samples >= SAMPLES:
            return number
    return 0


def _last(added: Added, steps: float) -> list[float]:
    """Return the norms of this many last steps."""
    found = list[float]()
    for span, norm in reversed(added):
        if steps <= 0:
            break
        steps -= span
        found += [] if norm is None else [norm]
    assert steps == 0
    return found


@pytest.mark.parametrize("after", [1, 16, 100])
@pytest.mark.parametrize("every", [1, 3, 40])
def test_a_window_is_the_last_steps(after: int, every: int) -> None:
    """A window has the mean of its samples, and is longer than asked for by a part at most."""
    random = np.random.default_rng(after * every)
    window, added = Window(after), list[tuple[float, float | None]]()
    full = 0
    for _ in range(max(4 * after, 40 * every) // every):
        norm = float(random.lognormal()) if random.random() < 0.8 else None
        added.append((float(every), norm))
        window.add((float(every), norm or 0.0, float(norm is not None), 0.0))
        shortest = _shortest(added, after)
        assert math.isnan(window.mean) == (not shortest)
        if not shortest:
            continue
        full += 1
        parts = np.array(window.state())
        steps, total, samples, _ = parts.sum(axis=0)
        inside = _last(added, steps)
        assert len(inside) == samples
        assert total == pytest.approx(math.fsum(inside), rel=1e-12)
        assert window.mean == pytest.approx(math.fsum(inside) / len(inside), rel=1e-12)
        assert steps >= shortest * every
        assert len(parts) == 1 or steps - parts[0, 0] < after or samples - parts[0, 2] < SAMPLES  # as short as parts allow
        assert len(parts) <= max(PARTS, SAMPLES) + 1
        assert all(part[0] < after / PARTS + every or part[2] <= 1 for part in parts)  # and these are no longer than need be
    assert full


def test_a_nonfinite_gradient_spoils_its_window() -> None:
    """The mean is NaN while a gradient in the window is not finite."""
    window = Window(20)
    known = []
    for number in range(60):
        window.add((1.0, 1e-6, 1.0, float(number == 5)))
        known.append(not math.isnan(window.mean))
    assert not any(known[:25])
    assert all(known[27:])


def _reading(step: float, *norms: float | None) -> NormReading:
    sums = [[0.0, 0.0, 0.0] if norm is None else [norm, 1.0, 0.0] for norm in norms]
    return NormReading(step, LAYERS[: len(norms)], np.array(sums).T)


def test_layers_below_are_those_of_a_plain_loop() -> None:
    """Over 300 readings the layers below the threshold are those of a plain loop, also around frozen layers."""
    random = np.random.default_rng(3)
    windows, plain = Windows(30), {layer: list[tuple[float, float | None]]() for layer in LAYERS}
    step, seen = 0.0, set[str]()
    for turn in range(300):
        span = float(random.integers(1, 4)) if turn else 0.0  # before the first reading nobody has counted
        step += span
        norms = [None if random.random() < 0.3 else float(random.uniform(0, size)) for size in (1, 2, 3)]
        without, afresh = ({"b"} if 100 <= turn < 140 else set[str]()), ({"c"} if turn == 200 else set[str]())
        windows.take(_reading(step, *norms), without, afresh)
        below, states = windows.below(1.05), windows.state()
        for layer, norm in zip(LAYERS, norms, strict=True):
            added = plain[layer] = [] if layer in without | afresh else [*plain[layer], (span, norm)]
            inside = _last(added, sum(part[0] for part in states.get(layer, ())))
            holds = bool(_shortest(added, 30)) and math.fsum(inside) / len(inside) < 1.05
            assert (layer in below) == holds
            if holds:
                assert below[layer] == pytest.approx(math.fsum(inside) / len(inside), rel=1e-12)
                seen.add(layer)
    assert seen >= {"a", "b"}
