"""Families as Prometheus text 0.0.4 and OpenMetrics 1.0.0.

The text before each value (`name{run="…",layer="…"} `) changes only when the label rows do, so it is prepared once per metric and
`LabelRows` object; a scrape only formats the numbers. The lines of series are equal in both formats except for exemplars, which
only OpenMetrics has; the comment lines differ. Here is also which format a client gets.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter import files
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop
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


class LastValues(BackgroundLoop):
    """The last metrics of a rank as a file for node_exporter's textfile collector, which serves them when the run is over.

    A thread writes `content` when the run ends, since a file system may hang. It begins at the start, since none can begin at the
    end of a program, and first removes the file of an earlier process of the same run and rank, whose values are outdated.
    """

    def __init__(self, path: Path, content: Callable[[], bytes], guard: Guard) -> None:
        self._path, self._content, self._guard = path, content, guard
        self._removed = False
        super().__init__("textfile", self._remove, guard=guard, last=self._write)
        self.wake()

    def _remove(self) -> None:
        self._removed = True
        if self._path.exists():  # a directory that does not exist yet, or cannot, is reported when there is something to write
            self._path.unlink()

    def _write(self) -> None:
        if not self._removed:  # the run was over before the thread came to it
            self._guard(self._remove)
        files.write(self._path, self._content())


def text_file(directory: str, run: str, rank: int) -> Path:
    """Return the path of the file of a rank."""
    return Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"


# Which format a client asks for, and whether it accepts gzip

# The media types of each format, those that say more last, and the values of parameters that it fits; an empty one may be absent.
# Only text is for clients that name no format: they may not know the others.
_OFFERS: dict[Format, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    Format.TEXT: (("*/*", "text/*", "text/plain"), {"version": ("", "0.0.4", "1.0.0")}),
    Format.OPENMETRICS: (("application/openmetrics-text",), {"version": ("", "1.0.0")}),
    Format.PROTOBUF: (
        ("application/vnd.google.protobuf",),
        {"proto": ("io.prometheus.client.metricfamily",), "encoding": ("delimited",)},
    ),
}

_QUALITY = re.compile(r"0(\.\d*)?|1(\.0*)?")

# A member of a list, or a part of one, may have the separator within quotes.
_MEMBERS, _PARTS = (re.compile(rf'(?:[^{separator}"]|"(?:[^"\\]|\\.)*+"?)+', re.DOTALL) for separator in ",;")


def negotiate(accept_header: str) -> Format:
    """Return the format of the highest quality among those that the client admits, else text.

    A media type counts more than a range that it is in. A client that admits none of ours gets text, too: it may understand it,
    unlike a 406.
    """
    qualities: dict[Format, tuple[int, float]] = {}
    for media_type, parameters, quality in _members(accept_header):
        for form, (types, fitting) in _OFFERS.items():
            if media_type in types and all(parameters.get(name, "") in values for name, values in fitting.items()):
                qualities[form] = max(qualities.get(form, (0, 0.0)), (types.index(media_type), quality))
    admitted = [form for form in Format if qualities.get(form, (0, 0.0))[1] > 0]
    return max(reversed(admitted), key=lambda form: qualities[form][1], default=Format.TEXT)


def accepts_gzip(accept_encoding_header: str) -> bool:
    """Return whether the client accepts gzip: named, or by `*`, and not at quality 0."""
    qualities = {coding: quality for coding, _, quality in _members(accept_encoding_header)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _members(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield value, parameters and quality of each member, without those whose quality is not a number from 0 to 1."""
    for member in _MEMBERS.findall(header.lower()):
        value, *rest = (part.strip() for part in _PARTS.findall(member) or [""])
        parameters = {name.strip(): text.strip().strip('"') for name, _, text in (part.partition("=") for part in rest)}
        quality = parameters.pop("q", "1")
        if value and _QUALITY.fullmatch(quality):
            yield value, parameters, float(quality)
