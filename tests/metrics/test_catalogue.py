"""How metrics are declared: what breaks Prometheus' conventions is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_grad_exporter.metrics.catalogue import Catalogue, Section
from torch_grad_exporter.metrics.families import Kind, Spec

Declare = Callable[[Section], Spec]


def test_a_declaration_is_a_spec() -> None:
    """A declaration returns the metric's spec, and the section has all of them in order."""
    section = Section("Title")
    made = (
        section.gauge("a_bytes", "A.", "layer", unit="bytes", opt_in="weights"),
        section.counter("b_total", "B.", older=True),
        section.histogram("c_seconds", "C.", (1.0, 2.0), "kind", unit="seconds"),
    )
    assert section.specs == made
    assert made == (
        Spec("a_bytes", Kind.GAUGE, "A.", ("layer",), "bytes", opt_in="weights"),
        Spec("b_total", Kind.COUNTER, "B.", older=True),
        Spec("c_seconds", Kind.HISTOGRAM, "C.", ("kind",), "seconds", (1.0, 2.0)),
    )


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
        (lambda s: s.gauge("a", "A.", "layer", "layer"), "twice"),
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
        with pytest.raises(ValueError, match="metrics of one name"):
            Catalogue(sections)


def test_a_catalogue_has_all_metrics_by_name() -> None:
    """A catalogue has its metrics in the order of declaration, and their labels without those of info metrics."""
    one, other = Section("One"), Section("Other")
    last = other.gauge("z", "Z.", "layer", "kind")
    first = one.gauge("y_info", "Y.", "version")
    second = one.gauge("a", "A.", "layer")
    catalogue = Catalogue([one, other])
    assert list(catalogue.items()) == [("y_info", first), ("a", second), ("z", last)]
    assert len(catalogue) == 3
    assert catalogue.labels == {"layer", "kind"}
