"""Prometheus and OpenTelemetry exporter for PyTorch training.

    from torch_grad_exporter import start_exporter

    exporter = start_exporter(model, port=9100)

From then on `/metrics` shows the norm of each layer's gradient, NaN counts, dead units, clipping and the
progress of the training. The training itself is never changed, never waited for and never raised into.

Importing the package imports no PyTorch; the first use of a name here does. What only stands in an environment, such as the pytest
fixture or OpenTelemetry's instrumentor, so costs those nothing who do not train.
"""

import importlib
from typing import TYPE_CHECKING

from torch_grad_exporter.version import __version__

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter
    from torch_grad_exporter.inspection.explain import explain
    from torch_grad_exporter.inspection.record import record
    from torch_grad_exporter.start import start_exporter

__all__ = ["Exporter", "__version__", "explain", "record", "start_exporter"]

_WHERE = {
    "Exporter": "torch_grad_exporter.exporter",
    "explain": "torch_grad_exporter.inspection.explain",
    "record": "torch_grad_exporter.inspection.record",
    "start_exporter": "torch_grad_exporter.start",
}


def __getattr__(name: str) -> object:
    """A public name, from its module, which is imported now; PEP 562. Raises `AttributeError` where there is none."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
