"""Arguments of `start_exporter` that have no environment variable of the exporter, each declared here and nowhere else.

They are objects, and what says where to push. OpenTelemetry has variables for the latter; `outputs/otlp/push_settings.py` reads
them, and checks them together with these arguments. After a change here, `make golden` writes the signature of `start_exporter` and
the docs anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.config import checks, kinds
from torch_grad_exporter.config.option import option, option_made
from torch_grad_exporter.outputs.otlp import push_settings


def _as_it_is(value: object) -> object:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was given, valid but for the push, whose arguments are checked with OpenTelemetry's variables; `None` for nothing."""

    otlp_endpoint: object = option(
        kinds.given("str | None", _as_it_is),
        None,
        'OpenTelemetry receiver to push the metrics to as well, such as "http://localhost:4318"',
        "OpenTelemetry's other variables count, too; see docs/otlp.md.",
        shown="none",
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    otlp_protocol: object = option(
        kinds.given('Literal["http/protobuf", "grpc"] | None', _as_it_is),
        None,
        "how to push",
        '"http/protobuf", or "grpc", which needs the extra of that name.',
        shown=f'"{push_settings.Protocol.HTTP.value}"',
        variable="OTEL_EXPORTER_OTLP_PROTOCOL",
    )
    otlp_headers: object = option(
        kinds.given("Mapping[str, str] | None", _as_it_is),
        None,
        "headers of what is pushed, such as one that says who sends",
        shown="none",
        variable="OTEL_EXPORTER_OTLP_HEADERS",
    )
    otlp_interval: object = option(
        kinds.given("float | None", _as_it_is),
        None,
        "seconds between two pushes; there is one more at the end",
        "The variable is in milliseconds.",
        shown=f"{push_settings.INTERVAL:g}",
        variable="OTEL_METRIC_EXPORT_INTERVAL",
    )
    optimizers: Mapping[str, torch.optim.Optimizer] = option_made(
        kinds.given(
            "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None",
            checks.checked_optimizers,
        ),
        dict,
        "optimizers, to give them names, or where they are not known before their first step",
        shown="found",
        variable="",
    )
    grad_scaler: Scaler | None = option(
        kinds.given("Scaler | None", checks.checked_scaler),
        None,
        "the `torch.amp.GradScaler` in use; the norms are divided by its scale",
        "One that is not given is found at its first step; give it, so that the first steps, which may overflow, have sizes too.",
        shown="found",
        variable="",
    )
    registry: prometheus_client.CollectorRegistry | None = option(
        kinds.given("prometheus_client.CollectorRegistry | None", checks.checked_registry),
        None,
        "a registry of `prometheus_client` in which the metrics are to appear as well",
        shown="none",
        variable="",
    )
    meter_provider: MeterProvider | None = option(
        kinds.given("MeterProvider | None", checks.checked_meter_provider),
        None,
        "OpenTelemetry's, in whose instruments global values, progress and resources are to appear as well",
        shown="none",
        variable="",
    )
