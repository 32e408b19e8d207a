"""The registry of collectors: each declares its name, its metrics and how it is made."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.metrics.catalogue import Catalogue, Section
from torch_grad_exporter.metrics.families import Family

SOURCE = "collector"


class Collector(Protocol):
    """A source of families at a scrape. It touches no tensor and makes no CUDA call.

    A collector with threads of its own also has a `start()`, and one that holds resources a `close()`.
    """

    def collect(self) -> Iterable[Family]:
        """Return the families of now. May raise: that costs this collector alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Declaration:
    """The declaration of a collector.

    Attributes:
        name: Also its name in the option `collectors`.
        sections: Its metrics.
        make: Makes it. May raise: that costs this collector alone.
        place: The lowest comes first in a scrape, in messages and in docs/metrics.md; of equals, the one that was declared first.
        reads_devices: Whether it shows `CollectorContext.memory`, which the training thread then has to read.
        judged: Whether the package's rules read its metrics; else most scrapes for rules leave it out.
    """

    name: str
    sections: tuple[Section, ...]
    make: Callable[[CollectorContext], Collector]
    place: int = 90
    reads_devices: bool = False
    judged: bool = True


class Registry:
    """The collectors that are declared, in their order. From any thread."""

    def __init__(self, declarations: Iterable[Declaration] = ()) -> None:
        self._declared: tuple[Declaration, ...] = ()
        for declaration in declarations:
            self.register(declaration)

    def register(self, declaration: Declaration, *, replace: bool = False) -> contextlib.ExitStack:
        """Add a collector to exporters that are started from now on, until the result is closed; those that run keep it.

        Args:
            declaration: Of the collector.
            replace: Whether it replaces the collector of its name until the result is closed.

        Raises:
            ValueError: The name is wrong, or another collector has the name or one of the metrics.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", declaration.name):
            raise ValueError(f"{declaration.name!r} is not a name of a collector; use lower case and underscores")
        if declaration.name in self.names and not replace:
            raise ValueError(f"duplicate collector {declaration.name!r}; choose another name")
        _catalogue((*(other for other in self if other.name != declaration.name), declaration))
        self._declared = (*self._declared, declaration)
        registration = contextlib.ExitStack()
        registration.callback(self._take_out, declaration)
        return registration

    def _take_out(self, declaration: Declaration) -> None:
        self._declared = tuple(other for other in self._declared if other is not declaration)

    def __iter__(self) -> Iterator[Declaration]:
        latest = {declaration.name: declaration for declaration in self._declared}
        return iter(sorted(latest.values(), key=lambda declaration: declaration.place))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all; each can be disabled."""
        return tuple(declaration.name for declaration in self)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources under which failures are counted."""
        return tuple(source_of(name) for name in self.names)

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue of all metrics."""
        return _catalogue(self)

    def reads_devices(self, chosen: Collection[str]) -> bool:
        """Return whether one of the chosen reads devices."""
        return any(declaration.reads_devices for declaration in self if declaration.name in chosen)

    @property
    def not_judged(self) -> frozenset[str]:
        """The names of those whose metrics no rule reads."""
        return frozenset(declaration.name for declaration in self if not declaration.judged)

    def made(self, chosen: Collection[str], context: CollectorContext) -> dict[str, Collector]:
        """Return the chosen ones by name; one that cannot be made costs only itself."""
        made: dict[str, Collector] = {}
        for declaration in self:
            if declaration.name in chosen:
                guard = context.errors.boundary(source_of(declaration.name), limit=None)
                if (collector := guard.result(declaration.make, context)) is not None:
                    made[declaration.name] = collector
        return made


def source_of(name: str) -> str:
    """Return the source under which a collector's failures are counted."""
    return f"{SOURCE}_{name}"


def _catalogue(declarations: Iterable[Declaration]) -> Catalogue:
    return Catalogue(section for declaration in declarations for section in declaration.sections)
