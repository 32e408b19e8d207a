"""Which format and which encoding a client asks for: `Accept` and `Accept-Encoding` as pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch_grad_exporter.outputs.prometheus.text import Format

_QUALITY = re.compile(r"0(\.\d*)?|1(\.0*)?")


class _Offer(NamedTuple):
    value: str
    parameters: dict[str, str]
    quality: float


def negotiate(accept_header: str) -> Format:
    """The format that the client prefers, by quality, then by how exactly it is named, then by order.

    The older text format where nothing else is requested, or nothing that we have: an answer that the
    client may understand is better than a 406.
    """
    offers = list(_offers(accept_header))
    best, best_rank = Format.TEXT, (0.0, 0, 0)
    for form in Format:
        matches = [(_exactness(form, offer), -index, offer.quality) for index, offer in enumerate(offers)]
        exactness, order, quality = max(matches, default=(-1, 0, 0.0))
        rank = (quality, exactness, order)
        if exactness >= 0 and quality > 0 and rank > best_rank:
            best, best_rank = form, rank
    return best


def accepts_gzip(accept_encoding_header: str) -> bool:
    """Whether the client takes gzip: named, or by `*`, and not at quality 0."""
    qualities = {offer.value: offer.quality for offer in _offers(accept_encoding_header)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _offers(header: str) -> Iterator[_Offer]:
    """The members of a comma-separated header; one whose quality is no number from 0 to 1 is left out."""
    for member in header.lower().split(","):
        value, *rest = (part.strip() for part in member.split(";"))
        parameters = {name.strip(): text.strip().strip('"') for name, _, text in (part.partition("=") for part in rest)}
        quality = parameters.pop("q", "1")
        if value and _QUALITY.fullmatch(quality):
            yield _Offer(value, parameters, float(quality))


def _exactness(form: Format, offer: _Offer) -> int:
    """2 where the offer names the format, 1 for its main type, 0 for anything, -1 where it is another one."""
    media_type, version, *_ = (part.strip() for part in form.value.split(";"))
    if offer.value == media_type:
        return 2 if offer.parameters.get("version") in {None, version.removeprefix("version=")} else -1
    return {f"{media_type.split('/')[0]}/*": 1, "*/*": 0}.get(offer.value, -1)
