"""The series of a family, for all Prometheus outputs.

A row of a family yields one series per column: one for a gauge or a counter, and for a histogram its
cumulated buckets, `_sum` and `_count`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from torch_grad_exporter.metrics.families import Exemplar, Family, FloatArray, Kind, Spec


@cache
def columns(spec: Spec) -> tuple[tuple[str, str | None], ...]:
    """Return the series of each row of the metric, as suffixes of its name and `le` labels, in the order of the scrape."""
    if spec.kind is not Kind.HISTOGRAM:
        return (("", None),)
    bounds = (*map(bound_text, spec.buckets), "+Inf")
    return (*(("_bucket", bound) for bound in bounds), ("_sum", None), ("_count", None))


def bound_text(bound: float) -> str:
    """Return a finite bucket bound as `le` value, in the canonical form of OpenMetrics: `0.0001`, `1.0`, `1e+06`.

    Two spellings of one bound would be two series. prometheus_client has this one too, but not in all its releases.
    """
    if abs(bound) < 1e6:
        return repr(float(bound))
    digits = len(repr(float(bound)).split("e")[0].replace(".", "").strip("-").rstrip("0"))
    return f"{bound:.{max(digits, 1) - 1}e}"


def table(family: Family) -> FloatArray:
    """Return the values of all present rows, shape (present rows, columns); buckets are cumulated."""
    if family.spec.kind is not Kind.HISTOGRAM:
        values = family.values[:, np.newaxis]
    elif family.sums is None:
        raise ValueError(f"{family.spec.name}: a histogram has sums")
    else:
        counts = np.cumsum(family.values, axis=1)
        values = np.column_stack((counts, family.sums, counts[:, -1]))
    return values if family.present is None else values[family.present]


def exemplars(family: Family) -> dict[int, Exemplar]:
    """Return the exemplars of present rows by their place in the flattened `table`."""
    if family.exemplars is None:
        return {}
    width = len(columns(family.spec))
    return {
        number * width + bucket: exemplar
        for number, row in enumerate(family.row_numbers)
        for bucket, exemplar in family.exemplars[row].items()
    }


def labels(family: Family, constant: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the labels of each present row, in the order of `table`. The family's own win; an empty value means no label."""
    rows = family.labels.rows
    for row in rows if family.present is None else itertools.compress(rows, family.present.tolist()):
        own = {name: value for name, value in zip(family.spec.labels, row, strict=True) if value}
        yield {**constant, **own}


def shared_labels(spec: Spec, constant: Mapping[str, str], only_on: Spec | None) -> dict[str, str]:
    """Return which of the `constant` labels each series of a metric has besides its own, which win.

    `only_on`: the metric that has them instead, None for all.
    """
    if only_on not in (None, spec):
        return {}
    return {name: value for name, value in constant.items() if name not in spec.labels}


def family_name(spec: Spec) -> str:
    """Return the name of the metric family in OpenMetrics: a counter's without `_total`."""
    return spec.name.removesuffix("_total") if spec.kind is Kind.COUNTER else spec.name


def unit(spec: Spec) -> str:
    """Return the unit if it may be declared, which needs a family name that ends in it, else an empty text."""
    return spec.unit if spec.unit and family_name(spec).endswith(f"_{spec.unit}") else ""
