"""How gradients changed between the end of the backward and the step, from their norms before and after.

One common factor may be a clipping or a division; norms alone do not tell which. A limit is known by the norm that
comes out: it repeats, though the factors differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length

AGREE = 4e-3  # largest relative difference of factors taken for equal: rounding to bfloat16 moves a norm less
UNTOUCHED = 1e-6  # a factor this close to 1 is none: both norms were rounded alike
COARSE = 1e-5  # common factors that differ by more are of gradients with fewer digits than float32
REPEATS = 1e-4  # largest relative difference of norms after clipping to the same limit
REMEMBERED, MATCHES = 16, 2  # samples that are remembered, and earlier norms that a limit has to repeat
COARSE_MATCHES, COARSE_SPREAD = 8, 5e-3  # in bfloat16 norms come close by chance: more of them, within this deviation


@dataclass(frozen=True, slots=True)
class Clipping:
    """Judgement for one optimizer: the clip coefficient and the norm that it saw, None if unknown."""

    coefficient: float | None
    after: float | None = None
    clipped: bool = False


class Edit:
    """Norms of an optimizer's gradients, shape (parameters,), before and after; 0 after where none was left."""

    def __init__(self, before: FloatArray, after: FloatArray) -> None:
        self.whole, self.seen = length(before), length(after)
        there = (before > 0) | (after > 0)
        with np.errstate(all="ignore"):
            self.ratio = float(np.float64(self.seen) / self.whole)
            ratios = after[there] / before[there]
        self.least, self.most = (float(ratios.min()), float(ratios.max())) if len(ratios) else (1.0, 1.0)
        self.untouched = self.least >= 1 - UNTOUCHED and self.most <= 1 + UNTOUCHED
        partly = self.least < 1 - UNTOUCHED and bool((np.abs(ratios - 1) <= UNTOUCHED).any())
        self.alike = self.most < np.inf and self.most - self.least <= AGREE * self.most and not partly
        self.coarse = self.most - self.least > COARSE * self.most
        self.shorter = 0 < self.seen < math.inf and 0 < self.whole < math.inf and self.ratio < 1 - UNTOUCHED


class ClipDetection:
    """Judges sample after sample, and remembers the norms after a common factor of the last ones."""

    def __init__(self) -> None:
        # By optimizers and sample: the norm after, the factor, and whether both are coarse.
        self._limits: defaultdict[frozenset[int], dict[int, tuple[float, float, bool]]] = defaultdict(dict)

    def judge(
        self, sample: int, edits: Mapping[int, Edit], *, norm: float | None, divided: bool, part: bool
    ) -> dict[int, Clipping]:
        """Judge what each optimizer saw of a sample; a clipping may be of all of them together.

        Args:
            sample: Its number. A sample that is judged again enters the memory once.
            edits: What happened to the gradients, by optimizer.
            norm: The global norm before clipping that the loop has given.
            divided: The divisor is known, so that no division is left in the norms.
            part: This rank has only a part of the gradients that the norm is of.
        """
        found = {o: self._of_one(sample, o, edit, norm, divided=divided, part=part) for o, edit in edits.items()}
        unknown = [o for o, one in found.items() if one.coefficient is None and not one.clipped and edits[o].shorter]
        if len(unknown) > 1 and not part:
            together = [edits[o] for o in unknown]
            ratios, seen = [edit.ratio for edit in together], math.hypot(*(edit.seen for edit in together))
            coarse = any(edit.coarse for edit in together)
            alike = max(ratios) - min(ratios) <= AGREE * max(ratios)
            if alike and self._repeats(sample, frozenset(unknown), seen, ratios[0], coarse=coarse):
                found |= {o: Clipping(edits[o].ratio, edits[o].seen, clipped=True) for o in unknown}
        return found

    def _of_one(self, sample: int, optimizer: int, edit: Edit, norm: float | None, *, divided: bool, part: bool) -> Clipping:
        if not 0 < edit.whole < math.inf:  # there is nothing to compare
            return Clipping(None, None if edit.whole else edit.seen)
        if edit.untouched or not edit.alike or not math.isfinite(edit.seen):
            # Clipping makes no gradient longer, and may make only some of them shorter.
            return Clipping(edit.ratio, edit.seen, clipped=not edit.untouched and edit.most <= 1 + UNTOUCHED)
        if divided and edit.ratio <= 1 + AGREE:
            return Clipping(edit.ratio, edit.seen, clipped=edit.ratio < 1 - AGREE)
        if not edit.shorter or (part and norm is None):
            return Clipping(None, edit.seen)
        if norm is not None and not part and math.isclose(norm, edit.whole, rel_tol=AGREE):
            return Clipping(edit.ratio, edit.seen, clipped=True)
        if norm is not None and not part and math.isclose(norm, edit.seen, rel_tol=REPEATS):
            return Clipping(edit.seen / norm, edit.seen)  # it was divided before, and not clipped
        whole = norm if part and norm is not None else edit.whole
        limit = self._repeats(sample, frozenset({optimizer}), edit.ratio * whole, edit.ratio, coarse=edit.coarse)
        # Another norm than that of the backward says that there was a division as well, by an unknown divisor.
        return Clipping(edit.ratio if limit and (norm is None or part) else None, edit.seen, clipped=limit)

    def _repeats(self, sample: int, optimizers: frozenset[int], norm: float, factor: float, *, coarse: bool) -> bool:
        """Return whether the norm after a common factor repeats earlier ones, and not only because the gradients do."""
        memory = self._limits[optimizers]
        memory.pop(sample, None)
        earlier = [*memory.values()]
        memory[sample] = norm, factor, coarse
        if len(memory) > REMEMBERED:
            del memory[next(iter(memory))]
        coarse |= any(one[2] for one in earlier)  # a power of two is exact in any type
        near = [one for one in earlier if coarse or math.isclose(one[0], norm, rel_tol=REPEATS)]
        tolerance = 2 * AGREE if coarse else REPEATS
        differ = sum(not math.isclose(one[1], factor, rel_tol=tolerance) for one in near)
        spread = float(np.std(np.log([norm, *(one[0] for one in near)]))) if coarse else 0.0
        return len(near) >= (COARSE_MATCHES if coarse else MATCHES) and differ >= MATCHES and spread <= COARSE_SPREAD
