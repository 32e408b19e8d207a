"""All metrics that the package's collectors declare."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import torch_grad_exporter.collectors
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.metrics.families import Spec

CATALOGUE = REGISTRY.catalogue


def by_constant() -> Mapping[str, Spec]:
    """The metrics by the names of the constants that their collectors' files have for them."""
    folder = Path(torch_grad_exporter.collectors.__file__).parent  # a collector's metrics may stand in several files
    files = [importlib.import_module(f"torch_grad_exporter.collectors.{path.stem}") for path in folder.glob("[a-z]*.py")]
    return {name: value for file in files for name, value in vars(file).items() if isinstance(value, Spec)}
