"""A run's history from a running exporter or from a file of `exporter.save`: only what has been checked is drawn."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import re
import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.collectors.outcomes import Happened
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.outputs.live.encoding import FORMAT, NONFINITE, VERSION, ZERO
from torch_grad_exporter.outputs.live.history import MOMENTS, QUANTITIES, VIEWS
from torch_grad_exporter.outputs.live.rows import SCALARS

TIMEOUT = 30.0
"""Seconds for the answer of a running exporter."""

MOST_BYTES = 256 * 2**20
"""Of a history, before and after decompression; one of 300 layers has 2 MB."""

Saved = dict[str, Any]
BoolArray = NDArray[np.bool_]


class PlotError(Exception):
    """What is wrong with the source or the target, for the user."""


def loaded(source: str, cacert: str | None = None) -> Saved:
    """The content of a file, or the answer of a running exporter, of a shape that can be drawn. Raises `PlotError`."""
    content = _fetched(source, cacert) if re.match(r"https?://", source) else _read(source)
    source = _without_password(source)
    try:
        text = _decompressed(content) if content.startswith(b"\x1f\x8b") else content
        found = json.loads(text, parse_constant=_refused)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlotError(f"{source} is no history of torch_grad_exporter; exporter.save(path) writes one")
    if found.get("version") != VERSION:
        raise PlotError(f"{source} has version {found.get('version')!r} of the format; this program reads version {VERSION}")
    try:
        _check(found)
    except KeyError as error:
        raise PlotError(f"{source} is damaged: it has no {error.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise PlotError(f"{source} is damaged: {error}") from None
    return found


def _refused(name: str) -> Never:
    """Refuses what only Python accepts as JSON: the page could not read it."""
    raise ValueError(f"{name} is no JSON")


def _without_password(source: str) -> str:
    """What messages call a source: they end up in logs, and in files that CI keeps."""
    return re.sub(r"^(https?://).*@", r"\1", source, flags=re.DOTALL)


def _decompressed(content: bytes) -> bytes:
    """Raises `ValueError` where it becomes larger than any history."""
    with gzip.open(io.BytesIO(content)) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError("too large")
    return found


def _read(source: str) -> bytes:
    try:
        with Path(source).open("rb") as file:
            return _limited(file.read(MOST_BYTES + 1), source)
    except OSError as error:
        address = f"; for an address write http://{source}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", source) else ""
        raise PlotError(f"cannot read {source}: {error}{address}") from None


def _limited(content: bytes, source: str) -> bytes:
    if len(content) > MOST_BYTES:
        raise PlotError(f"{source} is larger than {MOST_BYTES // 2**20} MiB, and so no history")
    return content


# From a running exporter


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the password is for the server that was named, and for no other."""

    def redirect_request(self, *_arguments: object) -> None:
        """As of `HTTPRedirectHandler`: `None` makes it an error."""


