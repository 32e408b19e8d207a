"""ClippedOptimizers: the optimizers that train something of the models, each with its own clipping.

A loop that makes a new optimizer each epoch goes on with the memory of the one before, under the same name.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.parameters import ParameterTracker
from torch_grad_exporter.actions.clip.policy import NoClipping, policy_name
from torch_grad_exporter.actions.clip.skipped_step import RemovedGradients, SkipFlag
from torch_grad_exporter.capture.torch_hooks import Removable
from torch_grad_exporter.collectors.clipping import ClipReport, ClipReports
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.store.host_transfer import HostTransfer

REPORT_SECONDS = 0.25  # between two reports of one optimizer, at least


@dataclass(eq=False, slots=True)
class ClippedOptimizer:
    """An optimizer's clipping, from its first step on.

    Attributes:
        flag: Makes it skip a step, if it is fused.
        removed: Makes it skip a step otherwise.
        name, clipping: Empty and None before its first step.
        handle: The hook right before its step.
        loss: The last one since its last step.
    """

    tracker: ParameterTracker
    flag: SkipFlag = field(default_factory=SkipFlag)
    removed: RemovedGradients = field(default_factory=RemovedGradients)
    name: str = ""
    clipping: Clipping | None = None
    handle: Removable | None = None
    report_due: float = 0.0
    loss: float | torch.Tensor | None = None


class ClippedOptimizers:
    """Holds models and optimizers weakly. Optimizers may come and go on any thread, and step on those that train.

    Attributes:
        saved: By name, what an optimizer that has not stepped yet goes on with.
        reports: What the policies have come to.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        named: Mapping[str, torch.optim.Optimizer],
        guard: Guard,
    ) -> None:
        self._models = weakref.WeakValueDictionary(models)
        self._named = {name: weakref.ref(optimizer) for name, optimizer in named.items()}
        self._guard = guard
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], ClippedOptimizer]] = {}
        self._transfer = HostTransfer()
        self.saved: dict[str, Mapping[str, Any]] = {}
        self.reports = ClipReports()

    def of(self, optimizer: torch.optim.Optimizer) -> ClippedOptimizer | None:
        """Return an optimizer's record, None if it owns nothing of the models."""
        reference, record = self._known.get(id(optimizer), (None, None))
        if reference is None or record is None or reference() is not optimizer:
            record = ClippedOptimizer(ParameterTracker(dict(self._models), optimizer))
            self._known[id(optimizer)] = weakref.ref(optimizer, functools.partial(self._collected, id(optimizer))), record
        return record if record.clipping is not None or record.tracker.current() is not None else None

    def alive(self) -> list[tuple[torch.optim.Optimizer, ClippedOptimizer]]:
        """Return those that are alive."""
        known = [*self._known.values()]  # at once: other threads may make and drop optimizers
        return [(optimizer, record) for reference, record in known if (optimizer := reference()) is not None]

    def clippings(self) -> dict[str, Clipping]:
        """Return the clippings by name of the optimizer."""
        return {record.name: record.clipping for _, record in [*self._known.values()] if record.clipping is not None}

    def name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the user's name, else that of one that it replaces, else its class, numbered from the second of a class on."""
        for name, reference in self._named.items():
            if reference() is optimizer:
                return name
        for other, record in self.alive():
            # A scheduler holds its optimizer in a cycle: if a loop makes both again, the earlier ones live on for a while.
            if record.name and type(other) is type(optimizer) and owned_by(other) == owned_by(optimizer):
                name = record.name
                self._keep(record)
                return name
        kind, taken = type(optimizer).__name__, {record.name for _, record in [*self._known.values()]}
        names = (kind if number == 1 else f"{kind}-{number}" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    def end(self) -> None:
        """Save the memories and report for the last time."""
        for _, record in self.alive():
            self._guard(self._keep, record)
        self._known.clear()

    def report(self, record: ClippedOptimizer) -> None:
        """Send what an optimizer's policies have come to towards the host, unless that was done a moment ago."""
        now = time.perf_counter()
        if now >= record.report_due and record.clipping is not None:
            record.report_due = now + REPORT_SECONDS
            self._guard(self._send, record.name, record.clipping)

    def _send(self, name: str, clipping: Clipping) -> None:
        labels: list[tuple[str, str]] = []
        values: list[torch.Tensor] = []
        layers = clipping.parameters.layers
        active = [*clipping.skipping, *(() if isinstance(clipping.active.policy, NoClipping) else (clipping.active,))]
        for run in (*active, *clipping.candidates):
            threshold = run.shown_threshold()
            if threshold is not None:
                values.append(threshold.double() if threshold.device.type != "mps" else threshold)
                own = layers if threshold.ndim and threshold.numel() == len(layers) else ("",)
                labels += [(policy_name(run.policy), layer) for layer in own]
        dtype = values[0].dtype if values else torch.float64
        counted = [run for run in active if run.decision is not None and run.decision.limit is None]
        values += [run.clipped_steps.to(dtype) for run in (*counted, *clipping.candidates)]
        if values and (ticket := self._transfer.send(torch.cat([value.reshape(-1) for value in values]))) is not None:
            clipped, tried = (tuple(policy_name(run.policy) for run in runs) for runs in (counted, clipping.candidates))
            self.reports.put(ClipReport(name, tuple(labels), clipped, tried, ticket))

    def _collected(self, number: int, _reference: object) -> None:
        _, record = self._known.pop(number, (None, None))
        if record is not None:
            self._guard(self._keep, record)

    def _keep(self, record: ClippedOptimizer) -> None:
        """Save the memory of an optimizer that is gone, for the one that takes its place."""
        name, clipping = record.name, record.clipping
        record.name, record.clipping = "", None
        if clipping is not None:
            self.saved[name] = clipping.state(copied=False)
            if clipping.device.type == "cpu":  # this may be another thread, which makes no call of a device
                self._send(name, clipping)
