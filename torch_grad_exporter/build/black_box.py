"""The black box: what keeps batches, what says which are needed, and what writes them."""

from __future__ import annotations

import dataclasses
import enum
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from torch_grad_exporter import files
from torch_grad_exporter.actions.black_box.recorder import BlackBoxRecorder
from torch_grad_exporter.actions.clip.policy import policy_name
from torch_grad_exporter.build.capturing import CaptureStage
from torch_grad_exporter.build.scraping import ScrapeStage
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import hostname
from torch_grad_exporter.inspection.black_box.keeper import BatchKeeper
from torch_grad_exporter.inspection.black_box.kept import SOURCE, BatchRing
from torch_grad_exporter.inspection.black_box.suspects import Suspects
from torch_grad_exporter.inspection.nan_origin.origins import Origins
from torch_grad_exporter.version import __version__


def build_black_box(
    stage: CaptureStage, models: Mapping[str, torch.nn.Module], origins: Origins | None, shown: ScrapeStage, checked: Checked
) -> BlackBoxRecorder:
    """Make the inspection that keeps batches, and return what writes them."""
    ring, errors = BatchRing(), stage.errors
    keeper = BatchKeeper(
        stage.context, ring, models, requests=stage.requests, rounds=stage.capture.rounds,
        guard=errors.boundary(SOURCE, "copies", limit=None),
    )  # fmt: skip
    stage.capture.inspections.add(keeper, errors.boundary(SOURCE, "batches"))
    suspects = Suspects(ring, stage.requests)
    shown.worker.register(SOURCE, suspects)
    shown.worker.listen(suspects)
    return BlackBoxRecorder(
        Path(checked.settings.black_box) / files.file_name(checked.run, checked.rank, ""), _about(checked),
        ring=ring, suspects=suspects, view=shown.view, origins=origins, capture=stage.capture, clock=stage.clock,
        guard=errors.boundary(SOURCE, "writing", limit=None), journal=shown.journal,
    )  # fmt: skip


def _about(checked: Checked) -> dict[str, object]:
    """Return the process and its options; not those that may hold secrets, which are addresses and headers to push to."""
    settings = {field.name: _plain(getattr(checked.settings, field.name)) for field in dataclasses.fields(checked.settings)}
    settings["clip"] = [policy_name(policy) for policy in checked.arguments.clip]
    process = {
        "run": checked.run, "rank": checked.rank, "world_size": checked.identity.world_size, "host": hostname(),
        "torch": torch.__version__, "python": platform.python_version(), "torch_grad_exporter": __version__,
    }  # fmt: skip
    return {"options": settings, "process": process}


def _plain(value: object) -> object:
    """Return a setting as JSON can hold it."""
    match value:
        case enum.Enum():
            return value.value
        case re.Pattern():
            return value.pattern
        case tuple():
            return [_plain(each) for each in value]
        case Mapping():
            return dict(value)
    return value
