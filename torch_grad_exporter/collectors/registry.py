"""Which collectors there are: each declares its name, its metrics and how it is made, and is found by registration."""

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
    """What yields families at a scrape. It touches no tensor and makes no CUDA call.

    One that does something of its own has a `start()` as well, and one that holds something a `close()`.
    """

    def collect(self) -> Iterable[Family]:
        """The families as of now. May raise: that costs this collector alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Declaration:
    """A collector: its name, which is also that in the option `collectors`, its metrics by section, and what makes it.

    `make` may raise: that costs this collector alone. `place`: the lowest comes first in a scrape, in messages and in docs/metrics.md; of equals, the one that was declared first.
    `reads_devices`: whether it shows `CollectorContext.memory`, which the training thread then has to read. `judged`: whether the
    package's rules read what it shows; else it is left out of most scrapes by which the exporter only judges.
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
        """Adds a collector: exporters that are started from now on have it, until the result is closed; those that run keep it.

        Raises `ValueError` for a wrong name, and where another collector has the name or one of the metrics. `replace`: until it is
        closed, it takes the place of the collector of its name.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", declaration.name):
            raise ValueError(f"{declaration.name!r} is no name of a collector; use lower case and underscores")
        if declaration.name in self.names and not replace:
            raise ValueError(f"there is a collector {declaration.name!r} already; choose another name")
        _catalogue((*(one for one in self if one.name != declaration.name), declaration))
        self._declared = (*self._declared, declaration)
        registration = contextlib.ExitStack()
        registration.callback(self._take_out, declaration)
        return registration

    def _take_out(self, declaration: Declaration) -> None:
        self._declared = tuple(one for one in self._declared if one is not declaration)

    def __iter__(self) -> Iterator[Declaration]:
        latest = {declaration.name: declaration for declaration in self._declared}
        return iter(sorted(latest.values(), key=lambda declaration: declaration.place))

    @property
    def names(self) -> tuple[str, ...]:
        """All of them; each can be switched off, and on."""
        return tuple(declaration.name for declaration in self)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources under which their failures are counted."""
        return tuple(source_of(name) for name in self.names)

    @property
    def catalogue(self) -> Catalogue:
        """All metrics that they declare."""
        return _catalogue(self)

    def reads_devices(self, chosen: Collection[str]) -> bool:
        """Whether one of the chosen does."""
        return any(declaration.reads_devices for declaration in self if declaration.name in chosen)

    @property
    def not_judged(self) -> frozenset[str]:
        """Those of which the package's rules read nothing."""
        return frozenset(declaration.name for declaration in self if not declaration.judged)

    def made(self, chosen: Collection[str], context: CollectorContext) -> dict[str, Collector]:
        """The chosen ones by name; one that cannot be made costs only itself."""
        guards = {one: context.errors.boundary(source_of(one.name), limit=None) for one in self if one.name in chosen}
        made = {one.name: guard.result(one.make, context) for one, guard in guards.items()}
        return {name: collector for name, collector in made.items() if collector is not None}


def source_of(name: str) -> str:
    """The source under which a collector's failures are counted."""
    return f"{SOURCE}_{name}"


def _catalogue(declarations: Iterable[Declaration]) -> Catalogue:
    return Catalogue(section for declaration in declarations for section in declaration.sections)
