"""FaultSigns: whether the run was well, and why to go back, by the counters of an evaluation."""

from __future__ import annotations

from collections import Counter, deque

from torch_grad_exporter.collectors.gradients import GRAD_GLOBAL_NORM_SPIKES, GRAD_NONFINITE_STEPS, GRAD_SAMPLE_STEP
from torch_grad_exporter.collectors.training import TRAIN_LOSS_NONFINITE, TRAIN_LOSS_SPIKES
from torch_grad_exporter.rules import Values

# Counters by reason, and how often they have to grow: after one step on NaN the weights are lost, another sign may be a bad batch.
COUNTERS = {
    "nonfinite_gradients": (GRAD_NONFINITE_STEPS, 1),
    "nonfinite_loss": (TRAIN_LOSS_NONFINITE, 3),
    "loss_spikes": (TRAIN_LOSS_SPIKES, 3),
    "norm_spikes": (GRAD_GLOBAL_NORM_SPIKES, 3),
}


class FaultSigns:
    """The signs that something is wrong with the training. For the thread that judges, but for `restart`.

    A sign is a step on gradients that are not finite, a loss that is not finite or that spikes, a reduced norm that spikes, or the
    cause that the user gave. Signs are remembered for `window` steps.

    Args:
        window: A number of steps.
        own: Whether signs are the cause, and not one that the user gave.

    Attributes:
        well: The last sampled step at which the run was seen to be well: no sign was remembered. None if there is none.
        reason: Why to go back now, None without a reason.
    """

    def __init__(self, window: int, *, own: bool) -> None:
        self._window = window
        self._own = own
        self._before: dict[str, float] | None = None
        self._signs: deque[tuple[int, str, float]] = deque()
        self._restart: int | None = None
        # Whether the training went back since the user's cause began to hold.
        self._answered = False
        self.well: int | None = None
        self.reason: str | None = None

    def restart(self, step: int) -> None:
        """Forget what was seen up to this step: the training went back. From any thread."""
        self._restart = step

    @property
    def stale(self) -> bool:
        """Whether the training went back since the last evaluation that tells anything."""
        return self._restart is not None

    def look(self, values: Values, step: int, given: str | None) -> None:
        """Take an evaluation.

        Args:
            values: The values of now.
            step: The training's last step.
            given: The name of the user's cause if it holds now.
        """
        sampled = max((int(last) for _, last in values.rows(GRAD_SAMPLE_STEP)), default=step)
        restart = self._restart
        if restart is not None:
            self._answered, self.reason = True, None
            self._signs.clear()
        self._answered = self._answered and given is not None
        counts = {
            reason: sum(count for labels, count in values.rows(spec) if not ("outcome" in spec.labels and "skipped" in labels))
            for reason, (spec, _) in COUNTERS.items()
        }
        before, self._before = self._before, counts
        if restart is not None and sampled <= restart:
            return
        self._restart = None if self._restart == restart else self._restart
        if restart is None and before is not None:
            grown = {reason: count - before[reason] for reason, count in counts.items()}
            self._signs.extend((step, reason, count) for reason, count in grown.items() if count > 0)
        if given is not None and not self._answered:
            self._signs.append((step, given, 1.0))
        while self._signs and self._signs[0][0] <= step - self._window:
            self._signs.popleft()
        if not self._signs:
            self.well = sampled
        if self._own:
            totals: Counter[str] = Counter()
            for _, reason, count in self._signs:
                totals[reason] += int(count)
            self.reason = next((reason for reason, (_, least) in COUNTERS.items() if totals[reason] >= least), None)
        else:
            self.reason = None if self._answered else given
