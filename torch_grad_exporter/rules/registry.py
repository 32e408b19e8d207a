"""Which rules there are: those of this package, and those that are registered."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from torch_grad_exporter.collectors.registry import Registration
from torch_grad_exporter.rules.declaration import Rule


class Rules:
    """Rules in their order. From any thread."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules: tuple[Rule, ...] = ()
        for rule in rules:
            self.register(rule)

    def register(self, rule: Rule) -> Registration:
        """Adds a rule: exporters that are started from now on judge by it, until the registration is closed.

        Raises `ValueError` where another rule has its name.
        """
        if any(rule.name == other.name for other in self._rules):
            raise ValueError(f"there is a rule {rule.name!r} already; choose another name")
        self._rules = (*self._rules, rule)
        return Registration(functools.partial(self._take_out, rule))

    def _take_out(self, rule: Rule) -> None:
        self._rules = tuple(one for one in self._rules if one is not rule)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)
