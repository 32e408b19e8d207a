"""The content of a run that `exporter.save` has written: only what has been checked is used. `docs/live.md` has its shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.collectors.outcomes import ActionMark
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.outputs.live.history import MEAN_AND_STDDEV, QUANTITIES, VIEWS
from torch_grad_exporter.outputs.live.step_rows import SCALARS
from torch_grad_exporter.rules.record import Wrong

FORMAT = "torch_grad_exporter history"
VERSION = 1

# The codes of a value that is not finite, and of 0 on a logarithmic scale. The code 0 stands for no value.
NONFINITE, ZERO = 65535, 1

# Records and bins, rules, actions; cells of a heatmap; and characters of a text, at most: far more than `History` and others keep.
MOST_ROWS, MOST_CELLS, LONGEST = 10_000, 2_000_000, 2**16

Saved = dict[str, Any]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Status:
    """The process whose history it is. `state`, `step`: None if the collector of training is off."""

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


@dataclass(frozen=True, slots=True)
class JudgedRule:
    """A rule by which a run was judged; `judged`: by the process; `there`: whether it had one of the metrics that the rule `needs`.

    The rule can fire after this many `seconds` or `samples`, of which None do not count, and at least `least` samples.
    """

    name: str
    judged: bool
    there: bool
    needs: tuple[str, ...]
    seconds: float
    samples: int | None
    least: int


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """The judgement of a run. `samples`, `seconds`: for how many and how long it was judged."""

    samples: int
    seconds: float
    rules: tuple[JudgedRule, ...]
    wrong: tuple[Wrong, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge or a counter at the end of a run: a number for each row of label values."""

    labels: tuple[str, ...]
    rows: Mapping[tuple[str, ...], float]


_Made = TypeVar("_Made", ActionMark, Status, JudgedRule, Wrong)


def status(saved: Saved) -> Status:
    """Return whose history it is. Like the others, raises `KeyError`, `TypeError` or `ValueError` if it is damaged."""
    for name in ("resources", "problems", "ranks"):
        _list(saved["status"][name], name, most=MOST_CELLS)
    return _made(Status, saved["status"])


def actions(saved: Saved) -> list[ActionMark]:
    """Return what `exporter.on` did, the oldest first; nothing if an earlier version has saved it."""
    return [_made(ActionMark, action) for action in _list(saved["status"].get("actions", []), "actions")]


def lines(saved: Saved, view: str) -> Lines:
    """Return the values of the run."""
    answer = saved["run"][view]
    return _lines(_steps(answer), {name: answer[name] for name in SCALARS}, answer.get("nonfinite") or {})


def _lines(steps: FloatArray, columns: Mapping[str, object], flagged: Mapping[str, object]) -> Lines:
    values, nonfinite = dict[str, FloatArray](), dict[str, BoolArray]()
    for name, content in columns.items():
        column = _list(content, name, len(steps))
        numbers = np.array([np.nan if value is None else float(value) for value in column])
        nonfinite[name] = np.array([value is not None for value in column], dtype=bool) & ~np.isfinite(numbers)
        places = np.array(_list(flagged.get(name, []), "nonfinite"), dtype=np.float64)
        if not np.isin(places, np.arange(len(steps))).all():
            raise ValueError(f"nonfinite has a place beyond the end of {name}")
        nonfinite[name][places.astype(int)] = True
        values[name] = np.where(np.isfinite(numbers), numbers, np.nan)
    return Lines(steps, values, nonfinite)


def logged(saved: Saved, view: str) -> Lines:
    """Return the values that the user has logged, by name; none if an earlier version has saved it."""
    answer = (saved.get("values") or {}).get(view)
    if answer is None:
        return Lines(np.zeros(0), {}, {})
    steps = _steps(answer)
    if len(answer["values"]) * len(steps) > MOST_CELLS:
        raise ValueError(f"values has more than {MOST_CELLS:,} numbers")
    return _lines(steps, {_text(name): column for name, column in answer["values"].items()}, answer["nonfinite"])


