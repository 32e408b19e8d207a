"""Differences for receivers that want them: whatever is lost on the way, what arrives adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.metrics.families import REMOVED, Exemplar, Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.otlp.delta import Deltas

pytestmark = no_timeout_in_a_soak

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
OLDER = Spec("cpu_seconds_total", Kind.COUNTER, "Seconds.", ("layer",), "seconds", older=True)
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0))
BOTH = (Kind.COUNTER, Kind.HISTOGRAM)


class Exports:
    """Exports number 1, 2 and so on, at the time of their number, which arrive whole or not at all."""

    def __init__(self, kinds: Collection[Kind]) -> None:
        self.deltas = Deltas(kinds, began=0)
        self.number = 0
        self._given: list[Family] = []

    def of(self, families: Iterable[Family]) -> list[Family]:
        """The differences of the next one."""
        self.number += 1
        self._given = self.deltas.of(families, at=self.number)
        return self._given

    def arrived(self) -> None:
        """Says that it has arrived."""
        for family in self._given:
            self.deltas.arrived(family, slice(0, len(family.row_numbers)))


def rows(*values: str) -> LabelRows:
    """Rows with one label each."""
    return LabelRows(tuple((value,) for value in values))


def counter(spec: Spec, totals: Mapping[str, float], *, absent: Sequence[str] = ()) -> Family:
    """A counter with a row for each total."""
    present = np.array([name not in absent for name in totals]) if absent else None
    return Family(spec, np.array(list(totals.values()), dtype=np.float64), rows(*totals), present)


def shown(family: Family) -> dict[str, float]:
    """The present rows of a counter."""
    present = np.ones(len(family.labels), dtype=np.bool_) if family.present is None else family.present
    return {row[0]: float(value) for row, value, there in zip(family.labels.rows, family.values, present, strict=True) if there}


def test_the_first_export_has_everything_and_the_next_ones_what_was_added() -> None:
    """Totals of 3, 5, 5 and 9 are sent as 3, 2, 0 and 4 if all of them arrive."""
    deltas, sent = Exports(BOTH), []
    for total in (3.0, 5.0, 5.0, 9.0):
        (family,) = deltas.of([counter(STEPS, {"a": total})])
        deltas.arrived()
        sent.append(shown(family))
    assert sent == [{"a": 3.0}, {"a": 2.0}, {"a": 0.0}, {"a": 4.0}]


def test_what_has_not_arrived_is_part_of_the_next_difference() -> None:
    """After an export that was lost the next one carries what was added in both times."""
    deltas = Exports(BOTH)
    assert shown(deltas.of([counter(STEPS, {"a": 3.0})])[0]) == {"a": 3.0}
    assert shown(deltas.of([counter(STEPS, {"a": 5.0})])[0]) == {"a": 5.0}
    deltas.arrived()
    assert shown(deltas.of([counter(STEPS, {"a": 6.0})])[0]) == {"a": 1.0}
    assert shown(deltas.of([counter(STEPS, {"a": 8.0})])[0]) == {"a": 3.0}


def test_only_the_last_export_can_arrive() -> None:
    """Rows of an export that was lost do not count as arrived when the next one, without them, arrives."""
    deltas = Exports(BOTH)
    deltas.of([counter(STEPS, {"a": 3.0, "b": 4.0})])
    deltas.of([counter(STEPS, {"a": 3.0})])
    deltas.arrived()
    assert shown(deltas.of([counter(STEPS, {"a": 3.0, "b": 6.0})])[0]) == {"a": 0.0, "b": 6.0}


def test_a_counter_that_begins_anew_is_sent_whole() -> None:
    """A total below the one that has arrived is all new; the differences go on from there, in the other rows undisturbed."""
    deltas, sent = Exports(BOTH), []
    for totals in ({"a": 10.0, "b": 1.0}, {"a": 2.0, "b": 4.0}, {"a": 7.0, "b": 4.0}):
        sent.append(shown(deltas.of([counter(STEPS, totals)])[0]))
        deltas.arrived()
    assert sent == [{"a": 10.0, "b": 1.0}, {"a": 2.0, "b": 3.0}, {"a": 5.0, "b": 0.0}]


def test_a_histogram_begins_anew_in_all_its_numbers() -> None:
    """One bucket below the one that has arrived makes the whole row new: its other buckets, its sum and its exponential counts."""
    deltas = Exports(BOTH)
    deltas.of([histogram({"a": ([1, 5, 0], 9.0, {-3: 5, 0: 1})})])
    deltas.arrived()
    (again,) = deltas.of([histogram({"a": ([3, 1, 2], 10.0, {-3: 6})})])
    assert again.sums is not None
    assert (again.values.tolist(), again.sums.tolist(), again.exponential) == ([[3.0, 1.0, 2.0]], [10.0], ({-3: 6},))


def histogram(made: Mapping[str, tuple[Sequence[int], float, Mapping[int, int]]]) -> Family:
    """A histogram with buckets, sum and exponential counts for each row."""
    values, sums, exponential = zip(*made.values(), strict=True)
    return Family(SECONDS, np.array(values, dtype=np.float64), rows(*made), None, np.array(sums), exponential)


def test_rows_that_were_away_go_on_where_they_were() -> None:
    """A row that is absent in one export and has no row in the next has its difference to the last time when it is back."""
    deltas = Exports(BOTH)
    deltas.of([counter(STEPS, {"a": 3.0, "b": 30.0})])
    deltas.arrived()
    assert shown(deltas.of([counter(STEPS, {"a": 4.0, "b": 31.0}, absent=["a"])])[0]) == {"b": 1.0}
    deltas.arrived()
    assert shown(deltas.of([counter(STEPS, {"b": 32.0})])[0]) == {"b": 1.0}
    deltas.arrived()
    assert shown(deltas.of([counter(STEPS, {"b": 32.0, "c": 7.0, "a": 9.0})])[0]) == {"b": 0.0, "c": 7.0, "a": 6.0}


def test_a_counter_from_before_the_exporter_begins_with_its_second_export() -> None:
    """What it had counted at its first export is never sent, whether that export arrives or not, and all later counts are."""
    for arrives in (True, False):
        deltas = Exports(BOTH)
        assert shown(deltas.of([counter(OLDER, {"a": 1000.0})])[0]) == {}
        if arrives:
            deltas.arrived()
        assert shown(deltas.of([counter(OLDER, {"a": 1003.0, "b": 500.0})])[0]) == {"a": 3.0}
        deltas.arrived()
        assert shown(deltas.of([counter(OLDER, {"a": 1004.0, "b": 502.0})])[0]) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "kinds", [(), (Kind.COUNTER,), (Kind.HISTOGRAM,), BOTH], ids=lambda kinds: "+".join(k.value for k in kinds)
)
def test_only_the_chosen_kinds_are_differences(kinds: tuple[Kind, ...]) -> None:
    """Families of other kinds, and gauges always, pass as the very objects that they are."""
    given = [
        Family(NORM, np.array([5.0]), rows("a")),
        counter(STEPS, {"a": 5.0}),
        histogram({"a": ([1, 2, 2], 5.0, {1: 5})}),
    ]
    deltas = Exports(kinds)
    deltas.of(given)
    deltas.arrived()
    found = deltas.of(given)
    assert [after is before for after, before in zip(found, given, strict=True)] == [one.spec.kind not in kinds for one in given]
    changed = [one for one in found if one.spec.kind in kinds]
    assert all(not one.values.any() and (one.sums is None or not one.sums.any()) for one in changed)


def test_the_families_of_the_scrape_stay_as_they_are() -> None:
    """The arrays of a family are another output's, too: no number in them changes, nor does what was kept if they change later."""
    family = histogram({"a": ([1, 2, 3], 4.0, {0: 6})})
    deltas = Exports(BOTH)
    for _ in range(2):
        deltas.of([family])
        deltas.arrived()
    assert family.sums is not None
    assert (family.values.tolist(), family.sums.tolist(), family.exponential) == ([[1.0, 2.0, 3.0]], [4.0], ({0: 6},))
    family.values[:] = 9.0
    family.sums[:] = 9.0
    (after,) = deltas.of([family])
    assert after.sums is not None
    assert (after.values.tolist(), after.sums.tolist()) == ([[8.0, 7.0, 6.0]], [5.0])


