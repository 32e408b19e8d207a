"""`explain`: runs a training step once, watches it, and says of each parameter why it gets a gradient or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.inspection.explain.drawing import STATES, draw
from torch_grad_exporter.inspection.explain.explanation import Explanation
from torch_grad_exporter.inspection.explain.gradients import GradientHooks, State
from torch_grad_exporter.inspection.explain.graph import Graph, operation
from torch_grad_exporter.inspection.explain.places import Places
from torch_grad_exporter.inspection.explain.rows import Judge, NamedParameter
from torch_grad_exporter.inspection.explain.snapshot import SavedState
from torch_grad_exporter.inspection.explain.watch import CutCollector
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import LayerNames, clean
from torch_grad_exporter.model.optimizers import has_copies
from torch_grad_exporter.torch_compat.compiler import runs_compiled, uncompiled
from torch_grad_exporter.torch_compat.fsdp import is_managed
from torch_grad_exporter.torch_compat.modules import parameters_in

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def explain(
    function: Callable[[], object] | torch.Tensor,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizers: Optimizers = (),
) -> Explanation:
    """Says of each parameter of the model whether it gets a gradient, and if not, why and where in the program.

    - `function`: a callable without arguments that runs a training step's forward and returns the loss, or that runs a whole
      step with `backward()`; or the loss itself. From a loss alone neither detached tensors nor operations that have no
      derivative can be told: they leave no node in the graph.
    - `model`: a module, or a mapping of names to modules, as `start_exporter` takes it.
    - `optimizers`: those that train it, one, several, or by name. Where they are given, parameters that none of them owns are told.

    The verdicts: `ok` (the note says where a gradient is zero everywhere, or not finite), `frozen`, `not_in_graph`, `detached_at`,
    `non_differentiable`, `optimizer_missing`, and `unknown` where it cannot be told. Parts that `torch.compile` has compiled run
    uncompiled. An exporter on the model counts the run like any other.

    Afterwards models (parameters, gradients, buffers, training mode, what is frozen), the optimizers that were given or that
    own a parameter of the models and stepped, and the random generators of PyTorch, NumPy and Python are exactly as before. That
    takes memory for a copy of all of these. What else the function does is its own: an iterator that has advanced, a scheduler
    or a gradient scaler that has stepped. Without a `backward()` in the function, one is run that leaves `.grad` alone and
    all-reduces nothing under `DistributedDataParallel`; with a reentrant checkpoint in the graph it is a usual one. The function's
    own collectives remain, such as that of buffers in a wrapper's forward: let all ranks call it. It reads values, so it waits for
    the device.

    What the function raises passes. Raises `TypeError` or `ValueError` that says what to change if an argument is wrong: a loss
    that is no scalar, that requires no gradient, or whose graph is freed; a function that returns no loss; a model without
    parameters, with lazy ones, or sharded by FSDP.
    """
    models = given.models(model)
    owners = list(given.optimizers(optimizers).values())
    parameters = _parameters(models)
    _check(models, parameters)
    if isinstance(function, torch.Tensor):
        _check_loss(function)
    elif not callable(function):
        raise TypeError(f"function={function!r}: expected a callable that returns the loss, or the loss, a tensor")
    graph = Graph([one.parameter for one in parameters])
    gradients = GradientHooks(graph, [one.parameter for one in parameters])
    with SavedState(models.values(), owners), contextlib.ExitStack() as stack:
        stack.callback(gradients.drop)
        watch = None
        if isinstance(function, torch.Tensor):
            _backward(function, gradients, keep_graph=True)
        else:
            watch = CutCollector(graph, Places(_modules(models)), gradients.begin)
            gradients.look()
            with uncompiled(), watch:
                result = function()
            _finish(result, gradients)
        return _explanation(Judge(graph, gradients, watch, owners), parameters)


def _explanation(judge: Judge, parameters: Sequence[NamedParameter]) -> Explanation:
    rows = judge.rows(parameters)
    return Explanation(tuple(rows), _notes(judge, parameters), draw(judge, parameters, rows))


def _finish(result: object, gradients: GradientHooks) -> None:
    """Runs a backward from the loss that the function has returned, unless it has run one itself."""
    if gradients.roots or gradients.arrived:
        return
    if result is None:
        raise ValueError("function: it returned nothing and ran no backward(); let it return the loss")
    if not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        raise TypeError(f"function: it returned {kind} and ran no backward(); let it return the loss, a tensor with one element")
    if result.numel() != 1:
        raise ValueError(f"function: {_several(result)}")
    if result.requires_grad:
        _backward(result, gradients, keep_graph=False)
    else:
        gradients.roots.append(result)
        gradients.look()


def _backward(loss: torch.Tensor, gradients: GradientHooks, *, keep_graph: bool) -> None:
    try:
        gradients.run(loss, keep_graph=keep_graph)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        message = (
            "function: the graph of the loss is freed, since a backward() has run through it; give the function that computes "
        )
        raise ValueError(f"{message}the loss, or call explain before the backward()") from error


def _check_loss(loss: torch.Tensor) -> None:
    if loss.numel() != 1:
        raise ValueError(f"function: {_several(loss)}")
    if not loss.requires_grad:
        raise ValueError(
            "function: the loss requires no gradient, so no way leads from it to a parameter; give the function that computes it, "
            "to see where it was cut off"
        )


def _several(loss: torch.Tensor) -> str:
    return f"the loss has shape {tuple(loss.shape)}; expected a single element, such as loss.mean()"


def _check(models: Mapping[str, torch.nn.Module], parameters: Sequence[NamedParameter]) -> None:
    if not parameters:
        raise ValueError("model: it has no parameters, so there is nothing to explain; pass the module that is trained")
    lazy = [one.name for one in parameters if is_lazy(one.parameter)]
    if lazy:
        raise ValueError(f"model: {lazy[0]} is not initialised; run one forward before, so that its shape is known")
    modules = [module for root in models.values() for module in root.modules()]
    if any(is_managed(module) or hasattr(type(module), "set_reshard_after_backward") for module in modules):
        raise ValueError("model: FSDP has sharded it and shows other parameters while it trains; explain it before it is sharded")


def _parameters(models: Mapping[str, torch.nn.Module]) -> list[NamedParameter]:
    """Each parameter once, under its first name."""
    found: dict[int, tuple[torch.nn.Parameter, str, list[str]]] = {}
    for model, root in models.items():
        labels = LayerNames(root)
        for raw, module in root.named_modules(remove_duplicate=False):
            for attribute, parameter in parameters_in(module).items():
                if parameter is None:
                    continue
                label = labels.of(raw, attribute) if raw in labels else clean(raw) or attribute
                layer = ".".join(part for part in (model, label) if part)
                name = layer if label == attribute and not clean(raw) else f"{layer}.{attribute}"
                names = found.setdefault(id(parameter), (parameter, layer, []))[2]
                names += [] if name in names else [name]
    return [NamedParameter(parameter, names[0], layer, tuple(names[1:])) for parameter, layer, names in found.values()]


def _modules(models: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """The name of each module by its `id`; that of a root's class where there is no name."""
    found: dict[int, str] = {}
    for model, root in models.items():
        for raw, module in root.named_modules():
            name = ".".join(part for part in (model, clean(raw)) if part)
            found.setdefault(id(module), name or type(module).__name__)
    return found


