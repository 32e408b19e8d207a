"""Prometheus text and OpenMetrics, held against prometheus_client's parsers and promtool."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.utils import floatToGoString

from tests.support.made_families import catalogue_families
from tests.support.tools import find
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

CONSTANT = {"run": "r1", "rank": "0"}
PARSERS: dict[Format, Callable[[str], Iterable[Metric]]] = {Format.TEXT: parse_text, Format.OPENMETRICS: parse_openmetrics}
NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0, 1e6))

both_formats = pytest.mark.parametrize("form", list(PARSERS))


def render(families: Iterable[Family], form: Format = Format.TEXT, labels: dict[str, str] = CONSTANT) -> str:
    """Return the text of the families."""
    return Renderer(labels).render(families, form).decode()


def parsed(text: str, form: Format) -> dict[tuple[str, frozenset[tuple[str, str]]], str]:
    """Return every sample by name and labels; the value is text, so that NaN equals NaN; a repeated sample fails."""
    samples = [sample for metric in PARSERS[form](text) for sample in metric.samples]
    result = {(sample.name, frozenset(sample.labels.items())): repr(float(sample.value)) for sample in samples}
    assert len(result) == len(samples)
    return result


def expected(family: Family) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], str]]:
    """Return the samples of a family by plain loops, as the reference."""
    spec = family.spec
    for index, row in enumerate(family.labels.rows):
        if family.present is not None and not family.present[index]:
            continue
        labels = {**CONSTANT, **dict(zip(spec.labels, row, strict=True))}
        if spec.kind is not Kind.HISTOGRAM:
            yield (spec.name, frozenset(labels.items())), repr(float(family.values[index]))
            continue
        count = 0.0
        for bound, inside in zip((*spec.buckets, math.inf), family.values[index], strict=True):
            count += float(inside)
            yield (f"{spec.name}_bucket", frozenset({**labels, "le": floatToGoString(bound)}.items())), repr(count)
        assert family.sums is not None
        yield (f"{spec.name}_sum", frozenset(labels.items())), repr(float(family.sums[index]))
        yield (f"{spec.name}_count", frozenset(labels.items())), repr(count)


@pytest.mark.slow
@both_formats
def test_the_parser_reads_every_declared_metric(form: Format) -> None:
    """The official parser reads from a scrape of the whole catalogue exactly the samples that went in."""
    families = catalogue_families(40, masked=True)
    reference = dict(itertools.chain.from_iterable(expected(family) for family in families))
    assert len(reference) > 1000
    assert parsed(render(families, form), form) == reference


@pytest.mark.server
def test_promtool_finds_nothing_to_complain_about() -> None:
    """`promtool check metrics` accepts a scrape of the whole catalogue without a remark."""
    text = render(catalogue_families(3))
    done = subprocess.run([find("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@both_formats
def test_label_values_survive_whatever_they_contain(form: Format) -> None:
    """500 label values of backslashes, quotes, line breaks, umlauts, emoji and the format's own signs come back unchanged."""
    source = random.Random(3)
    assert 'layer="a?b"' in render([Family(NORM, np.ones(1), LabelRows((("a\udc80b",),)))])  # a lone surrogate
    values = {"".join(source.choices('\\"\n\tnäß😀 {},=#%', k=source.randint(0, 8))) for _ in range(500)}
    family = Family(NORM, np.arange(float(len(values))), LabelRows(tuple((value,) for value in values)))
    text = Renderer({**CONSTANT, "user": 'a\\"\nü'}).render([family], form).decode()
    (metric,) = PARSERS[form](text)
    # An empty value is left out: to Prometheus that is the same as no label.
    assert [sample.labels.get("layer", "") for sample in metric.samples] == list(values)
    assert {sample.labels["user"] for sample in metric.samples} == {'a\\"\nü'}


@both_formats
def test_values_are_exact(form: Format) -> None:
    """Not-a-number, the infinities, zeros, the smallest and the largest float come back bit for bit."""
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.5, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1e16, 1e22]
    family = Family(NORM, np.array(values), LabelRows(tuple((f"l{i}",) for i in range(len(values)))))
    text = render([family], form)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line.split()[-1] for line in lines[:6]] == ["NaN", "+Inf", "-Inf", "0.0", "-0.0", "1.0"]
    assert sorted(parsed(text, form).values()) == sorted(map(repr, values))


def test_openmetrics_is_byte_exact() -> None:
    """OpenMetrics names a counter without `_total`, declares a unit that the name ends in, and ends with EOF."""
    families = [
        Family(Spec("busy_seconds_total", Kind.COUNTER, "Busy.", unit="seconds"), np.array([1.5])),
        Family(Spec("tokens_total", Kind.COUNTER, "Tokens.", unit="tokens_total"), np.array([2.0])),
        Family(Spec("age", Kind.GAUGE, "Age.", unit="seconds"), np.array([3.0])),
    ]
    assert render(families, Format.OPENMETRICS, {}) == (
        "# HELP busy_seconds Busy.\n# TYPE busy_seconds counter\n# UNIT busy_seconds seconds\nbusy_seconds_total 1.5\n"
        "# HELP tokens Tokens.\n# TYPE tokens counter\ntokens_total 2.0\n"
        "# HELP age Age.\n# TYPE age gauge\nage 3.0\n"
        "# EOF\n"
    )


@both_formats
def test_families_of_one_metric_are_merged(form: Format) -> None:
    """Families of one metric stand under one HELP and TYPE where it appeared first, and absent rows leave no line."""
    none = np.zeros(1, dtype=np.bool_)
    families = [
        Family(NORM, np.array([1.0]), LabelRows((("a",),))),
        Family(STEPS, np.array([2.0]), LabelRows((("a",),))),
        Family(NORM, np.array([3.0]), LabelRows((("b",),)), none),
        Family(NORM, np.array([4.0]), LabelRows((("c",),))),
        Family(SECONDS, np.ones((1, 4)), LabelRows((("a",),)), none, np.ones(1)),
    ]
    text = render(iter(families), form)
    assert text.count("# HELP norm ") == text.count("# TYPE norm ") == 1
    assert [line[0] + line[-3:] for line in text.splitlines() if not line.startswith("#")] == ["n1.0", "n4.0", "s2.0"]
    assert "time_seconds" not in text
    # Two labels of one name are not a valid line.
    text = render([Family(NORM, np.ones(1), LabelRows((("own",),)))], labels={"run": "r", "layer": "constant"})
    assert text.splitlines()[-1] == 'norm{run="r",layer="own"} 1.0'
