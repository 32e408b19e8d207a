"""`load_black_box`: reads what `black_box=` has written."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_grad_exporter.actions.black_box.writing import ABOUT, CONTENT, FORMAT, PART, boxes_below
from torch_grad_exporter.arguments import some
from torch_grad_exporter.inspection.black_box import random_states
from torch_grad_exporter.rules import Problem


@dataclass(frozen=True, slots=True, eq=False)
class KeptForward:
    """What a model was given in one forward.

    Attributes:
        step: Optimizer steps before it.
        root: Name of the model, empty if there is only one.
        args: The positional arguments: tensors on the CPU, numbers and texts in plain lists, tuples and dictionaries.
        kwargs: The keyword arguments, likewise.
        left_out: By its place, such as `args.0`, why a value is None here.
        states: The states of the random generators when the forward began.
    """

    step: int
    root: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left_out: Mapping[str, str] = field(repr=False)
    states: Mapping[str, Any] = field(repr=False)

    def random_states(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which random numbers are those of that forward; at its end the generators are as before it.

        These are the global generators of PyTorch on the CPU and on the CUDA devices of the batch and of the model, of
        NumPy and of Python.
        """
        return random_states.restored(self.states)

    def to(self, device: str | torch.device) -> KeptForward:
        """Return the same with all tensors on a device."""

        def moved(value: Any) -> Any:  # noqa: ANN401 - plain values and containers
            if isinstance(value, torch.Tensor):
                return value.to(device)
            if isinstance(value, dict):
                return {key: moved(part) for key, part in value.items()}
            return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

        return replace(self, args=moved(self.args), kwargs=moved(self.kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class BlackBox:
    """What was kept of a problem. The weights are not in it: take the last checkpoint from before it.

    Attributes:
        path: The folder.
        problem: What was wrong, as the rule or `nan_origin` named it.
        step: Optimizer steps before the last of `batches`.
        found_at_step: Optimizer steps when the problem was found, which is later.
        batches: The last two that a model was given until it went wrong, the latest last. If values were not finite, the last one
            is that after which the first of them was seen.
        samples: The last 600 samples of all layers: `steps` and `times`, shape (n,); `layers`, their names; and quantities such as
            `norm`, shape (n, layers), infinite where a value was not finite and NaN where there was none. `run` has those of the
            run, such as `loss`, likewise.
        options: The options of the exporter.
        process: The run, the rank, the host and the versions.
        lost: Batches of the run that were dropped, as memory is limited, before it was known whether they were sound. If there are
            any, `batches` may be others than those that went wrong.
        time: Unix time at which it was written.
    """

    path: Path
    problem: Problem
    step: int
    found_at_step: int
    batches: tuple[KeptForward, ...] = field(repr=False)
    samples: Mapping[str, Any] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    process: Mapping[str, Any] = field(repr=False)
    lost: int
    time: float


def load_black_box(path: str | os.PathLike[str]) -> BlackBox:
    """Read a black box that `start_exporter(black_box=...)` has written. See docs/when-a-step-goes-wrong.md.

    Nothing in it is executed: it is read with `torch.load(weights_only=True)`.

    Args:
        path: The folder of the box, or one above it that has a single box.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several, or it is damaged or of another version.
    """
    folder = _box_at(Path(path))
    try:
        about = _about(folder)
        content = torch.load(folder / CONTENT, map_location="cpu", weights_only=True)
        wrong = about["problem"]
        return BlackBox(
            path=folder,
            problem=Problem(**{**wrong, "others": tuple(wrong["others"])}),
            step=about["step"],
            found_at_step=about["found_at_step"],
            batches=tuple(KeptForward(**{**batch, "args": tuple(batch["args"])}) for batch in content["batches"]),
            samples=content["samples"],
            options=about["options"],
            process=about["process"],
            lost=about["lost"],
            time=about["time"],
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"load_black_box({str(folder)!r}): it is damaged: {error}") from error


def _about(folder: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if {name: about[name] for name in FORMAT} != FORMAT:
        raise ValueError(f"it is of another version than {FORMAT['version']}")
    return about


def _box_at(path: Path) -> Path:
    partial = path.suffix == PART
    boxes = [path] if (path / ABOUT).is_file() and not partial else [] if partial else boxes_below(path)
    if not boxes:
        raise FileNotFoundError(f"load_black_box({str(path)!r}): there is none; pass the folder that the log names")
    if len(boxes) > 1:
        names = some([str(box) for box in boxes], 6)
        raise ValueError(f"load_black_box({str(path)!r}): there are {len(boxes)} black boxes; pass one of {names}")
    return boxes[0]
