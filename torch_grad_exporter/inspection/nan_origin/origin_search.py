"""OriginSearch: where the first value came from that is not finite, by a tape and its flags. Pure, without tensors.

There is one only where a value that is not finite has reached the loss or a gradient. In the forward the graph is followed from the
loss backwards, through values that are not finite and those that were not flagged. A finite value ends the search, so a mask of
-inf before a softmax is not met. The origin is the first of the values met, in the order of execution. In the backward it is the
first operation that gave a gradient which is not finite, or what made a value that this operation had got in the forward.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from torch_grad_exporter.inspection.nan_origin.tape import LEAF, MOVES, FlaggedTape, HeldTensor, TensorPlace, Value

NAMES = {"nan": "NaN", "inf": "Inf"}
UNKNOWN = "unknown"

_SCALED = "; a gradient scaler skips such a step, which is routine as long as it is rare"


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where NaN or Inf began: the layer, or "batch", "loss" or "unknown"; the label `pass`; "nan" or "inf".

    `step`: optimizer steps before it. `parameter`: the full name of the parameter or buffer, if it is one. `routine`: a gradient
    scaler skips such steps, and causes them by its search for the largest scale.
    """

    layer: str
    stage: str
    kind: str
    step: int
    text: str
    parameter: str = ""
    routine: bool = False


# Operations by which a mask puts -inf where it wants it, or passes it on.
FILLS = frozenset((
    "MaskedFill", "Where", "Add", "Sub", "IndexPut", "IndexFill", "MaskedScatter", "Scatter", "CopySlices", "Fill", "Tril", "Triu",
    "ConstantPadNd", "Cat", "Stack", "Expand", "View", "UnsafeView", "Clone",
))  # fmt: skip

