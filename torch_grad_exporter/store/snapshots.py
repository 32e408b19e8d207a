"""Snapshots: what the collectors and other consumers see of the tables; their arrays are never written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.store.cursors import Cursor, Losses, Single
from torch_grad_exporter.store.histograms import Records
from torch_grad_exporter.store.layer_table import UntrackedLayers
from torch_grad_exporter.store.run_table import TotalsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class GradientSnapshot:
    """All gradient values at one moment, of one and the same sample; the same arrays as long as nothing changes."""

    table: ParameterTable
    layer_values: Records  # of the table's layers
    recent_max: FloatArray  # shape (layers,): over the last minute, NaN where unknown and in a consumer's reading
    optimizers: tuple[int, ...]  # numbers
    totals: Records  # of these optimizers
    samples: int
    undelivered: int  # samples whose vectors never arrived
    unattributed: int  # samples of which it is unknown whose they were
    norm_observed: bool  # the norms in the only record of `totals` are observed ones
    untracked: UntrackedLayers
    exponential: Exponential  # of the table's layers
    exponential_totals: Exponential  # of the optimizers
    declared: Mapping[str, FloatArray]  # other statistics by column, `statistic.column`, shape (layers,)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that the collectors show, at one moment."""

    gradients: GradientSnapshot
    totals: TotalsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class NewGradients:
    """What is new of the gradients since a consumer's last read, in the order of the snapshot; NaN where nothing is."""

    samples: int
    peaks: FloatArray  # shape (2, layers): the norm and the z-score that were farthest from zero
    peaks_of_totals: FloatArray  # shape (2, optimizers): the largest norm, and norm after clipping
    norms: FloatArray | None = None  # shape (3, layers), if asked for: sum of norms, how many, how many not finite


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Everything at one moment, but for the last minute and the last steps, and what is new to one consumer."""

    snapshot: Snapshot
    gradients: NewGradients
    losses: Losses = field(default_factory=Losses)  # none in the reading of a single sample
    singles: Sequence[Single] = ()


@dataclass(slots=True, eq=False)
class EachSample:
    """A consumer that reads at each of the next samples while some are `left`; `take` gets Unix time and the reading."""

    cursor: Cursor
    take: Callable[[float, Reading], object]
    left: int
