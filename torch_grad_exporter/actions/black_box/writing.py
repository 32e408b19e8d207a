"""Writes a black box: a folder that is there whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.inspection.black_box import random_states
from torch_grad_exporter.inspection.black_box.kept import WRITTEN, KeptBatch, KeptTensor
from torch_grad_exporter.outputs.live.history import VIEWS, History
from torch_grad_exporter.outputs.live.rows import SCALARS

FORMAT = {"format": "torch_grad_exporter black box", "version": 1}

# The files of a box: what a person reads first, and tensors for `torch.load`.
ABOUT, CONTENT = "about.json", "content.pt"

# The end of the name of a folder that is being written.
PART = ".part"

ON_DEVICE = "it was on its device, and no forward came in which it could be copied"


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
        if isinstance(value, KeptTensor):
            copy = value.tensor.clone() if value.tensor is not None and batch.on_host else None
            if value.changed:  # looked at after the copy, which may have been made meanwhile
                copy = None
            if copy is None:
                left_out.setdefault(value.place, WRITTEN if value.changed else ON_DEVICE)
            return copy
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

    return {
        "step": batch.step,
        "root": batch.root,
        "args": plain(batch.args),
        "kwargs": plain(batch.kwargs),
        "left_out": left_out,
        "states": random_states.plain(batch.states),
    }


def boxes_below(folder: Path) -> list[Path]:
    """Return the whole boxes in the folder of a rank, or in those below a folder."""
    abouts = itertools.chain(folder.glob(f"*/{ABOUT}"), folder.glob(f"*/*/{ABOUT}"))
    return sorted(path.parent for path in abouts if path.parent.suffix != PART)


def sweep(folder: Path) -> None:
    """Remove what a process of this run and rank that was killed has left."""
    for part in folder.glob(f".*{PART}"):
        shutil.rmtree(part, ignore_errors=True)


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
