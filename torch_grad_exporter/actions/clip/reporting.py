"""Reporter: what policies have come to goes to the host now and then, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.measuring import on_device
from torch_grad_exporter.actions.clip.policy import Policy, policy_name
from torch_grad_exporter.actions.clip.table import ParameterGroups
from torch_grad_exporter.collectors.clip_reports import ClipReport, ClipReports
from torch_grad_exporter.store.host_transfer import HostTransfer

SECONDS = 0.25
"""Between two reports of one optimizer, at least."""


class Reporter:
    """Belongs to the thread that trains. `clock` in seconds."""

    def __init__(self, policy: Policy | None, dry_run: Sequence[Policy], reports: ClipReports, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._names = [policy_name(one) for one in dry_run]
        self._reports = reports
        self._clock = clock
        self._transfer = HostTransfer()
        self._due: dict[str, float] = {}
        self._layers: tuple[ParameterGroups, torch.Tensor] | None = None
        """Of each unit, the place of its layer."""

    def report(self, name: str, clipping: Clipping) -> None:
        """Sends what an optimizer's policies have come to, unless that was done a moment ago."""
        now = self._clock()
        if now >= self._due.get(name, now):
            self._due[name] = now + SECONDS
            self._send(name, clipping)

    def report_last(self, name: str, clipping: Clipping) -> None:
        """The same at the end; only where no device is asked, since that may be another thread."""
        if clipping.device.type == "cpu":
            self._send(name, clipping)

    def _send(self, name: str, clipping: Clipping) -> None:
        labels: list[tuple[str, str]] = []
        values: list[torch.Tensor] = []
        own = [] if self._policy is None else [(policy_name(self._policy), self._policy, clipping.running.decision)]
        tried = zip(self._names, clipping.candidates, strict=True)
        for label, policy, decision in (*own, *((label, one.policy, one.decision) for label, one in tried)):
            if decision is not None:
                found = self._by_layer(decision.threshold, policy, clipping.groups)
                values.append(found.double() if found.device.type != "mps" else found)
                layers = clipping.groups.layers if found.numel() == len(clipping.groups.layers) and found.ndim else ("",)
                labels += [(label, layer) for layer in layers]
        values += [one.clipped_steps.reshape(1).to(values[0].dtype if values else torch.float64) for one in clipping.candidates]
        if values and (ticket := self._transfer.send(torch.cat([value.reshape(-1) for value in values]))) is not None:
            self._reports.put(ClipReport(name, tuple(labels), tuple(self._names), ticket))

    def _by_layer(self, threshold: torch.Tensor, policy: Policy, groups: ParameterGroups) -> torch.Tensor:
        """One threshold for all, or one of each layer: of its units the smallest."""
        if policy.scope != "unit" or threshold.ndim == 0:
            return threshold
        if self._layers is None or self._layers[0] is not groups:
            units = [layer for entry, layer in zip(groups.entries, groups.layer_of, strict=True) for _ in range(entry.units)]
            self._layers = groups, on_device(units, threshold.device)
        least = torch.full((len(groups.layers),), torch.inf, device=threshold.device, dtype=threshold.dtype)
        return least.scatter_reduce_(0, self._layers[1], threshold, "amin")
