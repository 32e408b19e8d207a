"""The options of `start_exporter`, each declared here and nowhere else.

An argument wins over its variable `TORCH_GRAD_EXPORTER_<NAME>`, and that over the default. After a
change here, `make golden` writes the docstring of `start_exporter` and the docs again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.actions.clip.policy import OnFailure, Policy, checked_policies, checked_policy
from torch_grad_exporter.actions.notify import notifiers
from torch_grad_exporter.capture.loss_scale import Scaler
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config import kinds
from torch_grad_exporter.config.option import option
from torch_grad_exporter.model import given as model_given
from torch_grad_exporter.model.replicas import Ranks
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.statistics.kernels.choice import Implementation

_NOT_AN_OPTIMIZER = "for anything else call exporter.step() after each step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options that have a variable of the exporter, valid.

    `every` is None for "auto", `run` is empty and `rank` None if not chosen, `collectors` are those
    that are enabled, and `web_config_file`, `sd_dir`, `advertise`, `textfile_dir` are empty for none.
    """

    # A table: the default, the help, how it is checked.
    # fmt: off
    port: int | None = option(9100, "port of `/metrics`; the next free one if it is taken",
        "0 takes any free one, see `exporter.port`; `None` serves nothing.", kind=kinds.PORT,
        shown="9100 + local rank")
    addr: str = option("", "address to listen on", "Everything that is served there is read-only.",
        kind=kinds.ADDRESS, shown="all interfaces")
    every: int | None = option(None,
        "sample every N rounds of optimizer steps, or adapt to the budget",
        'With "auto" the interval between samples is as short as `overhead_budget` allows.',
        kind=kinds.INTERVAL, shown='"auto"')
    overhead_budget: float = option(0.01, "share of training time that sampling may take", kind=kinds.SHARE)
    include: tuple[re.Pattern[str], ...] = option((),
        "regular expressions, searched in layer names; only layers that match one are watched",
        kind=kinds.PATTERNS, shown="all layers")
    exclude: tuple[re.Pattern[str], ...] = option((),
        "regular expressions, searched in layer names; layers that match one are left out",
        kind=kinds.PATTERNS, shown="none")
    max_layers: int = option(300,
        "layers that are shown; those beyond that number are folded by module depth, or in ranges "
        "such as `blocks.0-9`",
        kind=kinds.whole(1, 100_000))
    dead_window: int = option(100,
        "samples of exactly zero gradient after which an output unit counts as dead",
        kind=kinds.whole(1, 1_000_000, "of samples "))
    moments: bool = option(False, "metrics of mean, deviation and extremes of gradients")
    weights: bool = option(False,
        "metrics of weights: their norms, their updates and how their elements spread")
    activations: bool | re.Pattern[str] = option(False,
        "metrics of the outputs of inner modules and of their gradients",
        "`True`: of all modules without children that `include` and `exclude` leave; a regular expression: of "
        "the modules whose names match it. See docs/activations.md.", kind=kinds.MODULES)
    layer_times: bool = option(False,
        "seconds of the forward and the backward of each layer, in sampled steps",
        "See docs/where-time-goes.md.")
    local_norm: bool = option(False,
        "under DDP, the norm of each rank's own gradient and the gradient noise scale")
    nan_origin: bool | str = option(False,
        "look for the place where a value became NaN or Inf, once there is one",
        '"always" looks in every sampled round, and so finds the first one. See docs/nan-origin.md.',
        kind=kinds.ORIGIN)
    statistics: Implementation = option(Implementation.AUTO,
        "what measures gradients on CUDA devices",
        '"torch": operations of torch, which read each gradient several times; "triton": programs '
        "that read it once, if they pass a comparison in the first samples; "
        '"auto": these on NVIDIA\'s GPUs where Triton is installed, as it is with torch\'s own builds for Linux.')
    collectors: frozenset[str] = option(lambda: frozenset(REGISTRY.names),
        'collectors to disable, such as `{"host": False}`',
        f"There are {', '.join(REGISTRY.names)}.", kind=kinds.COLLECTORS, shown="all")
    web_config_file: str = option("",
        "TLS and basic authentication, in the format of Prometheus' exporters",
        "See docs/security.md.", kind=kinds.path("a web configuration file"), shown="none")
    run: str = option("", "name of the run, on every series",
        kind=kinds.NAME, shown="from the launcher, or new")
    rank: int | None = option(None, "rank in the job, on every series", kind=kinds.RANK,
        shown="from the launcher, or 0")
    ranks: Ranks = option(Ranks.AUTO,
        "which ranks show series per layer of gradients that are not sharded",
        '"auto": the first of those whose gradients `DistributedDataParallel` makes equal, and all others; '
        '"all"; "first": rank 0, where the user\'s code makes them equal. What is sharded is shown by every '
        "rank that has a part of it.")
    labels: Mapping[str, str] = option(dict, "more labels for every series", kind=kinds.LABELS,
        shown="none")
    sd_dir: str = option("",
        "directory that Prometheus reads with `file_sd_configs`; this rank's file is there as long as it runs",
        kind=kinds.path("a directory that Prometheus reads with file_sd_configs"), shown="none")
    advertise: str = option("",
        "host name or address under which Prometheus reaches this host, if it is not the one "
        "that the exporter finds",
        kind=kinds.HOST, shown="found")
    linger: float = option(0.0, "seconds that the end waits, at most, for one more scrape",
        kind=kinds.SECONDS, shown="0")
    textfile_dir: str = option("",
        "directory of node_exporter's textfile collector, for the last values",
        kind=kinds.path("a directory of node_exporter's textfile collector"), shown="none")
    on_failure: OnFailure = option(OnFailure.CONTINUE,
        "what becomes of a step whose gradients `clip` cannot clip",
        'With "continue" it is taken without clipping, which is counted, and after ten in a row nothing is '
        'clipped any more; with "raise" it raises `RuntimeError`.')


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The other options, valid: objects, and where to push.

    `outputs/otlp/push_settings.py` checks those of the push, with OpenTelemetry's variables.
    """

    # fmt: off
    otlp_endpoint: object = option(None,
        'OpenTelemetry receiver to push the metrics to as well, such as "http://localhost:4318"',
        "OpenTelemetry's other variables count, too; see docs/otlp.md.", kind=kinds.given(),
        shown="none", variable="OTEL_EXPORTER_OTLP_ENDPOINT")
    otlp_protocol: object = option(None, "how to push",
        '"http/protobuf", or "grpc", which needs the extra of that name.', kind=kinds.given(),
        shown=f'"{push_settings.Protocol.HTTP.value}"', variable="OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp_headers: object = option(None,
        "headers of what is pushed, such as one that says who sends",
        kind=kinds.given(parse=kinds.pairs, spelled="`authorization=Basic ...`, several with commas"),
        shown="none", variable="OTEL_EXPORTER_OTLP_HEADERS")
    otlp_interval: object = option(None,
        "seconds between two pushes; there is one more at the end",
        "The variable is in milliseconds.", kind=kinds.given(parse=float, spelled="a number"),
        shown=f"{push_settings.INTERVAL:g}", variable="OTEL_METRIC_EXPORT_INTERVAL")
    optimizers: Mapping[str, torch.optim.Optimizer] = option(dict,
        "optimizers, to give them names, or where they are not known before their first step",
        kind=kinds.given(lambda value: model_given.optimizers(value, otherwise=_NOT_AN_OPTIMIZER)),
        shown="found", variable="")
    grad_scaler: Scaler | None = option(None,
        "the `torch.amp.GradScaler` in use; the norms are divided by its scale",
        "One that is not given is found at its first step; give it, so that the first steps, which "
        "may overflow, have sizes too.",
        kind=kinds.given(kinds.scaler), shown="found", variable="")
    clip: Policy | None = option(None,
        "clipping policy, applied before each optimizer's step, which changes the training",
        "Such as `MaxNorm(1.0)` from `torch_grad_exporter.actions`. See docs/acting.md.",
        kind=kinds.given(lambda value: None if value is None else checked_policy(value)),
        variable="")
    dry_run: tuple[Policy, ...] = option((),
        "policies of which it is only shown what each would have done",
        kind=kinds.given(checked_policies), shown="none", variable="")
    alerts: tuple[notifiers.Notifier, ...] = option((),
        "what tells of problems when they begin and end",
        "Such as `[Log(), Webhook(url)]` from `torch_grad_exporter.actions`. See docs/notify.md.",
        kind=kinds.given(notifiers.chosen), shown="none", variable="")
    registry: prometheus_client.CollectorRegistry | None = option(None,
        "a registry of `prometheus_client` in which the metrics are to appear as well",
        kind=kinds.instance("expected a prometheus_client.CollectorRegistry",
            lambda value: hasattr(value, "register")),
        shown="none", variable="")
    meter_provider: MeterProvider | None = option(None,
        "OpenTelemetry's, in whose instruments global values, progress and resources are to appear as well",
        kind=kinds.instance("expected an opentelemetry.metrics.MeterProvider",
            lambda value: isinstance(value, MeterProvider)),
        shown="none", variable="")
