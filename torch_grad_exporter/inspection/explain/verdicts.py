"""Verdicts: why each parameter has, or has not, a gradient, judged from what was seen."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.inspection.explain.cuts import Cut, CutCollector, CutKind
from torch_grad_exporter.inspection.explain.graph import REENTRANT, GradientState, Graph
from torch_grad_exporter.inspection.explain.places import Where
from torch_grad_exporter.model.optimizers import has_copies, owned_by
from torch_grad_exporter.torch_compat.autograd import operation
from torch_grad_exporter.torch_compat.compiler import runs_compiled

# A reentrant checkpoint that is in no graph, and how to mend that.
CHECKPOINT = "CheckpointFunction"
WITHOUT_GRADIENTS = (
    "no input of the checkpoint requires a gradient, so with use_reentrant=True nothing in it gets one: use_reentrant=False, "
    "or requires_grad_() on an input (Transformers: model.enable_input_require_grads())"
)

# Operations whose derivative is zero, or is taken to be.
ROUNDING = frozenset({"Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Heaviside", "Bernoulli", "Poisson", "Normal"})


class Verdict(enum.StrEnum):
    """Why a parameter has a gradient or not."""

    OK = "ok"
    """A gradient arrives; the note says whether it is zero everywhere, or not finite."""
    FROZEN = "frozen"
    """`requires_grad` is False."""
    NOT_IN_GRAPH = "not_in_graph"
    """No way leads from the loss to the parameter, and no cut was seen."""
    DETACHED_AT = "detached_at"
    """The loss depends on it through a tensor that was detached."""
    NON_DIFFERENTIABLE = "non_differentiable"
    """The loss depends on it through an operation that has no derivative, or whose derivative is zero everywhere."""
    OPTIMIZER_MISSING = "optimizer_missing"
    """A gradient arrives, and none of the given optimizers owns the parameter."""
    UNKNOWN = "unknown"
    """It is unknown; the note says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one parameter.

    Attributes:
        parameter: Its name.
        layer: The name of its layer.
        verdict: Why it has a gradient or not.
        where: The place in the program that the verdict is about, None if there is none or it is unknown.
        note: More of it.
    """

    parameter: str
    layer: str
    verdict: Verdict
    where: Where | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of the models with its name and layer; `others`: its other names."""

    parameter: torch.nn.Parameter
    name: str
    layer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judge:
    """The judge of parameters, by what was seen. `cuts` is None where there is only a loss, a root of `graph`."""

    graph: Graph
    cuts: CutCollector | None
    optimizers: Sequence[torch.optim.Optimizer]
    parameters: Sequence[NamedParameter]

    def rows(self) -> list[Row]:
        """Return a row for each parameter, in order."""
        owned: set[int] = set().union(*map(owned_by, self.optimizers))
        everything = [named.parameter for named in self.parameters]
        complete = not self.optimizers or any(has_copies(optimizer, everything) for optimizer in self.optimizers)
        rows = []
        for number, named in enumerate(self.parameters):
            verdict, where, note = self._verdict(number)
            if verdict is Verdict.OK and not complete and id(named.parameter) not in owned:
                verdict = Verdict.OPTIMIZER_MISSING
                note = _joined("a gradient arrives, and no optimizer that was given owns it", note)
            names = f"also {', '.join(named.others)}" if named.others else ""
            rows.append(Row(named.name, named.layer, verdict, where, _joined(note, names)))
        return rows

    def _verdict(self, number: int) -> tuple[Verdict, Where | None, str]:
        bit = 1 << number
        state = self.graph.arrived.get(number, GradientState.MISSING)
        if state is GradientState.OK:
            return Verdict.OK, None, ""
        if state is GradientState.MISSING and not self.graph.trained & bit:
            return Verdict.FROZEN, None, "requires_grad is False"
        if state is GradientState.MISSING and not any(self.graph.behind(root) & bit for root in self.graph.roots):
            return self._outside_the_graph(bit)
        return self._spoiled(bit, state)

    def _spoiled(self, bit: int, state: GradientState) -> tuple[Verdict, Where | None, str]:
        """Return what the first node, in the order of the backward, says that passed on such a gradient towards the parameter."""
        turns = (turn for turn in self.graph.turns if turn.state is state)
        turn = next((turn for turn in turns if self.graph.behind_node(turn.following) & bit), None)
        if turn is None and state is GradientState.MISSING:
            return Verdict.UNKNOWN, None, "it is in the graph, and no gradient was seen to arrive"
        if turn is None:
            return Verdict.OK, None, f"gradient is {state}"
        name, where = operation(turn.node), self.graph.places.get(turn.node)
        if state is GradientState.MISSING:
            return Verdict.NON_DIFFERENTIABLE, where, f"the backward of {name} returns no gradient"
        if state is GradientState.ZERO and name in ROUNDING:
            return Verdict.NON_DIFFERENTIABLE, where, f"{name.lower()}: its derivative is zero everywhere"
        return Verdict.OK, where, f"gradient is {state}: from the backward of {name} on"

    def _outside_the_graph(self, bit: int) -> tuple[Verdict, Where | None, str]:
        if self.cuts is None:
            return Verdict.NOT_IN_GRAPH, None, "give the function that computes the loss, to see whether it was cut off"
        seen = [cut for cut in self.cuts.of(self.cuts.carried(self.graph.roots)) if cut.lost & bit]
        if seen:
            in_graph = any(node.name() == REENTRANT for node in self.graph.below(self.graph.roots))
            if not in_graph and all(cut.operation == CHECKPOINT for cut in seen):
                return Verdict.DETACHED_AT, seen[0].where, f"{CHECKPOINT}; {WITHOUT_GRADIENTS}"
            return _of_cuts(seen)
        escaped = next((cut for cut in self.cuts.of(self.cuts.escaped) if cut.lost & bit), None)
        if escaped is not None:
            note = f"{escaped.operation}: its value left PyTorch, so whether the loss depends on it cannot be seen"
            return Verdict.UNKNOWN, escaped.where, note
        if self.graph.failures:
            return Verdict.UNKNOWN, None, "watching the forward failed"
        used = self.cuts.used.get(bit)
        note = "not used in the forward" if used is None else "used here, and the loss does not depend on the result"
        return Verdict.NOT_IN_GRAPH, used, note

    def notes(self) -> tuple[str, ...]:
        """Return what concerns the loss, the optimizers, or the run as a whole."""
        roots = self.graph.roots
        notes = [f"the loss is {root.item()}" for root in roots if root.numel() == 1 and not bool(torch.isfinite(root).all())]
        if roots and not any(root.requires_grad for root in roots):
            notes.append("the loss requires no gradient: backward() would raise")
        # Where the backward first passed on a gradient that a parameter has in the end, and that is bad.
        for turn in self.graph.turns:
            behind, arrived = self.graph.behind_node(turn.following), self.graph.arrived
            if any(behind >> i & 1 and arrived.get(i, GradientState.MISSING) is turn.state for i in range(len(self.parameters))):
                at = f"{operation(turn.node)} {self.graph.places.get(turn.node) or ''}".strip()
                notes.append(f"the first bad gradient in the backward is {turn.state}: from {at} on")
                break
        leaves = (getattr(node, "variable", None) for node in self.graph.below(roots))
        foreign = {id(leaf) for leaf in leaves if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in self.graph.bits}
        if foreign:
            depends = f"the loss depends on {len(foreign)} parameters that are in no model here"
            notes.append(f"{depends}; layers in a plain list or dict belong to no module: use torch.nn.ModuleList or ModuleDict")
        everything = [named.parameter for named in self.parameters]
        known = {id(parameter) for parameter in everything}
        for optimizer in self.optimizers:
            strangers = len(owned_by(optimizer) - known)
            if strangers and not has_copies(optimizer, everything):
                notes.append(
                    f"{type(optimizer).__name__} owns {strangers} parameters that are in no model here; "
                    "was the model replaced or copied after it?"
                )
        if runs_compiled():
            notes.append("compiled parts ran compiled: what is in them cannot be seen before PyTorch 2.6")
        if failures := self.graph.failures:
            notes.append(f"watching failed {len(failures)} times, first with {type(failures[0]).__name__}: {failures[0]}")
        return tuple(notes)


def _of_cuts(cuts: Sequence[Cut]) -> tuple[Verdict, Where | None, str]:
    first = next((cut for cut in cuts if cut.kind is not CutKind.UNSEEN), cuts[0])
    verdicts = {CutKind.DETACHED: Verdict.DETACHED_AT, CutKind.NON_DIFFERENTIABLE: Verdict.NON_DIFFERENTIABLE}
    others = {f"{cut.operation} {cut.where}" for cut in cuts if cut is not first and str(cut.where) != str(first.where)}
    more = f"also cut at {min(others)}" + (f" and {len(others) - 1} more" if len(others) > 1 else "") if others else ""
    return verdicts.get(first.kind, Verdict.UNKNOWN), first.where, _joined(first.operation, first.note, more)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
