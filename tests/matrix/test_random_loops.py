"""Random training loops: the numbers shown of them are right, nearly all samples are shown, and the training is unchanged."""

from __future__ import annotations

import random

import pytest
import torch

from tests.matrix.random_loops import Loop, Style, Verdict, state, verdict

LOOPS = 1000

SHOWN = 0.95
"""Minimal share of the sampled rounds that are shown."""


def chunks(first: int, most: int, size: int) -> list[object]:
    """Return the seeds of each test: `first` of them for `make test`, the others for `make test-full`."""
    starts = range(first, most, size)
    return [range(first), *(pytest.param(range(start, min(start + size, most)), marks=pytest.mark.full) for start in starts)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(10, LOOPS, 55))
def test_random_loop_is_shown_right(seeds: range) -> None:
    """No scrape of a loop shows a number that its own record does not have, and hardly a sample is lost."""
    verdicts: dict[int, Verdict] = {seed: verdict(seed) for seed in seeds}
    wrong = {seed: each.wrong[:3] for seed, each in verdicts.items() if each.wrong}
    assert not wrong, "\n".join(f"{seed} {Loop(seed).style}: {lines}" for seed, lines in wrong.items())
    assert sum(each.shown for each in verdicts.values()) >= SHOWN * sum(each.due for each in verdicts.values())


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(5, 200, 20))
def test_random_loop_trains_the_same(seeds: range) -> None:
    """The models hold the same in the end as without an exporter, to the last bit."""
    for seed in seeds:
        assert all(map(torch.equal, state(seed, watched=True), state(seed, watched=False))), Loop(seed).style


def test_loops_of_all_kinds_are_drawn() -> None:
    """Each kind of behaviour occurs in many of the loops."""
    styles = [Style.drawn(random.Random(seed)) for seed in range(LOOPS)]
    kinds = {
        "two optimizers": [style.kind == "two" for style in styles],
        "in turn": [style.kind == "in turn" for style in styles],
        "frozen in turn": [style.kind == "in turn" and style.toggles for style in styles],
        "another backward from some round on": [0 < style.auxiliary_from < style.rounds for style in styles],
        "another backward before the model's": [style.auxiliary_from < style.rounds and style.auxiliary_first for style in styles],
        "edits": [bool(style.edits) for style in styles],
        "edits between backwards": [bool(style.edits) and style.edits_between and max(style.counts) > 1 for style in styles],
        "skipped steps": [style.skips > 0 for style in styles],
        "freezing": [style.kind != "in turn" and style.freezes > 0 for style in styles],
        "zeros instead of nothing": [not style.set_to_none for style in styles],
        "shorter rounds": [len({*style.counts}) > 1 for style in styles],
        "unsampled rounds": [style.every > 1 for style in styles],
    }
    assert {kind: sum(count) for kind, count in kinds.items() if sum(count) < LOOPS // 20} == {}
