"""Properties of all that is added up and judged on the host, the totals against a model of them in plain Python."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from gradients import INF, NAN, close
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from properties import Series, both_formats, no_timeout_in_a_soak, series, totals
from test_ledger import NOW, after, captured, closed, parts, row, ticket

from torch_grad_exporter.baseline import Baselines
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.events import Captured, Hints, Observed, Outcome, Stepped, Told, Weights, mailbox
from torch_grad_exporter.families import Family
from torch_grad_exporter.host import HostSide, Snapshot
from torch_grad_exporter.layers import LayerIndex
from torch_grad_exporter.ledger import UNOWNED, GradientLedger
from torch_grad_exporter.samples import Groups, Sample
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.totals import TrainingTotals
from torch_grad_exporter.transfer import Arrived

pytestmark = no_timeout_in_a_soak


@st.composite
def measured_rows(draw: st.DrawFn) -> list[float]:
    """What may have been measured of a parameter of 8 elements and 2 units."""
    nans, infs = draw(st.sampled_from([(0, 0)] * 6 + [(1, 0), (0, 2), (3, 1)]))
    norm = NAN if nans else INF if infs else draw(st.sampled_from([0.0, 5e-324, 1e-200, 1.0, 1e200, 1.7e308]) | st.floats(0, 1e6))
    return row(norm, zeros=draw(st.integers(0, 8)), nans=nans, infs=infs)


@given(st.dictionaries(st.integers(0, 5), measured_rows(), min_size=1), st.booleans())
def test_a_layer_is_the_sum_of_its_parameters(rows: dict[int, list[float]], together: bool) -> None:
    """Norm, counts and extremes of a group are those over all its parameters, whatever their size."""
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
    sample = Sample.of(captured(1, rows, plan=LayerIndex({"": layers}).plan, owners=[0] * 6))
    with np.errstate(all="ignore"):
        groups = Groups.of(sample, sample.present, together=together)
        norms, nans, zeros = groups.norms(), groups.sum(Column.NANS), groups.sum(Column.ZEROS)
        smallest, largest = groups.smallest(Column.MIN), groups.largest(Column.MIN, Column.MAX)
    members = [list(rows.values())] if together else [[r for p, r in rows.items() if p // 2 == i] for i in groups.layers]
    for i, own in enumerate(members):
        norm = NAN if any(r[Column.NANS] for r in own) else math.hypot(*(r[Column.NORM] for r in own))
        assert close(norms[i], norm, 1e-12)
        assert (nans[i], zeros[i]) == (sum(r[Column.NANS] for r in own), sum(r[Column.ZEROS] for r in own))
        assert close(smallest[i], NAN if nans[i] else min(r[Column.MIN] for r in own), 0)
        assert close(largest[i], NAN if nans[i] else max(r[Column.MAX] for r in own), 0)


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


@pytest.mark.parametrize("log", [True, False])
@given(st.data())
def test_baselines_stay_finite_and_judge_as_defined(log: bool, data: st.DataObject) -> None:
    """After any values nothing in a baseline or a z-score is Inf, and verdicts are those of exact arithmetic."""
    usual = st.floats(0.5, 2) if log else st.sampled_from([0.0, 1.7e308, -1.7e308, 1e200, 1e-300]) | st.floats(-2, 2)
    series = data.draw(st.lists(usual, min_size=18, max_size=24)) + data.draw(st.lists(usual | st.floats(), max_size=20))
    series += [data.draw(st.floats())] * data.draw(st.sampled_from([0, 1, 31, 32, 33, 60]))
    baselines = Baselines(log=log)
    baselines.grow(1)
    for sample, (zscore, spike) in zip(series, judged_exactly(series, log=log), strict=True):
        verdict = baselines.judge(np.zeros(1, dtype=np.int64), np.array([sample]))
        assert bool(verdict.spike[0]) == spike
        found = float(verdict.zscore[0])
        if zscore is None or abs(zscore) > Fraction(1e300):
            assert not math.isinf(found)
        else:
            assert math.isfinite(found) or not log
            assert not math.isfinite(found) or math.isclose(found, zscore, rel_tol=1e-6, abs_tol=1e-6)
    assert not np.isinf(baselines._values).any()


class Model:
    """What the totals should be, in plain Python, of events in the order in which they are applied.

    `rows`, `scale`: of the pending capture; `after`: what each optimizer saw of it: its number, the loss scale that it
    told, and whether it left out its step. `resets`: how often histograms of global norms began anew.
    """

    def __init__(self) -> None:
        self.pending: Captured | None = None
        self.rows: dict[int, list[float]] = {}
        self.scale: float | None = None
        self.after: list[tuple[int, float | None, bool]] = []
        self.counted = -1
        self.samples = 0
        self.layers: dict[str, dict[str, float]] = {}
        self.optimizers: dict[int, dict[str, float]] = {}
        self.not_finite = False
        self.norms_are_observed = False
        self.resets = 0

    # Events

    def capture(self, event: Captured, rows: dict[int, list[float]], scale: float | None) -> None:
        """The one before of another round has an unknown outcome; a NaN that was thrown away within the round was skipped."""
        if self.pending is not None and self.pending.round != event.round:
            self.publish_unclosed(Outcome.UNKNOWN)
        elif self.pending is not None and event.again and any(map(nonfinite, self.rows.values())):
            self.publish_unclosed(Outcome.SKIPPED)
            self.counted = -1
        self.pending, self.rows, self.scale, self.after = event, rows, scale, []

    def close(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        self.publish(outcome, stepped)
        self.pending = None

    def expire(self, now: float) -> None:
        event = self.pending
        if event is not None and self.counted != event.round and now - event.at > (1 if event.likely_last else 10):
            self.publish_unclosed(Outcome.UNKNOWN)

    def observe(self, norm: float) -> None:
        if len(self.optimizers) > 1:
            return
        one = self.optimizer(next(iter(self.optimizers), UNOWNED))
        if not self.norms_are_observed:
            self.norms_are_observed = True
            self.begin_anew()
        self.not_finite = not (math.isfinite(norm) and norm >= 0)
        if not self.not_finite:
            enter(one, norm)

    def tell(self, outcome: Outcome) -> None:
        if self.not_finite:
            next(iter(self.optimizers.values()))[outcome.value] += 1
            self.not_finite = False

    # What they come to

    def publish_unclosed(self, outcome: Outcome) -> None:
        event = self.pending
        assert event is not None
        owners = frozenset(int(event.owners[p]) for p in self.rows)
        self.publish(outcome, frozenset(o for o, _, _ in self.after) or event.usual or owners)

    def publish(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        event = self.pending
        assert event is not None
        new = self.counted != event.round
        self.counted, self.not_finite = event.round, False
        self.samples += new
        scale = next((s for s in (self.scale, *(s for _, s, _ in self.after)) if s is not None), 1.0)
        mine = {p: r for p, r in self.rows.items() if int(event.owners[p]) in stepped}
        norms = {p: r[Column.NORM] / scale if 0 < scale < INF else NAN for p, r in mine.items()}
        by_layer: dict[str, list[int]] = {}
        for p in mine:
            by_layer.setdefault(event.plan.layers[event.plan.layer_of[p]], []).append(p)
        for name, here in by_layer.items():
            layer = self.layers.setdefault(name, dict.fromkeys(("captures", "nans", "infs", "count", "sum"), 0.0))
            layer["norm"] = combined(norms[p] for p in here)
            if new:
                layer["captures"] += 1
                layer["nans"] += sum(mine[p][Column.NANS] for p in here)
                layer["infs"] += sum(mine[p][Column.INFS] for p in here)
                enter(layer, layer["norm"])
        left_out = {number for number, _, found_inf in self.after if found_inf}
        # What nobody owns stands for an optimizer only while none is known.
        known = stepped | self.optimizers.keys()
        numbers = sorted({o for p in mine if (o := int(event.owners[p])) != UNOWNED or known == {UNOWNED}})
        for number in numbers:
            self.optimizer(number)
        for number in numbers:
            here = [p for p in mine if int(event.owners[p]) == number]
            one = self.optimizers[number]
            if new:
                if not self.norms_are_observed:
                    enter(one, combined(norms[p] for p in here))
                one["skipped" if number in left_out else outcome.value] += any(nonfinite(mine[p]) for p in here)

    def optimizer(self, number: int) -> dict[str, float]:
        """The first one takes over from nobody; with a second one it is not known whose the observed norms were."""
        if number not in self.optimizers and UNOWNED in self.optimizers:
            self.optimizers = {number if o == UNOWNED else o: one for o, one in self.optimizers.items()}
        elif number not in self.optimizers:
            if self.norms_are_observed:
                self.norms_are_observed = False
                self.begin_anew()
            self.optimizers[number] = dict.fromkeys(("count", "sum", "stepped", "skipped", "unknown"), 0.0)
        return self.optimizers[number]

    def begin_anew(self) -> None:
        self.resets += 1
        for one in self.optimizers.values():
            one["count"] = one["sum"] = 0.0


def nonfinite(one: Sequence[float]) -> bool:
    """Whether a row has any NaN or Inf element."""
    return bool(one[Column.NANS] or one[Column.INFS])


def combined(norms: Iterable[float]) -> float:
    """The norm of a whole from those of its parts."""
    parts = list(norms)
    return NAN if any(map(math.isnan, parts)) else math.hypot(*parts)


def enter(one: dict[str, float], norm: float) -> None:
    """Counts and adds up a norm, unless it, or the sum, is not finite."""
    if math.isfinite(one["sum"] + norm):
        one["count"] += 1
        one["sum"] += norm


NAMES = ("Adam", "SGD")
SCALES = st.sampled_from([None, None, None, 1.0, 65536.0, 3.0, 0.0, INF, NAN, 1e-45, 5e-324])
FACTORS = st.sampled_from([1.0, 0.5, 0.3, 1.5, 0.0, NAN, INF])
OBSERVED = st.floats() | st.sampled_from([0.0, 1.0, 1.7e308, -1.0, -1.7e308, NAN, INF])
SECONDS = st.sampled_from([0.4, 3.0, 20.0, 90.0])
STEPPED = st.frozensets(st.sampled_from([0, 1]), min_size=1)


class Machine(RuleBasedStateMachine):
    """Posts what training, a user and time may bring, in any order, and compares each scrape with `Model`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2), "b": torch.nn.Linear(4, 2, bias=False)})
        self.index = LayerIndex({"": self.module})
        self.post = mailbox()
        self.ledger = GradientLedger(5, Hints())
        self.ledger.use(self.index.plan)
        self.now = NOW
        self.errors = ErrorLog(("worker",), logging.Logger("test"))  # noqa: LOG001 - one of its own, not of the process
        self.host = HostSide(self.post, self.ledger, TrainingTotals(), self.errors, now=lambda: self.now)
        self.model = Model()
        self.number = 0
        self.before: Series = {}
        self.resets = 0

    @initialize(owners=st.sampled_from([(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 0, UNOWNED), (UNOWNED,) * 3]))
    def begin(self, owners: tuple[int, ...]) -> None:
        self.owners = dict(zip([("a", "weight"), ("a", "bias"), ("b", "weight")], owners, strict=True))

    # Training

    def posted(self, rows: dict[int, list[float]], *, again: bool = False, **more: object) -> Captured:
        """A capture of the current round, which is in the mailbox."""
        plan = self.index.plan
        owners = [self.owners.get((tracked.layer, tracked.attribute), 0) for tracked in plan.tracked]
        event = captured(self.number, rows, plan=plan, owners=owners, at=self.now, **more)
        self.post.append(dataclasses.replace(event, again=again))
        return self.post[-1]

    @rule(data=st.data(), scale=SCALES, same_round=st.booleans())
    def backward(self, data: st.DataObject, scale: float | None, same_round: bool) -> None:
        size = len(self.index.plan.tracked)
        rows = data.draw(st.dictionaries(st.sampled_from(range(size)), measured_rows(), min_size=1))
        missing = [position for position in range(size) if position not in rows]
        likely_last, again = data.draw(st.booleans()), data.draw(st.booleans())
        usual = data.draw(st.frozensets(st.sampled_from([0, 1])))
        self.number += not same_round or self.model.pending is None
        event = self.posted(rows, again=again, missing=missing, likely_last=likely_last, usual=usual, scale=scale)
        self.model.capture(event, rows, scale)

    @precondition(lambda self: self.model.pending is not None)
    @rule(data=st.data(), factor=FACTORS, scale=SCALES)
    def gradients_are_read_again(self, data: st.DataObject, factor: float, scale: float | None) -> None:
        model = self.model
        assert model.pending is not None
        optimizer, full = data.draw(st.sampled_from([0, 1])), data.draw(st.booleans())
        found_inf = data.draw(st.sampled_from([None, None, 0.0, 1.0]))
        probes = data.draw(st.sets(st.sampled_from(sorted(model.rows)), min_size=1))
        norms = {position: [model.rows[position][Column.NORM] * factor] for position in probes}
        # A scale that only this norm contains would look like a power of two by which the optimizer unscaled.
        own_scale = scale if model.scale is None else None
        event = after(model.pending.round, {}, optimizer=optimizer, full=full, loss_scale=scale, own_scale=own_scale)
        self.post.append(dataclasses.replace(event, parts=parts(model.pending.plan, norms), found_inf=ticket(found_inf)))
        model.after.append((optimizer, scale, bool(found_inf)))

    @precondition(lambda self: self.model.pending is not None)
    @rule(outcome=st.sampled_from(Outcome), stepped=STEPPED)
    def round_ends(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        event = self.model.pending
        assert event is not None
        self.post.append(closed(event.round, outcome, owners=event.owners, stepped=stepped))
        self.model.close(outcome, stepped)

    @rule(norm=st.floats(0.1, 10), count=st.sampled_from([1, 22]))
    def ordinary_rounds(self, norm: float, count: int) -> None:
        for i in range(count):
            self.number += 1
            rows = {position: row(norm * (1 + 0.1 * (i % 3))) for position in range(len(self.index.plan.tracked))}
            self.model.capture(self.posted(rows), rows, None)
            self.round_ends(Outcome.STEPPED, frozenset({0, 1}))

    @rule(data=st.data())
    def any_round(self, data: st.DataObject) -> None:
        """All that may happen from one backward to the next."""
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
            self.backward(data, data.draw(SCALES), same_round=True)
            if data.draw(st.booleans()):
                self.gradients_are_read_again(data, data.draw(FACTORS), data.draw(SCALES))
            if data.draw(st.booleans()):
                self.norm_is_observed(data.draw(OBSERVED))
            if data.draw(st.booleans()):
                self.time_passes(data.draw(SECONDS))
        if data.draw(st.booleans()):
            self.round_ends(data.draw(st.sampled_from(Outcome)), data.draw(STEPPED))
        if data.draw(st.booleans()):
            self.outcome_is_told(data.draw(st.sampled_from(Outcome)))

    @rule(change=st.sampled_from(["freeze", "thaw", "grow"]))
    def parameters_change(self, change: str) -> None:
        if change == "grow":
            self.module["c"] = torch.nn.Linear(4, 2, bias=False)
        else:
            self.module["b"].requires_grad_(change == "thaw")
        self.index.refresh()

    # The user and time

    @rule(norm=OBSERVED)
    def norm_is_observed(self, norm: float) -> None:
        self.post.append(Observed("grad_norm", norm))
        self.model.observe(norm)

    @rule(outcome=st.sampled_from(Outcome))
    def outcome_is_told(self, outcome: Outcome) -> None:
        self.post.append(Told(outcome))
        self.model.tell(outcome)

    @rule(name=st.sampled_from(["loss", "samples", "tokens"]), value=OBSERVED, count=st.sampled_from([1, 22]))
    def value_is_observed(self, name: str, value: float, count: int) -> None:
        self.post.extend([Observed(name, value)] * count)

    @rule(norms=st.tuples(*[st.floats(0) | st.sampled_from([NAN, INF, 1e200, 5e-324])] * 3), seconds=st.none() | st.floats(0, 1e4))
    def steps_are_taken(self, norms: tuple[float, ...], seconds: float | None) -> None:
        self.post.append(Weights(self.index.plan, np.zeros(1, dtype=np.int64), Arrived(np.array(norms))))
        self.post.append(Stepped(seconds, 0.001))

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        """The worker looks into the mailbox at its end."""
        self.now += seconds
        self.host.drain()
        self.model.expire(self.now)

    # What is seen

    @rule()
    def scrape(self) -> None:
        snapshot = self.host.snapshot()
        self.model.expire(self.now)
        assert self.errors.counts() == {"worker": 0}
        self.compare(snapshot)
        self.nothing_falls(snapshot)
        assert not np.isinf(snapshot.gradients.recent_max).any()
        for baselines in (self.ledger._layer_baseline, self.ledger._global_baseline):
            filled = np.isfinite(baselines._values).sum(axis=1)
            assert filled.tolist() == np.minimum(baselines._count, 128).tolist()
            assert not np.isinf(baselines._values).any()

    def compare(self, snapshot: Snapshot) -> None:
        """Counts and histograms are those of the model."""
        gradients = snapshot.gradients
        assert gradients.samples == self.model.samples
        assert gradients.optimizers == tuple(self.model.optimizers)
        shown = dict(zip(gradients.plan.layers, gradients.table, strict=True))
        for name, layer in self.model.layers.items():
            if name in shown:
                assert {n: float(shown[name][n]) for n in ("captures", "nans", "infs")}.items() <= layer.items()
                assert close(shown[name]["norm"], layer["norm"], 1e-12)
                same_histogram(shown[name], layer)
        for total, one in zip(gradients.totals, self.model.optimizers.values(), strict=True):
            assert {o.value: float(total[f"nonfinite_{o.value}"]) for o in Outcome}.items() <= one.items()
            same_histogram(total, one)

    def nothing_falls(self, snapshot: Snapshot) -> None:
        """Counters and histograms are finite and never fall, but for norms that begin anew from another source."""
        found = totals(series(self.families(snapshot)))
        found |= {(name,): value for name, value in snapshot.totals.sums.items()}
        found |= {("loss",): snapshot.totals.loss_nonfinite, ("loss", "spikes"): snapshot.totals.loss_spikes}
        found |= {("duration",): snapshot.totals.duration_sum}
        # The one that was there first has no label while there is no other.
        first = next((f"optimizer={NAMES[number]}" for number in self.model.optimizers if number != UNOWNED), "")
        now = {tuple(part for part in key if part != first): value for key, value in found.items()}
        assert all(map(math.isfinite, now.values()))
        for key, value in now.items():
            if self.resets == self.model.resets or not key[0].startswith("torch_grad_global_norm"):
                assert value >= self.before.get(key, 0.0), key
        self.before |= now
        self.resets = self.model.resets

    def families(self, snapshot: Snapshot) -> list[Family]:
        return list(GradientCollector(lambda: snapshot.gradients, NAMES, dead_window=5, moments=True, weights=True).collect())

    def teardown(self) -> None:
        """The last scrape can be read in both formats."""
        self.scrape()
        found = both_formats(self.families(self.host.snapshot()))
        assert all(math.isfinite(value) for key, value in found.items() if key[0] == "torch_grad_norm_zscore")


def same_histogram(found: np.void, expected: dict[str, float]) -> None:
    """As many observations, and the same sum."""
    assert float(found["buckets"].sum()) == expected["count"]
    assert close(found["bucket_sum"], expected["sum"], 1e-12)


TestTotals = Machine.TestCase
