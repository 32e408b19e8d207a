"""How gradients were clipped, or by what they were divided, between the end of backward and the optimizer.

Their norms are measured again where the optimizer sees them. One common factor may be that of a clipping to a limit, or that of a
division, as by the number of tokens; norms alone do not tell which. A limit is known by the norm that comes out: it is the same
one again and again, though the factors differ. So the clip coefficient is known where the norm after repeats, where the loop tells
the norm before the clipping or by what it divides, and where gradients were changed by different factors, as by clipping by value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.aggregation.edits import AGREE, UNTOUCHED, Edit, Lately

REPEATS = 1e-4
"""Largest relative difference of norms after clipping to the same limit."""

MATCHES = 2
"""Earlier norms that a norm has to repeat, to be one that was clipped to a limit."""

COARSE_MATCHES, COARSE_SPREAD = 8, 5e-3
"""Where gradients, their norm and the factor are rounded to bfloat16, norms come close to each other by chance: so many earlier
ones have to be remembered, and the relative standard deviation of all of them may be so large."""

UNEXPLAINED = 3
"""Samples whose given norm explains nothing, after which it is taken for another one than that of all gradients."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Judgement for one optimizer. `coefficient`: `None` if it is unknown; `after`: the norm that the optimizer saw, likewise.

    `clipped`: whether the optimizer saw smaller gradients than the backward gave, for a clipping. `divisor`: by what the loop has
    divided the gradients before, as far as the norm that it gave shows; `sure`: whether that is certain.
    """

    coefficient: float | None
    after: float | None = None
    clipped: bool = False
    divisor: float = 1.0
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the loop has said of a sample. `divided`: by what it divides, so that no division is left in the norms.

    `norm`: the global norm before clipping. `part`: it is that of more than this rank has.
    """

    divided: bool = False
    norm: float | None = None
    part: bool = False


@dataclass(frozen=True, slots=True)
class _Short:
    """A norm after a common factor below 1."""

    norm: float
    factor: float
    coarse: bool


