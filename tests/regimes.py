"""A training loop under an exporter, and beside it a float64 record of what each metric should say.

`Recorder` looks at `parameter.grad` right after a backward and right before a step and does plain arithmetic;
it knows nothing of how the exporter captures. `values` flattens a scrape into `(name, labels) -> value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from torch_grad_exporter import Exporter

Key = tuple[str, tuple[tuple[str, str], ...]]


def key(name: str, **labels: str) -> Key:
    """The key of a series in what `values` returns; empty labels do not count."""
    return name, tuple(sorted((k, v) for k, v in labels.items() if v))


def values(exporter: Exporter) -> dict[Key, float]:
    """Every sample of a scrape; of a histogram its `_count` and `_sum`."""
    found: dict[Key, float] = {}
    for family in exporter.collect():
        for position, row in enumerate(family.labels.rows):
            if family.present is not None and not family.present[position]:
                continue
            labels = dict(zip(family.spec.labels, row, strict=True))
            if family.sums is None:
                found[key(family.spec.name, **labels)] = float(family.values[position])
            else:
                found[key(family.spec.name + "_count", **labels)] = float(family.values[position].sum())
                found[key(family.spec.name + "_sum", **labels)] = float(family.sums[position])
    return found


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    """One series of a scrape, `None` if it is absent."""
    return values(exporter).get(key(name, **labels))


def mode(exporter: Exporter) -> str:
    """The rung of the ladder in use."""
    found = values(exporter)
    return next(m for m in ("output", "parameter", "optimizer") if found[key("torch_grad_exporter_capture_mode", mode=m)] == 1)


def errors(exporter: Exporter) -> dict[str, float]:
    """The failures of the exporter itself that were counted, by source."""
    return {k[1][0][1]: v for k, v in values(exporter).items() if k[0] == "torch_grad_exporter_errors_total" and v}


@dataclass
class Named:
    """A parameter with its layer."""

    name: str
    layer: str
    parameter: torch.nn.Parameter


def named_parameters(models: Mapping[str, torch.nn.Module]) -> list[Named]:
    """The parameters that require a gradient, each once, with the layer that owns it."""
    found: dict[int, Named] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            owner, _, own = name.rpartition(".")
            layer = ".".join(part for part in (prefix, owner or own) if part)
            full = f"{prefix}.{name}" if prefix else name
            if parameter.requires_grad:
                found.setdefault(id(parameter), Named(full, layer, parameter))
    return list(found.values())


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """The L2 norm over float64 tensors."""
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients as they are now, in float64, by the parameter's name."""
    return {n: p.grad.detach().double().clone() for n, p in model.named_parameters() if p.grad is not None}


@dataclass
class _Layer:
    """What is expected of one layer."""

    last: dict[str, float] = field(default_factory=dict)
    captures: int = 0
    nans: int = 0
    infs: int = 0
    squared: float = 0.0
    finite: int = 0


@dataclass
class _Optimizer:
    """What is expected of one optimizer."""

    owned: set[int]
    steps: int = 0
    norm: float | None = None
    after: float | None = None
    clipped: int = 0
    nonfinite: dict[str, int] = field(default_factory=lambda: {"stepped": 0, "skipped": 0, "unknown": 0})
    norms: list[float] = field(default_factory=list)


