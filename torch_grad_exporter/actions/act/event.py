"""What an action is told, and when it is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.rules import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """That a rule or a condition holds.

    `name`: the one that `on` was given, else that of the rule or of the condition's function. `alert`: the rule, `None` of a
    condition. `values`: of a condition what it has read, by the call that read it, such as `last(torch_train_loss)`; of a rule the
    number that is wrong, by layer, `""` where it is of no layer. `problems`: what the rule has found. `step`: optimizer steps until
    now. `time`: Unix time.
    """

    name: str
    alert: str | None
    values: Mapping[str, float]
    step: int
    time: float
    problems: tuple[Problem, ...] = ()


Action = Callable[[Event], object]


@dataclass(slots=True)
class Timing:
    """When an action is due: once its cause has held for `for_` seconds without a break, `cooldown` seconds after the last time."""

    for_: float
    cooldown: float
    _since: float | None = field(init=False, default=None)
    _acted: float = field(init=False, default=-math.inf)

    def due(self, holds: bool, now: float) -> bool:
        """Whether it is, at an evaluation at this time. Changes nothing but since when the cause holds."""
        if not holds:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.for_ and now - self._acted >= self.cooldown

    def acted(self, now: float) -> None:
        """It happens: the cooldown begins."""
        self._acted = now