def _first_bad(judge: Judge, count: int) -> list[str]:
    """Where the backward first passed on a gradient that a parameter has in the end, and that is bad."""
    arrived = judge.gradients.arrived
    for turn in judge.gradients.turns:
        behind = judge.graph.behind_node(turn.following)
        if any(behind >> number & 1 and arrived.get(number, State.MISSING) is turn.state for number in range(count)):
            place = judge.graph.place(turn.node)
            at = " ".join(part for part in (operation(turn.node), str(place or "")) if part)
            return [f"the first bad gradient in the backward is {STATES[turn.state]}: from {at} on"]
    return []


def _notes(judge: Judge, parameters: Sequence[NamedParameter]) -> tuple[str, ...]:
    """What concerns the loss, the optimizers, or the watching as a whole."""
    roots = judge.gradients.roots
    notes = [f"the loss is {root.item()}" for root in roots if root.numel() == 1 and not bool(torch.isfinite(root).all())]
    if roots and not any(root.requires_grad for root in roots):
        notes.append("the loss requires no gradient: backward() would raise")
    notes += _first_bad(judge, len(parameters))
    everything = [one.parameter for one in parameters]
    known = {id(parameter) for parameter in everything}
    for optimizer in judge.optimizers:
        strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strangers and not has_copies(optimizer, everything):
            kind = type(optimizer).__name__
            notes.append(
                f"{kind} owns {strangers} parameters that are in no model here; was the model replaced or copied after it?"
            )
    if runs_compiled():
        notes.append("compiled parts ran compiled: what is in them cannot be seen before PyTorch 2.6")
    failures = [*judge.gradients.failures, *(judge.watch.failures if judge.watch is not None else ())]
    if failures:
        notes.append(f"watching failed {len(failures)} times, first with {type(failures[0]).__name__}: {failures[0]}")
    return tuple(notes)
