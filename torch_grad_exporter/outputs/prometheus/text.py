"""Families as Prometheus text 0.0.4 and OpenMetrics 1.0.0.

The text before each value (`name{run="…",layer="…"} `) changes only when the label rows do, so it is prepared once per metric and
`LabelRows` object; a scrape only formats the numbers. The lines of series are equal in both formats except for exemplars, which
only OpenMetrics has; the comment lines differ.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from itertools import compress
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.families import Family, LabelRows, Spec, by_spec
from torch_grad_exporter.outputs.prometheus import series
from torch_grad_exporter.outputs.prometheus.protobuf import ProtobufRenderer


class Format(enum.Enum):
    """The formats of a scrape; the value is the content type. Of several that a client likes equally well it gets the last."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"


_NON_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class Renderer:
    """Renders families, each series with the constant labels first and the family's own labels, which win, after.

    Every metric's lines are together, even if they come from several families. A metric without a present row does not appear.
    Invalid Unicode is shown as `?`. `only_on` and `start`: see `ProtobufRenderer`, which renders that format.
    """

    def __init__(self, constant_labels: Mapping[str, str], *, only_on: Spec | None = None, start: float | None = None) -> None:
        self._constant_labels = dict(constant_labels)
        self._only_on = only_on
        self._protobuf = ProtobufRenderer(constant_labels, only_on=only_on, start=start)
        self._prepared: WeakKeyDictionary[LabelRows, dict[Spec, list[str]]] = WeakKeyDictionary()

    def render(self, families: Iterable[Family], form: Format) -> bytes:
        """Return the body of a scrape. Raises what iterating `families` raises, and on arrays that do not fit their rows."""
        if form is Format.PROTOBUF:
            return self._protobuf.render(families)
        blocks = []
        for spec, members in by_spec(families).items():
            if lines := "".join(self._lines(family, form) for family in members):
                blocks.append(f"{_header(spec, form)}{lines}\n".encode("utf-8", "replace"))
        return b"".join([*blocks, b"# EOF\n" if form is Format.OPENMETRICS else b""])

    def _lines(self, family: Family, form: Format) -> str:
        prefixes = self._prefixes(family.spec, family.labels)
        if family.present is not None:
            mask = np.repeat(family.present, len(series.columns(family.spec)))
            prefixes = list(compress(prefixes, mask.tolist()))
        values = series.table(family).ravel()
        numbers = list(map(repr, values.tolist()))
        for place in np.flatnonzero(~np.isfinite(values)).tolist():
            numbers[place] = _NON_FINITE[numbers[place]]
        if form is Format.OPENMETRICS:
            for place, of in series.exemplars(family).items():  # after a bucket's number
                trace, span = of.trace_id.hex(), of.span_id.hex()
                numbers[place] += f' # {{trace_id="{trace}",span_id="{span}"}} {of.value!r} {of.at!r}'
        parts = [""] * (2 * len(numbers))
        parts[0::2] = prefixes
        parts[1::2] = numbers
        return "".join(parts)

    def _prefixes(self, spec: Spec, labels: LabelRows) -> list[str]:
        prepared = self._prepared.setdefault(labels, {})
        if spec in prepared:
            return prepared[spec]
        constant = [_pair(*label) for label in series.shared_labels(spec, self._constant_labels, self._only_on).items()]
        frames = {labelled: _frames(spec, labelled=labelled) for labelled in (False, True)}
        prefixes: list[str] = []
        for row in labels.rows:
            # An empty value is equal to no label, for Prometheus and for a reader.
            own = [_pair(name, value) for name, value in zip(spec.labels, row, strict=True) if value]
            pairs = ",".join((*constant, *own))
            prefixes += [before + pairs + after for before, after in frames[bool(pairs)]]
        prepared[spec] = prefixes
        return prefixes


def _frames(spec: Spec, *, labelled: bool) -> list[tuple[str, str]]:
    """Return the texts before and after the labels of a row, per column.

    Each line begins with the line break that ends the one before: one piece less to join per series.
    """
    frames = []
    for suffix, le in series.columns(spec):
        bucket = "" if le is None else _pair("le", le)
        opening, closing = ("{", "} ") if labelled or bucket else ("", " ")
        comma = "," if labelled and bucket else ""
        frames.append((f"\n{spec.name}{suffix}{opening}", f"{comma}{bucket}{closing}"))
    return frames


def _pair(name: str, value: str) -> str:
    return f'{name}="{_escape(value, quotes=True)}"'


def _escape(text: str, *, quotes: bool) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _header(spec: Spec, form: Format) -> str:
    openmetrics = form is Format.OPENMETRICS
    name = series.family_name(spec) if openmetrics else spec.name
    # OpenMetrics wants quotes in HELP escaped; in the older format a backslash before a quote would be shown.
    help_line = f"# HELP {name} {_escape(spec.help, quotes=openmetrics)}\n"
    unit = series.unit(spec) if openmetrics else ""
    return f"{help_line}# TYPE {name} {spec.kind.value}" + (f"\n# UNIT {name} {unit}" if unit else "")
