"""Why each parameter has, or has not, a gradient: from what was seen to verdicts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.inspection.explain.gradients import GradientHooks, State, Turn
from torch_grad_exporter.inspection.explain.graph import Graph, operation
from torch_grad_exporter.inspection.explain.places import Where
from torch_grad_exporter.inspection.explain.watch import Cut, CutCollector, CutKind
from torch_grad_exporter.model.optimizers import has_copies, owned_by

ROUNDING = frozenset({"Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Heaviside", "Bernoulli", "Poisson", "Normal"})
"""Operations whose derivative is zero, or is taken to be."""


class Verdict(enum.StrEnum):
    """Why a parameter has a gradient or not."""

    OK = "ok"
    """A gradient arrives; the note says whether it is zero everywhere, or not finite."""
    FROZEN = "frozen"
    """`requires_grad` is False."""
    NOT_IN_GRAPH = "not_in_graph"
    """No way leads from the loss to the parameter, and none was seen that has been cut."""
    DETACHED_AT = "detached_at"
    """The loss depends on it through a tensor that was detached."""
    NON_DIFFERENTIABLE = "non_differentiable"
    """The loss depends on it through an operation that has no derivative, or whose derivative is zero everywhere."""
    OPTIMIZER_MISSING = "optimizer_missing"
    """A gradient arrives, and none of the optimizers that were given owns the parameter."""
    UNKNOWN = "unknown"
    """It cannot be told; the note says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter. `where`: the place in the program that the verdict is about, `None` if there is none, or it is not known."""

    parameter: str
    layer: str
    verdict: Verdict
    where: Where | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of the models with its name and layer; `others`: the names under which it is known as well."""

    parameter: torch.nn.Parameter
    name: str
    layer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judge:
    """Finds the verdicts. `watch`: what saw the forward, `None` where there is only a loss.

    `graph`, `gradients`: with the loss in the latter's roots. `optimizers`: those that were given.
    """

    graph: Graph
    gradients: GradientHooks
    watch: CutCollector | None
    optimizers: Sequence[torch.optim.Optimizer]

    def rows(self, parameters: Sequence[NamedParameter]) -> list[Row]:
        """A row for each parameter, in order."""
        owned: set[int] = set().union(*map(owned_by, self.optimizers))
        everything = [one.parameter for one in parameters]
        copied = any(has_copies(optimizer, everything) for optimizer in self.optimizers)
        judged = [self._row(number, one) for number, one in enumerate(parameters)]
        if self.optimizers and not copied:
            judged = [
                self._without_optimizer(row) if row.verdict is Verdict.OK and id(one.parameter) not in owned else row
                for row, one in zip(judged, parameters, strict=True)
            ]
        return [_tied(row, one.others) for row, one in zip(judged, parameters, strict=True)]

    def _row(self, number: int, one: NamedParameter) -> Row:
        verdict, where, note = self._verdict(number)
        return Row(one.name, one.layer, verdict, where, note)

    def _verdict(self, number: int) -> tuple[Verdict, Where | None, str]:
        bit = 1 << number
        if number in self.gradients.arrived:
            return self._of_gradient(bit, self.gradients.arrived[number])
        if not self.gradients.trained & bit:
            return Verdict.FROZEN, None, "requires_grad is False"
        if any(self.graph.behind(root) & bit for root in self.gradients.roots):
            return self._nothing_arrived(bit)
        return self._outside_the_graph(bit)

    def _of_gradient(self, bit: int, state: State) -> tuple[Verdict, Where | None, str]:
        turn = self._turn(bit, state)
        if state is State.OK:
            return Verdict.OK, None, ""
        if turn is None:
            return Verdict.OK, None, "gradient is zero" if state is State.ZERO else "gradient is not finite"
        name, where = operation(turn.node), self.graph.place(turn.node)
        if state is State.NONFINITE:
            return Verdict.OK, where, f"gradient is not finite: from the backward of {name} on"
        if name in ROUNDING:
            return Verdict.NON_DIFFERENTIABLE, where, f"{name.lower()}: its derivative is zero everywhere"
        return Verdict.OK, where, f"gradient is zero: from the backward of {name} on"

    def _nothing_arrived(self, bit: int) -> tuple[Verdict, Where | None, str]:
        turn = self._turn(bit, State.MISSING)
        if turn is None:
            return Verdict.UNKNOWN, None, "it is in the graph, and no gradient was seen to arrive"
        where = self.graph.place(turn.node)
        return Verdict.NON_DIFFERENTIABLE, where, f"the backward of {operation(turn.node)} returns no gradient"

    def _turn(self, bit: int, state: State) -> Turn | None:
        """The first node, in the order of the backward, that passed on such a gradient towards the parameter."""
        for turn in self.gradients.turns:
            if turn.state is state and self.graph.behind_node(turn.following) & bit:
                return turn
        return None

    def _outside_the_graph(self, bit: int) -> tuple[Verdict, Where | None, str]:
        if self.watch is None:
            return Verdict.NOT_IN_GRAPH, None, "give the function that computes the loss, to see whether it was cut off"
        carried = self.watch.carried(self.gradients.roots)
        seen = [cut for cut in _chosen(self.watch.cuts, carried) if cut.lost & bit]
        if seen:
            return self._of_cuts(seen)
        escaped = [cut for cut in _chosen(self.watch.cuts, self.watch.escaped) if cut.lost & bit]
        if escaped:
            note = f"{escaped[0].operation}: its value left PyTorch, so whether the loss depends on it cannot be seen"
            return Verdict.UNKNOWN, escaped[0].where, note
        if self.watch.failures:
            return Verdict.UNKNOWN, None, "watching the forward failed"
        used = self.watch.used.get(bit)
        if used is None:
            return Verdict.NOT_IN_GRAPH, None, "not used in the forward"
        return Verdict.NOT_IN_GRAPH, used, "used here, and the loss does not depend on the result"

    def _of_cuts(self, cuts: Sequence[Cut]) -> tuple[Verdict, Where | None, str]:
        first = next((cut for cut in cuts if cut.kind is not CutKind.UNSEEN), cuts[0])
        verdicts = {CutKind.DETACHED: Verdict.DETACHED_AT, CutKind.NON_DIFFERENTIABLE: Verdict.NON_DIFFERENTIABLE}
        others = {f"{cut.operation} {cut.where}" for cut in cuts if cut is not first and str(cut.where) != str(first.where)}
        more = f"also cut at {min(others)}" + (f" and {len(others) - 1} more" if len(others) > 1 else "") if others else ""
        note = "; ".join(part for part in (first.operation, first.note, more) if part)
        return verdicts.get(first.kind, Verdict.UNKNOWN), first.where, note

    def _without_optimizer(self, row: Row) -> Row:
        note = "; ".join(part for part in ("a gradient arrives, and no optimizer that was given owns it", row.note) if part)
        return Row(row.parameter, row.layer, Verdict.OPTIMIZER_MISSING, row.where, note)


def _chosen(cuts: Sequence[Cut], bits: int) -> list[Cut]:
    return [cut for number, cut in enumerate(cuts) if bits >> number & 1]


def _tied(row: Row, others: Sequence[str]) -> Row:
    if not others:
        return row
    note = "; ".join(part for part in (row.note, f"also {', '.join(others)}") if part)
    return Row(row.parameter, row.layer, row.verdict, row.where, note)