def test_only_rows_that_arrive_are_subtracted() -> None:
    """Rows are told by their place among the present ones, and each goes on from its own last arrival, in all its numbers."""
    deltas = Exports(BOTH)
    (steps,) = deltas.of([counter(STEPS, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, absent=["b"])])
    deltas.deltas.arrived(steps, slice(1, 2))
    (steps,) = deltas.of([counter(STEPS, {"a": 10.0, "b": 20.0, "c": 30.0, "d": 40.0})])
    assert shown(steps) == {"a": 10.0, "b": 20.0, "c": 27.0, "d": 40.0}
    made = [{"a": ([n, 0, 0], float(n), {1: n}), "b": ([0, n, 0], 2.0 * n, {2: n})} for n in (5, 7)]
    (family,) = deltas.of([histogram(made[0])])
    deltas.deltas.arrived(family, slice(1, 2))
    (family,) = deltas.of([histogram(made[1])])
    assert family.sums is not None
    assert (family.values.tolist(), family.sums.tolist()) == ([[7.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [7.0, 4.0])
    assert family.exponential == ({1: 7}, {2: 2})


def test_each_row_counts_since_its_last_arrival() -> None:
    """Until then since the last export without it, or the start; one that is older than the exporter since its first export."""
    deltas = Exports(BOTH)

    def since(names: Sequence[str], spec: Spec = STEPS) -> list[int]:
        (family,) = deltas.of([counter(spec, dict.fromkeys(names, 5.0))])
        found.append(family)
        return deltas.deltas.since(family).tolist()

    found: list[Family] = []
    assert since("ab") == [0, 0]
    deltas.deltas.arrived(found[-1], slice(0, 1))
    assert since("ab") == [1, 0]
    assert since("abc") == [1, 0, 2]
    deltas.arrived()
    assert since("cba") == [3, 3, 3]
    assert since("ab", OLDER) == [5, 5]  # none of them is sent
    assert since("ab", OLDER) == [5, 5]
    deltas.arrived()
    assert since("ab", OLDER) == [6, 6]


def test_an_exemplar_is_sent_until_it_arrives() -> None:
    """Only those of observations since the last arrival are sent, those that were lost again; the scrape's stay as they are."""
    one, two, three = (Exemplar(0.5, at, b"a" * 16, b"b" * 8) for at in (1.0, 2.0, 3.0))
    family = Family(SECONDS, np.ones((2, 3)), rows("a", "b"), sums=np.ones(2))
    deltas, sent = Exports(BOTH), []
    exports = [
        (({0: one}, {}), True),
        (({0: one}, {}), True),
        (({0: one, 2: two}, {1: one}), False),
        (({0: three, 2: two}, {1: one}), True),
    ]
    for exemplars, arrives in [*exports, exports[-1]]:
        (found,) = deltas.of([replace(family, exemplars=exemplars)])
        sent.append(found.exemplars)
        if arrives:
            deltas.arrived()
    nothing: tuple[dict[int, Exemplar], ...] = ({}, {})
    assert sent == [({0: one}, {}), nothing, ({2: two}, {1: one}), ({0: three, 2: two}, {1: one}), nothing]
    assert exports[0][0] == ({0: one}, {})
    partly = Exports(BOTH)
    both = replace(family, exemplars=({0: one}, {1: two}))
    partly.deltas.arrived(partly.of([both])[0], slice(1, 2))
    assert partly.of([both])[0].exemplars == ({0: one}, {})
    (found,) = Exports(()).of([replace(family, exemplars=exports[0][0])])
    assert found.exemplars == exports[0][0]


def test_equal_rows_of_two_metrics_are_two() -> None:
    """The same label value in two counters is subtracted from its own."""
    other = Spec("other_total", Kind.COUNTER, "Others.", ("layer",))
    deltas = Exports(BOTH)
    deltas.of([counter(STEPS, {"a": 5.0}), counter(other, {"a": 50.0})])
    deltas.arrived()
    assert [shown(one) for one in deltas.of([counter(STEPS, {"a": 6.0}), counter(other, {"a": 52.0})])] == [{"a": 1.0}, {"a": 2.0}]


def test_what_a_removed_layer_had_sent_is_taken_off_once() -> None:
    """A layer in the place of a removed one is removed before anything of it has arrived: all of it comes with the remainder."""
    deltas = Exports(BOTH)
    deltas.of([histogram({"a": ([5, 0, 0], 5.0, {0: 5})})])
    deltas.arrived()
    (found,) = deltas.of([histogram({"b": ([2, 0, 0], 2.0, {0: 2}), REMOVED: ([5, 0, 0], 5.0, {0: 5})})])
    assert found.exponential == ({0: 2}, {})
    deltas.arrived()
    lost = {"b": ([2, 0, 0], 2.0, {0: 2}), "c": ([3, 0, 0], 3.0, {0: 3}), REMOVED: ([5, 0, 0], 5.0, {0: 5})}
    assert deltas.of([histogram(lost)])[0].exponential == ({}, {0: 3}, {})
    (found,) = deltas.of([histogram({"b": ([2, 0, 0], 2.0, {0: 2}), REMOVED: ([8, 0, 0], 8.0, {0: 8})})])
    assert found.sums is not None
    assert (found.values.tolist(), found.sums.tolist()) == ([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]], [0.0, 3.0])
    assert found.exponential == ({}, {0: 3})


NAMES = ("a", "b", "c", "d")


@dataclass(slots=True)
class Truth:
    """All observations of one row so far, and what a receiver has added up of it."""

    observed: list[int] = field(default_factory=list)
    before_first: int = -1
    """Observations at the first export that had the row; -1 for none."""
    received: Counter[object] = field(default_factory=Counter)
    known: int = 0
    """Observations at the last export with the row that arrived."""


def of_row(spec: Spec, truth: Truth) -> tuple[list[float], float, dict[int, int]]:
    """Numbers, sum and exponential counts of a row, by plain loops; observations are whole numbers, so that sums are exact."""
    if spec.kind is Kind.COUNTER:
        return [float(sum(truth.observed))], 0.0, {}
    counts = [sum(low <= one < high for one in truth.observed) for low, high in ((0, 3), (3, 6), (6, 10))]
    return [float(count) for count in counts], float(sum(truth.observed)), dict(Counter(truth.observed))


def family_of(spec: Spec, names: Sequence[str], absent: frozenset[str], truths: Mapping[str, Truth]) -> Family:
    """What a collector would show."""
    made = [of_row(spec, truths[name]) for name in names]
    present = np.array([name not in absent for name in names], dtype=np.bool_) if absent else None
    if spec.kind is Kind.COUNTER:
        return Family(spec, np.array([values[0] for values, _, _ in made]), rows(*names), present)
    values = np.array([one for one, _, _ in made]).reshape(len(names), 3)
    return Family(spec, values, rows(*names), present, np.array([one for _, one, _ in made]), tuple(one for _, _, one in made))


def receive(family: Family, arrived: Sequence[int], truths: Mapping[str, Truth]) -> None:
    """Adds rows of a family of differences to what the receiver has; none of them is negative."""
    for index in arrived:
        (name,) = family.labels.rows[index]
        numbers = np.atleast_1d(family.values[index])
        assert (numbers >= 0).all()
        truths[name].received.update({("value", i): float(number) for i, number in enumerate(numbers)})
        if family.sums is not None:
            truths[name].received["sum"] += float(family.sums[index])
        if family.exponential is not None:
            assert all(count > 0 for count in family.exponential[index].values())
            truths[name].received.update({("bucket", i): count for i, count in family.exponential[index].items()})


def totals(spec: Spec, observed: list[int]) -> dict[object, float]:
    """What a receiver should have of these observations, zeros left out."""
    values, total, buckets = of_row(spec, Truth(observed))
    found: dict[object, float] = {("value", i): value for i, value in enumerate(values)}
    found |= {"sum": total} | {("bucket", i): count for i, count in buckets.items()}
    return {key: value for key, value in found.items() if value}


STEP = st.tuples(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=6),  # what is observed
    st.permutations(NAMES).flatmap(lambda names: st.integers(0, 4).map(lambda count: names[:count])),  # the rows of the export
    st.frozensets(st.sampled_from(NAMES), max_size=2),  # those that are absent
    st.builds(slice, st.integers(0, 3), st.integers(0, 4)),  # which of the rows that are sent arrive
)


