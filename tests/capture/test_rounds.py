"""The rules of rounds as a state machine, against a plain model that keeps the whole past and looks everything up in it."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tests.support.properties  # noqa: F401 - the profile
from torch_grad_exporter.capture import round_pattern, rounds
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.capture.rounds import Round, RoundEffects, RoundTracker
from torch_grad_exporter.transfer.outcomes import Lost, Outcome

UNSEEN = 9
"""The number under which steps count that no optimizer reports."""


@dataclass
class Past:
    """A round that is over."""

    models: frozenset[int]
    stepped: frozenset[int]
    backwards: int
    cleared: bool


@dataclass
class Now:
    """The round that is not."""

    number: int
    sampled: bool
    backwards: int = 0
    models: set[int] = field(default_factory=set)
    fired: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)
    state: str = "nothing read"
    """Or `read`, or `closed`."""
    lost: bool = False
    abandoned: bool = False
    norm: bool = False
    extra: bool = False


class Plain:
    """The rules, said plainly: nothing is remembered but the list of all rounds."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.past: list[Past] = []
        self.now = Now(0, sampled=True)
        self.stepping: set[int] = set()
        self.cleared_since_step = False
        self.undecided = self.undecided_here = 0
        self.skipped_unseen = False
        self.skipped = self.unseen = self.lost = self.withdrawn = 0
        self.closed: list[tuple[int, Outcome]] = []
        self.norms: list[Outcome] = []

    @property
    def steps(self) -> list[Past]:
        """The rounds with a step."""
        return [one for one in self.past if one.stepped]

    def clears_in_each_step(self) -> bool:
        """SAM: the last four steps had a clearing before them."""
        return len(self.steps) >= 4 and all(one.cleared for one in self.steps[-4:])

    def has_had_a_plain_step(self) -> bool:
        """There was a step without a clearing before it."""
        return any(not one.cleared for one in self.steps)

    def backward_begins(self, evidence: ClearingEvidence) -> None:
        """A new round after a step; else it is decided whether the last step was skipped."""
        self.stepping.clear()
        now = self.now
        if now.stepped:
            self.next_round()
            return
        if not now.backwards:
            return
        usual = [one.backwards for one in self.steps if one.backwards][-64:]
        cleared = evidence.gone or (evidence.written and bool(usual) and now.backwards >= min(usual))
        self.cleared_since_step |= cleared
        if not cleared or self.clears_in_each_step():
            return
        unreported = evidence.updated and not evidence.reporting
        decided = evidence.scaler_known or self.has_had_a_plain_step() or (unreported and self.undecided_here >= 2)
        if not decided:
            self.undecided += 1
            self.undecided_here += 1
            now.backwards, now.state = 0, "nothing read" if now.state == "read" else now.state
            now.fired.clear()
        elif unreported:
            self.unseen += 1 + self.undecided
            self.undecided, self.cleared_since_step = 0, False
            now.stepped.add(UNSEEN)
            self.next_round()
        else:
            self.skipped += 1 + self.undecided
            self.undecided = 0
            self.next_round(skipped=True)

    def next_round(self, *, skipped: bool = False) -> None:
        """The outcome of what is open is told; the round becomes a past one."""
        now = self.now
        self.tell(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        self.close(Outcome.SKIPPED if skipped else Outcome.STEPPED if now.stepped else Outcome.UNKNOWN)
        self.past.append(Past(frozenset(now.models), frozenset(now.stepped), now.backwards, self.cleared_since_step))
        self.undecided_here = 0
        if now.stepped:
            self.cleared_since_step = False
            if self.clears_in_each_step():
                self.undecided = 0
            if self.has_had_a_plain_step():
                self.skipped += self.undecided
                self.undecided = 0
        if now.sampled and now.fired and now.state == "nothing read":
            self.lose()
        surprise = (skipped or self.skipped_unseen) and not now.sampled
        self.skipped_unseen = False
        due = (now.number + 1) % self.every == 0
        self.now = Now(now.number + 1, due or surprise, extra=not due)

    def tell(self, outcome: Outcome) -> None:
        """The outcome of an observed norm."""
        if self.now.norm:
            self.now.norm = False
            self.norms.append(outcome)

    def close(self, outcome: Outcome) -> None:
        """The outcome of a sample."""
        if self.now.state == "read":
            self.now.state = "closed"
            self.closed.append((self.now.number, outcome))

    def lose(self) -> None:
        """A sample that was due and was not taken; each once."""
        self.lost += not self.now.lost
        self.now.lost = True

    def all_have_stepped(self, waited: frozenset[int]) -> bool:
        """All who own gradients, but for those that did not step in the last eight rounds of the kind."""
        alike = [one.stepped for one in self.steps if one.models == self.now.models][-8:]
        if len(alike) == 8:
            waited &= frozenset().union(*alike)
        return waited <= self.now.stepped


MODELS = strategies.sets(strategies.integers(0, 1), min_size=1)
OPTIMIZERS = strategies.integers(0, 2)
EVIDENCE = strategies.builds(ClearingEvidence, *[strategies.booleans()] * 5)


@dataclass
class Made:
    """What the tracker has decided."""

    skipped: int = 0
    unseen: int = 0
    withdrawn: int = 0
    closed: list[tuple[int, Outcome]] = field(default_factory=list)
    closed_for: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    """The optimizers that stepped, and those that usually do, of each sample."""
    norms: list[Outcome] = field(default_factory=list)
    begun: list[tuple[bool, bool]] = field(default_factory=list)

    def tracker(self, due: Callable[[int], bool]) -> RoundTracker:
        """A tracker whose decisions are noted here."""
        effects = RoundEffects(
            self.skip,
            self.count_unseen,
            self.norms.append,
            self.close,
            lambda _current: None,
            self.withdraw,
            lambda _number: False,
            self.begin,
        )
        return RoundTracker(due, lambda: UNSEEN, effects)

    def withdraw(self, _current: Round) -> None:
        self.withdrawn += 1

    def skip(self, steps: int) -> None:
        self.skipped += steps

    def count_unseen(self, optimizer: int, steps: int) -> None:
        assert optimizer == UNSEEN
        self.unseen += steps

    def close(self, current: Round, outcome: Outcome, usual: frozenset[int]) -> None:
        self.closed.append((current.number, outcome))
        self.closed_for.append((frozenset(current.stepped), usual))

    def begin(self, sampled: bool, after_step: bool) -> None:
        self.begun.append((sampled, after_step))


def nothing() -> ClearingEvidence:
    """The gradients of the last backward are there as they were."""
    return ClearingEvidence()


class Machine(RuleBasedStateMachine):
    """Both are told the same, and have to agree after each event."""

    @initialize(every=strategies.integers(1, 4))
    def start(self, every: int) -> None:
        """Every so many rounds are sampled."""
        self.plain = Plain(every)
        self.made = Made()
        self.tracker = self.made.tracker(lambda number: number % every == 0)

    @rule(models=MODELS, evidence=EVIDENCE, fired=strategies.sets(strategies.integers(0, 3)), read=strategies.booleans())
    def backward(self, models: set[int], evidence: ClearingEvidence, fired: set[int], read: bool) -> None:
        """A backward from its begin to its end; what is to be read is read, or fails to be."""
        plain = self.plain
        asked: list[bool] = []

        def seen() -> ClearingEvidence:
            asked.append(True)
            return evidence

        asks = bool(plain.now.backwards) and not plain.now.stepped
        self.tracker.backward_began(seen)
        assert asked == [True] * asks
        plain.backward_begins(evidence)
        for model in models:
            self.tracker.model_reached(model)
        plain.now.models |= models
        fired = fired if plain.now.sampled else set()
        wants = self.tracker.backward_ended(fired)
        plain.now.backwards += 1
        plain.now.fired |= fired
        known = [one.backwards for one in plain.past if one.backwards][-64:]
        expected = bool(fired) and plain.now.backwards >= (min(known) if known else 1)
        assert wants == expected
        if expected:
            self.tracker.sample_read(taken=read)
            if not read:
                plain.lose()
            elif plain.now.state == "nothing read":
                plain.now.state = "read"

    @rule()
    def backward_that_cannot_be_read(self) -> None:
        """A sampled round turns out not to be readable."""
        if self.plain.now.sampled:
            self.tracker.withdraw(Lost.GATHERED)
            self.plain.withdrawn += self.plain.now.state == "read"
            if self.plain.now.state != "nothing read" or not self.plain.now.extra:
                self.plain.lose()
            if self.plain.now.state == "read":
                self.plain.now.state = "nothing read"
            self.plain.now.sampled = False

    @rule(optimizer=OPTIMIZERS, waited=strategies.frozensets(OPTIMIZERS))
    def step(self, optimizer: int, waited: frozenset[int]) -> None:
        """A step: the first of its round, another one, or one of an optimizer that has stepped already."""
        plain = self.plain
        self.tracker.step_began(optimizer)
        assert optimizer in self.tracker.stepping
        again = optimizer in plain.now.stepped
        assert self.tracker.step_taken(optimizer) == (again or not plain.now.backwards)
        if again:
            plain.next_round()
        self.tracker.step_ended(optimizer, waited)
        plain.now.stepped.add(optimizer)
        plain.tell(Outcome.STEPPED)
        if plain.now.state == "read" and plain.all_have_stepped(waited):
            plain.close(Outcome.STEPPED)
        assert optimizer not in self.tracker.stepping

    @rule(optimizer=OPTIMIZERS, closure=strategies.booleans())
    def step_that_raises(self, optimizer: int, closure: bool) -> None:
        """A step that begins and never ends."""
        self.tracker.step_began(optimizer, closure=closure)
        self.tracker.step_abandoned()
        self.plain.now.abandoned = bool(self.plain.now.backwards)
        assert not self.tracker.stepping
        assert not self.tracker.closures

    @rule()
    def norm(self) -> None:
        """The user gives the global norm: the sample tells its outcome, if there is one."""
        self.tracker.norm_observed()
        self.plain.now.norm = self.plain.now.state == "nothing read"
        if self.plain.now.stepped:
            self.plain.tell(Outcome.STEPPED)

    @rule(counted=strategies.integers(1, 300), skipped=strategies.integers(0, 2))
    @precondition(lambda self: self.plain.now.stepped and self.plain.now.state != "read")
    def rounds_that_were_counted(self, counted: int, skipped: int) -> None:
        """Rounds that were counted elsewhere, none of them sampled; a skipped one has the next one sampled."""
        self.tracker.rounds_counted(counted, skipped)
        now = self.plain.now
        self.plain.now = Now(now.number + counted + skipped, False, now.backwards, now.models, stepped=now.stepped)
        self.plain.skipped += skipped
        self.plain.skipped_unseen |= skipped > 0

    @rule(backwards=strategies.integers(1, 3))
    @precondition(lambda self: self.plain.now.stepped)
    def backwards_that_were_counted(self, backwards: int) -> None:
        """Backwards of a round that goes on are of the same models."""
        models = set(self.plain.now.models)
        self.tracker.backwards_counted(backwards)
        self.plain.next_round()
        self.plain.now.backwards, self.plain.now.models = backwards, models

    @rule(number=strategies.integers(0, 1000))
    def numbered(self, number: int) -> None:
        """The user numbers the round."""
        self.tracker.numbered(number)
        self.plain.now.number = number

    @invariant()
    def both_agree(self) -> None:
        """Numbers, counts and outcomes are those of the model."""
        if not hasattr(self, "plain"):
            return
        now, current = self.plain.now, self.tracker.current
        assert (current.number, current.sampled, current.backwards) == (now.number, now.sampled, now.backwards)
        assert (current.fired, current.stepped) == (now.fired, now.stepped)
        assert (self.made.skipped, self.made.unseen) == (self.plain.skipped, self.plain.unseen)
        assert sum(self.tracker.lost.values()) == self.plain.lost
        assert self.made.withdrawn == self.plain.withdrawn
        assert self.made.closed == self.plain.closed
        assert self.made.norms == self.plain.norms
        assert self.tracker.sample_is_open == (now.state == "read")

    def teardown(self) -> None:
        """At the end nothing is left open."""
        if hasattr(self, "plain"):
            self.tracker.training_over()
            self.plain.tell(Outcome.UNKNOWN)
            self.plain.close(Outcome.STEPPED if self.plain.now.stepped else Outcome.UNKNOWN)
            self.both_agree()
            self.tracker.training_over()
            self.both_agree()


TestMachine = pytest.mark.filterwarnings("ignore")(Machine.TestCase)
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_rules_of_rounds_know_no_torch() -> None:
    """The tracker and what it is made of import nothing that imports torch."""
    imported = {
        node.module
        for module in (rounds, round_pattern)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    ours = {name for name in imported if name.startswith("torch")}
    assert ours == {
        "torch_grad_exporter.capture.round_pattern",
        "torch_grad_exporter.transfer.outcomes",
    }


def test_a_foreign_step_changes_nothing_but_what_is_known_of_the_round() -> None:
    """A step of an optimizer of another model ends no round and closes no sample."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    tracker.backward_began(nothing)
    tracker.backward_ended({0})
    tracker.sample_read(taken=True)
    tracker.foreign_step()
    assert made == Made()
    assert tracker.current.foreign
    assert tracker.sample_is_open
    assert tracker.current.number == 0


def test_gradients_that_are_found_at_a_step_are_read() -> None:
    """Where no backward is seen, what an optimizer is about to use makes the sample; the next step of it begins another round."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    tracker.step_began(0)
    tracker.step_to_be_read(0)
    assert not tracker.gradients_found(frozenset())
    assert tracker.gradients_found(frozenset({1, 2}))
    tracker.sample_read(taken=True)
    tracker.step_taken(0)
    assert made == Made()
    tracker.step_ended(0, frozenset({0}))
    assert made == Made(closed=[(0, Outcome.STEPPED)], closed_for=[(frozenset({0}), frozenset())])
    assert tracker.current.fired == {1, 2}
    tracker.step_to_be_read(0)
    assert (tracker.current.number, made.begun) == (1, [(True, True)])


@pytest.mark.parametrize("passes", [3, 6])
def test_passes_of_one_step_are_no_skipped_steps(passes: int) -> None:
    """Gradients that are cleared several times before each step, as in surgery on those of six tasks, are no skipped steps."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    for _ in range(10):
        for pass_ in range(passes):
            tracker.backward_began(lambda gone=pass_ > 0: ClearingEvidence(gone=gone))
            tracker.backward_ended(set())
        tracker.step_began(0)
        tracker.step_ended(0)
    assert made.skipped == 0
    assert tracker.current.number == 9


@pytest.mark.parametrize("skips", [1, 3, 6])
def test_steps_skipped_before_the_first_are_told_by_the_first_plain_one(skips: int) -> None:
    """Clearings that were held are skipped steps as soon as a step comes without one before it."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    for step in range(skips + 2):
        tracker.backward_began(lambda gone=step > 0: ClearingEvidence(gone=gone))
        tracker.backward_ended(set())
        if step >= skips:
            tracker.step_began(0)
            tracker.step_ended(0)
    assert made.skipped == 0
    tracker.backward_began(ClearingEvidence)
    assert made.skipped == skips


def test_three_changes_of_parameters_without_a_report_are_steps() -> None:
    """Before any step was seen, two clearings with changed parameters may be passes (SAM); with the third all were steps."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    for _ in range(4):
        tracker.backward_began(lambda: ClearingEvidence(gone=True, updated=True, reporting=False))
        tracker.backward_ended(set())
    assert made == Made(unseen=3, begun=[(True, True)])
    assert tracker.current.number == 1


def test_passes_of_several_backwards_are_no_skipped_steps() -> None:
    """Two passes of two backwards to each step, cleared in between; that nothing is cleared within the second changes nothing."""
    made = Made()
    tracker = made.tracker(lambda _: True)
    for _ in range(6):
        for cleared in (False, False, True, False):
            tracker.backward_began(functools.partial(ClearingEvidence, gone=cleared))
            tracker.backward_ended(set())
        tracker.step_began(0)
        tracker.step_taken(0)
        tracker.step_ended(0)
    assert made.skipped == 0
    assert tracker.current.number == 5


def test_a_skipped_step_in_counted_rounds_is_remembered_until_a_round_begins() -> None:
    """Counted rounds without a skip that follow do not make it forgotten: the next round is sampled."""
    tracker = Made().tracker(lambda number: number == 0)
    tracker.step_began(0)
    tracker.step_ended(0)
    tracker.backward_began(nothing)
    assert not tracker.current.sampled
    tracker.step_ended(0)
    tracker.rounds_counted(5, 1)
    tracker.rounds_counted(5, 0)
    tracker.backward_began(nothing)
    assert tracker.current.sampled


def test_an_answer_that_comes_late_makes_the_next_round_a_sample() -> None:
    """A step before that turns out to be skipped is looked at, unless the round before was sampled."""
    effects = RoundEffects(*[lambda *_arguments: None] * 6, lambda _number: True, lambda *_arguments: None)
    tracker = RoundTracker(lambda number: number == 0, lambda: UNSEEN, effects)
    sampled = []
    for _ in range(4):
        tracker.backward_began(nothing)
        sampled.append(tracker.current.sampled)
        tracker.step_ended(0)
    assert sampled == [True, False, True, False]
