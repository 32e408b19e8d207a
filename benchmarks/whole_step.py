"""What a whole step costs more with the exporter, in CPU time of the training thread: `python -m benchmarks.whole_step`.

Two equal trainings in one process take steps by turns. Their tensors lie at different places in memory, which alone makes up to
2 % of a step: what they differ by before the exporter starts on one of them and after it has closed is subtracted, and half of
what changes in that meanwhile is the control. Norms by `torch._foreach_norm` are measured in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from torch_grad_exporter import start_exporter

OFF = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container"), False)


@dataclass(frozen=True, slots=True)
class Case:
    """A training. `every`: the interval between samples, None for the defaults; `pairs`: measured steps of each training."""

    name: str
    layers: int
    size: int
    every: int | None
    pairs: int
    warm_up: int = 20


CASES = (
    Case("2 layers of 8x8, not sampled", 2, 8, 4096, 12_000, 400),
    Case("2 layers of 8x8, defaults", 2, 8, None, 12_000, 400),
    Case("48 layers of 256x256, defaults", 48, 256, None, 3000, 1200),
    Case("48 layers of 256x256, each step sampled", 48, 256, 1, 200),
    Case("24 layers of 1024x1024, each step sampled", 24, 1024, 1, 60),
    Case("6,000 layers of 4x4 with biases, each step sampled", 6000, 4, 1, 16, 3),
)


def training(case: Case) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Return a model whose gradients neither vanish nor explode, and its step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(case.size, case.size, bias=case.size < 256) for _ in range(case.layers)]
    for layer in layers:
        torch.nn.init.orthogonal_(layer.weight)
    model, inputs = torch.nn.Sequential(*layers), torch.randn(16, case.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, step


def microseconds(action: Callable[[], object]) -> float:
    """Return the CPU time of this thread for one call."""
    start = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - start) / 1e3


def by_turns(plain: Callable[[], None], step: Callable[[], None], pairs: int) -> tuple[float, float]:
    """Return the mean CPU time of a plain step, and how much more the other takes, in microseconds."""
    plain_time = more = 0.0
    for number in range(pairs):
        first, second = (plain, step) if number % 2 else (step, plain)
        times = {first: microseconds(first)}
        times[second] = microseconds(second)
        plain_time += times[plain]
        more += times[step] - times[plain]
    return plain_time / pairs, more / pairs


def measure(case: Case) -> str:
    """Return the row of a case."""
    plain_model, plain = training(case)
    model, step = training(case)
    options = {} if case.every is None else {"every": case.every}
    by_turns(plain, step, 20)
    _, before = by_turns(plain, step, case.pairs // 2)
    with start_exporter(model, port=None, collectors=OFF, **options):
        by_turns(plain, step, case.warm_up)
        plain_step, during = by_turns(plain, step, case.pairs)
    _, after = by_turns(plain, step, case.pairs // 2)
    gradients = [parameter.grad for parameter in plain_model.parameters()]
    norms = median(microseconds(lambda: torch.stack(torch._foreach_norm(gradients))) for _ in range(20))
    more, control = during - (before + after) / 2, (after - before) / 2
    shares = f"{more / plain_step:.2%} | {control / plain_step:+.2%}"
    return f"| {case.name} | {plain_step:,.0f} | {more:,.1f} | {shares} | {norms:,.0f} | {more / norms:.2f} |"


def first(case: Case) -> str:
    """Return the times of the start and of the first sampled step, in a process that has started an exporter before."""
    plain_model, plain = training(case)
    plain()
    model, step = training(case)
    step()
    before = microseconds(plain)
    begun = time.thread_time_ns()
    with start_exporter(model, port=None, collectors=OFF, every=1):
        start = (time.thread_time_ns() - begun) / 1e3
        more = microseconds(step) - (before + microseconds(plain)) / 2
    del plain_model
    return f"{case.name}: start {start:,.0f} us, first step {more:,.0f} us more"


def main() -> None:
    """Print the table, and then the start with the most parameters."""
    torch.set_num_threads(1)
    print("| training | plain step, us | more, us | more | control | _foreach_norm, us | more / norms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for case in CASES:
        print(measure(case), flush=True)
    print(first(CASES[-1]), flush=True)


if __name__ == "__main__":
    main()
