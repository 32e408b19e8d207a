"""A training whose gradients are those that a test asks for, and the exporter that watches it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from tests.support.scrape import OFF, outcomes, value
from torch_grad_exporter import Exporter, start_exporter


class Given(nn.ModuleDict):
    """Layers whose parameters get exactly the gradients that are given to `forward`, by parameter."""

    def forward(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(parameter * gradient).sum() for parameter, gradient in gradients.items()]).sum()


def two_layers() -> Given:
    """Layer `a` with a weight (4, 3) and a bias (4,), layer `b` with a weight (2, 4)."""
    return Given({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2, bias=False)}).double()


def by_layer(model: Given) -> list[torch.optim.Optimizer]:
    """Return an SGD for layer `a` and an Adam for layer `b`."""
    return [torch.optim.SGD(model["a"].parameters(), 0.0), torch.optim.Adam(model["b"].parameters(), 0.0)]


class Training:
    """Steps that change no parameter, of one optimizer (SGD), or of those that `optimizers` makes for the model.

    Gradients are named by their parameter, `a_bias`, or by the layer for its weight, `a`. A number stands for a gradient of this
    norm that has one element, a tensor for itself.
    """

    def __init__(
        self,
        model: Given | None = None,
        optimizers: Callable[[Given], Sequence[torch.optim.Optimizer]] = lambda model: [torch.optim.SGD(model.parameters(), 0.0)],
        **options: Any,  # noqa: ANN401 - as `start_exporter` has them
    ) -> None:
        self.model = two_layers() if model is None else model
        self.optimizers = optimizers(self.model)
        self.exporter: Exporter = start_exporter(self.model, None, **{"every": 1, "collectors": OFF, **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exporter.close()

    def backward(self, *, clear: bool = True, loss_scale: float = 1.0, **gradients: float | torch.Tensor) -> None:
        """Run one backward, after clearing unless another one of the round was before."""
        if clear:
            self.model.zero_grad()
        given = {self.parameter(name): gradient for name, gradient in gradients.items()}
        loss = self.model({parameter: _gradient(parameter, gradient) for parameter, gradient in given.items()})
        (loss * loss_scale).backward()

    def step(self, *which: int) -> None:
        """Step with the optimizers of these numbers, or with all."""
        for number, optimizer in enumerate(self.optimizers):
            if number in which or not which:
                optimizer.step()

    def round(self, **gradients: float | torch.Tensor) -> None:
        """Run a backward and the steps of all optimizers."""
        self.backward(**gradients)
        self.step()

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that a gradient is named by."""
        layer, _, parameter = name.partition("_")
        return getattr(self.model[layer], parameter or "weight")  # type: ignore[no-any-return]

    def multiply(self, factor: float, *layers: str) -> None:
        """Multiply the gradients of these layers, or of all, as a loop does between backward and step."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (not layers or name.split(".")[0] in layers):
                parameter.grad *= factor

    def layer(self, name: str, layer: str, **labels: str) -> float | None:
        """Return a layer's series of this scrape, without `torch_grad_`; None if absent."""
        return value(self.exporter, f"torch_grad_{name}", layer=layer, **labels)

    def whole(self, name: str, **labels: str) -> float | None:
        """Return a series over all layers, without `torch_grad_`; None if absent."""
        return value(self.exporter, f"torch_grad_{name}", **labels)

    def outcomes(self, optimizer: str = "") -> dict[str, float]:
        """Return the steps whose gradients were not finite, by outcome."""
        return outcomes(self.exporter, optimizer=optimizer)

    def saved(self, folder: Path) -> dict[str, Any]:
        """Close the exporter, and return what it saves of the run."""
        self.exporter.close()
        self.exporter.save(folder / "run.json")
        return json.loads((folder / "run.json").read_text())  # type: ignore[no-any-return]


def _gradient(parameter: nn.Parameter, given: float | torch.Tensor) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given.to(parameter.dtype)
    gradient = torch.zeros_like(parameter)
    gradient.view(-1)[0] = given
    return gradient
