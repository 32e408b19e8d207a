"""The entry point: checks everything before anything is registered, and makes an `Exporter`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, ParamSpec, TypeVar

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.actions import Notifier
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.config.checked import Checked, check
from torch_grad_exporter.config.option import UNSET, Unset, check_names, with_shown_defaults
from torch_grad_exporter.errors import say
from torch_grad_exporter.exporter import Exporter, open_exporters
from torch_grad_exporter.model import given
from torch_grad_exporter.torch_compat.optimizers import Scaler

logger = logging.getLogger("torch_grad_exporter")

Models = torch.nn.Module | Mapping[str, torch.nn.Module]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _suggesting(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Name the nearest keyword where one is misspelt, as Python itself does from 3.13 on."""

    @functools.wraps(function)
    def suggesting(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        check_names(options.keys() - {"model"})
        return function(*arguments, **options)

    return suggesting


@with_shown_defaults
@_suggesting
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
    optimizer_state: bool | Unset = UNSET,
    activations: bool | str | Unset = UNSET,
    attention: bool | Unset = UNSET,
    layer_times: bool | Unset = UNSET,
    local_norm: bool | Unset = UNSET,
    routers: bool | Unset = UNSET,
    nan_origin: bool | Literal["always"] | Unset = UNSET,
    replicas: bool | Unset = UNSET,
    black_box: str | os.PathLike[str] | Unset = UNSET,
    flops_per_step: float | Unset | None = UNSET,
    peak_flops: float | Unset | None = UNSET,
    statistics: Literal["auto", "torch", "triton"] | Unset = UNSET,
    collectors: Mapping[str, bool] | Unset = UNSET,
    web_config_file: str | os.PathLike[str] | Unset = UNSET,
    run: str | Unset = UNSET,
    rank: int | Unset = UNSET,
    ranks: Literal["auto", "all", "first"] | Unset = UNSET,
    labels: Mapping[str, str] | Unset = UNSET,
    labels_on: Literal["series", "target"] | Unset = UNSET,
    sd_dir: str | os.PathLike[str] | Unset = UNSET,
    advertise: str | Unset = UNSET,
    linger: Literal["auto"] | float | Unset = UNSET,
    textfile_dir: str | os.PathLike[str] | Unset = UNSET,
    state_dir: str | os.PathLike[str] | Unset = UNSET,
    on_failure: Literal["continue", "raise"] | Unset = UNSET,
    otlp_endpoint: str | None = None,
    otlp_protocol: Literal["http/protobuf", "grpc"] | None = None,
    otlp_headers: Mapping[str, str] | None = None,
    otlp_interval: float | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None = None,
    grad_scaler: Scaler | None = None,
    clip: Policy | Sequence[Policy] | None = None,
    dry_run: Sequence[Policy] | None = None,
    alerts: Notifier | Sequence[Notifier] | None = None,
    registry: prometheus_client.CollectorRegistry | None = None,
    extra_registries: Sequence[prometheus_client.CollectorRegistry] | None = None,
    meter_provider: MeterProvider | None = None,
) -> Exporter:
    """Watch the training of `model`; serve a live page at `http://<host>:<port>/` and its metrics at `/metrics`.

    Options up to `on_failure` can also be given as environment variables, such as
    `TORCH_GRAD_EXPORTER_PORT` for `port`; an argument wins. See docs/options.md.

    Starting again on a model replaces the exporter that was there. Errors name the argument, its
    value and the fix, and are raised before anything is registered; later, nothing is ever raised
    into the training.

    Args:
        model: A module, or a mapping of names to modules, whose names become the
            first part of the layer labels.
        port: Port of `/metrics`; the next free one if it is taken (default: 9100 + local rank). 0
            takes any free one, see `exporter.port`; `None` serves nothing.
        addr: Address to listen on (default: all interfaces). Everything that is served there is
            read-only.
        every: Sample every N rounds of optimizer steps, or adapt to the budget (default: "auto").
            With "auto" the interval between samples is as short as `overhead_budget` allows.
        overhead_budget: Share of training time that sampling may take (default: 0.01).
        include: Regular expressions, searched in layer names; only layers that match one are
            watched (default: all layers).
        exclude: Regular expressions, searched in layer names; layers that match one are left out
            (default: none).
        max_layers: Layers that are shown; those beyond that number are folded by module depth, or
            in ranges such as `blocks.0-9` (default: 300).
        dead_window: Samples of exactly zero gradient after which an output unit counts as dead
            (default: 100).
        moments: Metrics of mean, deviation and extremes of gradients (default: off).
        weights: Metrics of weights: their norms, their updates and how their elements spread
            (default: off).
        optimizer_state: Metrics of what Adam and its kin remember of each layer's gradients
            (default: off). See docs/what-leads-the-loss.md.
        activations: Metrics of the outputs of inner modules and of their gradients (default: off).
            `True`: of all modules without children that `include` and `exclude` leave; a regular
            expression: of the modules whose names match it. See docs/activations.md.
        attention: Metrics of attention: its largest logits and the entropy of its weights (default:
            off). Of modules that call `torch.nn.functional.scaled_dot_product_attention`, or
            `softmax` with four dimensions. See docs/attention.md.
        layer_times: Seconds of the forward and the backward of each layer, in sampled steps
            (default: off). See docs/where-time-goes.md.
        local_norm: Under DDP, the norm of each rank's own gradient, and the gradient noise scale
            (default: off). The latter also without DDP, where each step accumulates gradients of
            several micro-batches.
        routers: How mixture-of-experts routers spread tokens over their experts (default: off). Of
            Transformers' and torchtitan's; others by `exporter.router`. See docs/routers.md.
        nan_origin: Look for the place where a value became NaN or Inf, once there is one (default:
            off). "always" looks in every sampled round, and so finds the first one. See
            docs/nan-origin.md.
        replicas: Compare the gradients, weights and buffers of ranks that hold copies of the model,
            such as under DDP (default: off). By checksums through the job's store, without a
            collective. See docs/distributed.md.
        black_box: Directory for what it takes to see a problem again: the last batches, random
            states and samples (default: none). Written when a NaN, a spike or an explosion is
            found, three times at most. See docs/when-a-step-goes-wrong.md.
        flops_per_step: Floating-point operations of a step of this rank, for the MFU (default: not
            known). See docs/goodput.md.
        peak_flops: Floating-point operations that the device of a rank can do in a second, for the
            MFU (default: by the GPU's name). That of many GPUs is known by their name, for dense
            bfloat16. Needs `flops_per_step`.
        statistics: What measures gradients on CUDA devices (default: "auto"). "torch": operations
            of torch, which read each gradient several times; "triton": programs that read it once,
            if they pass a comparison in the first samples; "auto": these on NVIDIA's GPUs where
            Triton is installed, as it is with torch's own builds for Linux.
        collectors: Collectors to disable, such as `{"host": False}` (default: all). There are
            gradients, optimizer_state, activations, nan_origin, replicas, attention, layer_times,
            watched, routers, training, goodput, logged, reinforcement, rollbacks, cuda_memory, gpu,
            process, host, container, extra, exporter.
        web_config_file: TLS and basic authentication, in the format of Prometheus' exporters
            (default: none). See docs/security.md.
        run: Name of the run, on every series (default: from the launcher, or new).
        rank: Rank in the job, on every series (default: from the launcher, or 0).
        ranks: Which ranks show series per layer of gradients that are not sharded (default:
            "auto"). "auto": the first of those whose gradients `DistributedDataParallel` makes
            equal, and all others; "all"; "first": rank 0, where the user's code makes them equal.
            What is sharded is shown by every rank that has a part of it.
        labels: More labels for every series (default: none).
        labels_on: Where `run`, `rank` and `labels` are (default: "series"). With "target" only on
            `torch_train_info`: for a Prometheus that has them on its targets, as from `sd_dir`. See
            docs/distributed.md.
        sd_dir: Directory that Prometheus reads with `file_sd_configs`; this rank's file is there as
            long as it runs (default: none).
        advertise: Host name or address under which Prometheus reaches this host, if it is not the
            one that the exporter finds (default: found).
        linger: Seconds that the end waits, at most, for one more scrape (default: "auto"). "auto":
            for each Prometheus that has scraped at least twice, until its next scrape; at most
            twice the time between its scrapes, and 60 seconds. Ctrl-C ends the wait.
        textfile_dir: Directory of node_exporter's textfile collector, for the last values (default:
            none).
        state_dir: Directory for a small file of each rank, which a restart of the run reads
            (default: none). With it and `exporter.resume(step)` it is known which steps are
            computed again. Needs a `run` that stays the same. See docs/goodput.md.
        on_failure: What becomes of a step whose gradients `clip` cannot clip (default: "continue").
            With "continue" it is taken without clipping, which is counted, and after ten in a row
            nothing is clipped any more; with "raise" it raises `RuntimeError`.
        otlp_endpoint: OpenTelemetry receiver of metrics, problems and actions, such as
            "http://localhost:4318" (default: none). OpenTelemetry's other variables count, too; see
            docs/otlp.md.
        otlp_protocol: How to push (default: "http/protobuf"). "http/protobuf", or "grpc", which
            needs the extra of that name.
        otlp_headers: Headers of what is pushed, such as one that says who sends (default: none).
        otlp_interval: Seconds between two pushes; there is one more at the end (default: 60). The
            variable is in milliseconds.
        optimizers: Optimizers, to give them names, or where they are not known before their first
            step (default: found).
        grad_scaler: The `torch.amp.GradScaler` in use; the norms are divided by its scale (default:
            found). One that is not given is found at its first step; give it, so that the first
            steps, which may overflow, have sizes too.
        clip: Clipping policy, or a list of policies, applied before each optimizer's step, which
            changes the training (default: None). Such as `[SkipNonFinite(), MaxNorm(1.0)]` from
            `torch_grad_exporter.actions`. See docs/clipping.md.
        dry_run: Policies of which it is only shown what each would have done (default: none).
        alerts: Notifiers that report problems when they begin and end (default: none). Such as
            `[Log(), Webhook(url)]` from `torch_grad_exporter.actions`. See docs/notify.md.
        registry: A registry of `prometheus_client` in which the metrics are to appear as well
            (default: none).
        extra_registries: Registries of `prometheus_client` whose metrics are served and pushed as
            well (default: none). Such as `[prometheus_client.REGISTRY]`. See docs/your-metrics.md.
        meter_provider: OpenTelemetry's, in whose instruments global values, progress and resources
            are to appear as well (default: none).

    Returns:
        The running exporter. Close it, or use it in a `with`; else it ends with the process.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument or a variable is wrong, or does not fit the model.
        ImportError: An option needs a package that is not installed.
    """
    models = given.models(model)
    checked = check(
        models, os.environ,
        port=port, addr=addr, every=every, overhead_budget=overhead_budget, include=include,
        exclude=exclude, max_layers=max_layers, dead_window=dead_window, moments=moments,
        weights=weights, optimizer_state=optimizer_state, activations=activations, attention=attention,
        layer_times=layer_times, local_norm=local_norm, routers=routers,
        nan_origin=nan_origin, replicas=replicas, black_box=black_box, flops_per_step=flops_per_step,
        peak_flops=peak_flops, statistics=statistics, collectors=collectors,
        web_config_file=web_config_file, run=run, rank=rank, ranks=ranks, labels=labels,
        labels_on=labels_on, sd_dir=sd_dir, advertise=advertise, linger=linger, textfile_dir=textfile_dir, state_dir=state_dir,
        on_failure=on_failure, otlp_endpoint=otlp_endpoint, otlp_protocol=otlp_protocol,
        otlp_headers=otlp_headers, otlp_interval=otlp_interval, optimizers=optimizers,
        grad_scaler=grad_scaler, clip=clip, dry_run=dry_run, alerts=alerts, registry=registry,
        extra_registries=extra_registries, meter_provider=meter_provider,
    )  # fmt: skip
    exporter = start(models, checked)
    try:
        exporter.announce()
    except BaseException as error:  # Ctrl-C: the caller gets no exporter that could be closed
        exporter.end(error)
        raise
    return exporter


def start(models: Mapping[str, torch.nn.Module], checked: Checked) -> Exporter:
    """Start an exporter in the place of those that give way to it, and leave it to the caller to say where it serves."""
    left: list[Callable[[Exporter], object]] = []
    for other in open_exporters():
        if other.gives_way is not None:
            left.append(other.gives_way)
            other.give_place()
        elif other.replaced_by(models.values()):
            say(logger, logging.INFO, "a new exporter replaces one on the same model, or on a model that is gone")
            other.give_place()
    exporter = Exporter(models, checked)
    for gives_way in left:
        gives_way(exporter)
    return exporter
