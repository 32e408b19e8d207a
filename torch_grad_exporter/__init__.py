"""Prometheus and OpenTelemetry exporter for PyTorch training.

    from torch_grad_exporter import start_exporter

    exporter = start_exporter(model, port=9100)

From then on `/metrics` shows the norm of each layer's gradient, NaN counts, dead units, clipping and the
progress of the training. The training itself is never changed, never waited for and never raised into.

Importing the package imports no PyTorch; the first use of a name here does. So the pytest fixture and OpenTelemetry's instrumentor,
which are found in every environment, cost programs that do not train nothing.
"""

import importlib
from typing import TYPE_CHECKING

from torch_grad_exporter.version import __version__

if TYPE_CHECKING:
    from torch_grad_exporter.actions.black_box.box import load_black_box
    from torch_grad_exporter.exporter import Exporter
    from torch_grad_exporter.inspection.explain import explain
    from torch_grad_exporter.inspection.record import record
    from torch_grad_exporter.start import start_exporter

__all__ = ["Exporter", "__version__", "explain", "load_black_box", "record", "start_exporter"]

_WHERE = {
    "Exporter": "torch_grad_exporter.exporter",
    "explain": "torch_grad_exporter.inspection.explain",
    "load_black_box": "torch_grad_exporter.actions.black_box.box",
    "record": "torch_grad_exporter.inspection.record",
    "start_exporter": "torch_grad_exporter.start",
}


def __getattr__(name: str) -> object:
    """Return a public name from its module, which is imported now; PEP 562."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