def _fetched(address: str, cacert: str | None) -> bytes:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises, too
    except ValueError:  # whose text may have the password in it
        raise PlotError(f"{_without_password(address)} is no address such as http://localhost:9100") from None
    path = re.sub(r"(/metrics)?/?$", "", parts.path)
    where = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query="", fragment="").geturl()
    headers = {"Accept-Encoding": "gzip"}
    if parts.username is not None:
        credentials = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        headers["Authorization"] = f"Basic {credentials}"
    request = urllib.request.Request(f"{where}/api/v1/saved", headers=headers)  # noqa: S310 - http and https alone come here
    opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=_context(cacert)))
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return _limited(answer.read(MOST_BYTES + 1), where)
    except urllib.error.HTTPError as error:
        fix = _fix(error)
        error.close()
        raise PlotError(f"{where} answers {error.code} {error.reason}{fix}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own are, too
        fix = "; --cacert names the authority of its certificate" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
        raise PlotError(f"{where} does not answer: {error}{fix}") from None


def _fix(error: urllib.error.HTTPError) -> str:
    """What can be done about an answer."""
    if error.code in (401, 403):
        return "; give user and password in the address: https://user:password@host:9100"
    if 300 <= error.code < 400:
        return f", which is not followed; it points to {error.headers.get('Location', 'nothing')[:200]!r}"
    return ""


def _context(cacert: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if cacert is not None:
            context.load_verify_locations(cacert)
    except OSError as error:  # ssl's own are, too
        raise PlotError(f"cannot read certificates from {cacert}: {error}") from None
    return context


# The content. Its shape is in `docs/live.md`.


@dataclass(frozen=True, slots=True)
class Status:
    """Whose history it is. `state`, `step`: `None` where the collector of training is off."""

    run: str
    rank: int
    world_size: int
    state: str | None
    step: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Values of the run by name, each of shape (n,), NaN where none is finite; `nonfinite`: where any record was not."""

    steps: FloatArray
    values: Mapping[str, FloatArray]
    nonfinite: Mapping[str, BoolArray]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A quantity of all layers: `values` of shape (layers, n), NaN where none is finite; `nonfinite`: where any record was not.

    `stride`: records in a column. `sharded`: layers whose values are those of this rank's part.
    """

    layers: list[str]
    steps: FloatArray
    values: FloatArray
    nonfinite: BoolArray
    stride: int
    log: bool
    sharded: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoments:
    """Mean and standard deviation over the elements of a layer's gradient, each of shape (n,), NaN where there is none.

    `nonfinite`: where any record was not finite. `sharded`: they are of this rank's part.
    """

    steps: FloatArray
    mean: FloatArray
    stddev: FloatArray
    nonfinite: BoolArray
    sharded: bool


def status(saved: Saved) -> Status:
    """Raises `KeyError`, `TypeError` or `ValueError` where it is damaged, as the others do."""
    found = saved["status"]
    state, step = found["state"], found["step"]
    for name in ("resources", "problems", "ranks"):
        _list(found[name], name)
    return Status(
        _text(found["run"]),
        int(found["rank"]),
        int(found["world_size"]),
        None if state is None else _text(state),
        None if step is None else float(_finite([step], "step")[0]),
    )


def actions(saved: Saved) -> list[Happened]:
    """What `exporter.on` did, the oldest first; none where an earlier version has saved it."""
    return [
        Happened(
            float(_finite([one["time"]], "time")[0]),
            int(_finite([one["step"]], "step")[0]),
            *(_text(one[name]) for name in ("name", "action", "result")),
        )
        for one in _list(saved["status"].get("actions", []), "actions")
    ]


def lines(saved: Saved, view: str) -> Lines:
    """The values of the run."""
    answer = saved["run"][view]
    steps, flagged = _steps(answer), answer.get("nonfinite") or {}
    values, nonfinite = dict[str, FloatArray](), dict[str, BoolArray]()
    for name in SCALARS:
        column = _list(answer[name], name, len(steps))
        found = np.array([np.nan if value is None else float(value) for value in column])
        nonfinite[name] = np.array([value is not None for value in column], dtype=bool) & ~np.isfinite(found)
        places = np.array(_list(flagged.get(name, []), "nonfinite"), dtype=np.float64)
        if not np.isin(places, np.arange(len(steps))).all():
            raise ValueError(f"nonfinite has a place beyond the end of {name}")
        nonfinite[name][places.astype(int)] = True
        values[name] = np.where(np.isfinite(found), found, np.nan)
    return Lines(steps, values, nonfinite)


def grid(saved: Saved, quantity: str, view: str) -> Grid:
    """A quantity of all layers."""
    answer = saved["layers"][quantity][view]
    steps, layers = _steps(answer), [_text(name) for name in _list(answer["layers"], "layers")]
    shape = len(steps), len(layers)
    values, infinite = _raw(answer, shape) if quantity in MOMENTS else _decoded(answer, shape)
    return Grid(
        layers,
        steps,
        values,
        infinite | _flags(answer.get("nonfinite") or "", shape),
        int(answer["stride"]),
        answer["scale"] == "log",
        frozenset(_text(name) for name in _list(answer.get("sharded") or [], "sharded")),
    )


def moments(saved: Saved, layer: str, view: str) -> LayerMoments:
    """Those of a layer, which has been recorded with them."""
    mean, stddev = (grid(saved, name, view) for name in MOMENTS)
    if layer not in mean.layers or layer not in stddev.layers or len(mean.steps) != len(stddev.steps):
        nothing = np.zeros(0)
        return LayerMoments(nothing, nothing, nothing, np.zeros(0, dtype=bool), sharded=False)
    at, other = mean.layers.index(layer), stddev.layers.index(layer)
    flagged = mean.nonfinite[at] | stddev.nonfinite[other]
    return LayerMoments(mean.steps, mean.values[at], stddev.values[other], flagged, sharded=layer in mean.sharded)


def has_moments(saved: Saved) -> bool:
    """Whether means and standard deviations were kept: where `moments` was on."""
    return all(name in saved["layers"] for name in MOMENTS)


def _raw(answer: Saved, shape: tuple[int, int]) -> tuple[FloatArray, BoolArray]:
    """Cells that are numbers of 32 bits, shape (layers, n): the finite ones, and which are infinite."""
    values = np.frombuffer(_bytes(answer["codes"], 4 * shape[0] * shape[1]), dtype="<f4").reshape(shape).T.astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan), np.isinf(values)


def _decoded(answer: Saved, shape: tuple[int, int]) -> tuple[FloatArray, BoolArray]:
    """Cells that are codes, shape (layers, n): the finite ones, and which are not."""
    codes = np.frombuffer(_bytes(answer["codes"], 2 * shape[0] * shape[1]), dtype="<u2").reshape(shape).T
    low, high = _finite([answer["low"], answer["high"]], "low and high")
    log = {"log": True, "linear": False}[answer["scale"]]
    if log and not -400 < low <= high < 300:
        raise ValueError("low and high are beyond the range of a logarithmic scale")
    values = low + (codes.astype(np.float64) - 1) / (NONFINITE - 2) * (high - low)
    values = np.where((codes == 0) | (codes == NONFINITE), np.nan, 10**values if log else values)
    if log:
        values[codes == ZERO] = 0
    return values, codes == NONFINITE


def _check(saved: Saved) -> None:
    """Reads all of it once."""
    status(saved)
    actions(saved)
    known = set(saved["layer"].keys())
    for view in VIEWS:
        lines(saved, view)
        for quantity in QUANTITIES + MOMENTS * has_moments(saved):
            if not known.issuperset(grid(saved, quantity, view).layers):
                raise ValueError("a layer of the heatmaps has no entry of its own")


def _flags(text: str, shape: tuple[int, int]) -> BoolArray:
    count = shape[0] * shape[1]
    if not text:
        return np.zeros(shape[::-1], dtype=bool)
    packed = np.frombuffer(_bytes(text, -(-count // 8)), dtype=np.uint8)
    return np.unpackbits(packed, count=count).reshape(shape).T.astype(bool)


def _steps(answer: Saved) -> FloatArray:
    steps = _finite(answer["steps"], "steps")
    if len(_finite(answer["times"], "times")) != len(steps):
        raise ValueError("times and steps differ in length")
    return steps


def _finite(found: object, name: str) -> FloatArray:
    values = np.array([float(value) for value in _list(found, name)], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has what is no number")
    return values


def _bytes(text: str, length: int) -> bytes:
    found = base64.b64decode(_text(text), validate=True)
    if len(found) != length:
        raise ValueError(f"{length} bytes are coded in {len(found)}")
    return found


def _list(found: object, name: str, length: int | None = None) -> list[Any]:
    if not isinstance(found, list) or length not in (None, len(found)):
        raise ValueError(f"{name} is no list" if length is None else f"{name} is no list of {length}")
    return found


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r:.40} is no text")
    return found
