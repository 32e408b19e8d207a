"""Surprises: a loss or a norm that is not finite, after which the next rounds are sampled to show where it comes from.

Nothing else brings samples: of a burst of large norms they would make the counts of spikes and the sums of squares too large.
"""

from __future__ import annotations

import math
import time

from torch_grad_exporter.requests import SURPRISE, Requests

# Rounds that are sampled after a surprise, and seconds in which further ones ask for none: their layers show by then.
ROUNDS, AGAIN_SECONDS = 4, 30.0


class Surprises:
    """Asks for samples where a layer may have caused what the run shows. Belongs to the worker."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._asked_at = -math.inf

    def seen(self) -> None:
        """Ask for samples, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._asked_at >= AGAIN_SECONDS:
            self._asked_at = now
            self._requests.arm(ROUNDS, SURPRISE)
