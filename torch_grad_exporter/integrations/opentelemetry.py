"""`opentelemetry-instrument python train.py`: OpenTelemetry's entry point for instrumentors, which finds this one by itself.

Nothing of PyTorch is imported before the program does so, and nothing of the exporter before it trains.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from torch_grad_exporter.errors import Guard, logger, warn

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter

# Names in `OTEL_METRICS_EXPORTER` that mean a push over OTLP.
OTLP = {"otlp", "otlp_proto_grpc", "otlp_proto_http"}

# Where OpenTelemetry pushes to by default.
DEFAULT_ENDPOINT = {"grpc": "http://localhost:4317", "http/protobuf": "http://localhost:4318"}

_PORT, _TEXTFILE = "TORCH_GRAD_EXPORTER_PORT", "TORCH_GRAD_EXPORTER_TEXTFILE_DIR"


class TorchGradExporterInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # it has no types where it is not installed
    """Watches what the process trains, as OpenTelemetry's variables say.

    No port is opened unless `TORCH_GRAD_EXPORTER_PORT` asks for one. `instrument()` takes options of `start_exporter`.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what is instrumented."""
        return ("torch >= 2.4",)

    def _instrument(self, **options: Any) -> None:
        self._program: _Program | None = None
        self._wanted = exporter_options(options, os.environ) is not None

        def attach() -> None:
            chosen = exporter_options(options, os.environ) if self._wanted else None
            if chosen is not None:
                self._program = _Program(chosen)

        def failed(error: Exception) -> None:
            warn("no training is watched: %s: %s", type(error).__name__, error, error=error)

        if self._wanted:
            # Guarded, since the program's own `import torch` calls it.
            wrapt.register_post_import_hook(lambda _torch: Guard(failed)(attach), "torch")

    def _uninstrument(self, **_options: Any) -> None:
        self._wanted = False
        if self._program is not None:
            self._program.close()


class _Program:
    """The program that is instrumented, which hears nothing of its exporter but the log."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        from torch_grad_exporter.integrations.attach import Attachment  # noqa: PLC0415 - it imports torch

        self.log = logger
        self._chosen = chosen
        self._attachment = Attachment(self)
        self._attachment.arm()

    def options(self) -> Mapping[str, Any]:
        """Return the options when a training begins: a program may set OpenTelemetry's provider after it has imported torch."""
        if "meter_provider" not in self._chosen or self._chosen["meter_provider"] is not None:
            return self._chosen
        from opentelemetry.metrics import get_meter_provider  # noqa: PLC0415 - a program that never trains does not pay for it

        return {**self._chosen, "meter_provider": get_meter_provider()}

    def attached(self, exporter: Exporter) -> None:
        """Do nothing: the attachment keeps it."""

    def replaced(self, exporter: Exporter) -> None:
        """End the exporter of other models."""
        exporter.end(None)

    def close(self) -> None:
        """Remove the hooks and end the exporter."""
        self._attachment.disarm()
        if self._attachment.exporter is not None:
            self._attachment.exporter.close()


def exporter_options(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the options of `start_exporter` by which each value goes one way only, None if it would go nowhere.

    Where metrics are pushed over OTLP, the exporter pushes all of them itself, those of layers too. Else a meter provider shows
    global values by the exporters it has: the one that is given, or for `None` OpenTelemetry's.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    chosen: dict[str, Any] = dict(options)
    if not environment.get(_PORT, "").strip():
        chosen.setdefault("port", None)
    names = {name.strip().lower() for name in environment.get("OTEL_METRICS_EXPORTER", "").split(",")} - {""}
    variables = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    endpoint = options.get("otlp_endpoint") is not None or any(environment.get(name, "").strip() for name in variables)
    provider = chosen.pop("meter_provider", None)
    is_shown = names != {"none"}
    if names & OTLP or (endpoint and not names):  # what neither options nor variables that `start_exporter` reads say of the push
        if "otlp" not in names and names & OTLP and "otlp_protocol" not in chosen:
            chosen["otlp_protocol"] = "grpc" if "otlp_proto_grpc" in names else "http/protobuf"
        if not endpoint:
            variable = environment.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", ""))
            protocol = str(chosen.get("otlp_protocol") or variable).strip().lower()
            chosen["otlp_endpoint"] = DEFAULT_ENDPOINT.get(protocol, DEFAULT_ENDPOINT["http/protobuf"])
    elif is_shown:
        chosen["meter_provider"] = provider
    elsewhere = chosen.get("port", environment.get(_PORT)) is not None or environment.get(_TEXTFILE, "").strip()
    return chosen if is_shown or elsewhere or "textfile_dir" in chosen else None
