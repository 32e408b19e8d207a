"""Declarations of metrics: a breach of Prometheus' conventions is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_grad_exporter.metrics.catalogue import Catalogue, Section
from torch_grad_exporter.metrics.families import Spec

Declare = Callable[[Section], Spec]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda s: s.gauge("a_total", "A."), "_total"),
        (lambda s: s.counter("a", "A."), "_total"),
        (lambda s: s.histogram("a", "A.", ()), "buckets"),
        (lambda s: s.gauge("a_seconds", "A."), "unit"),
        (lambda s: s.gauge("a_milliseconds", "A.", unit="milliseconds"), "unit"),
        (lambda s: s.gauge("A", "A."), "lower case"),
        (lambda s: s.gauge("a", "A.", "the layer"), "lower case"),
        (lambda s: s.gauge("a", "A.", "layer", "layer"), "unique"),
        (lambda s: s.histogram("a", "A.", (1.0,), "le"), "label le"),
        (lambda s: s.gauge("a", "What it says"), "sentence"),
    ],
)
def test_what_breaks_conventions_is_refused(declare: Declare, message: str) -> None:
    """A metric that breaks a convention is refused with its name, and the section does not get it."""
    section = Section("Title")
    with pytest.raises(ValueError, match=rf"^(a|A)[^:]*: .*{message}"):
        declare(section)
    assert section.specs == ()


@pytest.mark.parametrize("second", ["a", "a_total"])
def test_two_metrics_of_one_name_are_refused(second: str) -> None:
    """Two metrics of one name are refused, also where only OpenMetrics, which drops `_total`, gives them one name."""
    one, other = Section("One"), Section("Other")
    one.gauge("a", "A.")
    (other.counter if second.endswith("_total") else other.gauge)(second, "Another one.")
    for sections in ([one, other], [one, one]):
        with pytest.raises(ValueError, match="have one name"):
            Catalogue(sections)
