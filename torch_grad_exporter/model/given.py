"""What a user gives as `model` and `optimizers`, checked. Raises errors that name the argument, the value and the fix."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_grad_exporter.arguments import numbered, shown


def models(model: object) -> dict[str, torch.nn.Module]:
    """Return the models by name, the empty one for a single module; raise for a value that cannot be watched."""
    models = {"": model} if isinstance(model, torch.nn.Module) else model
    if not isinstance(models, Mapping):
        raise TypeError(f"model={_kind(model)}: expected a torch.nn.Module or a mapping of names to modules{_fix(model)}")
    if not models:
        raise ValueError("model={}: expected at least one module in the mapping")
    for name, module in models.items():
        if not isinstance(name, str) or not isinstance(module, torch.nn.Module):
            raise TypeError(f"model[{name!r}]={_kind(module)}: expected names that are strings and torch.nn.Modules")
        if not name and len(models) > 1:
            raise ValueError("model['']: expected a name for each module; it becomes the first part of the layer labels")
    for name in models:
        if any(other.startswith(f"{name}.") for other in models if name):
            raise ValueError(f"model[{name!r}]: another name begins with it and a dot, so their layers could not be distinguished")
    if len({id(module) for module in models.values()}) != len(models):
        raise ValueError("model: the same module stands under two names; name it once")
    return dict(models)


def _kind(value: object) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _fix(model: object) -> str:
    """Return what to do about the usual mistakes, as the end of a sentence."""
    if isinstance(model, type):
        return f"; call the class: {model.__name__}(...)"
    if isinstance(model, torch.optim.Optimizer):
        return "; pass the model whose parameters it has"
    return "; the model comes first, as in start_exporter(model, 9100)" if isinstance(model, int) else ""


def optimizers(value: object, *, otherwise: str = "") -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name, by default that of their class. `otherwise`: what to do with a value of another type."""
    several = [value] if isinstance(value, torch.optim.Optimizer) else value
    if isinstance(several, list | tuple):
        several = dict(zip(numbered([type(optimizer).__name__ for optimizer in several]), several, strict=True))
    if not isinstance(several, Mapping | None):
        raise TypeError(f"optimizers={shown(value)}: expected an optimizer, a list of them or a mapping of names to them")
    for key, optimizer in (several or {}).items():
        if not isinstance(key, str) or not isinstance(optimizer, torch.optim.Optimizer):
            hint = f"; {otherwise}" if otherwise else ""
            raise TypeError(f"optimizers[{key!r}]={type(optimizer).__name__}: expected a torch.optim.Optimizer{hint}")
    return dict(several or {})
