"""Starts an exporter in a worker of Ray Train.

See docs/frameworks.md. Ray's callbacks run on its controller, where nothing trains: call it in the training function, which each
worker runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter import start_exporter as start
from torch_grad_exporter.config.option import UNSET, Unset, with_shown_defaults
from torch_grad_exporter.exporter import open_exporters
from torch_grad_exporter.integrations.common import numbers_of, require
from torch_grad_exporter.integrations.session import Models

require("ray", "2.10", extra="ray", package="ray[train]")

import ray.train  # noqa: E402 - require() has raised if it is missing


@with_shown_defaults
def start_exporter(model: Models, port: int | Unset | None = UNSET, **options: Any) -> Exporter:
    """Start an exporter in the training function of Ray Train, one in each worker; see `torch_grad_exporter.start_exporter`.

    The run has the name of Ray's experiment, with that of the trial if it is another; the rank is Ray's world rank. Call it after
    `prepare_model`, with what that returned. In a `with` an exception in the training function makes the run `failed`:

        with start_exporter(model) as exporter:
            ...
            report({"loss": loss, **exporter.values("^torch_grad_global_norm")})

    Args:
        model: What `prepare_model` returned.
        port: Of the first worker on a host; others take the next ones, by their local rank.
        options: Those of `start_exporter`, which win over what Ray knows.

    Returns:
        The running exporter.

    Raises:
        RuntimeError: It is called outside of a training function.
        TypeError: As `start_exporter` does.
        ValueError: Likewise.
    """
    outside = "start_exporter() of torch_grad_exporter.integrations.ray was called outside of a training function of Ray Train; "
    outside += "call it in train_func, or use torch_grad_exporter.start_exporter"
    try:  # without a context some versions raise and others return one that knows nothing
        context = ray.train.get_context()
        rank = context.get_world_rank()
    except RuntimeError as error:
        raise RuntimeError(outside) from error
    if rank is None:
        raise RuntimeError(outside)
    # All ranks and a restart share the name of the experiment; a trial among several has its own.
    experiment = context.get_experiment_name() or "ray"
    try:
        trial = context.get_trial_name()
    except DeprecationWarning:  # raised by newer versions, which have no trials
        trial = None
    run = experiment if not trial or trial == experiment else f"{experiment}/{trial}"
    return start(model, port, **{"run": run, "rank": rank, **options})


def report(metrics: Mapping[str, Any], **options: Any) -> None:
    """Report metrics to Ray, with the arguments of `ray.train.report`.

    This worker's exporters show their numbers, and that a checkpoint is written if there is one.
    """
    with contextlib.ExitStack() as saving:
        for exporter in open_exporters():
            if values := numbers_of(metrics):
                exporter.guarded(exporter.log, values)
            if options.get("checkpoint") is not None:
                saving.enter_context(exporter.checkpointing())
        ray.train.report(metrics, **options)
