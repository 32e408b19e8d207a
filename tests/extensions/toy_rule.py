"""A rule of another package: the toy was asked too often."""

from __future__ import annotations

from collections.abc import Iterator

from tests.extensions.toy_collector import TOY_LAYERS, TOY_QUESTIONS
from torch_grad_exporter.rules import Finding, RuleContext, rule

MINUTES_20 = 1200.0
OFTEN = 2


@rule("ToyAskedOften", frozenset({"initialising", "training"}), remembers={TOY_QUESTIONS: MINUTES_20})
def asked_often(context: RuleContext) -> Iterator[Finding]:
    """There were more questions within twenty minutes than the toy likes."""
    questions, layers = context.growth(TOY_QUESTIONS, MINUTES_20), context.values.one(TOY_LAYERS)
    if questions >= OFTEN:
        yield Finding("warning", f"Asked {questions:g} times about {layers:g} layers.")


RULE = asked_often
