"""The windows of norms, against all norms in a list: each number, and when there is one."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torch_grad_exporter.actions.freeze.freeze import Freeze
from torch_grad_exporter.actions.freeze.norms import PARTS, SAMPLES, NormReading, Window, Windows
from torch_grad_exporter.aggregation.cursor import NormSums

LAYERS = ("a", "b", "c")


def test_sums_are_those_of_a_plain_loop() -> None:
    """A sum, a count and a count of non-finite gradients for each row, also over new tables, and none of it twice."""
    random = np.random.default_rng(0)
    sums, plain = NormSums(5), [[0.0, 0, 0] for _ in range(5)]
    for turn in range(200):
        rows = np.flatnonzero(random.random(len(plain)) < 0.6)
        norms = random.lognormal(-5, 4, len(rows))
        norms[random.random(len(rows)) < 0.1] = random.choice([math.nan, math.inf])
        nonfinite = ~np.isfinite(norms) & (random.random(len(rows)) < 0.7)  # a finite gradient of unknown size has no norm
        sums.enter(rows, norms, nonfinite)
        for row, norm, bad in zip(rows.tolist(), norms.tolist(), nonfinite.tolist(), strict=True):
            plain[row][0] += norm if math.isfinite(norm) else 0.0
            plain[row][1] += math.isfinite(norm)
            plain[row][2] += bad
        if turn % 50 == 20:  # rows go, change places and come
            index = random.permutation(len(plain) + 2)[: len(plain)]
            index[index >= len(plain)] = -1
            sums, plain = sums.moved(index), [[0.0, 0, 0] if row < 0 else plain[row] for row in index.tolist()]
        if turn % 50 == 45:
            assert sums.take().T.tolist() == plain
            plain = [[0.0, 0, 0] for _ in plain]
            assert not sums.take().any()


Added = Sequence[tuple[float, float | None]]
"""What was added, one after the other: over how many steps, and the norm of a sample in them."""


def _shortest(added: Added, after: int) -> int:
    """How many of the last additions are `after` steps and ten samples, 0 if there are none."""
    steps, samples = 0.0, 0
    for number, (span, norm) in enumerate(reversed(added), start=1):
        steps, samples = steps + span, samples + (norm is not None)
        if steps >= after and samples >= SAMPLES:
            return number
    return 0


def _last(added: Added, steps: float) -> list[float]:
    """The norms in the last so many steps, which have to be those of a number of additions."""
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
    """Its mean is that of its samples; it is as long as asked for, or as ten samples, and by a part or an addition longer."""
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


def test_one_gradient_that_is_not_finite_spoils_a_window_until_it_has_left() -> None:
    """NaN for as long as it is in it, and no longer."""
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
    """Over 300 readings of three layers: left out while they are frozen, begun anew when they are not."""
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


def test_a_state_is_read_while_norms_come() -> None:
    """A checkpoint on the thread that trains, and readings on the one that judges: neither raises."""
    freeze, over = Freeze(after=100), threading.Event()
    window = freeze._windows
    window.take(_reading(0.0, 1.0, 1.0, 1.0), ())

    def judge() -> None:
        for step in range(1, 15000):
            window.take(_reading(float(step), 1.0, 1.0, 1.0), ())
        over.set()

    thread = threading.Thread(target=judge)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not over.is_set():
            assert set(freeze.state_dict()["norms"]) == set(LAYERS)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_a_busy_host_is_no_failure() -> None:
    """A reading that would have to wait is left out, and the layers that begin anew are not forgotten with it."""
    freeze = Freeze(1e-3, after=20)
    layers: Any = SimpleNamespace(labels=SimpleNamespace(frozen=frozenset()), sharded=frozenset)
    busy = True

    def read() -> NormReading:
        if busy:
            raise TimeoutError("another drain did not finish")
        return _reading(1.0, 1.0)

    freeze._layers, freeze._norms = layers, SimpleNamespace(read=read)  # type: ignore[assignment]
    freeze._revived.append("a")
    assert not freeze.holds(None)  # type: ignore[arg-type]
    assert list(freeze._revived) == ["a"]
    busy = False
    assert not freeze.holds(None)  # type: ignore[arg-type]
    assert not freeze._revived
