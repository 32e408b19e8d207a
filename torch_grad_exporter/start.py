"""The user's door: `start_exporter` checks everything before anything is registered, and makes an `Exporter`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter import lifecycle
from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.config import checks, settings
from torch_grad_exporter.config.settings import UNSET, Unset
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.distributed.store import JobStore, run_name
from torch_grad_exporter.errors import say
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.outputs.otlp import push_settings

logger = logging.getLogger("torch_grad_exporter")

Models = torch.nn.Module | Mapping[str, torch.nn.Module]


def start_exporter(
    model: Models,
    port: int | Unset | None = UNSET,
    *,
    addr: str | Unset = UNSET,
    every: Literal["auto"] | int | Unset = UNSET,
    overhead_budget: float | Unset = UNSET,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None = None,
    grad_scaler: Scaler | None = None,
    include: str | Sequence[str] | Unset = UNSET,
    exclude: str | Sequence[str] | Unset = UNSET,
    max_layers: int | Unset = UNSET,
    dead_window: int | Unset = UNSET,
    moments: bool | Unset = UNSET,
    weights: bool | Unset = UNSET,
    local_norm: bool | Unset = UNSET,
    collectors: Mapping[str, bool] | Unset = UNSET,
    web_config_file: str | os.PathLike[str] | Unset = UNSET,
    run: str | Unset = UNSET,
    rank: int | Unset = UNSET,
    ranks: Literal["auto", "all", "first"] | Unset = UNSET,
    labels: Mapping[str, str] | Unset = UNSET,
    sd_dir: str | os.PathLike[str] | Unset = UNSET,
    advertise: str | Unset = UNSET,
    linger: float | Unset = UNSET,
    textfile_dir: str | os.PathLike[str] | Unset = UNSET,
    otlp_endpoint: str | None = None,
    otlp_protocol: Literal["http/protobuf", "grpc"] | None = None,
    otlp_headers: Mapping[str, str] | None = None,
    otlp_interval: float | None = None,
    registry: prometheus_client.CollectorRegistry | None = None,
    meter_provider: MeterProvider | None = None,
) -> Exporter:
    """Watches the training of `model` and serves its metrics at `http://<host>:<port>/metrics`.

    Every argument but the model, the optimizers, the scaler, the last two and those of OTLP can also be given as an
    environment variable, `TORCH_GRAD_EXPORTER_PORT` for `port` and so on; an argument wins.

    - `model`: a module, or a mapping of names to modules, whose names become the first part of the layer labels.
    - `port`: 9100 plus the local rank by default; the next free one if it is taken; 0 for any free one; `None`
      serves nothing. `addr`: the address to listen on, by default all interfaces.
    - `every`: "auto" adapts the interval between samples to `overhead_budget`, the share of training time that
      sampling may take (default 0.01); a number samples every so many rounds of optimizer steps.
    - `optimizers`: only needed to give them names, or where they are not known before their first step.
    - `grad_scaler`: the `torch.amp.GradScaler` in use; the norms are divided by its scale.
    - `include`, `exclude`: regular expressions, searched in layer names. `max_layers` (default 300): beyond it,
      layers are folded by module depth.
    - `dead_window` (default 100): samples of exactly zero gradient after which an output unit counts as dead.
    - `moments`, `weights`: metrics of the gradient's moments, and of weights and their updates. `local_norm`: under DDP the
      norm of this rank's own gradient, and the gradient noise scale.
    - `collectors`: which to switch off, such as `{"host": False}`; on by default are gradients, training,
      cuda_memory, gpu, process, host, container and exporter. `{"whole_run": True}`, on all ranks, has rank 0 show what the
      samples of all ranks say together.
    - `web_config_file`: TLS and basic authentication, in the format of Prometheus' exporters; see docs/security.md.
    - `run`, `rank`: on every series; by default from the launcher, else a new name and 0. `labels`: more of them.
    - `ranks`: which ranks show series per layer of gradients that are not sharded. "auto": the first of those whose
      gradients `DistributedDataParallel` makes equal, and all others; "all"; "first": rank 0, where they are made equal by
      hand. What is sharded is shown by every rank that has a part of it.
    - `sd_dir`: a directory that Prometheus reads with `file_sd_configs`; this rank's file is there as long as it lives.
      `advertise`: the host name or address in it, where Prometheus needs another one than it says by itself.
    - `linger`: seconds that the end waits, at most, for one more scrape. `textfile_dir`: a directory of node_exporter's
      textfile collector, for the last values.
    - `otlp_endpoint`: an OpenTelemetry receiver, such as "http://localhost:4318", to which the metrics are pushed as well, every
      `otlp_interval` seconds (default 60) and at the end; `otlp_protocol`: "http/protobuf" or "grpc"; `otlp_headers`: such as one
      that says who sends. OpenTelemetry's own variables, `OTEL_EXPORTER_OTLP_ENDPOINT` and so on, do the same; see docs/otlp.md.
    - `registry`: a `prometheus_client` registry in which the metrics are to appear as well. `meter_provider`: one of
      OpenTelemetry's, in whose instruments a few of them are to appear: global values, progress and resources.

    Starting again on a model replaces the exporter that was there. Raises `TypeError` or `ValueError` before
    anything is registered if an argument is wrong; later, nothing is ever raised into the training.
    """
    chosen = {name: value for name, value in locals().items() if name in settings.CHOICES}
    choices = settings.resolve(chosen, os.environ)
    push = push_settings.resolve(otlp_endpoint, otlp_protocol, otlp_headers, otlp_interval, environment=os.environ)
    identity, store = distributed.identity(os.environ), JobStore()
    models, named = checks.checked_models(model), checks.checked_optimizers(optimizers)
    checks.check_objects(grad_scaler, registry, meter_provider)
    number = identity.rank if choices.rank is None else choices.rank
    index = checks.checked_index(models, choices, chosen, Replicas(choices.ranks, number, identity.world_size))
    checks.check_ownership(index, named)
    web_config = checks.checked_web_config(choices, chosen)
    _replace_others(models.values())
    exporter = Exporter(
        models, index, choices, identity, optimizers=named, grad_scaler=grad_scaler, registry=registry, web_config=web_config,
        run=run_name(identity, choices.run, store), store=store, push=push, meter_provider=meter_provider,
    )  # fmt: skip
    lifecycle.register(exporter)
    return exporter


def _replace_others(models: Collection[torch.nn.Module]) -> None:
    """Closes exporters on one of the models. A notebook cell that is run again makes its model anew: then the old one is gone."""
    for other in lifecycle.open_exporters():
        if isinstance(other, Exporter) and (other.watches(models) or other.orphaned):
            say(logger, logging.INFO, "a new exporter replaces one on the same model, or on a model that is gone")
            other.close()
