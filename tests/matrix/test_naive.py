"""Naive monitors in some regimes of training: where their norms are wrong, and where they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.matrix import REGIMES
from tests.matrix.distributed import REGIMES as OF_TWO_RANKS
from tests.matrix.harness import Run, Way
from tests.matrix.naive import NaiveMonitor
from tests.matrix.test_matrix import FIRST
from tests.support.ranks import run_ranks

WRONG = {
    "accumulated": (
        "layer_appended", "parameter_replaced", "lazy_modules_in_the_loop", "post_accumulate_hook_that_changes",
        "module_added_with_its_own_group", "module_replaced", "adapters_injected", "lazy_modules",
        "post_accumulate_hook_that_collects", "gradients_assigned_by_hand", "autocast_and_scaler", "closure",
        "a_step_that_raises", "a_loop_that_ends_after_a_backward", "steps_by_hand", "optimizers_within_the_backward_from_before",
    ),
    "stepping": (
        "clip_grad_norm", "skipped_after_clipping", "closure", "untouched_modules",
        "clip_grad_value", "accumulation_that_clips", "nonfinite_before_clipping", "gradients_changed_before_the_step",
        "scale_by_hand", "fused_under_a_scaler", "several_steps_to_a_backward", "steps_by_hand", "lbfgs",
        "mixture_of_experts", "frozen_in_the_run", "a_loop_that_ends_after_a_backward",
    ),
}  # fmt: skip
"""Regimes by the place where gradients are read. `make test` runs the first four."""

RIGHT = {
    "accumulated": (
        "plain", "clip_grad_norm", "gradients_changed_before_the_step", "untouched_modules", "accumulation", "mixture_of_experts",
    ),
    "stepping": (
        "plain", "layer_appended", "post_accumulate_hook_that_changes", "autocast_and_scaler", "lazy_modules_in_the_loop",
        "optimizers_within_the_backward",
    ),
}  # fmt: skip


def cases(table: dict[str, tuple[str, ...]]) -> list[object]:
    """Return each place with each of its regimes, all but the first four only for `make test-full`."""
    return [
        pytest.param(reads, kind, marks=[pytest.mark.full] * (position >= 4))
        for reads, kinds in table.items()
        for position, kind in enumerate(kinds)
    ]


def run(reads: str, kind: str) -> Run:
    """Return a regime's run with a naive monitor and without an exporter."""
    found = REGIMES[FIRST[kind]].run(Way.PLAIN, tolerant=True, monitor=NaiveMonitor(reads))
    assert found.compared > 0
    return found


@pytest.mark.parametrize(("reads", "kind"), cases(WRONG))
def test_wrong(reads: str, kind: str) -> None:
    """The monitor's norms differ from the record."""
    assert run(reads, kind).wrong


@pytest.mark.parametrize(("reads", "kind"), cases(RIGHT))
def test_right(reads: str, kind: str) -> None:
    """The monitor's norms are those of the record."""
    assert run(reads, kind).wrong == []


def rank_main(rank: int, folder: str, reads: str, wrong: bool) -> None:
    """Trains with DDP on one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = OF_TWO_RANKS["ddp[kind=plain]"].run(Way.PLAIN, tolerant=True, monitor=NaiveMonitor(reads))
    dist.destroy_process_group()
    assert found.compared > 0
    assert bool(found.wrong) == wrong


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(("reads", "wrong"), [("accumulated", True), ("stepping", False)])
def test_under_ddp(reads: str, wrong: bool, tmp_path: Path) -> None:
    """Hooks of the parameters read gradients before they are reduced over the ranks, the hook of the step after it."""
    run_ranks(rank_main, str(tmp_path), reads, wrong)
