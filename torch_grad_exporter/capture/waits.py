"""GradientWaits: how long this rank waits, when its own gradients are done, until those of all ranks are reduced.

Under `DistributedDataParallel` a callback that is queued when a backward begins runs when this rank's last gradient is there, and
before the wrapper's own, which waits for the other ranks and the network and writes the means back. From one to the other is
the wait. Host clock, so on the CPU only: on CUDA the host does not wait there.

A reentrant checkpoint runs backwards within the backward, and the wrapper may wait in one of those. Backwards are numbered
by autograd: where two in a row have consecutive numbers, none ran within the first. A wait is known only where that was so
lately.
"""

from __future__ import annotations

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Hooks
from torch_grad_exporter.torch_compat.autograd import after_backward


class GradientWaits:
    """Times the waits of sampled rounds and enters them into the clock. Belongs to the thread of the backward."""

    def __init__(self, clock: StepClock, hooks: Hooks) -> None:
        self._clock = clock
        self._hook: GuardedHook = hooks.guarded("backward_hook", self._gradients_are_there)
        self._latest: int | None = None
        self._alone = False
        self._since: float | None = None
        self._counted: int | None = None
        """The last round that was counted."""

    def saw(self, task: int) -> None:
        """Another backward has begun; called for each, also those of rounds that are not sampled."""
        if self._latest is not None:
            self._alone = task == self._latest + 1
        self._latest = task
        self._since = None

    def missed(self) -> None:
        """There were backwards that were not seen."""
        self._latest = None

    def begin(self) -> None:
        """The backward that has just begun, of a sampled round, is one that reduces."""
        self._clock.gradient_waits.expected()
        if self._alone:
            after_backward(self._hook)

    def _gradients_are_there(self) -> None:
        self._since = self._clock.clock()

    def end(self, number: int, moment: float) -> None:
        """The backward was over at `moment` of the clock, and the wrapper done with it. `number`: of the round."""
        since, self._since = self._since, None
        if since is None:
            return
        self._clock.gradient_waits.waited(moment - since, new_round=self._counted != number)
        self._counted = number
