"""All metrics that the package's collectors declare."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.metrics.families import Spec

CATALOGUE = REGISTRY.catalogue


def by_constant() -> Mapping[str, Spec]:
    """The metrics by the names of the constants that their collectors' files have for them."""
    files = [importlib.import_module(declaration.make.__module__) for declaration in REGISTRY]
    return {name: value for file in files for name, value in vars(file).items() if isinstance(value, Spec)}
