"""Trigger: one call of `exporter.on`, its cause, and what may go wrong in the user's code."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.actions.act.event import Action, Timing
from torch_grad_exporter.actions.act.measurements import Measurements, near
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.windows import ConditionError
from torch_grad_exporter.actions.users_code import contained, without_addresses
from torch_grad_exporter.errors import LIMIT, ErrorLog, Guard, raised_by_handler
from torch_grad_exporter.rules import RULES, Problem, Rule, Values
from torch_grad_exporter.rules.catalogue import promql_only
from torch_grad_exporter.rules.episodes import Episode

SOURCE = "action"
"""Of the failures of actions and conditions."""


Condition = Callable[[Measurements], object]

FOR, COOLDOWN = 0.0, 600.0
"""Seconds, where `on` is given none."""


@dataclass(eq=False, slots=True)
class Trigger:
    """What is asked for: a rule or a condition, and the action. `counted`: the action's name in metrics.

    `conditions`, `actions`: the guards of the user's code, which switch it off after ten failures in a row.
    """

    name: str
    rule: str | None
    condition: Condition | None
    action: Action | StepAction
    timing: Timing
    measurements: Measurements
    counted: str
    conditions: Guard
    actions: Guard
    wrong: bool = False
    """Whether the condition asks for what can never be there."""
    removed: bool = False

    def acted(self, now: float) -> None:
        """It happens: the cooldown begins, unless the action knows by itself when it is due again."""
        if not self.by_itself:
            self.timing.acted(now)

    @property
    def by_itself(self) -> bool:
        """Whether the action is its own cause."""
        return isinstance(self.action, StepAction) and self.condition == self.action.holds

    @property
    def off(self) -> bool:
        """Whether it is removed or switched off."""
        return self.removed or self.wrong or self.conditions.off or self.actions.off

    @property
    def idle(self) -> bool:
        """Whether the action can no longer happen. With a condition that is switched off it can, where another rank has a cause."""
        return self.removed or self.actions.off

    def judge(self, values: Values, now: float) -> bool:
        """Whether the condition holds with these values; what it raises is raised. NaN, of what is not known yet, does not."""
        self.measurements.begin(values, now)
        if self.condition is None:
            return False
        found = contained(self.condition, self.measurements)
        return bool(found) and not (isinstance(found, float) and math.isnan(found))


@dataclass(frozen=True, slots=True)
class RuleProblems:
    """What the problems of a rule come to: the numbers that are wrong, by layer."""

    problems: tuple[Problem, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: str, active: Mapping[tuple[str, str, str | None], Episode]) -> RuleProblems:
        """Those of a rule among all that have begun."""
        problems = tuple(episode.problem for (alert, _, _), episode in active.items() if alert == rule)
        return cls(problems, {one.layer or "": one.value for one in problems if one.value is not None})


class Failures:
    """Counts what the user's code raises, and logs it once for each condition and action, with its name."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._told: set[object] = set()

    def guard(self, what: str) -> Guard:
        """A guard that switches off what is called so."""
        one = object()  # several may be called the same
        gave_up = functools.partial(self._errors.gave_up, f"{SOURCE} ({what})")
        return Guard(lambda error: self.failed(what, error, one), limit=LIMIT, gave_up=gave_up)

    def failed(self, what: str, error: Exception, one: object = None) -> None:
        """Counts a failure of what is called so. `one`: which it is, where several may be. Raises what is none of ours."""
        if raised_by_handler(error):
            raise error
        if (one or what) in self._told:
            self._errors.count(SOURCE, error)
            return
        self._told.add(one or what)
        reason = f"{type(error).__name__}: {without_addresses(str(error))}"
        self._errors.tell(SOURCE, RuntimeError(f"{what}: {reason}; further failures of it are only counted"))

    def wrong(self, what: str, error: ConditionError) -> None:
        """Counts a condition that can never be judged."""
        self._errors.tell(SOURCE, RuntimeError(f"{what}: {error}; it is switched off"))


def cause(what: object, rules: tuple[Rule, ...]) -> tuple[Rule | None, Condition | None]:
    """The rule or the condition. Raises `TypeError` or `ValueError` where it is neither."""
    if isinstance(what, str):
        known = {rule.name: rule for rule in rules}
        if what in promql_only():
            raise ValueError(
                f"what={what!r}: only Prometheus judges this rule; use a condition, such as "
                f'lambda m: m.last("torch_grad_global_norm") > 10, or one of the rules {", ".join(known)}'
            )
        if what not in known:
            raise ValueError(f"what={what!r}: there is no such rule{near(what, known)}; docs/runbook.md has them all")
        return known[what], None
    if isinstance(what, StepAction):
        raise TypeError(f"what={what!r}: an action is no cause of another one")
    if not callable(what):
        raise TypeError(f"what={what!r}: expected the name of a rule, or a callable that takes the measurements")
    _check_called("what", what)
    return None, what


def asked(what: object, action: object, timing: Timing) -> tuple[Rule | None, Condition | None, Action | StepAction]:
    """The rule or the condition, and the action, of a call of `on`. Raises `TypeError` or `ValueError` where they are none."""
    if action is None and isinstance(what, StepAction) and what.has_cause:
        for name, value, default in (("for_", timing.for_, FOR), ("cooldown", timing.cooldown, COOLDOWN)):
            if value != default:
                raise ValueError(f"{name}={value:g}: {what!r} knows by itself when it is due; leave {name} out")
        return None, what.holds, what
    if action is None:
        raise TypeError(f"action=None: what is to be done on {what!r}? Only Freeze(...) needs no cause: exporter.on(Freeze(...))")
    rule, condition = cause(what, rules_now())
    return rule, condition, checked(action)


def _check_called(name: str, function: object) -> None:
    """Raises `TypeError` where a call would run nothing of the function yet."""
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(bare) or kind(getattr(type(bare), "__call__", None)) for kind in kinds):  # noqa: B004 - it is looked at, not asked for
        raise TypeError(f"{name}={function!r}: expected a plain function; a call of this one would run nothing of it")


def seconds(name: str, value: object) -> float:
    """A time. Raises `TypeError` or `ValueError` where it is none."""
    expected = "expected seconds, a number that is not below 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: {expected}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: {expected}")
    return float(value)


def checked(action: object) -> Action | StepAction:
    """An action. Raises `TypeError` where it is none."""
    if isinstance(action, type) and issubclass(action, StepAction):
        raise TypeError(f"action={action.__name__}: expected an action, not its class; write {action.__name__}(...)")
    if not isinstance(action, StepAction) and not callable(action):
        raise TypeError(f"action={action!r}: expected a callable that takes an Event, or a built-in action such as Stop()")
    _check_called("action", action)
    return action


def name_of(function: object) -> str:
    """What a callable is called."""
    while isinstance(function, functools.partial):
        function = function.func
    found = str(getattr(function, "__name__", type(function).__name__))
    return "lambda" if found == "<lambda>" else found


def rules_now() -> tuple[Rule, ...]:
    """Those that are registered."""
    return tuple(RULES)
