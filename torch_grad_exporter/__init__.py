"""Prometheus and OpenTelemetry exporter for PyTorch training.

    from torch_grad_exporter import start_exporter

    exporter = start_exporter(model, port=9100)

From then on `/metrics` shows the norm of each layer's gradient, NaN counts, dead units, clipping and the
progress of the training. The training itself is never changed, never waited for and never raised into.
"""

from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.inspection.explain import explain
from torch_grad_exporter.inspection.record import record
from torch_grad_exporter.start import start_exporter
from torch_grad_exporter.version import __version__

__all__ = ["Exporter", "__version__", "explain", "record", "start_exporter"]
