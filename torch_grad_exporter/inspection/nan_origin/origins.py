"""Origins: the host's side of NaN origin. It asks for armed rounds, judges tapes and keeps the places that they show."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.nan_origin.flags import Sent
from torch_grad_exporter.inspection.nan_origin.tape import Tape
from torch_grad_exporter.inspection.nan_origin.verdict import Flagged, Origin, origin_of
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import Inspected

logger = logging.getLogger("torch_grad_exporter")

AGAIN_SECONDS = 5.0
"""Between two alarms that arm, at least: while it goes on, more rounds show the same."""

LINES = 64
"""Lines that are logged, at most."""


ROUNDS = 4
"""Rounds that an alarm arms."""

PLACES = 32
"""Places that are shown at most; beyond, the oldest is dropped."""


class OriginPlaces:
    """Layer, pass and kind of each place, with the step at which it was last found. From any thread: replaced, never changed."""

    def __init__(self) -> None:
        self._steps: Mapping[tuple[str, str, str], int] = {}

    @property
    def steps(self) -> Mapping[tuple[str, str, str], int]:
        """The places, the latest last."""
        return self._steps

    def add(self, place: tuple[str, str, str], step: int) -> bool:
        """Add a place; return whether it is new among those that are shown. For one thread at a time."""
        steps = {other: at for other, at in self._steps.items() if other != place} | {place: step}
        new = place not in self._steps
        while len(steps) > PLACES:
            del steps[next(iter(steps))]
        self._steps = steps
        return new


@dataclass(frozen=True, slots=True, eq=False)
class SentTape:
    """The data of a record: a tape, and how its flags are packed."""

    tape: Tape
    sent: Sent


class Origins:
    """Takes tapes, and listens to what is not finite. Belongs to the worker.

    `steps`: optimizer steps so far.
    """

    def __init__(
        self, places: OriginPlaces, steps: Callable[[], int], requests: Requests, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._places = places
        self._steps = steps
        self._requests = requests
        self._now = now
        self._armed_at = -AGAIN_SECONDS
        self._losses = 0  # not finite since the last tape
        self._since: dict[str, int] = {}  # by layer, the steps after which its gradients were first found non-finite
        self._finite_at: dict[str, int] = {}  # by parameter, the steps after which it was last seen finite
        self._told_at = -1  # the step of the last origin that was reported
        self._lines = 0

    # What arms

    def counted(self, sample: CountedSample) -> None:
        """Arm rounds where a sample is not finite."""
        if sample.sample.nonfinite():
            step = self._steps()
            for layer in sample.sample.nonfinite_layers():
                self._since.setdefault(layer, step)
            self._arm()

    def observed(self, name: str, value: float) -> None:
        """Arm rounds where a loss or a global norm is not finite."""
        if name in ("loss", "grad_norm") and not math.isfinite(value):
            self._losses += name == "loss"
            self._arm()

    def rounds_over(self, rounds: int) -> None:
        """Nothing: rounds alone arm nothing."""

    def _arm(self) -> None:
        now = self._now()
        if now - self._armed_at >= AGAIN_SECONDS:
            self._armed_at = now
            self._requests.arm(ROUNDS, "nan_origin")

    # What is found

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Judge a tape."""
        assert isinstance(record.data, SentTape)  # noqa: S101 - only `NanOrigin` sends records of this name
        tape, sent = record.data.tape, record.data.sent
        flagged = Flagged(tape, *sent.values(values))
        losses, self._losses = self._losses, 0
        origin = origin_of(flagged, loss_was_wrong=losses > 0)
        if origin is not None and not self._follows(origin):
            self._told_at = origin.step
            self._tell(self._dated(origin))
        self._remember(flagged)

    def _remember(self, flagged: Flagged) -> None:
        """Which parameters are finite, and what was known of their layers is over then."""
        wrong = {held.layer for held in flagged.tape.held if flagged.kind(held.slot)}
        for held in flagged.tape.held:
            if not flagged.kind(held.slot):
                self._finite_at[held.name] = flagged.tape.step
                if held.layer not in wrong:
                    self._since.pop(held.layer, None)

    def _follows(self, origin: Origin) -> bool:
        """Whether it is a parameter that was finite until the step of an origin that was told: that step has made it so."""
        finite = self._finite_at.get(origin.parameter)
        return finite is not None and self._told_at >= finite and origin.step > self._told_at

    def _dated(self, origin: Origin) -> Origin:
        """Adds since when a parameter or buffer is not finite, as far as that is known."""
        if not origin.parameter:
            return origin
        first, finite = self._since.get(origin.layer), self._finite_at.get(origin.parameter)
        if finite is not None:
            since = f"it was finite at step {finite}"
        elif first is not None and first < origin.step:
            since = f"non-finite since step {first}, when gradients of its layer first were"
        else:
            since = f"non-finite since before step {origin.step}"
        return replace(origin, text=f"{origin.text}; {since}")

    def _tell(self, origin: Origin) -> None:
        if self._places.add((origin.layer, origin.stage, origin.kind), origin.step) and self._lines < LINES:
            self._lines += 1
            level = logging.INFO if origin.routine else logging.WARNING
            say(logger, level, "nan_origin: at step %d %s", origin.step, origin.text)
