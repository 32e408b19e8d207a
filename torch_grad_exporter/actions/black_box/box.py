"""A black box: a folder that is there whole or not at all, and `load_black_box`, which reads it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.arguments import some
from torch_grad_exporter.inspection.black_box.kept import WRITTEN, KeptBatch, KeptTensor
from torch_grad_exporter.inspection.black_box.random_states import plain_states, restored_states
from torch_grad_exporter.outputs.live.history import VIEWS, History
from torch_grad_exporter.outputs.live.step_rows import SCALARS
from torch_grad_exporter.rules import Problem

FORMAT = {"format": "torch_grad_exporter black box", "version": 1}

# The files of a box: what a person reads first, and tensors for `torch.load`.
ABOUT, CONTENT = "about.json", "content.pt"

# The end of the name of a folder that is being written.
PART = ".part"

ON_DEVICE = "it was on its device, and no forward came in which it could be copied"


def _mapped(value: Any, change: Callable[[Any], object]) -> Any:  # noqa: ANN401 - plain values and containers
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    return change(value)


# Writing


def samples_of(history: History) -> dict[str, Any]:
    """Return the last samples of all layers, and of the run, as tensors: infinity for what is not finite, NaN for nothing."""
    recent = VIEWS["recent"]
    grids = {name: history.grid(name, recent) for name in history.quantities}
    layers, part = next(iter(grids.values()))
    run = history.run(recent)
    return {
        "layers": list(layers),
        "times": torch.tensor(part.times),
        "steps": torch.tensor(part.steps.astype(np.int64)),
        # A record may have come between two of these calls.
        **{name: torch.tensor(grid.values[: len(part.times), : len(layers)]) for name, (_, grid) in grids.items()},
        "run": {
            "times": torch.tensor(run.times),
            "steps": torch.tensor(run.steps.astype(np.int64)),
            **{name: torch.tensor(run.values[:, place]) for place, name in enumerate(SCALARS)},
        },
    }


def plain_batch(batch: KeptBatch) -> dict[str, Any]:
    """Return a batch as `torch.load` reads it; a tensor that was written to meanwhile is left out."""
    left_out = dict(batch.left_out)

    def plain(value: object) -> object:
        if not isinstance(value, KeptTensor):
            return value
        copy = value.tensor.clone() if value.tensor is not None and batch.on_host else None
        if copy is None or value.changed:  # looked at after the copy, which may have been made meanwhile
            left_out.setdefault(value.place, WRITTEN if value.changed else ON_DEVICE)
            return None
        return copy

    return {
        "step": batch.step,
        "root": batch.root,
        "args": _mapped(batch.args, plain),
        "kwargs": _mapped(batch.kwargs, plain),
        "left_out": left_out,
        "states": plain_states(batch.states),
    }


def boxes_below(folder: Path) -> list[Path]:
    """Return the whole boxes in the folder of a rank, or in those below a folder."""
    abouts = itertools.chain(folder.glob(f"*/{ABOUT}"), folder.glob(f"*/*/{ABOUT}"))
    return sorted(path.parent for path in abouts if path.parent.suffix != PART)


def write(folder: Path, name: str, about: Mapping[str, Any], content: Mapping[str, Any]) -> Path:
    """Write a box into the folder of a rank, and return where it is.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(boxes_below(folder)) + 1}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:100]}"
    part = folder / f".{uuid.uuid4().hex}{PART}"
    part.mkdir()
    try:
        # By a file of Python's: of a path PyTorch reports a full disk as a fault of its own.
        with (part / CONTENT).open("wb") as file:
            torch.save(dict(content), file)
        (part / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        for written in (part / CONTENT, part / ABOUT, part):
            _to_disk(written)
        part.rename(path)
        _to_disk(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, RuntimeError):  # by PyTorch, such as one that hides that the disk is full
            raise OSError(f"{CONTENT} cannot be written: {error}") from error
        raise
    return path


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


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
        return restored_states(self.states)

    def to(self, device: str | torch.device) -> KeptForward:
        """Return the same with all tensors on a device."""

        def moved(value: object) -> object:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        return replace(self, args=_mapped(self.args, moved), kwargs=_mapped(self.kwargs, moved))


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
    given = Path(path)
    boxes = [] if given.suffix == PART else [given] if (given / ABOUT).is_file() else boxes_below(given)
    if not boxes:
        raise FileNotFoundError(f"load_black_box({str(given)!r}): there is none; pass the folder that the log names")
    if len(boxes) > 1:
        names = some([str(box) for box in boxes], 6)
        raise ValueError(f"load_black_box({str(given)!r}): there are {len(boxes)} black boxes; pass one of {names}")
    (folder,) = boxes
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if {name: about.pop(name) for name in FORMAT} != FORMAT:
            raise ValueError(f"it is of another version than {FORMAT['version']}")  # noqa: TRY301 - one sentence for all
        content = torch.load(folder / CONTENT, map_location="cpu", weights_only=True)
        wrong = about.pop("problem")
        batches = tuple(KeptForward(**{**batch, "args": tuple(batch["args"])}) for batch in content["batches"])
        problem = Problem(**{**wrong, "others": tuple(wrong["others"])})
        return BlackBox(path=folder, problem=problem, batches=batches, samples=content["samples"], **about)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"load_black_box({str(folder)!r}): it is damaged: {error}") from error