def grid(saved: Saved, quantity: str, view: str) -> Grid:
    """Return a quantity of all layers."""
    answer = saved["layers"][quantity][view]
    steps, layers = _steps(answer), [_text(name) for name in _list(answer["layers"], "layers", most=MOST_CELLS)]
    shape = len(steps), len(layers)
    if shape[0] * shape[1] > MOST_CELLS:
        raise ValueError(f"{quantity} has more than {MOST_CELLS:,} cells")
    if quantity in MEAN_AND_STDDEV:  # numbers of 32 bits
        raw = np.frombuffer(_bytes(answer["codes"], 4 * shape[0] * shape[1]), dtype="<f4").reshape(shape).T.astype(np.float64)
        values, infinite = np.where(np.isfinite(raw), raw, np.nan), np.isinf(raw)
    else:
        values, infinite = _decoded(answer, shape)
    flags: BoolArray = np.zeros(shape, dtype=bool)
    if text := answer.get("nonfinite"):
        packed = np.frombuffer(_bytes(text, -(-flags.size // 8)), dtype=np.uint8)
        flags = np.unpackbits(packed, count=flags.size).astype(bool)
    return Grid(
        layers,
        steps,
        values,
        infinite | flags.reshape(shape).T,
        int(answer["stride"]),
        answer["scale"] == "log",
        frozenset(_text(name) for name in _list(answer.get("sharded") or [], "sharded", most=MOST_CELLS)),
    )


def moments(saved: Saved, layer: str, view: str) -> tuple[Lines, bool]:
    """Return `mean` and `stddev` over the elements of a layer's gradient, empty if it has none; and whether of this rank's part."""
    grids = {name: grid(saved, name, view) for name in MEAN_AND_STDDEV}
    mean = grids["mean"]
    if any(layer not in of.layers or len(of.steps) != len(mean.steps) for of in grids.values()):
        return Lines(
            np.zeros(0), dict.fromkeys(MEAN_AND_STDDEV, np.zeros(0)), dict.fromkeys(MEAN_AND_STDDEV, np.zeros(0, dtype=bool))
        ), False
    values = {name: of.values[of.layers.index(layer)] for name, of in grids.items()}
    nonfinite = {name: of.nonfinite[of.layers.index(layer)] for name, of in grids.items()}
    return Lines(mean.steps, values, nonfinite), layer in mean.sharded


def has_moments(saved: Saved) -> bool:
    """Return whether means and standard deviations were kept, as with `moments=True`."""
    return all(name in saved["layers"] for name in MEAN_AND_STDDEV)


def _decoded(answer: Saved, shape: tuple[int, int]) -> tuple[FloatArray, BoolArray]:
    """Return cells that are codes, shape (layers, n): the finite ones, and which are not."""
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


def judged_of(saved: Mapping[str, Any]) -> RunJudgement | None:
    """Return what the run came to, None if an earlier version has saved it. Raises like `status`."""
    judged = saved.get("judged")
    if judged is None:
        return None
    rules = tuple(_made(JudgedRule, rule) for rule in _list(judged["rules"], "rules"))
    wrong = tuple(_made(Wrong, problem) for problem in _list(judged["wrong"], "wrong"))
    return RunJudgement(int(judged["samples"]), float(judged["seconds"]), rules, wrong)


def metrics_of(saved: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the gauges and counters at the end by name; none if an earlier version has saved it. Raises like `status`."""
    metrics = {}
    for name, content in (saved.get("metrics") or {}).items():
        labels, rows = _texts(content["labels"]), [_texts(row) for row in content["rows"]]
        if any(len(row) != len(labels) for row in rows):
            raise ValueError(f"a row of {name} does not have the labels {', '.join(labels)}")
        metrics[name] = Metric(labels, dict(zip(rows, map(float, content["values"]), strict=True)))
    return metrics


def check(saved: Saved) -> None:
    """Read everything that can be drawn once. Raises like `status`."""
    status(saved)
    actions(saved)
    known = set(saved["layer"].keys())
    for view in VIEWS:
        lines(saved, view)
        logged(saved, view)
        for quantity in QUANTITIES + MEAN_AND_STDDEV * has_moments(saved):
            if not known.issuperset(grid(saved, quantity, view).layers):
                raise ValueError("a layer of the heatmaps has no entry of its own")


def _made(kind: type[_Made], content: Mapping[str, object]) -> _Made:
    """Return a dataclass with the values of its fields, checked by their types."""
    read: Any = {"str": _text, "bool": bool, "int": lambda value: int(_number(value)), "float": _number, "tuple[str, ...]": _texts}
    values: dict[str, Any] = {}
    for field in fields(kind):
        name, _, optional = str(field.type).partition(" | ")
        value = content[field.name]
        values[field.name] = None if optional and value is None else read[name](value)
    return kind(**values)


def _number(content: object) -> float:
    return float(_finite([content], "a field")[0])


def _steps(answer: Saved) -> FloatArray:
    steps = _finite(answer["steps"], "steps")
    if len(_finite(answer["times"], "times")) != len(steps):
        raise ValueError("times and steps differ in length")
    return steps


def _finite(content: object, name: str) -> FloatArray:
    values = np.array([float(value) for value in _list(content, name)], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has a value that is not a finite number")
    return values


def _bytes(text: str, length: int) -> bytes:
    content = base64.b64decode(text, validate=True)
    if len(content) != length:
        raise ValueError(f"{len(content)} bytes instead of {length}")
    return content


def _list(content: object, name: str, length: int | None = None, most: int = MOST_ROWS) -> list[Any]:
    if not isinstance(content, list) or length not in (None, len(content)):
        raise ValueError(f"{name} is not a list" + ("" if length is None else f" of {length}"))
    if len(content) > most:
        raise ValueError(f"{name} has more than {most:,} entries")
    return content


def _texts(content: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(content, list):
        raise TypeError(f"{content!r:.40} is not a list")
    return tuple(map(_text, content))


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError(f"{content!r:.40} is not a text")
    if len(content) > LONGEST:
        raise ValueError(f"{content[:20]!r}... is too long")
    return content
