"""Rules on what an optimizer remembers of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.optimizer_state import OPTIMIZER_RMS_RATIO
from torch_grad_exporter.collectors.training import TRAIN_STEPS
from torch_grad_exporter.rules.context import BUSY, THRESHOLDS, RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, rule

# Below this ratio the second moment is left over from gradients of long ago. In the first steps nothing is judged.
LEFT_OVER, FIRST_STEPS = 0.02, 1000


@rule(
    "SpikeAhead",
    BUSY,
    Alert(
        "warning",
        """
        (max by (run) (torch_optimizer_rms_ratio) > 8 or max by (run) (torch_optimizer_rms_ratio) < 0.02)
        and on (run) max by (run) (torch_train_steps_total) > 1000
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        keep_firing_for="10m",
        summary="The second moment of the optimizer of run {{ $labels.run }} is out of date, and its loss may spike.",
        description=(
            "The largest ratio of a layer's gradient to the root of its second moment is {{ $value | humanize }}, not about 1."
        ),
    ),
    by_samples=True,
    needs=(OPTIMIZER_RMS_RATIO,),
    first_steps=(
        "Look at torch_optimizer_rms_ratio by layer. Lower beta2, as to 0.95, or the learning rate, or clip updates as StableAdamW "
        "does; if the data have just changed, warm the learning rate up again. Keep a checkpoint from before."
    ),
    why=(
        "Far above 1 gradients have outgrown what the optimizer divides by: Wortsman et al. (2023) see losses spike 1 to 8 steps "
        "later, and use 2.3 for one large layer. Here any layer counts, and healthy runs of small models reach 6.3 with a beta2 of "
        "0.999. Near 0 in all layers it divides by what is left of old gradients, which shrinks by itself until steps are too "
        "large (arXiv 2506.04805); healthy runs stay above 0.05. In the first 1000 steps both are usual."
    ),
    note=(
        "Needs optimizer_state=True, and Adam or one of its kin. With a beta2 of 0.95 no ratio is above 4.5: there it says only "
        "that all are near 0."
    ),
)
def spike_ahead(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the second moment lags far behind a layer's gradients, or far before all gradients."""
    ratios = context.values.table(OPTIMIZER_RMS_RATIO)
    largest = ratios.largest()
    if largest is None or not (context.values.table(TRAIN_STEPS).largest() or 0) > FIRST_STEPS:
        return
    if largest > THRESHOLDS["SpikeAhead"]:
        layer = next(row[0] for row, number in ratios.items() if number == largest)
        text = f"Gradients have outgrown the second moment of the optimizer, most in {layer}: {largest:.3g} times its root."
    elif largest < LEFT_OVER:
        text = f"All gradients are small beside the second moment of the optimizer: at most {largest:.2g} of its root."
    else:
        return
    yield Finding("warning", text, value=largest)
