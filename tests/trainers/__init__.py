"""Trainings by the packages that people train with, in an environment of their own (`make trainers`).

Importing it, as a rank's process does too, sees to it that nothing asks the network.
"""

from __future__ import annotations

import importlib.util
import os

import torch

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.update(TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_CPU="true", LIGHTNING_DISABLE_VERSION_CHECK="1")

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _torchvision_can_be_imported() -> None:
    """Declares operators that torchvision asks for on import, where torch has no CUDA and its build has: none is called here."""
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.submodule_search_locations is not None
    try:
        torch.ops.load_library(f"{found.submodule_search_locations[0]}/_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_torchvision_can_be_imported()
