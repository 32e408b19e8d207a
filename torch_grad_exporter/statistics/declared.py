"""What a statistic is: its columns, how it is measured and its definition. It knows no metric.

The statistics of the package itself are found in its files: each module of `torch_grad_exporter.statistics` that has a
`STATISTIC` adds one. Others are registered:

    with register(Statistic("signs", (ColumnSpec("positive", Combine.SUM),), reference, host, device)):
        exporter = start_exporter(model)

What is declared when an exporter starts is measured on each of its samples; the values by layer arrive in
`GradientSnapshot.declared["signs.positive"]`, where a collector finds them.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter import statistics
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import Combine


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One number for each gradient. `combine`: how that of the whole comes from those of its parts.

    `power`: of the loss scale that it contains. Where it is not 0, a gradient times c has the value times c ** power.
    `whole_only`: it has no meaning for a layer of which this rank has only a part, and is left out there.
    """

    name: str
    combine: Combine
    power: int = 0
    whole_only: bool = False


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of one gradient as Python's floats: all of them, and those of each output unit, if it has any."""

    flat: Sequence[float]
    units: Sequence[Sequence[float]] = ()


Reference = Callable[[Elements], tuple[float, ...]]
"""The definition, in plain loops: a value for each column."""

HostMeasure = Callable[[FloatArray], FloatArray]
"""From a block of several gradients of equal size, shape (gradients, elements), to shape (gradients, columns), float64.

The block is read-only, contiguous, float32 or float64, and gone afterwards. A large gradient comes in several blocks, whose
values are combined as the columns say; it has at least one element. What is raised costs the sample. The training thread calls it,
and the worker for a zero that a sparse gradient does not store.
"""

DeviceMeasure = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""The same by torch on another device, from a chunk of any real floating type, and the widest type that the device computes in.

It never branches on the data, so that the host never waits for the device.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """A statistic of gradients.

    `host`, `device`: how it is measured on the CPU and on other devices; `None` for the package's own that `host.py` and
    `device.py` measure together. `float64`: blocks on the CPU are to be float64 in any case. `opt_in`: the option that
    switches it on, if it is not always measured.
    """

    name: str
    columns: tuple[ColumnSpec, ...]
    reference: Reference
    host: HostMeasure | None = None
    device: DeviceMeasure | None = None
    float64: bool = False
    opt_in: str = ""


_registered: dict[str, Statistic] = {}


def register(statistic: Statistic) -> contextlib.ExitStack:
    """Has exporters that start from now on measure a statistic, until what it returns is closed, or left as a context.

    Raises `ValueError` where another one has its name, or where something of it is missing.
    """
    columns = [column.name for column in statistic.columns]
    if not columns or len(set(columns)) < len(columns):
        raise ValueError(f"statistic {statistic.name!r}: expected columns of different names, got {columns}")
    if statistic.host is None or statistic.device is None:
        raise ValueError(f"statistic {statistic.name!r}: give it a measure for the host and one for devices")
    if statistic.name in _registered or statistic.name in of_the_package():
        raise ValueError(f"statistic {statistic.name!r}: there is one of this name; choose another one, or close its registration")
    _registered[statistic.name] = statistic
    registration = contextlib.ExitStack()
    registration.callback(_registered.pop, statistic.name)
    return registration


def declared() -> list[Statistic]:
    """All statistics that are measured apart from others: the package's own by name, and those that are registered now."""
    return [*of_the_package().values(), *_registered.values()]


def of_the_package() -> dict[str, Statistic]:
    """The package's own by name."""
    return dict(sorted((one.name, one) for one in found_in(statistics.__name__, statistics.__path__)))


def found_in(name: str, path: Sequence[str]) -> Iterator[Statistic]:
    """The `STATISTIC` of each module of a package that has one."""
    for module in pkgutil.iter_modules(path, f"{name}."):
        found = None if module.ispkg else getattr(importlib.import_module(module.name), "STATISTIC", None)
        if isinstance(found, Statistic):
            yield found


def chosen(options: Mapping[str, bool]) -> list[Statistic]:
    """Those that are always measured, and those whose option is on."""
    return [one for one in declared() if not one.opt_in or options.get(one.opt_in, False)]
