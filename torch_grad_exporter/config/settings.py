"""What the user may choose, each option declared here and nowhere else.

An argument wins over its environment variable `TORCH_GRAD_EXPORTER_<NAME>`, and that over the default. All of it is checked before
anything is registered. After a change here, `make golden` writes the signature of `start_exporter` and the docs anew.
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
from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.capture.schedule import LONGEST
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config import kinds
from torch_grad_exporter.config.option import option
from torch_grad_exporter.model.replicas import Ranks
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.statistics.kernels.choice import Implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All choices, valid. `every` is `None` for "auto"; `run` is empty and `rank` `None` where they were not chosen.

    `collectors`: those that are on. `web_config_file`, `sd_dir`, `advertise`, `textfile_dir`: empty for none.
    """

    port: int | None = option(
        kinds.port(),
        9100,
        "port of `/metrics`; the next free one if it is taken",
        "0 takes any free one, see `exporter.port`; `None` serves nothing.",
        shown="9100 + local rank",
    )
    addr: str = option(
        kinds.address(), "", "address to listen on", "Everything that is served there is read-only.", shown="all interfaces"
    )
    every: int | None = option(
        kinds.interval(LONGEST),
        None,
        "sample every N rounds of optimizer steps, or adapt to the budget",
        'With "auto" the interval between samples is as short as `overhead_budget` allows.',
        shown='"auto"',
    )
    overhead_budget: float = option(kinds.share("training time", "0.01"), 0.01, "share of training time that sampling may take")
    include: tuple[re.Pattern[str], ...] = option(
        kinds.patterns("layer names"),
        (),
        "regular expressions, searched in layer names; only layers in which one is found are watched",
        shown="all layers",
    )
    exclude: tuple[re.Pattern[str], ...] = option(
        kinds.patterns("layer names"),
        (),
        "regular expressions, searched in layer names; layers in which one is found are left out",
        shown="none",
    )
    max_layers: int = option(
        kinds.whole(1, 100_000),
        300,
        "layers that are shown; what is beyond that number is folded by module depth, or in ranges such as `blocks.0-9`",
    )
    dead_window: int = option(
        kinds.whole(1, 1_000_000, "samples"),
        100,
        "samples of exactly zero gradient after which an output unit counts as dead",
    )
    moments: bool = option(kinds.switch(), False, "metrics of mean, deviation and extremes of gradients")
    weights: bool = option(kinds.switch(), False, "metrics of weights: their norms, their updates and how their elements spread")
    activations: bool | re.Pattern[str] = option(
        kinds.activations(),
        False,
        "metrics of the outputs of inner modules and of their gradients",
        "`True`: of all modules without children that `include` and `exclude` leave; a regular expression: of those modules in "
        "whose name it is found. See docs/activations.md.",
    )
    layer_times: bool = option(
        kinds.switch(),
        False,
        "seconds of the forward and the backward of each layer, in sampled steps",
        "See docs/where-time-goes.md.",
    )
    local_norm: bool = option(kinds.switch(), False, "under DDP, the norm of each rank's own gradient and the gradient noise scale")
    nan_origin: bool | str = option(
        kinds.switch_or("always"),
        False,
        "look for the place where a value became NaN or Inf, once there is one",
        '"always" looks in every sampled round, and so finds the first one. See docs/nan-origin.md.',
    )
    statistics: Implementation = option(
        kinds.choice(Implementation),
        Implementation.AUTO,
        "what measures gradients on CUDA devices",
        '"auto", "torch": operations of torch, which read each gradient several times; "triton": programs that read it once, '
        "where Triton is installed and they pass a comparison in the first samples.",
        shown='"auto"',
    )
    collectors: frozenset[str] = option(
        kinds.collectors(),
        lambda: REGISTRY.on_by_default,
        'collectors to switch off, such as `{"host": False}`, or on',
        f"There are {', '.join(REGISTRY.names)}. "
        '`{"whole_run": True}`, on all ranks, makes rank 0 show the samples of all ranks together.',
        shown="all but whole_run",
    )
    web_config_file: str = option(
        kinds.path("a web configuration file"),
        "",
        "TLS and basic authentication, in the format of Prometheus' exporters",
        "See docs/security.md.",
        shown="none",
    )
    run: str = option(kinds.name(200), "", "name of the run, on every series", shown="from the launcher, or new")
    rank: int | None = option(kinds.rank(), None, "rank in the job, on every series", shown="from the launcher, or 0")
    ranks: Ranks = option(
        kinds.choice(Ranks),
        Ranks.AUTO,
        "which ranks show series per layer of gradients that are not sharded",
        '"auto": the first of those whose gradients `DistributedDataParallel` makes equal, and all others; "all"; "first": rank 0, '
        "where they are made equal by hand. What is sharded is shown by every rank that has a part of it.",
        shown='"auto"',
    )
    labels: Mapping[str, str] = option(kinds.labels(), dict, "more labels for every series", shown="none")
    sd_dir: str = option(
        kinds.path("a directory that Prometheus reads with file_sd_configs"),
        "",
        "directory that Prometheus reads with `file_sd_configs`; this rank's file is there as long as it runs",
        shown="none",
    )
    advertise: str = option(
        kinds.host(),
        "",
        "host name or address under which Prometheus reaches this host, where it is not the one that the exporter finds",
        shown="found",
    )
    linger: float = option(kinds.seconds(3600), 0.0, "seconds that the end waits, at most, for one more scrape", shown="0")
    textfile_dir: str = option(
        kinds.path("a directory of node_exporter's textfile collector"),
        "",
        "directory of node_exporter's textfile collector, for the last values",
        shown="none",
    )
    on_failure: OnFailure = option(
        kinds.choice(OnFailure),
        OnFailure.CONTINUE,
        "what becomes of a step whose gradients `clip` cannot clip",
        'With "continue" it is taken without clipping, which is counted, and after ten in a row nothing is clipped any more; with '
        '"raise" it raises `RuntimeError`.',
        shown='"continue"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments that have no environment variable of the exporter: objects, and what says where to push.

    All are valid but for the push: `outputs/otlp/push_settings.py` checks its arguments with OpenTelemetry's variables.
    """

    otlp_endpoint: object = option(
        kinds.given("str | None"),
        None,
        'OpenTelemetry receiver to push the metrics to as well, such as "http://localhost:4318"',
        "OpenTelemetry's other variables count, too; see docs/otlp.md.",
        shown="none",
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    otlp_protocol: object = option(
        kinds.given('Literal["http/protobuf", "grpc"] | None'),
        None,
        "how to push",
        '"http/protobuf", or "grpc", which needs the extra of that name.',
        shown=f'"{push_settings.Protocol.HTTP.value}"',
        variable="OTEL_EXPORTER_OTLP_PROTOCOL",
    )
    otlp_headers: object = option(
        kinds.given("Mapping[str, str] | None", parse=kinds.pairs, spelled="`authorization=Basic ...`, several with commas"),
        None,
        "headers of what is pushed, such as one that says who sends",
        shown="none",
        variable="OTEL_EXPORTER_OTLP_HEADERS",
    )
    otlp_interval: object = option(
        kinds.given("float | None", parse=float, spelled="a number"),
        None,
        "seconds between two pushes; there is one more at the end",
        "The variable is in milliseconds.",
        shown=f"{push_settings.INTERVAL:g}",
        variable="OTEL_METRIC_EXPORT_INTERVAL",
    )
    optimizers: Mapping[str, torch.optim.Optimizer] = option(
        kinds.optimizers(),
        dict,
        "optimizers, to give them names, or where they are not known before their first step",
        shown="found",
        variable="",
    )
    grad_scaler: Scaler | None = option(
        kinds.scaler(),
        None,
        "the `torch.amp.GradScaler` in use; the norms are divided by its scale",
        "One that is not given is found at its first step; give it, so that the first steps, which may overflow, have sizes too.",
        shown="found",
        variable="",
    )
    clip: Policy | None = option(
        kinds.given("Policy | None", lambda given: None if given is None else checked_policy(given)),
        None,
        "how gradients are clipped before each optimizer's step, which changes the training",
        "Such as `MaxNorm(1.0)` from `torch_grad_exporter.actions`. See docs/acting.md.",
        shown="not",
        variable="",
    )
    dry_run: tuple[Policy, ...] = option(
        kinds.given("Sequence[Policy] | None", checked_policies),
        (),
        "policies of which it is only shown what each would have done",
        shown="none",
        variable="",
    )
    alerts: tuple[notifiers.Notifier, ...] = option(
        kinds.given("Notifier | Sequence[Notifier] | None", notifiers.chosen),
        (),
        "what tells of problems when they begin and end",
        "Such as `[Log(), Webhook(url)]` from `torch_grad_exporter.actions`. See docs/notify.md.",
        shown="none",
        variable="",
    )
    registry: prometheus_client.CollectorRegistry | None = option(
        kinds.instance(
            "prometheus_client.CollectorRegistry", "a prometheus_client.CollectorRegistry", lambda value: hasattr(value, "register")
        ),
        None,
        "a registry of `prometheus_client` in which the metrics are to appear as well",
        shown="none",
        variable="",
    )
    meter_provider: MeterProvider | None = option(
        kinds.instance("MeterProvider", "an opentelemetry.metrics.MeterProvider", lambda value: isinstance(value, MeterProvider)),
        None,
        "OpenTelemetry's, in whose instruments global values, progress and resources are to appear as well",
        shown="none",
        variable="",
    )
