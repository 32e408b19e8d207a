"""Origin: the place where NaN or Inf began, as it is shown and logged."""

from __future__ import annotations

from dataclasses import dataclass

from torch_grad_exporter.inspection.nan_origin.tape import FlaggedTape, HeldTensor, TensorPlace

NAMES = {"nan": "NaN", "inf": "Inf"}
UNKNOWN = "unknown"

_SCALED = "; a gradient scaler skips such a step, which is routine as long as it is rare"


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where NaN or Inf began.

    Attributes:
        layer: The module, or "batch", "loss" or "unknown".
        stage: The label `pass`.
        kind: "nan" or "inf".
        step: Optimizer steps before it.
        text: A sentence.
        parameter: The full name of the parameter or buffer, if it is one.
        routine: A gradient scaler skips such steps, and causes them by its search for the largest scale.
    """

    layer: str
    stage: str
    kind: str
    step: int
    text: str
    parameter: str = ""
    routine: bool = False


class OriginWriter:
    """The origins of a tape, each with its sentence."""

    def __init__(self, flagged: FlaggedTape) -> None:
        self._flagged, self._tape = flagged, flagged.tape

    def of_call(self, number: int, stage: str, kind: str, action: str, operation: str = "") -> Origin:
        """Return the origin in a call of a module that did this, in an operation if it is known."""
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

    def of_held(self, held: HeldTensor) -> Origin:
        """Return the origin in a parameter or buffer."""
        kind, stage = self._flagged.kind(held.slot), "buffer" if held.buffer else "parameter"
        text = f"{stage} {held.name} was {NAMES[kind]} before the forward"
        return Origin(held.layer, stage, kind, self._tape.step, text, held.name)

    def of_batch(self, place: TensorPlace) -> Origin:
        """Return the origin in an input of a model."""
        kind, call = self._flagged.kind(place.slot), self._tape.calls[place.call]
        return Origin("batch", "batch", kind, self._tape.step, f"input {place.name or 0} of {call.layer} had {NAMES[kind]}")

    def of_loss(self, kind: str, text: str) -> Origin:
        """Return the origin behind the model."""
        scaled = self._tape.scaled
        return Origin("loss", "loss", kind, self._tape.step, f"{text}; outside of any module{_SCALED * scaled}", routine=scaled)

    def of_reduction(self, parameters: list[str]) -> Origin:
        """Return the origin where this process computed finite gradients only, and has others in the end."""
        tape = self._tape
        kind = self._flagged.any_of(tape.after[name] for name in parameters)
        if not tape.ranks or tape.full:
            return self.unknown(kind, "a gradient is not finite, and nothing was seen that made it so")
        layer = next((held.layer for held in tape.held if held.name == parameters[0]), parameters[0])
        overflow = " or the sum over ranks overflows" if kind == "inf" else ""
        text = f"{NAMES[kind]} came with the reduction over ranks: the gradients of this rank were finite, another rank's were not"
        return Origin(layer, "reduction", kind, tape.step, f"{text}{overflow}")

    def unknown(self, kind: str, why: str) -> Origin:
        """Return an origin without a place."""
        return Origin(UNKNOWN, UNKNOWN, kind, self._tape.step, f"it is not known where it began: {why}")
