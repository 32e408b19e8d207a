"""Loss scales that nothing but the gradients' norms tell, as of a loop that scales its loss by hand.

Such a loop has scaled its loss in each step. So a common factor that is an exact power of two, and at most 2**-5, is an unscaling
if several samples lately had one, of scales that do not jump, and none had a gradient that was cut by less. Else it is a division.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.edits import Edit, Lately

LARGEST_UNSCALING = 2.0**-5
SMALLEST_UNSCALING = 2.0**-127
"""Scales are float32 numbers."""

CONFIRMED = 6
"""Samples, of those that are remembered, that have to reveal a scale until it is believed."""

SCALED_SHARE = 0.25
"""Share of the last samples that have to reveal a scale, for there to be one: a scaled loss may be clipped most times."""

NONE, HIDDEN = 1.0, 0.0
"""What a sample has shown instead of a scale: that there is none, or a clipping that hides whether there is one."""


@dataclass(slots=True)
class ScalesByHand:
    """Looks at sample after sample, and remembers of each optimizer what the last ones have shown."""

    _shown: defaultdict[int, Lately[float]] = field(default_factory=lambda: defaultdict(Lately))

    def look(self, sample: int, optimizer: int, edit: Edit) -> float | None:
        """The loss scale of an optimizer's gradients in the sample of this number: 1 if there is none, `None` if unknown."""
        if not math.isfinite(edit.whole) or not edit.whole or not math.isfinite(edit.seen):
            return None
        memory = self._shown[optimizer]
        most = float(edit.ratios.max())
        found = NONE if most > LARGEST_UNSCALING * (1 + 1e-6) else HIDDEN
        if found == HIDDEN and edit.alike and _is_unscaling(ratio := float(np.median(edit.ratios))):
            found = 1 / ratio
        memory.enter(sample, found)
        shown = memory.all()
        if NONE in shown:
            return NONE
        return found if found != HIDDEN and _steady([one for one in shown if one != HIDDEN]) else None

    def may_be(self, optimizer: int) -> bool:
        """Whether an optimizer's gradients seem to have such a scale, so that those of which it is not known have no sizes."""
        shown = self._shown[optimizer].all() if optimizer in self._shown else []
        scales = sum(one != HIDDEN for one in shown)
        return NONE not in shown and scales > 0 and scales >= SCALED_SHARE * len(shown)


def _steady(scales: list[float]) -> bool:
    """Whether enough scales were revealed, and they follow each other as a scaler's do."""
    return len(scales) >= CONFIRMED and all(0.49 < after / before < 2.01 for before, after in itertools.pairwise(scales))


def _is_unscaling(ratio: float) -> bool:
    """Whether a ratio of norms is a power of two that a gradient scaler would leave."""
    if not SMALLEST_UNSCALING <= ratio <= LARGEST_UNSCALING * (1 + 1e-6):
        return False
    exponent = math.log2(ratio)
    return abs(exponent - round(exponent)) < 1e-6
