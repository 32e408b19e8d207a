"""Collectors: a file each, from totals or from the machine to families. They touch no tensor and make no CUDA call.

A collector's file declares its metrics and, as `COLLECTOR`, itself. No other file names it: all files of this package are
searched once, and `REGISTRY` has what they declare. A collector of another package is added by `REGISTRY.register`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration, Registry


def _declared() -> Iterator[Declaration]:
    for module in pkgutil.iter_modules(__path__):
        declaration = getattr(importlib.import_module(f"{__name__}.{module.name}"), "COLLECTOR", None)
        if isinstance(declaration, Declaration):
            yield declaration


# All registered collectors.
REGISTRY = Registry(_declared())
