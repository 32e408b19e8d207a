"""All that is added up on the host, against a model of it in plain Python, over any course of events."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.aggregation.test_gradients import NOW, after, captured, closed, parts, row, ticket
from tests.aggregation.test_properties_of_totals import measured_rows
from tests.support.gradients import INF, NAN, close
from tests.support.properties import Series, both_formats, no_timeout_in_a_soak, series, totals
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide, Snapshot
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.transfer.events import (
    Captured,
    Mailbox,
    Observed,
    Outcome,
    OutcomeResolved,
    Stepped,
    Weights,
    Withdrawn,
)
from torch_grad_exporter.transfer.transfer import Arrived

pytestmark = no_timeout_in_a_soak


class Model:
    """What the totals should be, in plain Python, of events in the order in which they are applied.

    `rows`, `scale`: of the pending capture, and the loss scale that any event told of it. `after`: the optimizers that saw
    it, and whether each left out its step. `counted`, `measured`: whose part of the round `number` is counted, and whose norm.
    """

    def __init__(self) -> None:
        self.pending: Captured | None = None
        self.rows: dict[int, list[float]] = {}
        self.scale: float | None = None
        self.after: list[tuple[int, bool]] = []
        self.number = -1
        self.counted: set[int] = set()
        self.measured: set[int] = set()
        self.faithful: dict[tuple[frozenset[int], int], bool] = {}
        self.samples = 0
        self.layers: dict[str, dict[str, float]] = {}
        self.optimizers: dict[int, dict[str, float]] = {}
        self.observed: dict[str, float] | None = None
        self.untold = False
        self.stepped: tuple[Outcome, frozenset[int]] | None = None

    # Events

    def capture(self, event: Captured, rows: dict[int, list[float]], scale: float | None) -> None:
        """The one before of another round has an unknown outcome; a NaN that was thrown away within the round was skipped."""
        if self.pending is not None and self.pending.round != event.round:
            self.publish_unclosed(Outcome.UNKNOWN)
        elif self.pending is not None and event.again and any(map(nonfinite, self.rows.values())):
            self.publish_unclosed(Outcome.SKIPPED)
            self.number = -1
        self.pending, self.rows, self.scale, self.after, self.stepped = event, rows, scale, [], None

    def close(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        self.publish(outcome, stepped)
        self.pending = None

    def withdraw(self) -> None:
        self.pending = None

    def step(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        """Some have stepped, others may."""
        self.stepped = (outcome, stepped)

    def expire(self, now: float) -> None:
        event = self.pending
        if event is None or now - event.at <= (1 if event.likely_last or self.stepped else 10):
            return
        counted = self.counted if self.number == event.round else set()
        if self.stepped is not None:
            if self.number != event.round or not self.stepped[1] <= counted:
                self.publish(*self.stepped, over=False)
        elif self.number != event.round and any(map(nonfinite, self.rows.values())):
            self.publish_unclosed(Outcome.UNKNOWN, over=False)

    def observe(self, norm: float) -> None:
        self.observed = self.observed or nothing()
        self.untold = not (math.isfinite(norm) and norm >= 0)
        if not self.untold:
            enter(self.observed, norm)

    def tell(self, outcome: Outcome) -> None:
        if self.untold and self.observed is not None:
            self.observed[outcome.value] += 1
            self.untold = False

    # What they come to

    def publish_unclosed(self, outcome: Outcome, *, over: bool = True) -> None:
        event = self.pending
        assert event is not None
        owners = frozenset(int(event.owners[p]) for p in self.rows)
        self.publish(outcome, frozenset(o for o, _ in self.after) or event.usual & owners or owners, over=over)

    def publish(self, outcome: Outcome, stepped: frozenset[int], *, over: bool = True) -> None:
        """Shows what is of the optimizers that stepped, or should have, and counts what of it is new."""
        event = self.pending
        assert event is not None
        if self.number != event.round:
            self.number, self.counted, self.measured = event.round, set(), set()
            self.samples += 1
        self.untold = False
        skipping = {optimizer for optimizer, left_out in self.after if left_out} | self.overflowed(event, outcome, stepped)
        shown = stepped | skipping
        scale = self.known_scale(event, outcome, over=over) if over or self.stepped else None
        mine = {p: r for p, r in self.rows.items() if int(event.owners[p]) in shown}
        norms = {p: NAN if scale is None else r[Column.NORM] / scale for p, r in mine.items()}
        owner = {p: int(event.owners[p]) for p in mine}
        owned = {event.table.layers[event.table.layer_of[p]] for p, o in enumerate(event.owners) if int(o) in shown}
        for name in owned & self.layers.keys():
            self.layers[name]["norm"] = NAN
        for name in dict.fromkeys(event.table.layers[event.table.layer_of[p]] for p in mine):
            here = [p for p in mine if event.table.layers[event.table.layer_of[p]] == name]
            self.publish_layer(self.layers.setdefault(name, nothing()), here, owner, norms)
        known = (shown | self.optimizers.keys()) - {UNOWNED}
        for number in sorted(shown & known if known else shown):
            here = [p for p in mine if owner[p] == number]
            if here:
                one = self.optimizer(number)
                if number not in self.measured:
                    enter(one, combined(norms[p] for p in here))
                if number not in self.counted:
                    one["skipped" if number in skipping else outcome.value] += any(nonfinite(mine[p]) for p in here)
        self.counted |= shown
        self.measured |= shown if scale is not None else set()

    def publish_layer(self, layer: dict[str, float], here: list[int], owner: dict[int, int], norms: dict[int, float]) -> None:
        layer["norm"] = combined(norms[p] for p in here)
        new = [p for p in here if owner[p] not in self.counted]
        layer["captures"] += bool(new)
        layer["nans"] += sum(self.rows[p][Column.NANS] for p in new)
        layer["infs"] += sum(self.rows[p][Column.INFS] for p in new)
        if unmeasured := [p for p in here if owner[p] not in self.measured]:
            enter(layer, combined(norms[p] for p in unmeasured))

    def known_scale(self, event: Captured, outcome: Outcome, *, over: bool) -> float | None:
        """The loss scale, `None` if it is no number to divide by or if there may be one that is not known."""
        if self.scale is not None:
            return self.scale if 0 < self.scale < INF else None
        finite = not any(map(nonfinite, self.rows.values()))
        return 1.0 if event.scale_known or outcome is Outcome.STEPPED or self.after or (over and finite) else None

    def overflowed(self, event: Captured, outcome: Outcome, stepped: frozenset[int]) -> set[int]:
        """Who did not step on gradients that are not finite, and always did on finite ones after backwards such as this."""
        owners = {p: int(event.owners[p]) for p in self.rows}
        kind = frozenset(owners.values()) - {UNOWNED}
        found = set()
        for number in kind if outcome is Outcome.STEPPED else ():
            bad = any(nonfinite(self.rows[p]) for p, o in owners.items() if o == number)
            if number in stepped:
                self.faithful.setdefault((kind, number), True)
            elif not bad:
                self.faithful[kind, number] = False
            elif self.faithful.get((kind, number)):
                found.add(number)
        return found

    def optimizer(self, number: int) -> dict[str, float]:
        """The first one takes over what was counted before any was known."""
        if number not in self.optimizers and UNOWNED in self.optimizers:
            self.optimizers = {number if o == UNOWNED else o: one for o, one in self.optimizers.items()}
        return self.optimizers.setdefault(number, nothing())

    # What is shown

    @property
    def norms_are_observed(self) -> bool:
        """Whether the norms that a user gave are shown: with a second optimizer it is not known whose they are."""
        return self.observed is not None and len(self.optimizers) < 2

    def shown(self) -> dict[int, dict[str, float]]:
        """The values by optimizer."""
        if self.observed is None or not self.norms_are_observed:
            return self.optimizers
        (number, one), *_ = [*self.optimizers.items(), (UNOWNED, nothing())]
        outcomes = {o.value: one[o.value] + self.observed[o.value] for o in Outcome}
        return {number: one | {"count": self.observed["count"], "sum": self.observed["sum"]} | outcomes}


def nothing() -> dict[str, float]:
    """The values of a layer or an optimizer before any sample."""
    return dict.fromkeys(("captures", "nans", "infs", "count", "sum", *(o.value for o in Outcome)), 0.0)


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
SCALES = st.sampled_from([None, None, None, 1.0, 65536.0, 3.0, 0.0, INF, NAN, 2.0**-149])
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
        self.post = Mailbox()
        self.gradients = GradientAggregation()
        self.gradients.use(self.index.table)
        self.now = NOW
        self.errors = ErrorLog(("worker",), logging.Logger("test"))  # noqa: LOG001 - one of its own, not of the process
        self.host = HostSide(self.post, self.gradients, TrainingTotals(), self.errors, now=lambda: self.now)
        self.model = Model()
        self.number = 0
        self.before: Series = {}
        self.observed = False

    @initialize(owners=st.sampled_from([(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 0, UNOWNED), (UNOWNED,) * 3]))
    def begin(self, owners: tuple[int, ...]) -> None:
        self.owners = dict(zip([("a", "weight"), ("a", "bias"), ("b", "weight")], owners, strict=True))

    # Training

    def posted(self, rows: dict[int, list[float]], *, again: bool = False, **more: object) -> Captured:
        """A capture of the current round, which is in the mailbox."""
        table = self.index.table
        owners = [self.owners.get((tracked.layer, tracked.attribute), 0) for tracked in table.tracked]
        event = captured(self.number, rows, table=table, owners=owners, at=self.now, **more)
        self.post.append(dataclasses.replace(event, again=again))
        return self.post[-1]

    @rule(data=st.data(), scale=SCALES, same_round=st.booleans())
    def backward(self, data: st.DataObject, scale: float | None, same_round: bool) -> None:
        size = len(self.index.table.tracked)
        rows = data.draw(st.dictionaries(st.sampled_from(range(size)), measured_rows(), min_size=1))
        missing = [position for position in range(size) if position not in rows]
        likely_last, again, scale_known = data.draw(st.tuples(*[st.booleans()] * 3))
        usual = data.draw(st.frozensets(st.sampled_from([0, 1])))
        self.number += not same_round or self.model.pending is None
        event = self.posted(
            rows, again=again, missing=missing, likely_last=likely_last, usual=usual, scale_known=scale_known, scale=scale
        )
        self.model.capture(event, rows, scale)

    @precondition(lambda self: self.model.pending is not None)
    @rule(data=st.data(), factor=FACTORS, scale=SCALES)
    def gradients_are_read_again(self, data: st.DataObject, factor: float, scale: float | None) -> None:
        model = self.model
        assert model.pending is not None
        optimizer = data.draw(st.sampled_from([0, 1]))
        found_inf = data.draw(st.sampled_from([None, None, 0.0, 1.0]))
        seen = data.draw(st.sets(st.sampled_from(sorted(model.rows)), min_size=1))
        norms = {position: [model.rows[position][Column.NORM] * factor] for position in seen}
        if model.scale is not None or model.after:
            scale = model.scale  # all that is told of one round is of one scaler
        own_scale = data.draw(st.sampled_from([None, scale]))
        event = after(model.pending.round, {}, optimizer=optimizer, loss_scale=scale, own_scale=own_scale)
        self.post.append(dataclasses.replace(event, parts=parts(model.pending.table, norms), found_inf=ticket(found_inf)))
        model.scale = scale
        model.after.append((optimizer, bool(found_inf)))

    @precondition(lambda self: self.model.pending is not None)
    @rule(outcome=st.sampled_from(Outcome), stepped=STEPPED)
    def round_ends(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        event = self.model.pending
        assert event is not None
        self.post.append(closed(event.round, outcome, owners=event.owners, stepped=stepped))
        self.model.close(outcome, stepped)

    @precondition(lambda self: self.model.pending is not None)
    @rule(outcome=st.sampled_from(Outcome), stepped=STEPPED)
    def step_is_taken_on_it(self, outcome: Outcome, stepped: frozenset[int]) -> None:
        event = self.model.pending
        assert event is not None
        end = closed(event.round, outcome, owners=event.owners, stepped=stepped)
        self.post.append(dataclasses.replace(end, final=False))
        self.model.step(outcome, stepped)

    @precondition(lambda self: self.model.pending is not None)
    @rule()
    def sample_is_withdrawn(self) -> None:
        event = self.model.pending
        assert event is not None
        self.post.append(Withdrawn(event.round))
        self.model.withdraw()

    @rule(norm=st.floats(0.1, 10), count=st.sampled_from([1, 22]))
    def ordinary_rounds(self, norm: float, count: int) -> None:
        for i in range(count):
            self.number += 1
            rows = {position: row(norm * (1 + 0.1 * (i % 3))) for position in range(len(self.index.table.tracked))}
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
        if self.model.pending is not None and self.model.stepped is None and 0 < norm < INF:
            norm = -1.0  # one that says by what gradients were divided is for tests/aggregation/test_clipping.py
        self.post.append(Observed("grad_norm", norm))
        self.model.observe(norm)

    @rule(outcome=st.sampled_from(Outcome))
    def outcome_is_told(self, outcome: Outcome) -> None:
        self.post.append(OutcomeResolved(outcome))
        self.model.tell(outcome)

    @rule(name=st.sampled_from(["loss", "samples", "tokens"]), value=OBSERVED, count=st.sampled_from([1, 22]))
    def value_is_observed(self, name: str, value: float, count: int) -> None:
        self.post.extend([Observed(name, value)] * count)

    @rule(norms=st.tuples(*[st.floats(0) | st.sampled_from([NAN, INF, 1e200, 5e-324])] * 3), seconds=st.none() | st.floats(0, 1e4))
    def steps_are_taken(self, norms: tuple[float, ...], seconds: float | None) -> None:
        self.post.append(Weights(self.index.table, np.zeros(1, dtype=np.int64), Arrived(np.array(norms))))
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
        rows = self.gradients._layers._baseline._rows
        assert np.isfinite(rows["past"]).sum(axis=1).tolist() == np.minimum(rows["count"], 128).tolist()
        assert not np.isinf(rows["past"]).any()
        for baseline in self.gradients._optimizers._baselines:
            assert np.isfinite(baseline._past).all()
            assert sorted(baseline._past) == baseline._ordered

    def compare(self, snapshot: Snapshot) -> None:
        """Counts and histograms are those of the model."""
        gradients = snapshot.gradients
        assert gradients.samples == self.model.samples
        assert gradients.optimizers == tuple(self.model.shown())
        assert gradients.norm_observed == self.model.norms_are_observed
        shown = dict(zip(gradients.table.layers, gradients.layer_values, strict=True))
        for name, layer in self.model.layers.items():
            if name in shown:
                assert {n: float(shown[name][n]) for n in ("captures", "nans", "infs")}.items() <= layer.items()
                assert close(shown[name]["norm"], layer["norm"], 1e-12)
                same_histogram(shown[name], layer)
        for total, one in zip(gradients.totals, self.model.shown().values(), strict=True):
            assert {o.value: float(total[f"nonfinite_{o.value}"]) for o in Outcome}.items() <= one.items()
            same_histogram(total, one)

    def nothing_falls(self, snapshot: Snapshot) -> None:
        """Counters and histograms are finite and never fall, but where norms come from another source than before."""
        found = totals(series(self.families(snapshot)))
        found |= {("sum", name): value for name, value in snapshot.totals.sums.items()}
        found |= {("loss",): snapshot.totals.loss_nonfinite, ("loss", "spikes"): snapshot.totals.loss_spikes}
        found |= {("duration",): snapshot.totals.duration_sum}
        assert all(map(math.isfinite, found.values()))
        changed = self.observed != self.model.norms_are_observed
        for key, value in found.items():
            if not (changed and key[0].startswith(("torch_grad_global_norm", "torch_grad_nonfinite_steps"))):
                assert value >= self.before.get(key, 0.0), key
        self.before |= found
        self.observed = self.model.norms_are_observed

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
