"""Properties of all that is added up and judged on the host, the totals against a model of them in plain Python."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.aggregation.test_gradients import captured, row
from tests.support.gradients import INF, NAN, close
from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.aggregation.baseline import Baseline, Baselines
from torch_grad_exporter.aggregation.samples import Choice, Groups, Sample
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import length

pytestmark = no_timeout_in_a_soak


@st.composite
def measured_rows(draw: st.DrawFn) -> list[float]:
    """What may have been measured of a parameter of 8 elements and 2 units."""
    nans, infs = draw(st.sampled_from([(0, 0)] * 6 + [(1, 0), (0, 2), (3, 1)]))
    norm = NAN if nans else INF if infs else draw(st.sampled_from([0.0, 5e-324, 1e-200, 1.0, 1e200, 1.7e308]) | st.floats(0, 1e6))
    return row(norm, zeros=draw(st.integers(0, 8)), nans=nans, infs=infs)


@given(st.dictionaries(st.integers(0, 5), measured_rows(), min_size=1))
def test_a_layer_is_the_sum_of_its_parameters(rows: dict[int, list[float]]) -> None:
    """Norm, counts and extremes of a group are those over all its parameters, whatever their size."""
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
    table = LayerIndex({"": layers}).table
    sample = Sample.of(captured(1, rows, table=table, owners=[0] * 6))
    with np.errstate(all="ignore"):
        groups = Groups(sample, Choice.of(table, sample.present))
        norms, nans, zeros = (groups.combined(column) for column in (Column.NORM, Column.NANS, Column.ZEROS))
        smallest, largest = groups.combined(Column.MIN), groups.combined(Column.MAX)
    for i, layer in enumerate(groups.layers.tolist()):
        own = [one for place, one in rows.items() if place // 2 == layer]
        assert close(norms[i], norm_of(own), 1e-12)
        assert (nans[i], zeros[i]) == (sum(r[Column.NANS] for r in own), sum(r[Column.ZEROS] for r in own))
        assert close(smallest[i], NAN if nans[i] else min(r[Column.MIN] for r in own), 0)
        assert close(largest[i], NAN if nans[i] else max(r[Column.MAX] for r in own), 0)
    assert groups.layers.tolist() == sorted({place // 2 for place in rows})
    assert close(length(sample.norms[sample.present]), norm_of(rows.values()), 1e-12)


def norm_of(rows: Iterable[Sequence[float]]) -> float:
    """The norm of all these parameters together."""
    return NAN if any(one[Column.NANS] for one in rows) else math.hypot(*(one[Column.NORM] for one in rows))


def judged_exactly(series: Sequence[float], *, log: bool) -> list[tuple[Fraction | None, bool]]:
    """Z-scores, and which values are spikes, from the definition, in fractions; gives up where a verdict hangs on rounding."""
    past: deque[Fraction] = deque(maxlen=128)
    found: list[tuple[Fraction | None, bool]] = []
    in_a_row = 0
    for sample in series:
        found.append((None, False))
        if not math.isfinite(sample) or (log and sample <= 0):
            continue
        value = Fraction(math.log(sample) if log else sample)
        if len(past) >= 20:
            middle = statistics.median(past)
            deviation = Fraction(1.4826) * statistics.median(abs(p - middle) for p in past)
            sigma = max(deviation, Fraction(0.1) if log else max(Fraction(0.01) * abs(middle), Fraction(1e-12)))
            limit = max(6 * sigma, Fraction(math.log(3) if log else 0))
            assume(abs(value - middle - limit) > Fraction(1e-9) * max(limit, abs(middle), abs(value)))
            found[-1] = ((value - middle) / sigma, value - middle > limit)
        spike = found[-1][1]
        in_a_row = in_a_row + 1 if spike else 0
        if in_a_row == 32:
            past.clear()
            in_a_row = 0
        elif not spike:
            past.append(value)
    return found


def drawn(data: st.DataObject, usual: st.SearchStrategy[float], other: st.SearchStrategy[float]) -> list[float]:
    """Usual values, some of any kind, and perhaps many of one value."""
    series = data.draw(st.lists(usual, min_size=18, max_size=24)) + data.draw(st.lists(usual | other, max_size=20))
    return series + [data.draw(other)] * data.draw(st.sampled_from([0, 1, 31, 32, 33, 60]))


@given(st.data())
def test_baselines_stay_finite_and_judge_as_defined(data: st.DataObject) -> None:
    """After any values nothing in a baseline or a z-score is Inf, and verdicts are those of exact arithmetic."""
    series = drawn(data, st.floats(0.5, 2), st.floats())
    baselines = Baselines(1)
    for sample, (zscore, spike) in zip(series, judged_exactly(series, log=True), strict=True):
        zscores, spikes = baselines.judge(np.zeros(1, dtype=np.int64), np.array([sample]))
        assert bool(spikes[0]) == spike
        assert zscore is None or math.isclose(float(zscores[0]), zscore, rel_tol=1e-6, abs_tol=1e-6)
        assert not math.isinf(zscores[0])
    assert not np.isinf(baselines._rows["past"]).any()


@pytest.mark.parametrize("log", [True, False])
@given(st.data())
def test_the_baseline_of_one_quantity_judges_as_defined(log: bool, data: st.DataObject) -> None:
    """Verdicts are those of exact arithmetic, whatever finite values come."""
    usual = st.floats(0.5, 2) if log else st.sampled_from([0.0, 1.7e308, -1.7e308, 1e200, 1e-300]) | st.floats(-2, 2)
    series = drawn(data, usual, st.floats(allow_nan=False, allow_infinity=False))
    baseline = Baseline(log=log)
    assert [baseline.is_spike(sample) for sample in series] == [spike for _, spike in judged_exactly(series, log=log)]
