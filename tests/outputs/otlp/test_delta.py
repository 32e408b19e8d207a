"""Differences for receivers with delta temporality: whatever is lost on the way, the sum of what arrives is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import REMOVED, Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.otlp.delta import Deltas

pytestmark = no_timeout_in_a_soak

STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0))
BOTH = (Kind.COUNTER, Kind.HISTOGRAM)


class Exports:
    """Numbered exports, each at the time of its number, which arrive whole or not at all."""

    def __init__(self, kinds: Collection[Kind]) -> None:
        self.deltas = Deltas(kinds, began=0)
        self.number = 0
        self._given: list[Family] = []

    def of(self, families: Iterable[Family]) -> list[Family]:
        """Return the differences of the next export."""
        self.number += 1
        self._given = self.deltas.of(families, at=self.number)
        return self._given

    def arrived(self) -> None:
        """Report that it has arrived."""
        for family in self._given:
            self.deltas.arrived(family, slice(0, len(family.row_numbers)))


def rows(*values: str) -> LabelRows:
    """Return rows with one label each."""
    return LabelRows(tuple((value,) for value in values))


def counter(totals: Mapping[str, float]) -> Family:
    """Return a counter with a row for each total."""
    return Family(STEPS, np.array(list(totals.values()), dtype=np.float64), rows(*totals))


def test_a_counter_that_restarts_is_sent_whole() -> None:
    """A total below the one that has arrived is new as a whole; differences go on from there, and in other rows undisturbed."""
    deltas, sent = Exports(BOTH), []
    for totals in ({"a": 10.0, "b": 1.0}, {"a": 2.0, "b": 4.0}, {"a": 7.0, "b": 4.0}):
        sent.append(deltas.of([counter(totals)])[0].values.tolist())
        deltas.arrived()
    assert sent == [[10.0, 1.0], [2.0, 3.0], [5.0, 0.0]]


def test_rows_that_did_not_arrive_come_again() -> None:
    """Of a family that is sent in two requests, the rows of the one that failed are sent again, and no others."""
    deltas = Deltas(BOTH, began=0)
    (first,) = deltas.of([counter({"a": 1.0, "b": 2.0})], at=1)
    deltas.arrived(first, slice(0, 1))
    (second,) = deltas.of([counter({"a": 1.0, "b": 5.0})], at=2)
    assert second.values.tolist() == [0.0, 5.0]
    assert deltas.since(second).tolist() == [1, 0]


# Layers that are removed, whose totals go into one remainder

BY_KIND = Spec("elements_total", Kind.COUNTER, "Elements.", ("layer", "kind"))


class Model:
    """Layers that count, are removed and come back; the remainder has the counts of removed ones."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.removed: int | None = None

    def families(self) -> list[Family]:
        """A counter, one with a second label, and a histogram with exponential counts beside it."""
        totals = self.counts | ({} if self.removed is None else {REMOVED: self.removed})
        numbers = np.array(list(totals.values()), dtype=np.float64)
        kinds = LabelRows(tuple((layer, kind) for kind in ("nan", "inf") for layer in totals))
        buckets = np.stack([numbers, np.zeros_like(numbers), np.zeros_like(numbers)], axis=1)
        exponential = Exponential.of([{3: total} if total else {} for total in totals.values()])
        return [
            Family(STEPS, numbers, rows(*totals)),
            Family(BY_KIND, np.concatenate([numbers, 2 * numbers]), kinds),
            Family(SECONDS, buckets, rows(*totals), sums=numbers / 10, exponential=exponential),
        ]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["count", "remove", "lost", "arrives"])), max_size=60))
def test_what_removed_layers_counted_arrives_once(actions: list[tuple[str, str]]) -> None:
    """Whatever layers come, count, go and come back, and whatever is lost, the sum of what arrives is all that was counted."""
    deltas, model, counted, arrived = Exports(BOTH), Model(), 0, Counter[str]()
    for layer, action in [*actions, ("", "arrives")]:
        if action == "count":
            model.counts[layer] = model.counts.get(layer, 0) + 1
            counted += 1
        elif action == "remove" and layer in model.counts:
            model.removed = (model.removed or 0) + model.counts.pop(layer)
        elif action in ("lost", "arrives"):
            families = deltas.of(model.families())
            for family in families:
                assert (family.values >= 0).all()
            if action == "arrives":
                deltas.arrived()
                for family in families:
                    arrived[family.spec.name] += family.values.sum()
                    arrived["sum"] += 0 if family.sums is None else family.sums.sum()
                    arrived["exponential"] += sum(sum(counts.values()) for counts in family.exponential or ())
    assert {name: arrived[name] for name in (STEPS.name, BY_KIND.name, SECONDS.name, "exponential")} == {
        STEPS.name: counted, BY_KIND.name: 3 * counted, SECONDS.name: counted, "exponential": counted,
    }  # fmt: skip
    assert arrived["sum"] == pytest.approx(counted / 10)
