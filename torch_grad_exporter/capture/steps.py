"""StepHooks: what the hooks of optimizers, and the steps that the user reports, mean for the clock and the rounds."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound, Lost
from torch_grad_exporter.capture.backward import BackwardHooks
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.counted_rounds import CountedRounds, Regular
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.forwards import ForwardHooks
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.observations import Observations
from torch_grad_exporter.capture.progress import OPTIMIZER, OUTSIDE, StepClock, TrainingThread
from torch_grad_exporter.capture.reader import GradientReader, StepView
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks, Removable
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers, positions_in
from torch_grad_exporter.store.records import Mailbox, Observed
from torch_grad_exporter.torch_compat.autograd import at_end_of_backward, capturing_graph, graph_task
from torch_grad_exporter.torch_compat.optimizers import LossScale, called_from_step, others_follow, remove_step_hooks

# Learning rates and the loss scale are read in sampled rounds, and otherwise this often at most.
SETTINGS_SECONDS = 0.5

# Parameter groups of an optimizer whose learning rates are shown.
GROUPS = 64

REDUCED = "gradients were written after the backward, as by an all-reduce; norms are those at the step, after clipping"


class StepHooks:
    """Receives the steps of all optimizers of the process. Belongs to the training thread.

    After the backward a sampled round's gradients were read as they were; at the step it is measured what the optimizer sees, after
    clipping. Where no backward is seen all of it is read here.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        clock: StepClock,
        cost: SampleCost,
        schedule: SamplingSchedule,
        mailbox: Mailbox,
        reader: GradientReader,
        hooks: Hooks,
        loss_scale: LossScale,
        inspections: Inspections,
        rounds: RoundTracker,
        detection: BackwardDetection,
        counted: CountedRounds,
        forwards: ForwardHooks,
        backward: BackwardHooks,
        observations: Observations,
        thread: TrainingThread,
        errors: ErrorLog,
        periodic: Callable[[], object] | None,
    ) -> None:
        self._index, self._optimizers, self._clock, self._cost, self._schedule = index, optimizers, clock, cost, schedule
        self._mailbox, self._reader, self._hooks, self._loss_scale = mailbox, reader, hooks, loss_scale
        self._inspections, self._rounds, self._detection = inspections, rounds, detection
        self._counted, self._forwards, self._backward = counted, forwards, backward
        self._observations, self._thread, self._periodic = observations, thread, periodic
        self._reading_early = errors.boundary("capture", "gradients at a step")
        self._reading_again = errors.boundary("capture", "gradients as the optimizer sees them")
        self._end_hook = hooks.guarded("optimizer_hook", self._backward_ended)
        self._look_hook = hooks.guarded("optimizer_hook", self._look)
        self._over_hook = hooks.guarded("optimizer_hook", self._counting_over)
        self._late_hook: Removable | None = None
        self._found_inf: dict[int, torch.Tensor | None] = {}  # by optimizer, a scaler's answer for the step under way
        self._emptied: set[int] = set()  # optimizers whose gradients `clip=` removes for the step under way
        self._nested: set[int] = set()  # optimizers whose step calls that of their base class, which PyTorch reports as two
        self._within: tuple[int, set[int]] = -1, set()  # the last backward in which optimizers have stepped, and which
        self._hooked = False  # an optimizer's hook has reported a step since the user last did
        self._settings_read = float("-inf")  # when learning rates were, by the clock

    # Before a step

    def began(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, over: bool = False) -> None:
        """Before any optimizer's step. `args` begin with the optimizer itself.

        `over`: it was not seen until it was over, so that no other hook is to be waited for.
        """
        rounds, clock = self._rounds, self._clock
        if not self._optimizers.concerns(optimizer):
            if self._thread.may_be_here():  # on another thread it has nothing to do with these models
                self._foreign_step()
            return
        self._counted.settle()
        task = graph_task()
        inside = frozenset(rounds.stepping) if clock.phases.stepping else frozenset()
        number = self._optimizers.number(optimizer, within_backward=task != -1, inside=inside)
        if number is None:
            self._foreign_step()
            return
        start = clock.clock()
        if task != -1:
            self._began_within_backward(task, number, optimizer)
            clock.spent(start)
            return
        self._thread.ident = threading.get_ident()
        if clock.phases.stepping and not called_from_step(sys._getframe(3)):
            clock.phases.enter(OUTSIDE, step_over=True)
            rounds.step_abandoned()
        if clock.phases.stepping and number in rounds.stepping:  # `step` has called `super().step()`
            self._nested.add(number)
            self._inner_step(StepView(number, found_inf=self._found_inf.get(number)))
            return
        clock.phases.enter(OPTIMIZER, start)
        sampled = rounds.current.sampled
        if sampled:
            self._loss_scale.search(sys._getframe(1))
        if sampled and not over and others_follow(self._hooks.step_numbers[0], optimizer):
            self._late_hook = optimizer.register_step_pre_hook(self._look_hook)
        else:
            self._look(optimizer, args, kwargs)
        clock.spent(start)

    def _foreign_step(self) -> None:
        """An optimizer that owns nothing of the model steps; inside the step of one that does, it works for that one."""
        rounds = self._rounds
        if not (self._clock.phases.stepping and rounds.stepping):
            rounds.current.foreign = True
        elif self._detection.sees_backwards:
            for optimizer in rounds.stepping & rounds.closures:  # about to use what the closure left
                self._before_step(StepView(optimizer, found_inf=self._found_inf.get(optimizer)))

    def _began_within_backward(self, task: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps before the backward is over, and uses up gradients: all that do so are one step, at its end."""
        self._backward.stepped_within()
        self._rounds.stepping.add(number)
        current = self._rounds.current
        current.read.add(number)
        if current.sampled:
            self._cost.of(self._read_early, current, positions_in(current.table, optimizer))
        if task != self._within[0]:
            self._within = task, set()
            at_end_of_backward(self._end_hook)
        self._within[1].add(number)

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Right before an optimizer's step, when no other hook will change the gradients any more."""
        number = self._optimizers.number(optimizer)
        if number is None:
            return
        # A scaler sets both for the time of a fused optimizer's step.
        found_inf = getattr(optimizer, "found_inf", None)
        found_inf = found_inf if isinstance(found_inf, torch.Tensor) else None
        grad_scale = None if found_inf is None else _grad_scale(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        sampled = self._rounds.current.sampled
        if self._backward.task != -1:
            self._backward.abandon()
        self._rounds.stepping.add(number)
        self._found_inf[number] = found_inf
        if closure is not None:  # the backward is yet to come, within the step
            self._rounds.closures.add(number)
        else:
            self._before_step(StepView(number, grad_scale, found_inf))
        if sampled:
            self._inspections.tell(Inspection.step_began, self._rounds.current, number)

    def clipped(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor | bool | None) -> None:
        """`clip=` has clipped gradients right before a step.

        `skip`: whether the optimizer is to skip it, on its device; true if its gradients are about to be removed, None if it takes
        the step.
        """
        number, clock = self._optimizers.number(optimizer), self._clock
        if skip is None and number in self._emptied:  # by an earlier evaluation of the closure
            self._emptied.discard(number)
            self._found_inf[number] = None
        if number is None or not (self._rounds.current.sampled or skip is not None):
            return
        start = clock.clock()
        if isinstance(skip, bool):
            if self._counted.counting is not None:  # where rounds are only counted, each step counts as taken
                self.began(optimizer, (optimizer,), {}, over=True)
            self._emptied.add(number)
            skip = torch.ones((), device="cpu")
        if skip is not None:
            self._found_inf[number] = skip
        current, seen = self._rounds.current, StepView(number, _grad_scale(optimizer), skip)
        looked = number in current.read if self._detection.sees_backwards else current.sampled and current.captured
        if looked and current.open and number not in self._rounds.closures:
            self._cost.of(self._reading_again, self._reader.read_again, current, seen, ours=True)
        clock.spent(start)
        if self._rounds.current.sampled:
            self._inspections.tell(Inspection.step_clipped, self._rounds.current, number)

    # What is read of a sampled round where an optimizer uses its gradients. Its time is charged to the sample.

    def _before_step(self, seen: StepView) -> None:
        """An optimizer is about to use these gradients, or has used those that a closure has left."""
        if not self._detection.sees_backwards:
            self._cost.of(self._read, seen)
            return
        current = self._rounds.current
        if current.sampled and current.fired and current.left is not None and self._reduced_since(seen):
            return
        if current.behind:
            self._cost.of(self._backward.catch_up)
        # Where the model's gradients were copied to those of another optimizer, it is not known what that one saw.
        copied = seen.optimizer in self._optimizers.copying or (current.foreign and not self._optimizers.reporting)
        if current.open and seen.optimizer not in current.read and not copied:
            current.read.add(seen.optimizer)
            self._cost.of(self._reading_again, self._reader.read_again, current, seen)

    def _inner_step(self, seen: StepView) -> None:
        """A step calls that of its base class: it may have reduced gradients before, as Horovod's does."""
        current = self._rounds.current
        if not (current.sampled and current.fired) or seen.optimizer in self._rounds.closures:
            return
        if self._detection.sees_backwards:
            self._reduced_since(seen)
        elif self._untouched(seen.optimizer) is False:
            current.early, current.early_fired = [], set()  # what was read before is no longer what is used
            self._cost.of(self._read, seen)

    def _reduced_since(self, seen: StepView) -> bool:
        """Return whether the loop reduced gradients after the backward; then what the optimizer will use is read instead.

        With `ranks="first"` and no wrapper the loop makes the gradients of ranks equal, in hooks within the backward or after it.
        In the second case gradients are written to, or replaced, before the step. Clipping writes to them, too: which of the two
        it was cannot be seen, so either counts. The first sample waits for its step; if nothing was written, later ones are read
        where the backward ends.
        """
        untouched, current = self._untouched(seen.optimizer), self._rounds.current
        if untouched and current.behind:
            self._cost.of(self._backward.read)
        if untouched is not False or seen.optimizer == self._optimizers.manual_number:
            return False  # a step that the user reports is over: its gradients may be cleared
        self._detection.read_at_steps(REDUCED)
        self._cost.of(self._read, seen)
        return True

    def _untouched(self, optimizer: int) -> bool | None:
        """Return whether an optimizer's gradients are as the backward left them; None where the loop reduces none by itself."""
        current = self._rounds.current
        if current.left is None or not self._backward.reduces_by_itself:
            return None
        untouched = current.left.moved().isdisjoint(self._optimizers.positions_of(current.table, optimizer))
        self._detection.trusts_backwards |= untouched
        return untouched

    def _read_early(self, current: ArmedRound, positions: list[int]) -> bool:
        read = self._reading_early(self._reader.read_early, current, positions)
        if not read:
            self._rounds.withdraw(Lost.FAILED)
        return read

    def _read(self, seen: StepView) -> None:
        """Read what the optimizer is about to use, where no backward is seen."""
        self._rounds.step_to_be_read(seen.optimizer)
        current = self._rounds.current
        if not current.sampled or capturing_graph():
            return
        self._forwards.look_for_ranks()
        if not current.captured:
            current.table = self._index.refresh()
        if not self._read_early(current, self._optimizers.positions_of(current.table, seen.optimizer)):
            return
        current.fired |= current.early_fired
        if current.fired:
            if self._backward.reduces_by_itself:
                current.left = GradientVersions.of(current.table.tracked)
            self._backward.read(seen)

    # After a step

    def ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After any optimizer's step."""
        number = self._optimizers.number(optimizer)  # None of a foreign one, and then nothing is changed
        if number is not None and graph_task() == -1:
            self._hooked = True
            self._ended(number)
            hook, self._late_hook = self._late_hook, None
            if hook is not None:
                hook.remove()

    def _backward_ended(self) -> None:
        self._hooked = True
        for number in sorted(self._within[1]):
            self._ended(number)

    def _counting_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Rounds are no longer only counted: after a step that was counted, or that of another optimizer."""
        counting = self._counted.counting
        counted = counting is not None and optimizer is counting.optimizer()
        self._counted.settle(after_step=counted)
        if not counted:
            # No hook announced the step, so that its beginning was not seen.
            self.began(optimizer, (), {}, over=True)
            self.ended(optimizer, (), {})

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done; count it unless an optimizer's hook has said so already. `number`: of the step.

        Raises `TypeError` where that is not a whole number, and then changes nothing.
        """
        number = None if number is None else operator.index(number)
        self._counted.settle()
        if not (self._hooked and self._rounds.current.stepped):
            optimizer = self._optimizers.manual()
            self._clock.phases.enter(OPTIMIZER)
            if self._backward.task != -1:
                self._backward.abandon()
            self._rounds.stepping.add(optimizer)
            self._before_step(StepView(optimizer))
            self._ended(optimizer)
        self._hooked = False
        if number is not None:
            self._rounds.current.number = number

    def _ended(self, number: int) -> None:
        """The optimizer of this number has stepped, however that became known."""
        rounds, clock, sees_backwards = self._rounds, self._clock, self._detection.sees_backwards
        start = clock.clock()
        clock.forward_came = False
        sampled, lent = rounds.current.sampled, self._schedule.lending
        if number not in rounds.stepping:  # `step` has called `super().step()`, which has reported before
            return
        found_inf = self._found_inf.pop(number, None)
        seen, late = StepView(number, found_inf=found_inf), number in rounds.closures
        if found_inf is None and not rounds.fused.undecided:
            clock.step_done(number)
        else:
            rounds.fused.stepped(rounds.current.number, number, found_inf)
        if number in self._emptied:  # other steps of it give no answer
            self._emptied.discard(number)
            rounds.fused.answering.discard(number)
        if late and not sees_backwards:
            self._before_step(seen)
        if rounds.step_taken(number):
            self._detection.step_without_backward()
        if late and sees_backwards:
            self._before_step(seen)
        first = not rounds.current.stepped
        rounds.step_ended(number, every=not self._detection.sees_backwards)
        self._inspections.tell(Inspection.step_over, sampled=rounds.next_is_sampled)
        self._detection.arm(sampled=rounds.next_is_sampled)
        if sampled:
            self._inspections.tell(Inspection.step_ended, rounds.current, number, found_inf)
        if sampled or start - self._settings_read > SETTINGS_SECONDS:
            self._read_settings()
        if first and self._backward.returned:
            self._backward.returned = False
            self._inspections.tell(Inspection.round_stepped)
        if self._periodic is not None:
            self._periodic()
        seconds, own = clock.step_ended(start, first_of_round=first, traced=sampled, lent=lent)
        if first:
            self._schedule.stepped(None if seconds is None else seconds - own, own, sampled=sampled)
            self._counted.round_over(self._regular_optimizer, self._over_hook)

    def _read_settings(self) -> None:
        """Hand over learning rates and the loss scale."""
        self._settings_read, step = self._clock.clock(), self._clock.number
        # Those that share a number step within the backward, one per parameter; the first stands for them.
        for number, optimizer in dict(reversed(self._optimizers.numbered())).items():
            for group, settings in enumerate(optimizer.param_groups[:GROUPS]):
                rate, labels = settings.get("lr"), (self._optimizers.names[number], str(group))
                if type(rate) is float:
                    self._mailbox.append(Observed("learning_rate", rate, labels, step))
                elif rate is not None:
                    self._observations.post("learning_rate", rate, labels, step)
        scale = self._loss_scale.value
        if scale is not None:
            self._observations.post("loss_scale", scale)

    def _regular_optimizer(self) -> Regular | None:
        """Return the only optimizer, if its round is over and the next ones may be taken for the same as all recent ones."""
        rounds, optimizers, detection, current = self._rounds, self._optimizers, self._detection, self._rounds.current
        busy = rounds.stepping or rounds.closures or current.open or self._backward.task != -1
        # FSDP2 with parameters on the host would wait for a hook; an answer may say that a step did not take place.
        if busy or not detection.by_nodes or detection.nodes.frozen_at_times or rounds.fused.undecided:
            return None
        known = optimizers.numbered()
        if len(known) != 1 or {known[0][0]} != current.stepped or not current.backwards or optimizers.has_tools:
            return None
        special = optimizers.copying | rounds.fused.answering | self._nested
        repeats = rounds.pattern.repeats(current.models, current.stepped, current.backwards)
        return known[0] if repeats and current.stepped.isdisjoint(special) else None

    # The end

    def close(self, *, failed: bool) -> None:
        """End the counting, and remove the hook of a single step; idempotent. `failed`: an exception has ended the training."""
        self._counted.settle(over=not failed)
        hook, self._late_hook = self._late_hook, None
        remove_step_hooks([] if hook is None else [hook])


def _grad_scale(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None
