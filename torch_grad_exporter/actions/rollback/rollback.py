"""Rollback: the training goes back to a copy from when all was well, and the data go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.rollback.copies import HostCopies, HostCopy, bytes_for
from torch_grad_exporter.actions.rollback.signs import COUNTERS, FaultSigns
from torch_grad_exporter.actions.rollback.state import UncopiableError
from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.errors import inform, warn
from torch_grad_exporter.resources.host_memory import available_memory
from torch_grad_exporter.rules import Problem, Rule, Values

EVERY, KEEP, MOST = 200, 2, 3  # the defaults

# Of the memory that is available, what copies may take. The rest is for what the training still needs.
SHARE = 0.9

# The step of a choice that ends the training.
END = -1


class Rollback(StepAction):
    """Takes the training back to a copy from when all was well; the data and the learning rates go on.

    Each `every` optimizer steps parameters, buffers, the optimizers' state and the loss scale are copied to the host's memory.
    `exporter.on(Rollback())` goes back when a step was taken on gradients that are not finite, or when within half of `every` steps
    three losses are not finite or spike, or the reduced norm spikes three times. `exporter.on(rule_or_condition, Rollback())` goes
    back when the rule or the condition begins to hold.

    It goes back to the latest copy after which the run was well for at least half of `every` steps; if there is none any more, to
    the latest from before the first sign of the fault.

    Args:
        every: Optimizer steps between two copies.
        keep: Copies that are kept.
        most: Times that it goes back to the same copy; after that it makes `exporter.should_stop` true.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong.
    """

    has_cause = each_step = True

    def __init__(self, every: int = EVERY, keep: int = KEEP, *, most: int = MOST) -> None:
        self.every = check_whole(f"every={shown(every)}", every, what="a number of optimizer steps", example=EVERY)
        copies = "a number of copies, since the latest may have been made after the fault,"
        self.keep = check_whole(f"keep={shown(keep)}", keep, least=2, what=copies, example=KEEP)
        self.most = check_whole(f"most={shown(most)}", most, what="a number of times", example=MOST)
        self._margin = (every + 1) // 2
        self._given: str | None = None  # the user's cause, None if it acts by itself
        self._training: Training | None = None  # while it is in use
        self._copies = HostCopies(keep)
        self._signs = FaultSigns(self._margin, own=False)
        # Why nothing can be copied, and whether it has said that all copies are too late.
        self._cannot = ""
        self._missed = False
        self._measured = False
        self._steps = 0
        # The copy gone back to last, and how often in a row.
        self._last: int | None = None
        self._in_row = 0
        # The round in which it went back last, while another optimizer may yet step in it.
        self._round: int | None = None
        self._ended = False

    def __repr__(self) -> str:
        return f"Rollback(every={self.every}, keep={self.keep}, most={self.most})"

    # What `exporter.on` calls

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """See `StepAction`."""
        if self._training is not None:
            raise ValueError(f"action={self!r}: it is in use; make another one for each on(), since it has a memory")
        try:
            _, tensors = training.state.pack()
        except UncopiableError as error:
            raise ValueError(f"action={self!r}: {error}") from error
        if not tensors:
            raise ValueError(f"action={self!r}: nothing to copy: no parameter requires a gradient")
        self._check_memory(training, bytes_for(tensors))
        self._given = None if own else "condition" if rule is None else rule.name

    def begin(self, training: Training, *, own: bool = False) -> None:
        """See `StepAction`."""
        training.rollbacks.in_use = True
        for reason in COUNTERS if self._given is None else (self._given,):
            training.rollbacks.know(reason)
        self._signs = FaultSigns(self._margin, own=own)
        self._training = training
        self._cannot, self._missed, self._measured, self._ended = "", False, False, False
        self._steps, self._last, self._in_row, self._round = 0, None, 0, None

    def end(self) -> None:
        """Drop all copies."""
        self._training = None
        self._copies.clear()

    def _check_memory(self, training: Training, size: int) -> None:
        """Raise `RuntimeError` if the copies of all ranks of this host do not fit into its memory."""
        available, ranks = available_memory(), training.ranks_here
        if available is not None and self.keep * size * ranks > SHARE * available:
            others = "" if ranks == 1 else f", and {ranks} ranks share this host"
            raise RuntimeError(
                f"action={self!r}: a copy takes {_gigabytes(size)}, {self.keep} take {_gigabytes(self.keep * size)}{others}; "
                f"{_gigabytes(available)} are available, of which copies may take {SHARE:.0%}"
            )

    # The thread that judges

    def judged(self, values: Values, *, holds: bool) -> bool:
        """Return whether to go back, by the signs of a fault so far."""
        training = self._training
        if training is None or self._ended:
            return False
        self._signs.look(values, training.clock.number, self._given if holds else None)
        good = self._good()
        training.rollbacks.good_step = None if good is None else good.shown
        return self._signs.reason is not None

    def _good(self) -> HostCopy | None:
        well = self._signs.well
        proven = [copy for copy in self._copies.whole() if well is not None and copy.shown + self._margin <= well]
        return proven[-1] if proven else None

    def choose(self, _training: Training, _problems: Sequence[Problem]) -> tuple[int, str | None] | None:
        """Return the copy's step and the reason."""
        if self._signs.stale:  # it has just gone back
            return None
        well, reason = self._signs.well, self._signs.reason
        older = [copy for copy in self._copies.whole() if well is not None and copy.shown < well]
        copy = self._good() or (older[-1] if older else None)
        if copy is None or copy.step is None:
            if not self._missed:
                self._missed = True
                warn("Rollback: %s, but all copies are from after it; every=%d may be too small", reason, self.every)
            return None
        self._missed = False
        return END if copy.step == self._last and self._in_row >= self.most else copy.step, reason

    def prepare(self, _training: Training, choice: Sequence[Any]) -> tuple[int, str]:
        """Return the step and the reason, and keep the copy. Raises `RuntimeError` if this rank does not have it."""
        step, reason = choice
        if step != END and not self._copies.hold(step):
            raise RuntimeError(self._cannot or f"the copy of step {step} is gone; make every={self.every} larger")
        return step, str(reason)

    def refused(self) -> None:
        """See `StepAction`."""
        self._copies.hold(None)

    # The thread that trains

    def step_over(self, steps: int) -> None:
        """Make a copy if one is due, or go back again."""
        training, before = self._training, self._steps
        self._steps = steps
        if training is None:
            return
        if self._round is not None and self._last is not None:
            if self._round == training.rounds.current.number:
                # Another optimizer has stepped, on gradients of the parameters as they were before.
                self._copies.write(training.state, self._last)
                return
            self._round = None
        if steps == before or self._cannot or self._ended:
            return
        if not self._measured:
            self._measured = True
            self._measure(training)
        if steps % self.every == 0 and not self._waits(training):
            start = time.perf_counter()
            self._copies.make(training.state, steps, training.clock.number)
            training.rollbacks.copied(time.perf_counter() - start, self._copies.held_bytes)
            if self._training is None:  # it has just ended
                self._copies.clear()

    def _waits(self, training: Training) -> bool:
        """Return whether the last copy is not known to be good yet, and would take the place of one that is.

        In a job all ranks make the same copies, and only rank 0 knows which are good.
        """
        copies = self._copies.whole()
        return training.ranks == 1 and bool(copies) and self._good() is not copies[-1]

    def _measure(self, training: Training) -> None:
        """Log what copies will take, now that optimizers have their state. Raises if there is not enough."""
        try:
            _, tensors = training.state.pack()
            size = bytes_for(tensors)
            self._check_memory(training, size)
        except (UncopiableError, RuntimeError) as error:
            self._cannot = f"this rank makes no copies: {error}"
            raise
        what = "each of %d copies takes %s of the host's memory, one is made every %d steps"
        inform(f"Rollback: {what}", self.keep, _gigabytes(size), self.every)

    def act(self, training: Training, prepared: tuple[int, str]) -> None:
        """Go back, or ask the loop to end if that has not helped."""
        step, reason = prepared
        if self._training is None or self._ended:
            return
        if step == END:
            self._ended = True
            training.stop.set()
            warn("Rollback: %s again after going back %d times to the same step: should_stop is true", reason, self.most)
            return
        now = training.clock.number
        self._signs.restart(now)
        try:
            copy = self._copies.write(training.state, step)
        finally:
            self._copies.hold(None)
        self._copies.drop_after(step)
        # Only optimizers that share a backward can undo it.
        self._round = training.rounds.current.number if len(training.optimizers.numbered()) > 1 else None
        self._in_row = self._in_row + 1 if step == self._last else 1
        self._last = step
        seconds = time.monotonic() - copy.at
        training.rollbacks.went_back(reason, copy.shown, self._steps - step, seconds)
        warn("Rollback: %s, went back from step %d to step %d, %.0f s", reason, now, copy.shown, seconds)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"
