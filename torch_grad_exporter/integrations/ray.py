"""What starts an exporter in a worker of Ray Train.

See docs/ray.md. Ray's callbacks run on its controller, where nothing trains: the line stands in the training function, which each
worker runs.
"""

from __future__ import annotations

from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter import start_exporter as start
from torch_grad_exporter.config.option import UNSET, Unset
from torch_grad_exporter.integrations.requirement import require
from torch_grad_exporter.integrations.session import Models

require("ray", "2.10", extra="ray")

import ray.train  # noqa: E402 - what is missing has been said by now


def start_exporter(model: Models, port: int | Unset | None = UNSET, **options: Any) -> Exporter:
    """As `torch_grad_exporter.start_exporter`, in the training function of Ray Train: one exporter in each worker.

    The run has the name of Ray's experiment, with that of the trial where it is another; the rank is Ray's world rank. `port`: of
    the first worker on a host; others take the next ones, by their local rank. `options` of yours win. Call it after
    `prepare_model`, with what that returned. In a `with` an exception in the training function makes the run `failed`:

        with start_exporter(model) as exporter:
            ...
            ray.train.report({"loss": loss, **exporter.values("^torch_grad_global_norm")})

    Raises `RuntimeError` outside of a training function, and what `start_exporter` raises.
    """
    context = _context()
    return start(model, port, **{"run": _run(context), "rank": context.get_world_rank(), **options})


def _context() -> Any:
    """Ray's context of this worker. Without one some versions raise and others give one that knows nothing."""
    outside = "start_exporter() of torch_grad_exporter.integrations.ray was called outside of a training function of Ray Train; "
    outside += "call it in train_func, or use torch_grad_exporter.start_exporter"
    try:
        context = ray.train.get_context()
        known = context.get_world_rank() is not None
    except RuntimeError as error:
        raise RuntimeError(outside) from error
    if not known:
        raise RuntimeError(outside)
    return context


def _run(context: Any) -> str:
    """The name of the experiment, which all ranks and a restart share; of a trial among several, also its name."""
    experiment = context.get_experiment_name() or "ray"
    try:
        trial = context.get_trial_name()
    except DeprecationWarning:  # raised by newer versions, which have no trials
        trial = None
    return experiment if not trial or trial == experiment else f"{experiment}/{trial}"
