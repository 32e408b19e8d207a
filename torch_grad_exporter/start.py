"""The entry point: `start_exporter` checks everything before anything is registered, and makes an `Exporter`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.actions import Notifier
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.composition import open_exporters
from torch_grad_exporter.config.checked import checked
from torch_grad_exporter.config.option import UNSET, Unset
from torch_grad_exporter.errors import say
from torch_grad_exporter.exporter import Exporter

logger = logging.getLogger("torch_grad_exporter")

Models = torch.nn.Module | Mapping[str, torch.nn.Module]


def start_exporter(
    model: Models,
    port: int | Unset | None = UNSET,
    *,
    addr: str | Unset = UNSET,
    every: Literal["auto"] | int | Unset = UNSET,
    overhead_budget: float | Unset = UNSET,
    include: str | Sequence[str] | Unset = UNSET,
    exclude: str | Sequence[str] | Unset = UNSET,
    max_layers: int | Unset = UNSET,
    dead_window: int | Unset = UNSET,
    moments: bool | Unset = UNSET,
    weights: bool | Unset = UNSET,
    activations: bool | str | Unset = UNSET,
    layer_times: bool | Unset = UNSET,
    local_norm: bool | Unset = UNSET,
    nan_origin: bool | Literal["always"] | Unset = UNSET,
    statistics: Literal["auto", "torch", "triton"] | Unset = UNSET,
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
    on_failure: Literal["continue", "raise"] | Unset = UNSET,
    otlp_endpoint: str | None = None,
    otlp_protocol: Literal["http/protobuf", "grpc"] | None = None,
    otlp_headers: Mapping[str, str] | None = None,
    otlp_interval: float | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None = None,
    grad_scaler: Scaler | None = None,
    clip: Policy | None = None,
    dry_run: Sequence[Policy] | None = None,
    alerts: Notifier | Sequence[Notifier] | None = None,
    registry: prometheus_client.CollectorRegistry | None = None,
    meter_provider: MeterProvider | None = None,
) -> Exporter:
    """Watches the training of `model` and serves its metrics at `http://<host>:<port>/metrics`.

    An option whose default is `UNSET` can also be given as an environment variable, `TORCH_GRAD_EXPORTER_PORT` for `port` and so
    on; an argument wins. In parentheses the defaults; see docs/options.md.

    - `model`: a module, or a mapping of names to modules, whose names become the first part of the layer labels.
    - `port` (9100 + local rank): port of `/metrics`; the next free one if it is taken. 0 takes any free one, see
      `exporter.port`; `None` serves nothing.
    - `addr` (all interfaces): address to listen on. Everything that is served there is read-only.
    - `every` ("auto"): sample every N rounds of optimizer steps, or adapt to the budget. With "auto" the interval between
      samples is as short as `overhead_budget` allows.
    - `overhead_budget` (0.01): share of training time that sampling may take.
    - `include` (all layers): regular expressions, searched in layer names; only layers in which one is found are watched.
    - `exclude` (none): regular expressions, searched in layer names; layers in which one is found are left out.
    - `max_layers` (300): layers that are shown; what is beyond that number is folded by module depth, or in ranges such as
      `blocks.0-9`.
    - `dead_window` (100): samples of exactly zero gradient after which an output unit counts as dead.
    - `moments` (off): metrics of mean, deviation and extremes of gradients.
    - `weights` (off): metrics of weights: their norms, their updates and how their elements spread.
    - `activations` (off): metrics of the outputs of inner modules and of their gradients. `True`: of all modules without
      children that `include` and `exclude` leave; a regular expression: of those modules in whose name it is found. See
      docs/activations.md.
    - `layer_times` (off): seconds of the forward and the backward of each layer, in sampled steps. See docs/where-time-goes.md.
    - `local_norm` (off): under DDP, the norm of each rank's own gradient and the gradient noise scale.
    - `nan_origin` (off): look for the place where a value became NaN or Inf, once there is one. "always" looks in every sampled
      round, and so finds the first one. See docs/nan-origin.md.
    - `statistics` ("auto"): what measures gradients on CUDA devices. "auto", "torch": operations of torch, which read each
      gradient several times; "triton": programs that read it once, where Triton is installed and they pass a comparison in the
      first samples.
    - `collectors` (all but whole_run): collectors to switch off, such as `{"host": False}`, or on. There are gradients,
      activations, nan_origin, layer_times, watched, training, whole_run, cuda_memory, gpu, process, host, container, exporter.
      `{"whole_run": True}`, on all ranks, makes rank 0 show the samples of all ranks together.
    - `web_config_file` (none): TLS and basic authentication, in the format of Prometheus' exporters. See docs/security.md.
    - `run` (from the launcher, or new): name of the run, on every series.
    - `rank` (from the launcher, or 0): rank in the job, on every series.
    - `ranks` ("auto"): which ranks show series per layer of gradients that are not sharded. "auto": the first of those whose
      gradients `DistributedDataParallel` makes equal, and all others; "all"; "first": rank 0, where they are made equal by
      hand. What is sharded is shown by every rank that has a part of it.
    - `labels` (none): more labels for every series.
    - `sd_dir` (none): directory that Prometheus reads with `file_sd_configs`; this rank's file is there as long as it runs.
    - `advertise` (found): host name or address under which Prometheus reaches this host, where it is not the one that the
      exporter finds.
    - `linger` (0): seconds that the end waits, at most, for one more scrape.
    - `textfile_dir` (none): directory of node_exporter's textfile collector, for the last values.
    - `on_failure` ("continue"): what becomes of a step whose gradients `clip` cannot clip. With "continue" it is taken without
      clipping, which is counted, and after ten in a row nothing is clipped any more; with "raise" it raises `RuntimeError`.
    - `otlp_endpoint` (none): OpenTelemetry receiver to push the metrics to as well, such as "http://localhost:4318".
      OpenTelemetry's other variables count, too; see docs/otlp.md.
    - `otlp_protocol` ("http/protobuf"): how to push. "http/protobuf", or "grpc", which needs the extra of that name.
    - `otlp_headers` (none): headers of what is pushed, such as one that says who sends.
    - `otlp_interval` (60): seconds between two pushes; there is one more at the end. The variable is in milliseconds.
    - `optimizers` (found): optimizers, to give them names, or where they are not known before their first step.
    - `grad_scaler` (found): the `torch.amp.GradScaler` in use; the norms are divided by its scale. One that is not given is
      found at its first step; give it, so that the first steps, which may overflow, have sizes too.
    - `clip` (not): how gradients are clipped before each optimizer's step, which changes the training. Such as `MaxNorm(1.0)`
      from `torch_grad_exporter.actions`. See docs/acting.md.
    - `dry_run` (none): policies of which it is only shown what each would have done.
    - `alerts` (none): what tells of problems when they begin and end. Such as `[Log(), Webhook(url)]` from
      `torch_grad_exporter.actions`. See docs/notify.md.
    - `registry` (none): a registry of `prometheus_client` in which the metrics are to appear as well.
    - `meter_provider` (none): OpenTelemetry's, in whose instruments global values, progress and resources are to appear as
      well.

    Starting again on a model replaces the exporter that was there. Raises `TypeError` or `ValueError` before
    anything is registered if an argument is wrong; later, nothing is ever raised into the training.
    """
    chosen = checked(dict(locals()), os.environ)
    told = _replace_others(chosen.models.values())
    exporter = Exporter(chosen)
    for tell in told:
        tell(exporter)
    return exporter


def _replace_others(models: Collection[torch.nn.Module]) -> list[Callable[[Exporter], object]]:
    """Closes the exporters whose place a new one takes; whom to tell of that one."""
    told = []
    for other in open_exporters():
        if other.gives_way is not None:
            told.append(other.gives_way)
            other.close()
        elif other.replaced_by(models):
            say(logger, logging.INFO, "a new exporter replaces one on the same model, or on a model that is gone")
            other.close()
    return told
