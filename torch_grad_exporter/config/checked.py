"""Everything that `start_exporter` was given, checked: what an exporter is built from, and what of it each stage gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.capture.build import CaptureOptions
from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.config import checks
from torch_grad_exporter.config.arguments import Arguments
from torch_grad_exporter.config.option import resolve
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.distributed.identity import Identity, identity
from torch_grad_exporter.distributed.store import JobStore, run_name
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.outputs.announcement import Rank
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.outputs.outputs import OutputOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All choices, valid, and the objects that they are about. `run`, `rank`: as the series carry them."""

    models: Mapping[str, torch.nn.Module]
    index: LayerIndex
    settings: Settings
    identity: Identity
    rank: int
    run: str
    store: JobStore
    optimizers: Mapping[str, torch.optim.Optimizer]
    grad_scaler: Scaler | None
    registry: prometheus_client.CollectorRegistry | None
    meter_provider: MeterProvider | None
    web_config: WebConfigFile | None
    push: push_settings.PushSettings | None

    @property
    def labels(self) -> dict[str, str]:
        """Those of every series."""
        return {"run": self.run, "rank": str(self.rank), **self.settings.labels}

    @property
    def whose(self) -> Rank:
        """Which process the values belong to, for outputs."""
        return Rank(self.run, self.rank, self.identity, self.labels)

    @property
    def capture(self) -> CaptureOptions:
        """For the capture."""
        return CaptureOptions(local_norm=self.settings.local_norm, weights=self.settings.weights)

    @property
    def outputs(self) -> OutputOptions:
        """For the outputs."""
        return OutputOptions(
            port=self.settings.port,
            addr=self.settings.addr,
            textfile_dir=self.settings.textfile_dir,
            web_config_file=self.settings.web_config_file,
            linger=self.settings.linger,
        )


def checked(given: Mapping[str, object], environment: Mapping[str, str]) -> Checked:
    """Checks all arguments by name, and the environment. Raises `TypeError`, `ValueError` or `ImportError` that says what is wrong.

    Nothing is registered, started or opened; the ranks of a job that has no name agree on one.
    """
    settings, chosen = resolve(Settings, given, environment), resolve(Arguments, given, {})
    push = push_settings.resolve(
        chosen.otlp_endpoint, chosen.otlp_protocol, chosen.otlp_headers, chosen.otlp_interval, environment=environment
    )
    place, store = identity(environment), JobStore()
    models = checks.checked_models(given["model"])
    rank = place.rank if settings.rank is None else settings.rank
    index = checks.checked_index(models, settings, given, Replicas(settings.ranks, rank, place.world_size))
    checks.check_ownership(index, chosen.optimizers)
    return Checked(
        models=models,
        index=index,
        settings=settings,
        identity=place,
        rank=rank,
        web_config=checks.checked_web_config(settings, given),
        run=run_name(place, settings.run, store),
        store=store,
        optimizers=chosen.optimizers,
        grad_scaler=chosen.grad_scaler,
        registry=chosen.registry,
        meter_provider=chosen.meter_provider,
        push=push,
    )
