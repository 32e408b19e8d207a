"""What a call of `Clipper` costs beside `clip_grad_norm_`, on the same gradients, in turns: `python -m benchmarks.clipping`.

The control is `clip_grad_norm_` a second time. Both get a list of parameters; the clipper also gets the model, whose changes it
then looks for in each call. `clip=` is held against `clip_grad_norm_` and then a step, the step being one that does nothing, of an
optimizer whose gradients `clip=` clips before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import record
from benchmarks.interleave import Blocks, Step, compare, interleave, trimmed_mean
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, MaxNorm, ZClip
from torch_grad_exporter.actions.clip.at_steps import SOURCES, ClipAtSteps
from torch_grad_exporter.actions.clip.options import ClipOptions
from torch_grad_exporter.errors import ErrorLog

ROUNDS = 60
BAR = 0.10
"""What `MaxNorm` over a list of parameters may cost beside `clip_grad_norm_`, and `clip=` beside that and a step."""

STEP, STEP_AGAIN, CLIPPED_STEP = "clip_grad_norm_, a step", "clip_grad_norm_, a step, again", "clip=MaxNorm, a step"


def _encoder() -> torch.nn.Module:
    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 6)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "3 layers": (lambda: torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]), 200),
    "transformer": (_encoder, 30),
    "80 layers": (lambda: torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(80)]), 50),
}
"""By name: the model, and how many calls make a block."""


def arms_of(model: torch.nn.Module) -> dict[str, Step]:
    """What is called in turns, all on the same gradients."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def clip_grad_norm() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    arms: dict[str, Step] = {"plain": clip_grad_norm, "clip_grad_norm_ again": clip_grad_norm}
    arms["MaxNorm, parameters"] = _calling(Clipper(parameters, MaxNorm(1.0)))
    for policy in (MaxNorm(1.0), AutoClip(), ZClip(), MaxNorm(1.0, scope="layer"), ZClip(scope="layer"), AGC()):
        name = type(policy).__name__
        arms[f"{name}, by layer" if policy.scope == "layer" else name] = _calling(Clipper(model, policy))
    optimizer = _Nothing(parameters)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return {**arms, STEP: clip_and_step, STEP_AGAIN: clip_and_step, CLIPPED_STEP: optimizer.step}


@contextlib.contextmanager
def clipping(model: torch.nn.Module, step: Step) -> Iterator[None]:
    """`clip=` is on; its first step, which finds the parameters, is over."""
    errors = ErrorLog(SOURCES)
    clip = ClipAtSteps(ClipOptions(policy=MaxNorm(1.0)), {"": model}, errors)
    clip.start()
    try:
        step()
        yield
    finally:
        clip.close()
    if any(errors.counts().values()):
        raise RuntimeError(f"clip= has failed: {errors.counts()}")


class _Nothing(torch.optim.Optimizer):
    """Its step does nothing."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__([*parameters], {})

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


def _calling(clipper: Clipper) -> Step:
    def call() -> None:
        clipper()

    return call


def table(rounds: int) -> record.Table:
    """Every arm of every model beside `clip_grad_norm_`."""
    rows: list[list[record.Cell]] = []
    for name, (make, calls) in MODELS.items():
        torch.manual_seed(0)
        model = make()
        arms = arms_of(model)
        around = {CLIPPED_STEP: functools.partial(clipping, model, arms[CLIPPED_STEP])}
        blocks = interleave(arms, steps_per_block=calls, rounds=rounds, around=around)
        steps = {arm: blocks.pop(arm) for arm in (STEP, STEP_AGAIN, CLIPPED_STEP)}
        tensors = sum(1 for _ in model.parameters())
        rows += [
            [name, tensors, *row] for row in (*_rows("clip_grad_norm_", blocks), *_rows(STEP, {"plain": steps.pop(STEP), **steps}))
        ]
    columns = ("model", "tensors", "call", "us", "beside clip_grad_norm_ %", "within the bar")
    notes = [
        f"{rounds} rounds of blocks in turns; in brackets what holds 95 % of resampled rounds.",
        f"Bar: MaxNorm over the same list of parameters at most {100 * BAR:.0f} % above clip_grad_norm_.",
        f"Bar: clip= at most {100 * BAR:.0f} % above clip_grad_norm_ and the same step.",
    ]
    return record.table("A call of Clipper, and a step with clip=", columns, rows, notes)


def _rows(baseline: str, blocks: Blocks) -> Iterator[list[record.Cell]]:
    """The baseline, which the blocks have as "plain", and the others beside it."""
    yield [baseline, round(1e6 * trimmed_mean(blocks["plain"]), 1), "", ""]
    for arm, row in compare(blocks).items():
        beside = f"{100 * row.overhead:+.1f} [{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        answer = ("yes" if row.overhead <= BAR else "no") if arm in ("MaxNorm, parameters", CLIPPED_STEP) else ""
        yield [arm, round(1e6 * row.seconds, 1), beside, answer]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it and writes `results/clipping.json`, or `clipping-trial.json` if it was shorter than usual."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clipping", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    made = table(chosen.rounds)
    for row in (made["columns"], *made["rows"], *made["notes"]):
        print(row if isinstance(row, str) else " | ".join(map(str, row)))
    name = "clipping" if chosen.rounds >= ROUNDS else "clipping-trial"
    print(f"written to {record.save(name, {'tables': [made]})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
