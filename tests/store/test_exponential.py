"""Exponential buckets of norms: their borders, and that they count what the classic buckets count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping

from tests.support.torch_versions import get_total_norm
from torch_grad_exporter import start_exporter
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.metrics.exponential import SCALE
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.store.exponential import ExponentialRows, buckets

MAPPING = LogarithmMapping(SCALE)
NAMES = ("torch_grad_norm_distribution", "torch_grad_global_norm_distribution")


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_buckets_are_those_of_opentelemetry(value: float) -> None:
    """A value's bucket is the one that the SDK finds, or its neighbour where the value is a border to the last few digits."""
    (found,) = buckets(np.array([value])).tolist()
    assert abs(found - MAPPING.map_to_index(value)) <= 1
    if found != MAPPING.map_to_index(value):
        border = 2 ** ((max(found, MAPPING.map_to_index(value))) / 2**SCALE)
        assert value == pytest.approx(border, rel=1e-13)


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "add", "new", "drop", "read"]), st.integers(0, 9), st.floats(0, 1e12)), max_size=60
    )
)
def test_rows_count_each_for_themselves(actions: list[tuple[str, int, float]]) -> None:
    """However rows come, go and are added up between values, and however far these lie apart, each has its own counts."""
    rows, reference = ExponentialRows(1), [Counter[int]()]
    for action, number, value in actions:
        row, keep = number % len(reference), list(range(len(reference)))
        if action == "enter":
            rows.enter(np.array([row, 0]), np.array([value, 1.0]))
            reference[0][-1] += 1
            if value > 0:
                reference[row][int(buckets(np.array([value]))[0])] += 1
        elif action == "add":
            rows.add(row, to=-1)
            reference[-1].update(dict(reference[row]))
        elif action == "read":
            assert list(rows.of([row])) == [dict(sorted(reference[row].items()))]
        else:
            keep = [-1, *keep] if action == "new" or len(keep) == 1 else [each for each in keep if each != row]
            rows.arrange(np.array(keep))
            reference = [Counter() if each < 0 else reference[each] for each in keep]
    assert list(rows.of(range(len(reference)))) == [dict(sorted(each.items())) for each in reference]


def trained(exporter: Exporter, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, observe: bool = False) -> None:
    """Train forty steps whose gradients grow and shrink, with a NaN, which is left out, and a zero."""
    for number in range(40):
        optimizer.zero_grad()
        factor = float("nan") if number == 7 else 0.0 if number == 9 else 2.0 ** (number % 13 - 6)
        (model(torch.randn(4, 3)).sum() * factor).backward()
        if observe:
            exporter.observe(grad_norm=get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        if number != 7:
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("observe", [False, True], ids=["sampled", "observed"])
def test_both_kinds_of_buckets_count_the_same(observe: bool) -> None:
    """For layers and over all, exponential buckets within a classic one count as many; a zero is in the classic one alone."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with start_exporter(model, port=None, every=1) as exporter:
        trained(exporter, model, optimizer, observe=observe)
        families = [family for family in exporter.collect() if family.spec.name in NAMES]
    assert [len(family.labels) for family in families] == [2, 1]
    for family in families:
        for row in range(len(family.labels)):
            assert merged(family, row) == pytest.approx(classic(family, row))
            assert sum((family.exponential or ())[row].values()) == 38  # without the NaN and the zero


def merged(family: Family, row: int) -> list[float]:
    """Return the exponential counts up to each bound, to within a bucket's width."""
    assert family.exponential is not None
    counts = family.exponential[row]
    return [sum(n for i, n in counts.items() if 2 ** ((i + 0.5) / 2**SCALE) <= bound) for bound in WIDE]


def classic(family: Family, row: int) -> list[float]:
    """Return the classic counts up to the same bounds, without the zero, which is below all."""
    bounds = np.array([*family.spec.buckets, np.inf])
    return [float(family.values[row][bounds <= bound].sum()) - 1 for bound in WIDE]


WIDE = (1e-8, 1e4)
"""Bounds far from every norm here, and in both kinds of classic buckets."""


def test_a_value_far_away_costs_one_bucket() -> None:
    """What lies between two values takes no memory."""
    rows = ExponentialRows(3)
    rows.enter(np.array([0, 1, 2]), np.array([1e-300, 1.0, 1e300]))
    assert rows.of([0, 1, 2]).counts.shape == (3, 3)
