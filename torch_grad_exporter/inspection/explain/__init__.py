"""Why a parameter has no gradient: `explain` runs a training step once, watches it, and says so of each parameter."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_grad_exporter.inspection.explain.cuts import CutCollector
from torch_grad_exporter.inspection.explain.explanation import Explanation, draw
from torch_grad_exporter.inspection.explain.graph import Graph, Places, Where
from torch_grad_exporter.inspection.explain.verdicts import Judge, NamedParameter, Row, Verdict
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import clean, joined, places_of
from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.compiler import uncompiled
from torch_grad_exporter.torch_compat.modules import is_managed
from torch_grad_exporter.torch_compat.tensors import local

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


Values = dict[str, Any]


class SavedState:
    """The state at the begin of a `with` block, restored at its end. Holds a copy of each tensor in between.

    Tensors stay the same objects. An optimizer that was not given is kept when it is about to step, if it owns a parameter of the
    models.
    """

    def __init__(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._restores = contextlib.ExitStack()  # goes on after one that raises
        self._tensors: set[int] = set()

    def __enter__(self) -> Self:
        self._keep_random()
        for module in {id(module): module for root in self._models for module in root.modules()}.values():
            self._restores.callback(_restore_module, module, module.training, _owned(module))
            for parameter in module.parameters(recurse=False):
                self._keep_parameter(parameter)
            for buffer in module.buffers(recurse=False):
                self._keep_tensor(buffer)
        for optimizer in self._optimizers:
            self._keep_optimizer(optimizer)
            for owned in _parameters_of(optimizer):
                self._keep_parameter(owned)
        self._restores.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._restores.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        known = any(other is optimizer for other in self._optimizers)
        if not known and not owned_by(optimizer).isdisjoint(self._tensors):
            self._optimizers.append(optimizer)
            self._keep_optimizer(optimizer)
            for parameter in _parameters_of(optimizer):
                # What it owns beyond the models has its gradient already, which the function has made.
                self._keep_tensor(parameter)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._tensors:
            self._tensors.add(id(tensor))
            self._restores.callback(_restore_tensor, tensor, tensor.detach().clone())

    def _keep_parameter(self, parameter: torch.Tensor) -> None:
        """Keep its value, whether it is frozen, and the gradient tensor with its value."""
        if id(parameter) not in self._tensors:
            gradient = parameter.grad
            held = None if gradient is None else gradient.detach().clone()
            self._restores.callback(_restore_gradient, parameter, parameter.requires_grad, gradient, held)
            self._keep_tensor(parameter)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [(group, self._kept(group)) for group in optimizer.param_groups]
        states = [(parameter, state, self._kept(state)) for parameter, state in optimizer.state.items()]
        self._restores.callback(_restore_optimizer, optimizer, groups, states)

    def _kept(self, values: Values) -> Values:
        """Return a copy of what an optimizer has by name, in which tensors are the same; what they hold is kept."""
        for value in values.values():
            if isinstance(value, torch.Tensor):
                self._keep_tensor(value)
        return {
            name: value if isinstance(value, torch.Tensor) else [*value] if name == "params" else copy.deepcopy(value)
            for name, value in values.items()
        }

    def _keep_random(self) -> None:
        """Keep the generators of PyTorch, on the CPU and on CUDA devices in use, of NumPy and of Python."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._restores.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        self._restores.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the one that users seed
        self._restores.callback(random.setstate, random.getstate())
        self._restores.callback(torch.set_rng_state, torch.get_rng_state())


def _restore_tensor(tensor: torch.Tensor, held: torch.Tensor) -> None:
    # Only where it differs: a write would make graphs unusable that have saved the tensor.
    if _same(tensor, held):
        return
    with torch.no_grad():
        if (tensor.shape, tensor.device) == (held.shape, held.device):
            tensor.copy_(held)
        else:
            tensor.data = held


def _same(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    if tensor.is_meta:
        return True  # it holds nothing
    if tensor.layout != torch.strided or (tensor.shape, tensor.device) != (held.shape, held.device):
        return False
    return bool(torch.equal(local(tensor.detach()), local(held)))  # of a DTensor only this rank's part: no collective


def _restore_gradient(parameter: torch.Tensor, trained: bool, gradient: torch.Tensor | None, held: torch.Tensor | None) -> None:
    parameter.requires_grad_(trained)
    if gradient is not None and held is not None:
        _restore_tensor(gradient, held)
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _owned(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


def _restore_module(module: torch.nn.Module, training: bool, owned: dict[str, torch.Tensor | None]) -> None:
    module.training = training
    for name, tensor in owned.items():
        if getattr(module, name, None) is not tensor:
            setattr(module, name, tensor)
    for name in _owned(module).keys() - owned.keys():
        setattr(module, name, None)  # a buffer that was None before


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[tuple[Values, Values]], states: list[tuple[Any, Values, Values]]
) -> None:
    optimizer.param_groups[:] = [group for group, _ in groups]
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state, _ in states})
    for values, kept in (*groups, *((state, kept) for _, state, kept in states)):
        values.clear()
        values.update(kept)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
