"""WeightWatch: the weight probe around the steps of sampled rounds, behind a guard of its own; its time belongs to the sample."""

from __future__ import annotations

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.sampler import Sampler
from torch_grad_exporter.capture.weights import WeightProbe
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.optimizers import Optimizers


class WeightWatch:
    """Belongs to the training thread."""

    def __init__(self, *, probe: WeightProbe, sampler: Sampler, optimizers: Optimizers, cost: SampleCost, errors: ErrorLog) -> None:
        self._probe = probe
        self._sampler = sampler
        self._optimizers = optimizers
        self._cost = cost
        self._guard = errors.boundary("weights")

    def before(self, optimizer: int) -> None:
        """An optimizer is about to step in a sampled round."""
        self._cost.of(self._guard, self._before, optimizer)

    def _before(self, optimizer: int) -> None:
        table = self._sampler.table
        owners, _ = self._optimizers.owners(table, {optimizer})
        self._probe.before(table, optimizer, owners)

    def after(self, optimizer: int) -> None:
        """It has stepped."""
        self._cost.of(self._guard, self._probe.after, optimizer)
