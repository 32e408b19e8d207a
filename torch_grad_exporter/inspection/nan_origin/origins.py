"""Origins: the host's side of NaN origin: it gives the alarm that arms rounds, judges tapes and tells what they show."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch_grad_exporter.collectors.origins import OriginPlaces
from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.nan_origin.flags import Sent
from torch_grad_exporter.inspection.nan_origin.tape import Tape
from torch_grad_exporter.inspection.nan_origin.verdict import Flagged, Origin, origin_of
from torch_grad_exporter.metrics.families import FloatArray

logger = logging.getLogger("torch_grad_exporter")

AGAIN_SECONDS = 5.0
"""Between two alarms that arm, at least: while it goes on, more rounds show the same."""

LINES = 64
"""Lines that are logged, at most."""


class Origins:
    """Belongs to the worker.

    `alarm`: is called where rounds are to be armed; `steps`: optimizer steps so far.
    """

    def __init__(
        self, places: OriginPlaces, steps: Callable[[], int], alarm: Callable[[], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._places = places
        self._steps = steps
        self._alarm = alarm
        self._now = now
        self._armed_at = -AGAIN_SECONDS
        self._losses = 0
        self._since: dict[str, int] = {}
        """By layer, the steps after which its gradients were first found non-finite."""
        self._finite_at: dict[str, int] = {}
        """By parameter, the steps after which it was last seen finite."""
        self._told_at = -1
        """The step of the last origin that was told."""
        self._lines = 0

    # What arms

    def gradients_were_wrong(self, layers: Iterable[str]) -> None:
        """A sample had gradients that are not finite, in these layers."""
        step = self._steps()
        for layer in layers:
            self._since.setdefault(layer, step)
        self._arm()

    def loss_was_wrong(self) -> None:
        """A loss was observed that is not finite."""
        self._losses += 1
        self._arm()

    def _arm(self) -> None:
        now = self._now()
        if now - self._armed_at >= AGAIN_SECONDS:
            self._armed_at = now
            self._alarm()

    # What is found

    def taker(self, tape: Tape, sent: Sent) -> Callable[[tuple[FloatArray, ...]], None]:
        """What takes the values of a tape once they have arrived."""
        return functools.partial(self._take, tape, sent)

    def _take(self, tape: Tape, sent: Sent, arrived: tuple[FloatArray, ...]) -> None:
        flagged = Flagged(tape, *sent.values(arrived))
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
