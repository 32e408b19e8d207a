"""Where a value became NaN or Inf, in words, for the rules on those: as far as `nan_origin=` has found it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_grad_exporter.collectors.nan_origin import NONFINITE_ORIGIN_STEP

if TYPE_CHECKING:
    from torch_grad_exporter.rules.context import RuleContext

ALREADY = frozenset({"parameter", "buffer", "unknown"})
"""Kinds of places that may only follow from another one."""

_SENTENCES = {
    "forward": "{layer} gave {kind} in the forward",
    "backward": "{layer} gave {kind} in the backward",
    "parameter": "A parameter of {layer} was {kind} already",
    "buffer": "A buffer of {layer} was {kind} already",
    "batch": "The batch had {kind}",
    "loss": "{kind} came from the loss, outside of any module",
    "reduction": "{kind} came to {layer} with the reduction over ranks",
}

ANNOTATION = (
    '{{ range query (printf "topk(3, torch_nonfinite_origin_step{run=%q})" $labels.run) }} nan_origin has found '
    "{{ .Labels.layer }} ({{ .Labels.pass }}, {{ .Labels.kind }}) at step {{ .Value }}.{{ end }}"
)
"""The end of an alert's description: the last places of a run, as a template of Prometheus."""


def origin(context: RuleContext) -> str:
    """The place that was found last, with a space behind it; of a parameter only where nothing else was. Empty for none."""
    found = [(row, step) for row, step in context.values.table(NONFINITE_ORIGIN_STEP).items()]
    if not found:
        return ""
    (layer, stage, kind), step = max(found, key=lambda one: (one[0][1] not in ALREADY, one[1]))
    sentence = _SENTENCES.get(stage, "It is not known where {kind} began").format(layer=layer, kind={"nan": "NaN"}.get(kind, "Inf"))
    return f"{sentence}, at step {step:g}. "
