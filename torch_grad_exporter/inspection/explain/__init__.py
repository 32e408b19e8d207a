"""Why a parameter has no gradient: `explain` runs a training step once, watches it, and says so of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.inspection.explain.cuts import CutCollector
from torch_grad_exporter.inspection.explain.explanation import Explanation, draw
from torch_grad_exporter.inspection.explain.graph import Graph
from torch_grad_exporter.inspection.explain.places import Places, Where
from torch_grad_exporter.inspection.explain.saved_state import SavedState
from torch_grad_exporter.inspection.explain.verdicts import Judge, NamedParameter, Row, Verdict
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import clean, joined, places_of
from torch_grad_exporter.torch_compat.compiler import uncompiled
from torch_grad_exporter.torch_compat.modules import is_managed

__all__ = ["Explanation", "Row", "Verdict", "Where", "explain"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def explain(
    function: Callable[[], object] | torch.Tensor,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizers: Optimizers = (),
) -> Explanation:
    """Say for each parameter of the model whether it gets a gradient, and if not, why and where in the program.

    The verdicts: `ok` (the note says where a gradient is zero everywhere, or not finite), `frozen`, `not_in_graph`, `detached_at`,
    `non_differentiable`, `optimizer_missing`, and `unknown`. Parts that `torch.compile` has compiled run uncompiled. An exporter on
    the model counts the run like any other.

    Afterwards models (parameters, gradients, buffers, training mode, what is frozen), the optimizers that were given or that
    own a parameter of the models and stepped, and the random generators of PyTorch, NumPy and Python are exactly as before. That
    takes memory for a copy of all of these. What else the function changes stays changed: an iterator that has advanced, a
    scheduler or a gradient scaler that has stepped. Without a `backward()` in the function, one is run that leaves `.grad` alone
    and all-reduces nothing under `DistributedDataParallel`; with a reentrant checkpoint in the graph it is a usual one. The
    function's own collectives remain, such as that of buffers in a wrapper's forward: let all ranks call it. It reads values, so it
    waits for the device. What the function raises passes.

    Args:
        function: A callable without arguments that runs a training step's forward and returns the loss, or that runs a whole step
            with `backward()`; or the loss itself. A loss alone shows neither detached tensors nor operations without a derivative:
            they leave no node in the graph.
        model: A module, or a mapping of names to modules, as `start_exporter` takes it.
        optimizers: Those that train it, one, several, or by name. If given, parameters that none of them owns are reported.

    Returns:
        A row for each parameter, and notes.

    Raises:
        TypeError: An argument is of a wrong type; the message says what to change.
        ValueError: Likewise for a loss that is not a scalar, that requires no gradient, or whose graph is freed; a function that
            returns no loss; a model without parameters, with lazy ones, or sharded by FSDP.
    """
    models = given.models(model)
    owners = list(given.optimizers(optimizers).values())
    parameters = _parameters(models)
    _check_model(models, parameters)
    if isinstance(function, torch.Tensor):
        _check_loss(function)
        if not function.requires_grad:
            raise ValueError(
                "function: the loss requires no gradient, so no way leads from it to a parameter; "
                "give the function that computes it, to see where it was cut off"
            )
    elif not callable(function):
        raise TypeError(f"function={function!r}: expected a callable that returns the loss, or the loss, a tensor")
    graph = Graph([named.parameter for named in parameters])
    with SavedState(models.values(), owners), contextlib.ExitStack() as stack:
        stack.callback(graph.drop)
        cuts = None
        if isinstance(function, torch.Tensor):
            _backward(function, graph, keep_graph=True)
        else:
            cuts = CutCollector(graph, Places(_modules(models)))
            graph.hook_parameters()
            with uncompiled(), cuts:
                result = function()
            _finish(result, graph)
        judge = Judge(graph, cuts, owners, parameters)
        rows = judge.rows()
        return Explanation(tuple(rows), judge.notes(), draw(judge, rows))


def _finish(result: object, graph: Graph) -> None:
    """Run a backward from the loss that the function has returned, unless it has run one itself."""
    if graph.roots or graph.arrived:
        return
    if result is None:
        raise ValueError("function: it returned nothing and ran no backward(); let it return the loss")
    if not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        raise TypeError(f"function: it returned {kind} and ran no backward(); let it return the loss, a tensor with one element")
    _check_loss(result)
    if result.requires_grad:
        _backward(result, graph, keep_graph=False)
    else:
        graph.roots.append(result)
        graph.hook_parameters()


def _backward(loss: torch.Tensor, graph: Graph, *, keep_graph: bool) -> None:
    try:
        graph.run(loss, keep_graph=keep_graph)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ValueError(
            "function: the graph of the loss is freed, since a backward() has run through it; "
            "give the function that computes the loss, or call explain before the backward()"
        ) from error


def _check_loss(loss: torch.Tensor) -> None:
    if loss.numel() != 1:
        raise ValueError(f"function: the loss has shape {tuple(loss.shape)}; expected a single element, such as loss.mean()")


def _check_model(models: Mapping[str, torch.nn.Module], parameters: Sequence[NamedParameter]) -> None:
    if not parameters:
        raise ValueError("model: it has no parameters, so there is nothing to explain; pass the module that is trained")
    lazy = [named.name for named in parameters if is_lazy(named.parameter)]
    if lazy:
        raise ValueError(f"model: {lazy[0]} is not initialised; run one forward before, so that its shape is known")
    modules = [module for root in models.values() for module in root.modules()]
    if any(is_managed(module) or hasattr(type(module), "set_reshard_after_backward") for module in modules):
        raise ValueError("model: FSDP has sharded it and shows other parameters while it trains; explain it before it is sharded")


def _parameters(models: Mapping[str, torch.nn.Module]) -> list[NamedParameter]:
    """Return each parameter once, with its names in the order of the models."""
    names: dict[int, list[str]] = {}
    for model, root in models.items():
        for raw, parameter in root.named_parameters(remove_duplicate=False):
            known = names.setdefault(id(parameter), [])
            known += {joined(model, clean(raw))} - {*known}
    places = places_of((number, model, root) for number, (model, root) in enumerate(models.items()))
    named = ((place, names[id(place.parameter)]) for place in places)
    return [NamedParameter(place.parameter, own[0], place.layer, tuple(own[1:])) for place, own in named]


def _modules(models: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Return the name of each module by its `id`; that of a root's class where there is no name."""
    names: dict[int, str] = {}
    for model, root in models.items():
        for raw, module in root.named_modules():
            name = joined(model, clean(raw))
            names.setdefault(id(module), name or type(module).__name__)
    return names
