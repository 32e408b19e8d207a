"""What `start_exporter` checks of the objects it is given, before anything is registered.

Each raises `TypeError` or `ValueError` that names the argument, its value and the fix.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider

from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.config.option import source
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.torch_compat import has_scale

logger = logging.getLogger("torch_grad_exporter")


def checked_models(model: object) -> dict[str, torch.nn.Module]:
    """The models by name, the empty one for a single module; raises on what cannot be watched."""
    models = {"": model} if isinstance(model, torch.nn.Module) else model
    if not isinstance(models, Mapping):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module or a mapping of names to modules")
    if not models:
        raise ValueError("model={}: expected at least one module in the mapping")
    for name, module in models.items():
        if not isinstance(name, str) or not isinstance(module, torch.nn.Module):
            raise TypeError(f"model[{name!r}]={type(module).__name__}: expected names that are strings and torch.nn.Modules")
        if not name and len(models) > 1:
            raise ValueError("model['']: expected a name for each module; it becomes the first part of the layer labels")
    for name in models:
        if any(other.startswith(f"{name}.") for other in models if name):
            raise ValueError(f"model[{name!r}]: another name begins with it and a dot, so their layers could not be told apart")
    if len({id(module) for module in models.values()}) != len(models):
        raise ValueError("model: the same module stands under two names; name it once")
    return dict(models)


def checked_optimizers(optimizers: object) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name; raises on what is none."""
    if optimizers is None:
        return {}
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    if isinstance(optimizers, Mapping):
        named = dict(optimizers)
    elif isinstance(optimizers, list | tuple):
        named = {}
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            count = sum(1 for o in optimizers[: len(named)] if type(o).__name__ == kind)
            named[f"{kind}-{count + 1}" if count else kind] = optimizer
    else:
        raise TypeError(f"optimizers={optimizers!r}: expected an optimizer, a list of them or a mapping of names to them")
    for name, optimizer in named.items():
        if not isinstance(name, str) or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers[{name!r}]={type(optimizer).__name__}: expected a torch.optim.Optimizer; "
                "for anything else call exporter.step() after each step"
            )
    return named


def checked_scaler(scaler: object) -> Scaler | None:
    """The gradient scaler; raises on what is none."""
    if scaler is not None and not has_scale(scaler):
        raise TypeError(f"grad_scaler={type(scaler).__name__}: expected a torch.amp.GradScaler")
    return cast("Scaler | None", scaler)


def checked_registry(registry: object) -> prometheus_client.CollectorRegistry | None:
    """The registry of `prometheus_client`; raises on what is none."""
    if registry is not None and not hasattr(registry, "register"):
        raise TypeError(f"registry={registry!r}: expected a prometheus_client.CollectorRegistry")
    return cast("prometheus_client.CollectorRegistry | None", registry)


def checked_meter_provider(provider: object) -> MeterProvider | None:
    """OpenTelemetry's meter provider; raises on what is none."""
    if provider is not None and not isinstance(provider, MeterProvider):
        raise TypeError(f"meter_provider={provider!r}: expected an opentelemetry.metrics.MeterProvider")
    return provider


def checked_index(
    models: Mapping[str, torch.nn.Module], settings: Settings, arguments: Mapping[str, object], replicas: Replicas
) -> LayerIndex:
    """The index of the layers that are to be watched; raises where there are none, or a pattern matches none."""
    if not any(True for module in models.values() for _ in module.parameters()):
        raise ValueError("model: it has no parameters, so there are no gradients to watch; pass the module that is trained")
    everything = LayerIndex(models).all_layers()
    for name, patterns in (("include", settings.include), ("exclude", settings.exclude)):
        for pattern in patterns:
            if not any(pattern.search(layer) for layer in everything):
                where = f"{source(arguments, name)}={pattern.pattern!r}"
                raise ValueError(f"{where}: matches none of the {len(everything)} layers; the first is {everything[0]!r}")
    layer_filter = LayerFilter(settings.include, settings.exclude)
    if not any(layer_filter.accepts(layer) for layer in everything):
        raise ValueError("include and exclude leave no layer of the model; loosen one of them")
    index = LayerIndex(models, layer_filter, settings.max_layers, replicas)
    if not index.table.tracked:
        message = "no parameter of the model requires a gradient yet; those that do later are picked up then"
        say(logger, logging.WARNING, message)
    if index.table.folded:
        message = "%d layers are shown as %d groups, for max_layers=%d; raise it, or choose layers with include="
        say(logger, logging.WARNING, message, index.table.folded, len(index.table.layers), settings.max_layers)
    return index


def check_ownership(index: LayerIndex, named: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raises on an optimizer that owns nothing of what is watched."""
    known = Optimizers(index)
    for name, optimizer in named.items():
        if not known.concerns(optimizer):
            raise ValueError(
                f"optimizers[{name!r}]={type(optimizer).__name__}: owns no parameter that is watched; "
                "pass the optimizer of this model, made after the model was moved or wrapped"
            )


def checked_web_config(settings: Settings, arguments: Mapping[str, object]) -> WebConfigFile | None:
    """The web configuration, read and checked, or `None` if none was named; raises on one that is wrong."""
    if not settings.web_config_file:
        return None
    try:
        return WebConfigFile(settings.web_config_file)
    except ValueError as error:
        raise ValueError(f"{source(arguments, 'web_config_file')}={settings.web_config_file!r}: {error}") from error
