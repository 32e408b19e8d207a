"""The rule on attention: logits that grow before the loss diverges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.attention import ATTENTION_MAX_LOGIT
from torch_grad_exporter.rules.context import BUSY, MINUTES_5, MINUTES_30, THRESHOLDS, RuleContext, by_layer
from torch_grad_exporter.rules.declaration import Alert, Finding, rule
from torch_grad_exporter.rules.values import Table

# By which factor logits have to grow within 30 minutes.
GROWTH = 1.5


@rule(
    "AttentionLogitsGrowing",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          min_over_time(torch_attention_max_logit[5m]) > 100
          and min_over_time(torch_attention_max_logit[5m]) > 1.5 * min_over_time(torch_attention_max_logit[30m])
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        """,
        summary="Attention logits of layer {{ $labels.layer }} of run {{ $labels.run }} grow.",
        description=(
            "In all samples of the last 5 minutes its largest attention logit was above 100, at least {{ $value | humanize }}, and "
            "1.5 times what it was within 30 minutes. Logits that go on growing make the loss diverge."
        ),
    ),
    remembers={ATTENTION_MAX_LOGIT: MINUTES_30},
    by_samples=True,
    needs=(ATTENTION_MAX_LOGIT,),
    takes_samples=20,
    first_steps=(
        "Lower the learning rate or warm it up for longer, and normalise queries and keys (QK-norm) or cap the logits from the "
        "next run on. Keep a checkpoint from before the growth. An entropy near 0 says that the attention has collapsed."
    ),
    why=(
        "100 is where Kimi K2 caps the logits of attention (QK-clip); Gemma 2 caps them at 50. ViT-22B without QK-norm diverged "
        "after they had grown to tens of thousands. 1.5 within 30 minutes: in these runs they grew tenfold in some thousand steps, "
        "while the lowest of 20 samples and of 120 differ by little in a run where they stay. The lowest of 5 minutes: a single "
        "batch with large logits does not count."
    ),
    note="Needs attention=True. A model whose logits are large and stay so is not meant: some have biases in queries and keys.",
)
def logits_growing(context: RuleContext) -> Iterator[Finding]:
    """Yield layers whose largest logit is large in all samples of five minutes, and was smaller within 30 minutes."""
    rows = context.values.table(ATTENTION_MAX_LOGIT).rows
    lowest, before = (Table(rows, np.fmin.reduce(context.over(ATTENTION_MAX_LOGIT, span))) for span in (MINUTES_5, MINUTES_30))
    growing = (lowest.numbers > THRESHOLDS["AttentionLogitsGrowing"]) & (lowest.numbers > GROWTH * before.numbers)
    yield from by_layer("warning", lowest, growing, "its attention logits grow, which precedes divergence")
