"""Count the functions of the exporter that one sampled step enters on the training thread, and their files.

Run it as `python -m benchmarks.functions_entered`. Comprehensions do not count: newer versions of Python make no function of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import torch_grad_exporter

ROOT = str(Path(torch_grad_exporter.__file__).parent)
WARM, STEPS = 40, 8
"""Steps before, and steps that are looked at: in one of eight all is read again."""


def entered(step: Callable[[], None]) -> set[tuple[str, str, int]]:
    """Return file, name and line of each function of the exporter that a call enters."""
    functions = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return functions


def main() -> None:
    """Print the numbers of functions and of files of each step."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(8, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with torch_grad_exporter.start_exporter(model, None, every=1):
        for _ in range(WARM):
            step()
        for _ in range(STEPS):
            functions = entered(step)
            print(f"{len(functions)} functions in {len({file for file, _, _ in functions})} files")


if __name__ == "__main__":
    main()