# Buffers that a module in training does not use.
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class OriginSearch:
    """One search through one tape for where NaN or Inf began."""

    def __init__(self, flagged: FlaggedTape) -> None:
        self._flagged, self._tape = flagged, flagged.tape
        tape = flagged.tape
        self._starts = [start for start, _ in tape.began]
        self._by_value: dict[Value, list[int]] = {}
        for number, place in enumerate(tape.places):
            if place.value is not None:
                self._by_value.setdefault(place.value, []).append(number)

    def origin(self, *, loss_was_nonfinite: bool) -> Origin | None:
        """Return it, None if no such value is known to have reached the loss or a gradient.

        `loss_was_nonfinite`: a loss that was not finite was observed since the tape before; used only without a backward.
        """
        tape, kind, any_of = self._tape, self._flagged.kind, self._flagged.any_of
        losses = any_of(slot for slot, _ in tape.losses)
        if losses:
            return self._forward([value for _, value in tape.losses], losses)
        outputs = self._outputs()
        values, worst = [place.value for place in outputs], any_of(place.slot for place in outputs)
        if not tape.backward:
            return self._forward(values, worst) if loss_was_nonfinite else None
        # The parameters whose gradient has become non-finite, and what the backward has given to leaves.
        new = [name for name, slot in tape.after.items() if kind(slot) and not (name in tape.before and kind(tape.before[name]))]
        given = any_of(
            slot
            for event in tape.events
            for at, slot in event.given if at < len(leaves := tape.nodes[event.node].leaves) and leaves[at]
        )  # fmt: skip
        if not (new or (given and (not tape.after or any_of(tape.after.values())))):
            return None
        if not tape.losses and worst == "nan":
            return self._forward(values, worst)
        return self._backward(new, given)

    def _outputs(self) -> list[TensorPlace]:
        """Return the outputs of whole models that are not finite."""
        roots = {*self._tape.roots}
        return [place for place in self._tape.places if place.output and place.call in roots and self._flagged.kind(place.slot)]

    # The forward

    def _forward(self, ends: Iterable[Value | None], kind: str) -> Origin | None:
        places, held = self._behind([end for end in ends if end is not None])
        if held:
            return self._of_held(held[0])
        if places:
            return self._blame(next((number for number in places if not self._is_intended(number)), places[0]))
        outputs = self._outputs()
        if outputs and not any(end is not None for end in ends):  # the graph is not to be seen
            return self._blame(self._tape.places.index(outputs[0]))
        if not kind:
            return None
        if not self._tape.losses:
            return self._unknown(kind, "the loss was not finite, and the model's outputs were")
        return self._of_loss(kind, "the outputs of the model were finite, the loss was not: look at the loss and its targets")

    def _behind(self, ends: list[Value]) -> tuple[list[int], list[HeldTensor]]:
        """Return what is not finite and has led to these values: places in the order of execution, and parameters."""
        kind, tape = self._flagged.kind, self._tape
        met: set[int] = set()
        held: dict[int, HeldTensor] = {}
        seen: set[Value] = set()
        descended: set[int] = set()
        while ends:
            value = ends.pop()
            if value in seen:
                continue
            seen.add(value)
            node, number = value
            if node == LEAF:
                if number >= 0 and kind(tape.held[number].slot):
                    held[number] = tape.held[number]
                continue
            here = self._by_value.get(value, [])
            wrong = [place for place in here if kind(tape.places[place].slot)]
            met.update(wrong)
            if (here and not wrong) or node in descended or node not in tape.nodes:
                continue
            descended.add(node)
            ends += [edge for edge in tape.nodes[node].edges if edge is not None]
        return sorted(met), [held[number] for number in sorted(held)]

    def _is_intended(self, number: int) -> bool:
        """Return whether it is the -inf of a mask, as far as its operation shows."""
        place = self._tape.places[number]
        return self._flagged.sinks(place.slot) and self._operation(place) in FILLS

    def _operation(self, place: TensorPlace) -> str:
        node = None if place.value is None else self._tape.nodes.get(place.value[0])
        return "" if node is None else node.name

    def _blame(self, number: int) -> Origin:
        """Return whose work a place is that is not finite, while nothing before it was."""
        tape = self._tape
        place = tape.places[number]
        if not place.output and tape.calls[place.call].parent == -1:
            return self._of_batch(place)
        call = place.call if place.output else tape.calls[place.call].parent
        kind = self._flagged.kind(place.slot)
        inputs = (other for other in tape.places if other.call == call and not other.output and other.value is None)
        loose = next((other for other in inputs if self._is_wrong(other)), None)
        if loose is not None and place.value is not None:
            return self._outside_of_graph(loose, call)
        if (own := self._own(call)) is not None:
            return self._of_held(own)
        name = self._operation(place) if place.output else ""
        return self._of_call(call, "forward", kind, f"gave {NAMES[kind]} for finite inputs", name)

    def _is_wrong(self, place: TensorPlace) -> bool:
        """Return whether it is not finite, and not a mask."""
        return bool(self._flagged.kind(place.slot)) and not self._flagged.is_mask(place.slot)

    def _outside_of_graph(self, place: TensorPlace, call: int) -> Origin:
        """Return where an input without a graph came from: the first such tensor in the same forward of a model."""
        tape = self._tape
        root = self._root_of(call)
        loose = (at for at, other in enumerate(tape.places) if other.value is None and self._is_wrong(other))
        number = next((at for at in loose if self._root_of(tape.places[at].call) == root), tape.places.index(place))
        first = tape.places[number]
        is_batch = not first.output and tape.calls[first.call].parent == -1
        return self._of_batch(first) if is_batch else self._blame(number)

    def _root_of(self, call: int) -> int:
        while self._tape.calls[call].parent != -1:
            call = self._tape.calls[call].parent
        return call

    def _own(self, call: int) -> HeldTensor | None:
        """Return a parameter or buffer of a call's module that is not finite and is used."""
        taped = self._tape.calls[call]
        for held in self._tape.held:
            unused = held.buffer and taped.training and held.attribute in RUNNING
            wrong = self._flagged.kind(held.slot) and not (held.buffer and self._flagged.is_mask(held.slot))
            if held.module == taped.module and wrong and not unused:
                return held
        return None

    # The backward

    def _backward(self, new: list[str], given: str) -> Origin | None:
        for event in self._tape.events:
            got, kind = (self._flagged.any_of(slot for _, slot in slots) for slots in (event.got, event.given))
            if got:
                return self._arrived(event.node, got)
            if kind:
                call, name = self._call_of(event.node), self._tape.nodes[event.node].name
                if call == -1:
                    return self._of_loss(kind, f"an operation after the model gave it in the backward ({name})")
                if (fed := self._fed(event.node)) is not None:
                    return fed
                return self._of_call(call, "backward", kind, f"gave {NAMES[kind]} in the backward for finite gradients", name)
        return self._of_reduction(new) if new and not given else None

    def _fed(self, node: int) -> Origin | None:
        """Return where a value began that the forward gave to this operation, None if those were finite.

        Where the loss does not use it, as with a fully masked row of attention, its gradient is zero, and zero times NaN is NaN.
        """
        places, held = self._behind([edge for edge in self._tape.nodes[node].edges if edge is not None])
        if held:
            return self._of_held(held[0])
        number = next((number for number in places if not self._is_intended(number)), None)
        return None if number is None else self._blame(number)

    def _arrived(self, node: int, kind: str) -> Origin:
        """Return who gave a gradient that is not finite to a node, where all that was seen to be given before was finite."""
        givers, seen = self._givers(node), {event.node for event in self._tape.events}
        unseen = {self._call_of(giver) for giver in givers - seen}
        # Operations of the loss had run before they could be hooked. With a part that was seen it may be the sum that overflows.
        of_loss = unseen == {-1} and (kind == "nan" or not givers & seen)
        if of_loss or not (givers or self._tape.losses):
            return self._of_loss(kind, "the gradient that came back to the model was not finite, its outputs were")
        return self._unknown(kind, "a gradient came from operations that were not seen, or the sum of its parts overflowed")

    def _givers(self, node: int) -> set[int]:
        """Return the nodes that give gradients to this one, also through operations that only move values, which are not hooked."""
        givers: set[int] = set()
        ends = [node]
        while ends:
            end = ends.pop()
            for number, other in self._tape.nodes.items():
                if any(edge is not None and edge[0] == end for edge in other.edges):
                    (ends.append if other.name in MOVES else givers.add)(number)
        return givers

    def _call_of(self, node: int) -> int:
        """Return the innermost call that has made a node, -1 if none has."""
        place = bisect.bisect_right(self._starts, node) - 1
        return -1 if place < 0 else self._tape.began[place][1]

    # The origins

    def _of_call(self, number: int, stage: str, kind: str, action: str, operation: str = "") -> Origin:
        call = self._tape.calls[number]
        parts = [f"{call.layer} ({call.kind}) {action}"]
        if operation and operation not in call.kind:
            parts.append(f"in {operation}")
        if call.number > 1:
            parts.append(f"in call {call.number} of it")
        if call.compiled:
            parts.append("it is compiled, so its inside is not seen")
        elif call.hidden:
            parts.append(f"or it was {' or '.join(call.hidden)}, which is compiled")
        routine = stage == "backward" and self._tape.scaled
        return Origin(call.layer, stage, kind, self._tape.step, ", ".join(parts) + _SCALED * routine, routine=routine)

    def _of_held(self, held: HeldTensor) -> Origin:
        kind, stage = self._flagged.kind(held.slot), "buffer" if held.buffer else "parameter"
        text = f"{stage} {held.name} was {NAMES[kind]} before the forward"
        return Origin(held.layer, stage, kind, self._tape.step, text, held.name)

    def _of_batch(self, place: TensorPlace) -> Origin:
        kind, call = self._flagged.kind(place.slot), self._tape.calls[place.call]
        return Origin("batch", "batch", kind, self._tape.step, f"input {place.name or 0} of {call.layer} had {NAMES[kind]}")

    def _of_loss(self, kind: str, text: str) -> Origin:
        scaled = self._tape.scaled
        return Origin("loss", "loss", kind, self._tape.step, f"{text}; outside of any module{_SCALED * scaled}", routine=scaled)

    def _of_reduction(self, parameters: list[str]) -> Origin:
        """Return the origin where this process computed finite gradients only, and has others in the end."""
        tape = self._tape
        kind = self._flagged.any_of(tape.after[name] for name in parameters)
        if not tape.ranks or tape.full:
            return self._unknown(kind, "a gradient is not finite, and nothing was seen that made it so")
        layer = next((held.layer for held in tape.held if held.name == parameters[0]), parameters[0])
        overflow = " or the sum over ranks overflows" if kind == "inf" else ""
        text = f"{NAMES[kind]} came with the reduction over ranks: the gradients of this rank were finite, another rank's were not"
        return Origin(layer, "reduction", kind, tape.step, f"{text}{overflow}")

    def _unknown(self, kind: str, why: str) -> Origin:
        return Origin(UNKNOWN, UNKNOWN, kind, self._tape.step, f"it is not known where it began: {why}")
