"""Random training loops: the numbers shown of them are right, nearly all samples are shown, and the training is unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.matrix.random_loops import Loop, trained, verdict

SHOWN = 0.95
"""Minimal share of the sampled rounds that are shown."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        range(20_298, 20_299),
        *(pytest.param(range(start, start + 50), marks=pytest.mark.full) for start in range(6, 506, 50)),
    ],
)
def test_random_loops(seeds: range) -> None:
    """No scrape shows a number that the loop's record does not have, hardly a sample is lost, and training is unchanged."""
    verdicts = {seed: verdict(seed) for seed in seeds}
    wrong = {seed: each.wrong[:3] for seed, each in verdicts.items() if each.wrong}
    assert not wrong, "\n".join(f"{seed} {Loop(seed).style}: {lines}" for seed, lines in wrong.items())
    assert sum(each.shown for each in verdicts.values()) >= SHOWN * sum(each.due for each in verdicts.values())
    for seed in seeds[::2]:
        assert all(map(torch.equal, verdicts[seed].state, trained(seed))), Loop(seed).style
