"""Carries a decision out on the gradients: multiplies them, or limits their elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_grad_exporter.actions.clip.measuring import Gradients
from torch_grad_exporter.actions.clip.policy import Decision, Scope
from torch_grad_exporter.actions.clip.table import ParameterGroups
from torch_grad_exporter.torch_compat.tensors import multiply_

DOUBLE = (torch.float64, torch.complex128)


def change(gradients: Gradients, decision: Decision, groups: ParameterGroups, scope: Scope) -> None:
    """Changes the gradients in place."""
    if decision.coefficients is not None:
        _multiply(gradients, decision.coefficients, groups, scope)
    if decision.limit is not None:
        _limit(gradients, decision.limit if gradients.scale is None else decision.limit * gradients.scale.to(decision.limit.device))


def _multiply(gradients: Gradients, coefficients: torch.Tensor, groups: ParameterGroups, scope: Scope) -> None:
    own: Sequence[torch.Tensor] = () if scope == "model" else _by_parameter(coefficients, groups, scope)
    for (tensors, places), at_once in zip(gradients.kinds, gradients.at_once, strict=True):
        device, dtype = tensors[0].device, tensors[0].dtype
        if scope == "model":
            multiply_(tensors, _fitting(coefficients, device, dtype), at_once=at_once)
        else:
            mine = [own[gradients.places[place]] for place in places]
            if scope == "unit":
                mine = [groups.entries[gradients.places[p]].along_units(one) for p, one in zip(places, mine, strict=True)]
            multiply_(tensors, [_fitting(one, device, dtype) for one in mine], at_once=at_once)


def _by_parameter(coefficients: torch.Tensor, groups: ParameterGroups, scope: Scope) -> Sequence[torch.Tensor]:
    """The coefficients of each parameter: its layer's, or those of its units."""
    if scope == "unit":
        return torch.split(coefficients, [entry.units for entry in groups.entries])
    layers = coefficients.unbind()
    return [layers[layer] for layer in groups.layer_of]


def _fitting(factor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A factor where a gradient is, not more precise than float32 unless the gradient is."""
    narrow = factor.dtype == torch.float64 and dtype not in DOUBLE
    return factor.to(device, torch.float32 if narrow else factor.dtype)


def _limit(gradients: Gradients, limit: torch.Tensor) -> None:
    for tensors, _ in gradients.kinds:
        if tensors[0].is_complex():
            raise ValueError("MaxValue: a gradient is complex, and complex numbers have no order; use MaxNorm")
        most = limit.to(tensors[0].device, tensors[0].dtype)
        least = -most
        for tensor in tensors:
            tensor.clamp_(least, most)
