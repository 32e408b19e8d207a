"""Origins: the worker's side of NaN origin. It asks for armed rounds, judges tapes and keeps the places that they show."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.nan_origin.flags import SentFlags
from torch_grad_exporter.inspection.nan_origin.sentences import Origin
from torch_grad_exporter.inspection.nan_origin.tape import FlaggedTape, Tape
from torch_grad_exporter.inspection.nan_origin.verdict import origin_of
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import Inspected, Outcome

logger = logging.getLogger("torch_grad_exporter")

# Rounds that an alarm arms, and seconds between two alarms that arm: while it goes on, more rounds show the same.
ROUNDS, AGAIN_SECONDS = 4, 5.0

# Lines that are logged, at most.
LINES = 64

# Places that are shown at most; beyond, the oldest is dropped.
PLACES = 32


@dataclass(frozen=True, slots=True, eq=False)
class SentTape:
    """The data of a record: a tape, and how its flags are packed."""

    tape: Tape
    sent: SentFlags


class Origins:
    """The origins that tapes show, and the alarms that arm rounds. Belongs to the worker.

    Attributes:
        steps: By layer, pass and kind of each place the step at which it was last found, the latest at the end. From any thread: it
            is replaced and never changed.
    """

    def __init__(self, requests: Requests) -> None:
        self.steps: Mapping[tuple[str, str, str], int] = {}
        self._requests = requests
        self._armed_at = -math.inf
        self._losses = 0  # not finite since the last tape
        self._since: dict[str, int] = {}  # by layer, the steps after which its gradients were first found non-finite
        self._finite_at: dict[str, int] = {}  # by parameter, the steps after which it was last seen finite
        self._reported_at = -1  # the step of the last origin that was reported
        self._lines = 0

    # What arms

    def counted(self, sample: CountedSample) -> None:
        """Arm rounds where a sample is not finite."""
        if sample.sample.nonfinite():
            ended = sample.ended
            step = max(ended.steps.values(), default=0) - (ended.outcome is Outcome.STEPPED)
            for layer in sample.sample.nonfinite_layers():
                self._since.setdefault(layer, step)
            self._arm()

    def observed(self, name: str, value: float) -> None:
        """Arm rounds where a loss or a global norm is not finite."""
        if name in ("loss", "grad_norm") and not math.isfinite(value):
            self._losses += name == "loss"
            self._arm()

    def rounds_over(self, rounds: int) -> None:
        """Do nothing: rounds alone arm nothing."""

    def _arm(self) -> None:
        now = time.monotonic()
        if now - self._armed_at >= AGAIN_SECONDS:
            self._armed_at = now
            self._requests.arm(ROUNDS, "nan_origin")

    # What is found

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Judge a tape."""
        assert isinstance(record.data, SentTape)  # noqa: S101 - only `NanOrigin` sends records of this name
        flagged = FlaggedTape(record.data.tape, *record.data.sent.values(values))
        losses, self._losses = self._losses, 0
        origin = origin_of(flagged, loss_was_nonfinite=losses > 0)
        if origin is not None and not self._is_consequence(origin):
            self._reported_at = origin.step
            self._report(origin)
        self._remember(flagged)

    def _remember(self, flagged: FlaggedTape) -> None:
        """Note which parameters are finite; what was known of their layers ends with that."""
        nonfinite = {held.layer for held in flagged.tape.held if flagged.kind(held.slot)}
        for held in flagged.tape.held:
            if not flagged.kind(held.slot):
                self._finite_at[held.name] = flagged.tape.step
                if held.layer not in nonfinite:
                    self._since.pop(held.layer, None)

    def _is_consequence(self, origin: Origin) -> bool:
        """Return whether it is a parameter that was finite until the step of a reported origin: that step has made it so."""
        finite = self._finite_at.get(origin.parameter)
        return finite is not None and self._reported_at >= finite and origin.step > self._reported_at

    def _report(self, origin: Origin) -> None:
        """Show a place, and log it unless it is shown already."""
        place = (origin.layer, origin.stage, origin.kind)
        new = place not in self.steps
        latest = [*((other, step) for other, step in self.steps.items() if other != place), (place, origin.step)]
        self.steps = dict(latest[-PLACES:])
        if new and self._lines < LINES:
            self._lines += 1
            level = logging.INFO if origin.routine else logging.WARNING
            say(logger, level, "nan_origin: at step %d %s", origin.step, self._dated(origin).text)

    def _dated(self, origin: Origin) -> Origin:
        """Add since when a parameter or buffer is not finite, as far as that is known."""
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
