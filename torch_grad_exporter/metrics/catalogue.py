"""Declarations of metrics, and the catalogue of all. It names none: each is declared by the collector that shows it.

The names are the product's interface. `docs/metrics.md` and the golden scrape follow the declarations, and a test keeps them in
step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch_grad_exporter.metrics.families import Kind, Spec

# Prometheus' base units in use; a share is a `ratio`, which is not a unit.
UNITS = ("seconds", "bytes", "joules", "watts", "celsius", "hertz")


class Section:
    """Metrics that are documented under one title, in the order of their declaration.

    A metric is declared once, by `gauge`, `counter` or `histogram`, which return its `Spec`. They raise `ValueError` if Prometheus'
    conventions are not kept.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._specs: list[Spec] = []

    def gauge(self, name: str, help_: str, *labels: str, unit: str = "", opt_in: str = "") -> Spec:
        """Declare a value that goes up and down. `opt_in`: the option or collector, off by default, that enables it."""
        return self._declare(Spec(name, Kind.GAUGE, help_, labels, unit, opt_in=opt_in))

    def counter(self, name: str, help_: str, *labels: str, unit: str = "", opt_in: str = "", older: bool = False) -> Spec:
        """Declare a value that only goes up. `older`: it began before the exporter did."""
        return self._declare(Spec(name, Kind.COUNTER, help_, labels, unit, opt_in=opt_in, older=older))

    def histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str, unit: str = "", opt_in: str = "") -> Spec:
        """Declare a distribution, counted in buckets with these upper bounds and one without."""
        return self._declare(Spec(name, Kind.HISTOGRAM, help_, labels, unit, buckets, opt_in))

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All metrics that were declared so far."""
        return tuple(self._specs)

    def _declare(self, spec: Spec) -> Spec:
        _check(spec)
        self._specs.append(spec)
        return spec


def _check(spec: Spec) -> None:
    """Check the conventions for one metric; `Spec` checks `_total` and buckets."""
    wrong = [name for name in (spec.name, *spec.labels) if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
    if wrong or len(set(spec.labels)) < len(spec.labels):
        raise ValueError(f"{spec.name}: names must be lower case with underscores, and labels unique: {wrong or spec.labels}")
    if "le" in spec.labels:
        raise ValueError(f"{spec.name}: the label le belongs to a histogram's buckets")
    last = _family_name(spec).rpartition("_")[2]
    if spec.unit not in ("", *UNITS) or spec.unit != (last if last in UNITS else ""):
        raise ValueError(f"{spec.name}: the unit {spec.unit!r} must be the last word of the name, and one of {', '.join(UNITS)}")
    if not spec.help.endswith("."):
        raise ValueError(f"{spec.name}: the help text must be a sentence")


class Catalogue(Mapping[str, Spec]):
    """All metrics of some sections by name, in the order of declaration. Raises `ValueError` for a duplicate name."""

    def __init__(self, sections: Iterable[Section]) -> None:
        self.sections = tuple(sections)
        self._specs = {spec.name: spec for section in self.sections for spec in section.specs}
        # In OpenMetrics a counter's family is called like the counter without `_total`.
        families: dict[str, Spec] = {}
        for spec in (spec for section in self.sections for spec in section.specs):
            name = _family_name(spec)
            if name in families:
                raise ValueError(f"{spec.name} and {families[name].name} have one name; choose another one")
            families[name] = spec

    def __getitem__(self, name: str) -> Spec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def labels(self) -> frozenset[str]:
        """The names of labels in use, except for the facts of metrics that are called `_info`."""
        return frozenset(label for spec in self.values() if not spec.name.endswith("_info") for label in spec.labels)


def _family_name(spec: Spec) -> str:
    return spec.name.removesuffix("_total")