class Recorder:
    """Records a loop. `optimizers`: one, or a mapping of the names that the exporter gives them.

    `unscale`: what gradients after a backward are multiplied with.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self.models = dict(model) if isinstance(model, Mapping) else {"": model}
        named = optimizers if isinstance(optimizers, Mapping) else {"": optimizers}
        self.optimizers = {n: _Optimizer({id(p) for g in o.param_groups for p in g["params"]}) for n, o in named.items()}
        self.layers: dict[str, _Layer] = {}
        self.backwards = 0
        self.skips = 0
        self.unscale = 1.0
        self._gradients: dict[int, torch.Tensor] = {}
        self._after: dict[str, list[torch.Tensor]] = {}
        self._seen: list[Named] = []

    # In the loop

    def backward(self, loss: torch.Tensor, *, unused: Iterable[str] = (), **options: bool) -> None:
        """Runs a backward and looks at the gradients that it left; `unused`: parameters that it did not reach."""
        loss.backward(**options)
        self.passed(unused=unused)

    def passed(self, *, unused: Iterable[str] = ()) -> None:
        """A backward is over: looks at the gradients that it left."""
        if self._after:
            self._settle("stepped")
        self.backwards += 1
        self._seen = named_parameters(self.models)
        skip = set(unused)
        self._gradients = {
            id(n.parameter): n.parameter.grad.detach().to_dense().double().clone() * self.unscale
            for n in self._seen
            if n.parameter.grad is not None and n.name not in skip
        }

    def stepping(self, name: str = "") -> None:
        """An optimizer is about to step: looks at what it sees."""
        one = self.optimizers[name]
        one.steps += 1
        mine = [n for n in self._seen if id(n.parameter) in one.owned and id(n.parameter) in self._gradients]
        self._after[name] = [n.parameter.grad.detach().to_dense().double().clone() for n in mine if n.parameter.grad is not None]

    def step(self, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        """An optimizer's step, looked at right before."""
        self.stepping(name)
        optimizer.step()

    def skipped(self, outcome: str = "skipped") -> None:
        """The step of the last backward does not take place."""
        self.skips += outcome == "skipped"
        self._settle(outcome)

    def _settle(self, outcome: str) -> None:
        """The round is over."""
        stepped = set(self._after) or set(self.optimizers)
        owned = set().union(*(self.optimizers[name].owned for name in stepped))
        members: dict[str, list[Named]] = {}
        for one in self._seen:
            if id(one.parameter) in owned:
                members.setdefault(one.layer, []).append(one)
        for layer, parts in members.items():
            self._settle_layer(self.layers.setdefault(layer, _Layer()), parts)
        for name in stepped:
            self._settle_optimizer(self.optimizers[name], self._after.get(name), outcome)
        self._after, self._gradients = {}, {}

    def _settle_layer(self, layer: _Layer, parts: list[Named]) -> None:
        got = [(p.name, g) for p in parts if (g := self._gradients.get(id(p.parameter))) is not None]
        layer.last["torch_grad_missing_parameters"] = len(parts) - len(got)
        if not got:
            return
        tensors = [g for _, g in got]
        total = norm(tensors)
        layer.captures += 1
        layer.nans += sum(int(t.isnan().sum()) for t in tensors)
        layer.infs += sum(int(t.isinf().sum()) for t in tensors)
        layer.last["torch_grad_norm"] = total
        layer.last["torch_grad_norm_squared"] = total**2
        layer.last["torch_grad_max_magnitude"] = max(float(t.abs().max()) for t in tensors)
        layer.last["torch_grad_zero_ratio"] = sum(int((t == 0).sum()) for t in tensors) / sum(t.numel() for t in tensors)
        rows = [row for t in tensors if t.dim() > 1 for row in t.flatten(1)]
        if rows:
            layer.last["torch_grad_zero_units_ratio"] = sum(bool((row == 0).all()) for row in rows) / len(rows)
        if math.isfinite(total):
            layer.finite += 1
            layer.squared += total**2

    def _settle_optimizer(self, one: _Optimizer, after: list[torch.Tensor] | None, outcome: str) -> None:
        mine = [g for i, g in self._gradients.items() if i in one.owned]
        if not mine:
            return
        one.norm = norm(mine)
        one.norms.append(one.norm)
        one.nonfinite[outcome] += not math.isfinite(one.norm)
        one.after = None if after is None or not math.isfinite(one.norm) else norm(after)
        one.clipped += one.after is not None and one.after < one.norm * (1 - 1e-6)

    # After the loop

    def expected(self) -> dict[Key, float]:
        """All that is known of what a scrape should show."""
        if self._after:
            self._settle("stepped")
        found: dict[Key, float] = {
            key("torch_train_backward_passes_total"): self.backwards,
            key("torch_train_skipped_steps_total"): self.skips,
        }
        for layer, one in self.layers.items():
            found.update({key(name, layer=layer): v for name, v in one.last.items()})
            found[key("torch_grad_captures_total", layer=layer)] = one.captures
            found[key("torch_grad_nonfinite_elements_total", layer=layer, kind="nan")] = one.nans
            found[key("torch_grad_nonfinite_elements_total", layer=layer, kind="inf")] = one.infs
            found[key("torch_grad_norm_squared_accumulated_total", layer=layer)] = one.squared
            found[key("torch_grad_norm_distribution_count", layer=layer)] = one.finite
        for name, one in self.optimizers.items():
            found.update(self._of_optimizer(name, one))
        return found

    def _of_optimizer(self, name: str, one: _Optimizer) -> dict[Key, float]:
        found = {key("torch_grad_clipped_steps_total", optimizer=name): float(one.clipped)}
        for outcome, count in one.nonfinite.items():
            found[key("torch_grad_nonfinite_steps_total", optimizer=name, outcome=outcome)] = count
        if one.norm is not None:
            found[key("torch_grad_global_norm", optimizer=name)] = one.norm
            finite = [n for n in one.norms if math.isfinite(n)]
            found[key("torch_grad_global_norm_distribution_count", optimizer=name)] = len(finite)
            found[key("torch_grad_global_norm_distribution_sum", optimizer=name)] = sum(finite)
        if one.after is not None and one.norm:
            found[key("torch_grad_global_norm_after_clip", optimizer=name)] = one.after
            found[key("torch_grad_clip_coefficient", optimizer=name)] = one.after / one.norm
        return found

    def check(self, exporter: Exporter, *, without: Iterable[str] = (), rel: float = 2e-5) -> None:
        """Asserts that a scrape shows exactly what was recorded, and that nothing failed inside the exporter."""
        left_out = set(without)
        actual = values(exporter)
        wrong = []
        for one, expected in self.expected().items():
            if one[0] in left_out:
                continue
            shown = actual.get(one)
            if shown is None or shown != pytest.approx(expected, rel=rel, abs=1e-12, nan_ok=True):
                wrong.append(f"{one[0]}{dict(one[1])}: shown {shown}, recorded {expected}")
        steps = sum(one.steps for one in self.optimizers.values())
        shown_steps = sum(v for k, v in actual.items() if k[0] == "torch_train_steps_total")
        if shown_steps != steps:
            wrong.append(f"torch_train_steps_total: shown {shown_steps}, recorded {steps}")
        failures = errors(exporter)
        if failures:
            wrong.append(f"errors: {failures}")
        assert not wrong, "\n" + "\n".join(wrong)


class Perceptron(torch.nn.Module):
    """Two linear layers with a ReLU, whose gradients have zeros and zero rows."""

    def __init__(self, inputs: int = 6, hidden: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(inputs, hidden)
        self.second = torch.nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batch(size: int = 5, inputs: int = 6) -> torch.Tensor:
    """Random inputs; seed first."""
    return torch.randn(size, inputs)