@dataclass(slots=True)
class Clippings:
    """Judges sample after sample, and remembers of each optimizer what came out of those before."""

    _limits: defaultdict[frozenset[int], Lately[_Short]] = field(default_factory=lambda: defaultdict(Lately))
    """Norms after a common factor below 1, of optimizers and of several together."""
    _given: defaultdict[int, Lately[bool]] = field(default_factory=lambda: defaultdict(Lately))
    """Whether a norm that the loop gave was that of all gradients, after a division and before clipping."""

    def judge(self, sample: int, edits: Mapping[int, Edit], said: Said) -> dict[int, Clipping]:
        """Judges what each optimizer saw of the sample of this number. A clipping may be that of all of them together."""
        found = {optimizer: self._one(sample, optimizer, edit, said) for optimizer, edit in edits.items()}
        open_ = {o: edits[o] for o, one in found.items() if one.coefficient is None and one.sure and _shorter(edits[o])}
        if len(open_) > 1 and not said.part:
            ratios = [edit.ratio for edit in open_.values()]
            seen = math.hypot(*(edit.seen for edit in open_.values()))
            together = max(ratios) - min(ratios) <= AGREE * max(ratios)
            coarse = any(edit.coarse for edit in open_.values())
            if together and self._is_limit(sample, frozenset(open_), seen, ratios[0], coarse=coarse):
                found |= {o: Clipping(edit.ratio, edit.seen, clipped=True) for o, edit in open_.items()}
        return found

    def _one(self, sample: int, optimizer: int, edit: Edit, said: Said) -> Clipping:
        whole, seen = edit.whole, edit.seen
        if not 0 < whole < math.inf:  # there is nothing to compare
            return Clipping(None, None if whole else seen)
        if not math.isfinite(seen):
            return Clipping(edit.ratio, seen)
        explained = self._by_norm(sample, optimizer, edit, said.norm) if said.norm is not None and not said.part else None
        if explained is not None:
            return explained
        if edit.untouched or not edit.alike:
            # Clipping makes no gradient longer, and may make only some of them shorter.
            return Clipping(edit.ratio, seen, clipped=not edit.untouched and bool(edit.ratios.max() <= 1 + UNTOUCHED))
        if said.divided and edit.ratio <= 1 + AGREE:
            return Clipping(edit.ratio, seen, clipped=edit.ratio < 1 - AGREE)
        return self._by_limit(sample, optimizer, edit, said)

    def _by_limit(self, sample: int, optimizer: int, edit: Edit, said: Said) -> Clipping:
        """What a common factor is: a clipping, if the norm after it repeats. A rank that has a part knows it by the given one."""
        whole = said.norm if said.part else edit.whole
        if whole is None or not _shorter(edit):
            return Clipping(None, edit.seen)
        limit = self._is_limit(sample, frozenset({optimizer}), edit.ratio * whole, edit.ratio, coarse=edit.coarse)
        return Clipping(edit.ratio if limit else None, edit.seen, clipped=limit)

    def _by_norm(self, sample: int, optimizer: int, edit: Edit, given: float) -> Clipping | None:
        """What the norm that the loop gave says of a change: a division before it, and a clipping after it.

        It may be a norm of another kind, or of other gradients: then it explains nothing. It is believed where it is the norm
        before any change, or where the optimizer saw just that norm or a limit.
        """
        divisor, memory = edit.whole / given, self._given[optimizer]
        plain = abs(divisor - 1) <= AGREE
        if plain or edit.untouched:
            memory.enter(sample, plain)
            return Clipping(edit.ratio, edit.seen, clipped=True) if plain and edit.alike and _shorter(edit) else None
        coefficient, earlier = edit.seen / given, memory.before(sample)
        trusted, clipped = sum(earlier) > len(earlier) / 2, divisor > 1 and coefficient < 1
        if edit.alike:
            same = math.isclose(coefficient, 1, rel_tol=AGREE if edit.coarse else REPEATS)
            limit = clipped and self._is_limit(sample, frozenset({optimizer}), edit.seen, coefficient, coarse=edit.coarse)
            memory.enter(sample, same or limit)
            if same and (not edit.coarse or trusted or not earlier):
                return Clipping(coefficient, edit.seen, divisor=divisor)
            trusted |= limit
        if clipped and trusted:
            return Clipping(coefficient, edit.seen, clipped=True, divisor=divisor)
        doubtful = clipped and edit.alike and earlier.count(False) < UNEXPLAINED
        return Clipping(None, edit.seen, sure=False) if doubtful else None

    def _is_limit(self, sample: int, optimizers: frozenset[int], norm: float, factor: float, *, coarse: bool) -> bool:
        """Whether the norm after a common factor repeats earlier ones, and not only because the gradients do."""
        memory = self._limits[optimizers]
        earlier = memory.before(sample)
        memory.enter(sample, _Short(norm, factor, coarse))
        coarse |= any(one.coarse for one in earlier)  # a power of two is exact in any type
        near = [one for one in earlier if coarse or math.isclose(one.norm, norm, rel_tol=REPEATS)]
        differ = sum(not math.isclose(one.factor, factor, rel_tol=2 * AGREE if coarse else REPEATS) for one in near)
        spread = float(np.std(np.log([norm, *(one.norm for one in near)]))) if coarse else 0.0
        return len(near) >= (COARSE_MATCHES if coarse else MATCHES) and differ >= MATCHES and spread <= COARSE_SPREAD


def combined(loop: Clipping, ours: Edit) -> Clipping:
    """The judgement of what the loop has done, and after it a clipping of which both norms are known."""
    if not 0 < ours.whole < math.inf or not math.isfinite(ours.seen):
        return replace(loop, after=ours.seen)
    coefficient = ours.ratio if loop.coefficient is None else loop.coefficient * ours.ratio
    clipped = loop.clipped or bool((ours.ratios < 1 - UNTOUCHED).any())
    return replace(loop, coefficient=coefficient, after=ours.seen, clipped=clipped)


def _shorter(edit: Edit) -> bool:
    """Whether the norm has become smaller by more than rounding."""
    return 0 < edit.seen < math.inf and 0 < edit.whole < math.inf and edit.ratio < 1 - UNTOUCHED