@given(steps=st.lists(STEP, min_size=1, max_size=9), spec=st.sampled_from([STEPS, OLDER, SECONDS]))
def test_differences_that_arrive_add_up_to_the_totals(
    steps: list[tuple[list[tuple[str, int]], list[str], frozenset[str], slice]], spec: Spec
) -> None:
    """Whichever rows of exports arrive, a receiver's sums are the totals at the last arrival of each."""
    deltas, truths = Exports(BOTH), {name: Truth([5]) for name in NAMES}
    for observed, names, absent, arrives in steps:
        for name, value in observed:
            truths[name].observed.append(value)
        (difference,) = deltas.of([family_of(spec, names, absent, truths)])
        for name in set(names) - absent:
            if truths[name].before_first < 0:
                truths[name].before_first = len(truths[name].observed)
        deltas.deltas.arrived(difference, arrives)
        arrived = list(difference.row_numbers)[arrives]
        receive(difference, arrived, truths)
        for row in arrived:
            truths[names[row]].known = len(truths[names[row]].observed)
    for truth in truths.values():
        begin = max(truth.before_first, 0) if spec.older else 0
        assert {key: value for key, value in truth.received.items() if value} == totals(spec, truth.observed[begin : truth.known])


# Layers that are removed, whose totals go into one remainder

