"""Detects clipping between backward and step: a limit is known by the norm after it, which repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.statistics.combine import length

AGREE = 4e-3  # largest relative difference of factors taken for equal: rounding to bfloat16 moves a norm less
UNTOUCHED = 1e-6  # a factor this close to 1 is none: both norms were rounded alike
COARSE = 1e-5  # common factors that differ by more are of gradients with fewer digits than float32
REPEATS = 1e-4  # largest relative difference of norms after clipping to the same limit
REMEMBERED, MATCHES = 16, 2  # samples that are remembered, and earlier norms that a limit has to repeat
COARSE_MATCHES, COARSE_SPREAD = 8, 5e-3  # in bfloat16 norms come close by chance: more of them, within this deviation


@dataclass(frozen=True, slots=True)
class ClipVerdict:
    """Judgement for one optimizer: the clip coefficient, the norm that it saw, and whether it was clipped; None if unknown."""

    coefficient: float | None
    after: float | None = None
    clipped: bool | None = False
    earlier: frozenset[int] = frozenset()  # samples that came out at the same limit, so that they were clipped as well


class Edit:
    """Norms of an optimizer's gradients before and after, shape (parameters,); 0 after if no gradient was left."""

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
    """Judges sample after sample, and remembers norms after a common factor."""

    def __init__(self) -> None:  # by optimizers and sample: the norm after, the factor, and whether they are coarse
        self._limits: dict[frozenset[int], dict[int, tuple[float, float, bool]]] = {}

    def judge(
        self, sample: int, edits: Mapping[int, Edit], *, norm: float | None, divided: bool, part: bool
    ) -> dict[int, ClipVerdict]:
        """Judge what each optimizer saw of a sample.

        Args:
            sample: The number of the sample, which may come again.
            edits: The norms before and after, by optimizer.
            norm: The global norm that the loop reported, None if it did not.
            divided: Whether gradients were divided in a known way, so that no division is left.
            part: Whether this rank has only a part of the gradients.
        """
        clippings = {o: self._judge(sample, o, edit, norm, divided=divided, part=part) for o, edit in edits.items()}
        unknown = [o for o, clip in clippings.items() if clip.clipped is None]
        if len(unknown) > 1 and not part:  # they may be clipped together
            ratios, seen = [edits[o].ratio for o in unknown], math.hypot(*(edits[o].seen for o in unknown))
            coarse, alike = any(edits[o].coarse for o in unknown), max(ratios) - min(ratios) <= AGREE * max(ratios)
            if alike and (earlier := self._repeats(sample, frozenset(unknown), seen, ratios[0], coarse=coarse)):
                clippings |= {o: ClipVerdict(edits[o].ratio, edits[o].seen, clipped=True, earlier=earlier) for o in unknown}
        return clippings

    def _judge(self, sample: int, optimizer: int, edit: Edit, norm: float | None, *, divided: bool, part: bool) -> ClipVerdict:
        ratio, seen = edit.ratio, edit.seen
        if not 0 < edit.whole < math.inf:  # there is nothing to compare
            return ClipVerdict(None, None if edit.whole else seen)
        if edit.untouched or not edit.alike or not math.isfinite(seen) or (divided and ratio <= 1 + AGREE):
            # Clipping makes no gradient longer, and may make only some of them shorter.
            shorter = edit.most <= 1 + UNTOUCHED and (not edit.alike or ratio < 1 - AGREE)
            return ClipVerdict(ratio, seen, clipped=shorter and not edit.untouched)
        whole, given = (norm, None) if part else (edit.whole, norm)
        if not edit.shorter or whole is None:
            return ClipVerdict(None, seen, clipped=None if edit.shorter else False)
        if given is not None and math.isclose(given, whole, rel_tol=AGREE):
            return ClipVerdict(ratio, seen, clipped=True)
        if given is not None and math.isclose(given, seen, rel_tol=REPEATS):
            return ClipVerdict(seen / given, seen)  # the norm was taken after a division, and nothing was clipped
        earlier = self._repeats(sample, frozenset({optimizer}), ratio * whole, ratio, coarse=edit.coarse)
        # Another given norm shows that there was a division as well, by an unknown divisor.
        return ClipVerdict(ratio if earlier and given is None else None, seen, bool(earlier) or None, earlier)

    def _repeats(self, sample: int, optimizers: frozenset[int], norm: float, factor: float, *, coarse: bool) -> frozenset[int]:
        """Return the samples whose norm after a common factor this one repeats; none if only because the gradients do."""
        memory = self._limits.setdefault(optimizers, {})
        memory.pop(sample, None)
        earlier, memory[sample] = dict(memory), (norm, factor, coarse)
        if len(memory) > REMEMBERED:
            del memory[next(iter(memory))]
        coarse |= any(was_coarse for _, _, was_coarse in earlier.values())  # a power of two is exact in any type
        near = {i: (n, f) for i, (n, f, _) in earlier.items() if coarse or math.isclose(n, norm, rel_tol=REPEATS)}
        differ = sum(not math.isclose(f, factor, rel_tol=2 * AGREE if coarse else REPEATS) for _, f in near.values())
        spread = float(np.std(np.log([norm, *(n for n, _ in near.values())]))) if coarse else 0.0
        known = len(near) >= (COARSE_MATCHES if coarse else MATCHES) and differ >= MATCHES and spread <= COARSE_SPREAD
        return frozenset(near) if known else frozenset()


def with_ours(
    norms: FloatArray, seen: FloatArray, own: Mapping[int, BoolArray], by_us: set[int], clippings: dict[int, ClipVerdict]
) -> FloatArray:
    """Add the clipping of `clip=` to the verdicts; return the norms before and after, shape (2, parameters).

    `clip=` comes after everything that the loop does, so both norms are known.

    Args:
        norms: The norms after the backward.
        seen: The norms after the loop, and after `clip=`.
        own: By optimizer, which parameters it owns.
        by_us: The optimizers whose gradients `clip=` has clipped.
        clippings: The verdicts, which are updated.
    """
    (after, clipped), edited = seen, np.full((2, len(norms)), np.nan)
    for optimizer, mine in own.items():
        loop = clippings.get(optimizer)
        before = norms if loop is None else after
        if optimizer in by_us:
            edited[:, mine] = before[mine], clipped[mine]
            ours, loop = Edit(before[mine], clipped[mine]), loop or ClipVerdict(1.0)
            coefficient, was_clipped = loop.coefficient, loop.clipped
            if 0 < ours.whole < math.inf and math.isfinite(ours.seen):
                coefficient = ours.ratio if coefficient is None else coefficient * ours.ratio
                was_clipped = ours.least < 1 - UNTOUCHED or was_clipped
            clippings[optimizer] = replace(loop, coefficient=coefficient, after=ours.seen, clipped=was_clipped)
        elif loop is not None and loop.coefficient is not None:  # within a closure the two cannot be distinguished
            edited[:, mine] = norms[mine], after[mine]
    return edited
