"""Trigger: one call of `exporter.on`, which joins a rule or a condition with an action."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_grad_exporter.actions.act.measurements import Measurements
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.arguments import check_number, near, shown
from torch_grad_exporter.errors import Guard, contained
from torch_grad_exporter.rules import RULES, Problem, Rule, Values
from torch_grad_exporter.rules.catalogue import promql_only

FOR, COOLDOWN = 0.0, 600.0  # the defaults of `on`, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A rule or a condition that holds.

    Attributes:
        name: The one that `on` was given, else that of the rule or of the condition's function.
        alert: The rule, None for a condition.
        values: For a condition what it has read, by the call that read it, such as `last(torch_train_loss)`. For a rule
            the number that is wrong, by layer, `""` without a layer.
        step: Optimizer steps so far.
        time: Unix time.
        problems: What is wrong by the rule.
    """

    name: str
    alert: str | None
    values: Mapping[str, float]
    step: int
    time: float
    problems: tuple[Problem, ...] = ()


Action = Callable[[Event], object]
Condition = Callable[[Measurements], object]


@dataclass(slots=True)
class Timing:
    """When an action is due: once its cause has held for `for_` seconds without a break, `cooldown` seconds after the last time."""

    for_: float
    cooldown: float
    _since: float | None = field(init=False, default=None)
    _acted: float = field(init=False, default=-math.inf)

    @classmethod
    def of(cls, for_: object, cooldown: object) -> Timing:
        """Return the timing of these arguments of `on`. Raises `TypeError` or `ValueError` if one is wrong."""
        return cls(
            check_number(f"for_={shown(for_)}", for_, what="seconds", example=30),
            check_number(f"cooldown={shown(cooldown)}", cooldown, what="seconds", example=COOLDOWN),
        )

    def due(self, holds: bool, now: float) -> bool:
        """Return whether it is due at an evaluation now. Changes only since when the cause holds."""
        if not holds:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.for_ and not self.cooling(now)

    def cooling(self, now: float) -> bool:
        """Return whether it has acted less than `cooldown` seconds ago."""
        return now - self._acted < self.cooldown

    def acted(self, now: float) -> None:
        """Begin the cooldown."""
        self._acted = now


@dataclass(eq=False, slots=True, kw_only=True)
class Trigger:
    """A rule or a condition, and the action.

    Attributes:
        label: The action's name in metrics.
        condition_guard: Disables the condition after ten failures in a row.
        action_guard: The same for the action.
        judged: Whether this rank judges it: what changes weights is judged on rank 0 alone.
        wrong: Whether the condition asks for what can never be there.
        ended: Whether it was removed, or this rank has missed the step, so that it may differ from others.
    """

    name: str
    rule: str | None
    condition: Condition | None
    action: Action | StepAction
    timing: Timing
    measurements: Measurements
    label: str
    condition_guard: Guard
    action_guard: Guard
    judged: bool = True
    wrong: bool = False
    ended: bool = False

    @property
    def off(self) -> bool:
        """Whether it is removed or disabled."""
        return self.idle or self.wrong or self.condition_guard.off

    @property
    def idle(self) -> bool:
        """Whether the action can no longer happen. Without its condition it still can, when another rank has a cause."""
        return self.ended or self.action_guard.off

    def holds(self, values: Values, now: float) -> bool:
        """Return whether the condition holds with these values. Raises what it raises. NaN, which is unknown, does not hold."""
        if self.condition is None:  # the action knows by itself
            return True
        self.measurements.begin(values, now)
        result = contained(self.condition, self.measurements)
        return bool(result) and not (isinstance(result, float) and math.isnan(result))


@dataclass(eq=False, slots=True, kw_only=True)
class StepTrigger(Trigger):
    """A trigger whose action runs at the end of a step.

    Attributes:
        step_guard: The same for what the action does at each step.
        number: Its place in the order of `on`, the same on all ranks.
        what: The action and from which step steps are counted, the same text on all ranks.
        choice: What exactly rank 0 wants to do, None if nothing. On other ranks: not None if they want it.
        pending: Whether it is decided or prepared, and neither done nor refused yet.
    """

    action: StepAction
    step_guard: Guard = field(init=False)
    number: int = field(init=False)
    what: str = field(init=False)
    choice: Any = None
    pending: bool = False

    @property
    def by_itself(self) -> bool:
        """Whether the action is its own cause."""
        return self.rule is None and self.condition is None

    def acted(self, now: float) -> None:
        """Begin the cooldown, unless the action knows by itself when it is due again."""
        if not self.by_itself:
            self.timing.acted(now)


# The arguments of `on`


def cause_and_action(what: object, action: object, timing: Timing) -> tuple[Rule | None, Condition | None, Action | StepAction]:
    """Return the rule or the condition, and the action, of a call of `on`. Raises `TypeError` or `ValueError` if one is wrong."""
    if action is None and isinstance(what, StepAction) and what.has_cause:
        for name, value, default in (("for_", timing.for_, FOR), ("cooldown", timing.cooldown, COOLDOWN)):
            if value != default:
                raise ValueError(f"{name}={value:g}: {what!r} knows by itself when it is due; leave {name} out")
        return None, None, what
    if action is None:
        raise TypeError(
            f"action=None: what is to be done on {what!r}? Only Freeze(...) and Rollback(...) need no cause: "
            "exporter.on(Freeze(...))"
        )
    rule, condition = _cause(what)
    if isinstance(action, type) and issubclass(action, StepAction):
        raise TypeError(f"action={action.__name__}: expected an action, not its class; write {action.__name__}(...)")
    if not isinstance(action, StepAction) and not callable(action):
        raise TypeError(f"action={shown(action)}: expected a callable that takes an Event, or a built-in action such as Stop()")
    _check_function("action", action)
    return rule, condition, action


def _cause(what: object) -> tuple[Rule | None, Condition | None]:
    if isinstance(what, str):
        known = {rule.name: rule for rule in RULES}
        if what in promql_only():
            raise ValueError(
                f"what={what!r}: only Prometheus judges this rule; use a condition, such as "
                f'lambda m: m.last("torch_grad_global_norm") > 10, or one of the rules {", ".join(known)}'
            )
        if what not in known:
            raise ValueError(f"what={what!r}: there is no such rule{near(what, known)}; docs/runbook.md has them all")
        return known[what], None
    if isinstance(what, StepAction):
        raise TypeError(f"what={shown(what)}: an action is not a cause of another one")
    if not callable(what):
        raise TypeError(f"what={shown(what)}: expected the name of a rule, or a callable that takes the measurements")
    _check_function("what", what)
    return None, what


def _check_function(name: str, function: object) -> None:
    """Raise `TypeError` for a function whose call runs nothing yet."""
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(bare) or kind(getattr(type(bare), "__call__", None)) for kind in kinds):  # noqa: B004 - it is looked at, not asked for
        raise TypeError(f"{name}={function!r}: expected a regular function, not a coroutine or generator function")


def name_of(function: object) -> str:
    """Return the name of a callable."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return "lambda" if name == "<lambda>" else name