BY_KIND = Spec("elements_total", Kind.COUNTER, "Elements.", ("layer", "kind"))


class Model:
    """Layers that count, are removed and come back; what they counted before is the remainder's."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.removed: int | None = None

    def families(self) -> list[Family]:
        """A counter, one with a second label, and a histogram with exponential counts beside it."""
        totals = self.counts | ({} if self.removed is None else {REMOVED: self.removed})
        numbers = np.array(list(totals.values()), dtype=np.float64)
        kinds = LabelRows(tuple((layer, kind) for kind in ("nan", "inf") for layer in totals))
        buckets = np.stack([numbers, np.zeros_like(numbers), np.zeros_like(numbers)], axis=1)
        exponential = tuple({3: total} if total else {} for total in totals.values())
        return [
            Family(STEPS, numbers, rows(*totals)),
            Family(BY_KIND, np.concatenate([numbers, 2 * numbers]), kinds),
            Family(SECONDS, buckets, rows(*totals), sums=numbers / 10, exponential=exponential),
        ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["count", "remove", "lost", "arrives"])), max_size=60))
def test_what_removed_layers_counted_arrives_once(actions: list[tuple[str, str]]) -> None:
    """Whatever layers come, count, go and come back, and whatever is lost: what arrives adds up to all that was counted."""
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


def test_removed_layers_leave_nothing_behind() -> None:
    """Of 1,000 layers, one after another, there are never more places than rows at one time."""
    deltas, model = Exports(BOTH), Model()
    for number in range(1000):
        if number:
            model.removed = (model.removed or 0) + model.counts.pop(str(number - 1))
        model.counts[str(number)] = 1
        deltas.of(model.families())
        deltas.arrived()
    tables = [deltas.deltas._tables[spec] for spec in (STEPS, SECONDS)]
    assert [len(table.known) for table in tables] == [3, 3]
    assert [len(table._rows) for table in tables] == [2, 2]
    assert len(tables[1]._exponential) == 2
