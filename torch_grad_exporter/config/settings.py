"""The options of `start_exporter`: their types and defaults, and one table of help.

An option of its own variable is one field of `Settings` and one row of `HELP`; `values.py` reads and checks it by its type. After a
change here, `make golden` writes the docstring of `start_exporter` and docs/options.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.actions.clip.options import OnFailure, checked_clip, checked_policies
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.actions.notify import notifiers
from torch_grad_exporter.arguments import shown
from torch_grad_exporter.capture.schedule import LONGEST
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config import values
from torch_grad_exporter.config.values import NO_PATH, FilePath, Range
from torch_grad_exporter.model import given as model_given
from torch_grad_exporter.model.replicas import Ranks
from torch_grad_exporter.statistics.kernels.choice import Implementation
from torch_grad_exporter.torch_compat.optimizers import Scaler, has_scale

# Of the exporter's variables; the rest is the option's name in capital letters.
PREFIX = "TORCH_GRAD_EXPORTER_"

Patterns = tuple[re.Pattern[str], ...]


def _all_collectors() -> dict[str, bool]:
    return dict.fromkeys(REGISTRY.names, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options that have a variable of the exporter, valid.

    `run` is empty and `rank` None if not chosen, `collectors` has all of them, and `web_config_file`, `sd_dir`, `advertise`,
    `textfile_dir`, `black_box` are empty for none.
    `textfile_dir`, `state_dir` are empty for none.
    """

    port: Annotated[int, Range(0, 65535)] | None = 9100
    addr: Annotated[str, values.address] = ""
    every: Annotated[int, Range(1, LONGEST)] | Literal["auto"] = "auto"
    overhead_budget: Annotated[float, Range(0, 1, inside=True)] = 0.01
    include: Patterns = ()
    exclude: Patterns = ()
    max_layers: Annotated[int, Range(1, 100_000)] = 300
    dead_window: Annotated[int, Range(1, 1_000_000)] = 100
    moments: bool = False
    weights: bool = False
    optimizer_state: bool = False
    activations: Annotated[bool | re.Pattern[str], values.not_empty] = False
    attention: bool = False
    layer_times: bool = False
    local_norm: bool = False
    routers: bool = False
    nan_origin: bool | Literal["always"] = False
    replicas: bool = False
    black_box: FilePath = NO_PATH
    flops_per_step: Annotated[float, Range(0, 1e30, inside=True)] | None = None
    peak_flops: Annotated[float, Range(0, 1e30, inside=True)] | None = None
    statistics: Implementation = Implementation.AUTO
    collectors: Annotated[Mapping[str, bool], values.collectors] = field(default_factory=_all_collectors)
    web_config_file: FilePath = NO_PATH
    run: Annotated[str, values.run_name] = ""
    rank: Annotated[int, Range(0, 10_000_000)] | None = None
    ranks: Ranks = Ranks.AUTO
    labels: Annotated[Mapping[str, str], values.labels] = field(default_factory=dict)
    labels_on: Literal["series", "target"] = "series"
    sd_dir: FilePath = NO_PATH
    advertise: Annotated[str, values.host] = ""
    linger: Annotated[float, Range(0, 3600)] | Literal["auto"] = "auto"
    textfile_dir: FilePath = NO_PATH
    state_dir: FilePath = NO_PATH
    on_failure: OnFailure = OnFailure.CONTINUE

    @property
    def interval(self) -> int | None:
        """The interval between samples in rounds, None for "auto"."""
        return None if self.every == "auto" else self.every

    @property
    def enabled_collectors(self) -> frozenset[str]:
        """The names of the collectors that run."""
        return frozenset(name for name, enabled in self.collectors.items() if enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The other options: objects, and where to push.

    `outputs/otlp/push_settings.py` checks those of the push, with OpenTelemetry's variables.
    """

    otlp_endpoint: str | None = None
    otlp_protocol: str | None = None
    otlp_headers: Mapping[str, str] | None = None
    otlp_interval: float | None = None
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    grad_scaler: Scaler | None = None
    clip: tuple[Policy, ...] = ()
    dry_run: tuple[Policy, ...] = ()
    alerts: tuple[notifiers.Notifier, ...] = ()
    registry: prometheus_client.CollectorRegistry | None = None
    extra_registries: tuple[prometheus_client.CollectorRegistry, ...] = ()
    meter_provider: MeterProvider | None = None

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> Arguments:
        """Return the arguments of `start_exporter`, checked; those of the push as they are.

        Raises:
            TypeError: An argument is of a wrong type; the message names it, the value and the fix.
            ValueError: An argument is wrong; the message names it, the value and the fix.
        """
        otherwise = "for anything else call exporter.step() after each step"
        scaler, clip, registry, provider = map(given.get, ("grad_scaler", "clip", "registry", "meter_provider"))
        if scaler is not None and not has_scale(scaler):
            raise TypeError(f"grad_scaler={type(scaler).__name__}: expected a torch.amp.GradScaler")
        if registry is not None and not hasattr(registry, "register"):
            raise TypeError(f"registry={shown(registry)}: expected a prometheus_client.CollectorRegistry")
        extra = given.get("extra_registries") or ()
        if not isinstance(extra, Sequence) or not all(isinstance(each, prometheus_client.CollectorRegistry) for each in extra):
            raise TypeError(f"extra_registries={shown(extra)}: expected a list, such as [prometheus_client.REGISTRY]")
        if registry is not None and registry in extra:
            raise ValueError("registry= and extra_registries= name the same registry, which would contain itself; leave out one")
        if provider is not None and not isinstance(provider, MeterProvider):
            raise TypeError(f"meter_provider={shown(provider)}: expected an opentelemetry.metrics.MeterProvider")
        return cls(
            **{name: given.get(name) for name in ("otlp_endpoint", "otlp_protocol", "otlp_headers", "otlp_interval")},
            optimizers=model_given.optimizers(given.get("optimizers"), otherwise=otherwise),
            grad_scaler=scaler,
            clip=checked_clip(clip),
            dry_run=checked_policies(given.get("dry_run")),
            alerts=notifiers.chosen(given.get("alerts")),
            registry=registry,
            extra_registries=tuple(extra),
            meter_provider=provider,
        )


class Help(NamedTuple):
    """What the docs say of an option.

    Attributes:
        help: One phrase without a full stop, also for `--help`.
        more: Further sentences.
        default: What is shown instead of the default.
        variable: The variable of others that stands for it, where that is not the exporter's own.
    """

    help: str
    more: str = ""
    default: str = ""
    variable: str = ""


# fmt: off
HELP = {
    "port": Help("port of `/metrics`; the next free one if it is taken",
        "0 takes any free one, see `exporter.port`; `None` serves nothing.", "9100 + local rank"),
    "addr": Help("address to listen on", "Everything that is served there is read-only.", "all interfaces"),
    "every": Help("sample every N rounds of optimizer steps, or adapt to the budget",
        'With "auto" the interval between samples is as short as `overhead_budget` allows.', '"auto"'),
    "overhead_budget": Help("share of training time that sampling may take"),
    "include": Help("regular expressions, searched in layer names; only layers that match one are watched", default="all layers"),
    "exclude": Help("regular expressions, searched in layer names; layers that match one are left out", default="none"),
    "max_layers": Help(
        "layers that are shown; those beyond that number are folded by module depth, or in ranges such as `blocks.0-9`"),
    "dead_window": Help("samples of exactly zero gradient after which an output unit counts as dead"),
    "moments": Help("metrics of mean, deviation and extremes of gradients"),
    "weights": Help("metrics of weights: their norms, their updates and how their elements spread"),
    "optimizer_state": Help("metrics of what Adam and its kin remember of each layer's gradients",
        "See docs/what-leads-the-loss.md."),
    "activations": Help("metrics of the outputs of inner modules and of their gradients",
        "`True`: of all modules without children that `include` and `exclude` leave; a regular expression: of "
        "the modules whose names match it. See docs/activations.md."),
    "attention": Help("metrics of attention: its largest logits and the entropy of its weights",
        "Of modules that call `torch.nn.functional.scaled_dot_product_attention`, or `softmax` with four dimensions. See "
        "docs/attention.md."),
    "layer_times": Help("seconds of the forward and the backward of each layer, in sampled steps",
        "See docs/where-time-goes.md."),
    "local_norm": Help("under DDP, the norm of each rank's own gradient, and the gradient noise scale",
        "The latter also without DDP, where each step accumulates gradients of several micro-batches."),
    "routers": Help("how mixture-of-experts routers spread tokens over their experts",
        "Of Transformers' and torchtitan's; others by `exporter.router`. See docs/routers.md."),
    "nan_origin": Help("look for the place where a value became NaN or Inf, once there is one",
        '"always" looks in every sampled round, and so finds the first one. See docs/nan-origin.md.'),
    "replicas": Help("compare the gradients, weights and buffers of ranks that hold copies of the model, such as under DDP",
        "By checksums through the job's store, without a collective. See docs/distributed.md."),
    "black_box": Help("directory for what it takes to see a problem again: the last batches, random states and samples",
        "Written when a NaN, a spike or an explosion is found, three times at most. See docs/when-a-step-goes-wrong.md.", "none"),
    "flops_per_step": Help("floating-point operations of a step of this rank, for the MFU",
        "See docs/goodput.md.", "not known"),
    "peak_flops": Help("floating-point operations that the device of a rank can do in a second, for the MFU",
        "That of many GPUs is known by their name, for dense bfloat16. Needs `flops_per_step`.", "by the GPU's name"),
    "statistics": Help("what measures gradients on CUDA devices",
        '"torch": operations of torch, which read each gradient several times; "triton": programs that read it once, if they '
        'pass a comparison in the first samples; "auto": these on NVIDIA\'s GPUs where Triton is installed, as it is with '
        "torch's own builds for Linux."),
    "collectors": Help('collectors to disable, such as `{"host": False}`', f"There are {', '.join(REGISTRY.names)}.", "all"),
    "web_config_file": Help("TLS and basic authentication, in the format of Prometheus' exporters", "See docs/security.md.",
        "none"),
    "run": Help("name of the run, on every series", default="from the launcher, or new"),
    "rank": Help("rank in the job, on every series", default="from the launcher, or 0"),
    "ranks": Help("which ranks show series per layer of gradients that are not sharded",
        '"auto": the first of those whose gradients `DistributedDataParallel` makes equal, and all others; "all"; "first": rank 0, '
        "where the user's code makes them equal. What is sharded is shown by every rank that has a part of it."),
    "labels": Help("more labels for every series", default="none"),
    "labels_on": Help("where `run`, `rank` and `labels` are",
        'With "target" only on `torch_train_info`: for a Prometheus that has them on its targets, as from `sd_dir`. See '
        "docs/distributed.md.", '"series"'),
    "sd_dir": Help(
        "directory that Prometheus reads with `file_sd_configs`; this rank's file is there as long as it runs", default="none"),
    "advertise": Help(
        "host name or address under which Prometheus reaches this host, if it is not the one that the exporter finds",
        default="found"),
    "linger": Help("seconds that the end waits, at most, for one more scrape",
        '"auto": for each Prometheus that has scraped at least twice, until its next scrape; at most twice the time between its '
        "scrapes, and 60 seconds. Ctrl-C ends the wait.", '"auto"'),
    "textfile_dir": Help("directory of node_exporter's textfile collector, for the last values", default="none"),
    "state_dir": Help("directory for a small file of each rank, which a restart of the run reads",
        "With it and `exporter.resume(step)` it is known which steps are computed again. Needs a `run` that stays the same. See "
        "docs/goodput.md.", "none"),
    "on_failure": Help("what becomes of a step whose gradients `clip` cannot clip",
        'With "continue" it is taken without clipping, which is counted, and after ten in a row nothing is clipped any more; '
        'with "raise" it raises `RuntimeError`.'),
    "otlp_endpoint": Help('OpenTelemetry receiver of metrics, problems and actions, such as "http://localhost:4318"',
        "OpenTelemetry's other variables count, too; see docs/otlp.md.", "none", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    "otlp_protocol": Help("how to push", '"http/protobuf", or "grpc", which needs the extra of that name.', '"http/protobuf"',
        "OTEL_EXPORTER_OTLP_PROTOCOL"),
    "otlp_headers": Help("headers of what is pushed, such as one that says who sends", default="none",
        variable="OTEL_EXPORTER_OTLP_HEADERS"),
    "otlp_interval": Help("seconds between two pushes; there is one more at the end", "The variable is in milliseconds.", "60",
        "OTEL_METRIC_EXPORT_INTERVAL"),
    "optimizers": Help("optimizers, to give them names, or where they are not known before their first step", default="found"),
    "grad_scaler": Help("the `torch.amp.GradScaler` in use; the norms are divided by its scale",
        "One that is not given is found at its first step; give it, so that the first steps, which may overflow, have sizes too.",
        "found"),
    "clip": Help("clipping policy, or a list of policies, applied before each optimizer's step, which changes the training",
        "Such as `[SkipNonFinite(), MaxNorm(1.0)]` from `torch_grad_exporter.actions`. See docs/clipping.md.", "None"),
    "dry_run": Help("policies of which it is only shown what each would have done", default="none"),
    "alerts": Help("notifiers that report problems when they begin and end",
        "Such as `[Log(), Webhook(url)]` from `torch_grad_exporter.actions`. See docs/notify.md.", "none"),
    "registry": Help("a registry of `prometheus_client` in which the metrics are to appear as well", default="none"),
    "extra_registries": Help("registries of `prometheus_client` whose metrics are served and pushed as well",
        "Such as `[prometheus_client.REGISTRY]`. See docs/your-metrics.md.", "none"),
    "meter_provider": Help("OpenTelemetry's, in whose instruments global values, progress and resources are to appear as well",
        default="none"),
}
