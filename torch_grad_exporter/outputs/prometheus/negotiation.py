"""Which format a client asks for, and whether it accepts gzip."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch_grad_exporter.outputs.prometheus.text import Format

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
