"""Training loops made by chance: what is shown of them is right, nearly all of it is shown, and nothing of them changes."""

from __future__ import annotations

import pytest
import torch

from tests.matrix.random_loops import Loop, Verdict, state, verdict

LOOPS = 1000
TOGETHER = 50
"""Loops to a test."""

SHOWN = 0.95
"""Share of the sampled rounds that are shown, at least."""


def _chunks() -> list[object]:
    """The first numbers of as many loops; `make test` runs one of the tests."""
    return [pytest.param(first, marks=[pytest.mark.full] if first else []) for first in range(0, LOOPS, TOGETHER)]


@pytest.mark.parametrize("first", _chunks())
def test_what_is_shown_of_a_random_loop_is_right(first: int) -> None:
    """In no scrape of any loop is there a number that its own record does not have, and hardly a sample is lost."""
    found: dict[int, Verdict] = {seed: verdict(seed) for seed in range(first, first + TOGETHER)}
    wrong = {seed: one.wrong[:3] for seed, one in found.items() if one.wrong}
    assert not wrong, "\n".join(f"{seed} {Loop(seed).style}: {said}" for seed, said in wrong.items())
    assert sum(one.shown for one in found.values()) >= SHOWN * sum(one.due for one in found.values())


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(20, 200, 20))])
def test_a_random_loop_trains_as_without_an_exporter(first: int) -> None:
    """The models hold the same in the end, to the last bit."""
    for seed in range(first, first + 20):
        assert all(map(torch.equal, state(seed, watched=True), state(seed, watched=False))), Loop(seed).style


def test_the_loops_are_of_all_kinds() -> None:
    """Each thing that a loop may do is done in many of them, so that none of it goes untried."""
    styles = [Loop(seed).style for seed in range(LOOPS)]
    kinds = {
        "two optimizers": [one.kind == "two" for one in styles],
        "in turn": [one.kind == "in turn" for one in styles],
        "frozen in turn": [one.kind == "in turn" and one.toggles for one in styles],
        "another backward from some round on": [0 < one.auxiliary_from < one.rounds for one in styles],
        "another backward before the model's": [one.auxiliary_from < one.rounds and one.auxiliary_first for one in styles],
        "edits": [bool(one.edits) for one in styles],
        "edits between backwards": [bool(one.edits) and one.edits_between and max(one.counts) > 1 for one in styles],
        "skipped steps": [one.skips > 0 for one in styles],
        "freezing": [one.kind != "in turn" and one.freezes > 0 for one in styles],
        "zeros instead of nothing": [not one.set_to_none for one in styles],
        "shorter rounds": [len({*one.counts}) > 1 for one in styles],
        "unsampled rounds": [one.every > 1 for one in styles],
    }
    assert {kind: sum(count) for kind, count in kinds.items() if sum(count) < LOOPS // 20} == {}
