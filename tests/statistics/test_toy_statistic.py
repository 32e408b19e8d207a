"""A statistic from outside the package: declared in one file, measured on every path, and shown by layer."""

from __future__ import annotations

import contextlib
import math
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.statistics.test_device_chunks import NARROW, ON_DEVICE
from tests.statistics.test_statistics import INF, NAN, Bare, plan_of, some, sparse
from tests.support.scrape import errors, value, values
from tests.support.statistics import by_position, elements
from tests.support.tools import PATIENCE
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, FloatArray, LabelRows
from torch_grad_exporter.statistics import declared, moments
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Elements, Statistic, register
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import Layout

# The statistic: all that an author writes


def _reference(elements: Elements) -> tuple[float, ...]:
    tiny = sum(abs(v) < 1e-6 for v in elements.flat)
    nonpositive = sum(not v > 0 for v in elements.flat)
    magnitudes = [abs(v) for v in elements.flat]
    return (
        float(len(elements.flat) - nonpositive),
        float(tiny),
        NAN if any(map(math.isnan, elements.flat)) else max(elements.flat, default=0.0),
        sum(m**3 for m in magnitudes),
        sum(magnitudes),
    )


def _host(block: FloatArray) -> FloatArray:
    magnitude = np.abs(block.astype(np.float64))
    columns = [(block > 0).sum(axis=1), (magnitude < 1e-6).sum(axis=1), block.max(axis=1), (magnitude**3).sum(axis=1)]
    return np.stack([*columns, magnitude.sum(axis=1)], axis=1).astype(np.float64)


def _device(chunk: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    magnitude = chunk.abs().to(wide)
    columns = [(chunk > 0).sum(dim=1), (magnitude < 1e-6).sum(dim=1), chunk.amax(dim=1), magnitude.pow(3).sum(dim=1)]
    return torch.stack([column.to(wide) for column in (*columns, magnitude.sum(dim=1))], dim=1)


TOY = Statistic(
    "toy",
    (
        ColumnSpec("positive", Combine.SUM),
        ColumnSpec("tiny", Combine.SUM),
        ColumnSpec("steepest", Combine.MAX, power=1, whole_only=True),
        ColumnSpec("cubes", Combine.SUM, power=3),
        ColumnSpec("absolute", Combine.SUM, power=1),
    ),
    _reference,
    _host,
    _device,
)

# Its metric

METRICS = Section("A toy statistic")

SPECS = {
    column: METRICS.gauge(f"toy_{column}", f"Toy column {column} of the layer.", "layer")
    for column in ("positive", "tiny", "steepest", "cubes", "absolute")
}


class ToyCollector:
    """Shows the columns by layer, where the exporter measures them."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        snapshot = self._snapshots.latest.gradients
        rows = LabelRows(tuple((layer,) for layer in snapshot.table.layers))
        for column, spec in SPECS.items():
            if (shown := snapshot.declared.get(f"toy.{column}")) is not None:
                yield Family(spec, shown, rows, ~np.isnan(shown))


def _make(context: CollectorContext) -> ToyCollector:
    return ToyCollector(context.snapshots)


COLLECTOR = Declaration("toy", (METRICS,), _make)


def scraped(exporter: Exporter) -> dict[tuple[str, str], float]:
    """Return the series of the toy in `/metrics`, by column and layer."""
    assert exporter.url is not None
    with urllib.request.urlopen(exporter.url, timeout=PATIENCE) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families if family.name.startswith("toy_") for sample in family.samples]
    return {(sample.name.removeprefix("toy_"), sample.labels["layer"]): sample.value for sample in samples}


def shown() -> contextlib.closing[Any]:
    """Register the collector for the block."""
    return contextlib.closing(REGISTRY.register(COLLECTOR))


def collected(exporter: Exporter) -> dict[tuple[str, str], float]:
    """Return the same from `collect`."""
    toys = {(name.removeprefix("toy_"), labels): number for (name, labels), number in values(exporter).items() if "toy_" in name}
    return {(column, dict(labels)["layer"]): number for (column, labels), number in toys.items() if column in SPECS}


def by_layer(gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[tuple[str, str], float]:
    """Return the columns of each layer by their definitions, from the gradients of its parameters."""
    found = {}
    for layer, members in gradients.items():
        flat = torch.cat([g.reshape(-1) for g in members]).double().tolist()
        found |= {(column, layer): v for column, v in zip(SPECS, _reference(Elements(flat)), strict=True)}
    return found


def model() -> torch.nn.Sequential:
    """Return two layers with two parameters each, and one with one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1, bias=False))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, list[torch.Tensor]]:
    """Train for some steps; return the gradients of the last one by layer."""
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(7, 6)).square().sum().backward()
        gradients: dict[str, list[torch.Tensor]] = {}
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(name.rpartition(".")[0], []).append(parameter.grad.clone())
        optimizer.step()
    return gradients


# From the declaration to the scrape


def test_a_users_statistic_is_in_the_scrape() -> None:
    """A registered statistic is measured for each layer in each sampled round, and `/metrics` shows it."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with (
        register(TOY),
        shown(),
        start_exporter(module, 0, addr="127.0.0.1", every=1) as exporter,
    ):
        assert collected(exporter) == {}
        for steps in (1, 1, 3):
            expected = by_layer(train(module, optimizer, steps))
            assert len(expected) == 15
            assert collected(exporter) == pytest.approx(expected, rel=1e-5)
        assert scraped(exporter) == pytest.approx(expected, rel=1e-5)  # an answer is kept for a while: this is the first one
        assert errors(exporter) == {}


def test_a_loss_scale_is_divided_out_by_its_power() -> None:
    """Under a gradient scaler a count stays, and each column is divided by the declared power of the scale."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with register(TOY), shown(), start_exporter(module, port=None, every=1, grad_scaler=scaler) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(module(torch.randn(7, 6)).square().sum()).backward()
            weight = module[3].weight.grad
            assert weight is not None
            expected = _reference(Elements((weight / 1024).reshape(-1).tolist()))
            scaled = _reference(Elements(weight.reshape(-1).tolist()))
            scaler.step(optimizer)
            scaler.update()
        columns = {column: number for (column, layer), number in collected(exporter).items() if layer == "3"}
    by_name = dict(zip(SPECS, expected, strict=True)) | {"tiny": scaled[1]}  # a threshold does not depend on the scale
    assert columns == pytest.approx(by_name, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(TOY, name="moments"), "there is one of this name"),
        (replace(TOY, host=None), "give it a measure for the host"),
        (replace(TOY, device=None), "and one for devices"),
        (replace(TOY, columns=()), "columns of different names"),
        (replace(TOY, columns=TOY.columns[:1] * 2), "columns of different names"),
    ],
    ids=["a name that is taken", "no host", "no device", "no columns", "one column twice"],
)
def test_what_cannot_be_measured_is_not_registered(wrong: Statistic, message: str) -> None:
    """A duplicate name, a missing measure and duplicate columns are refused."""
    with pytest.raises(ValueError, match=message):
        register(wrong)
    with register(TOY), pytest.raises(ValueError, match="close its registration"):
        register(TOY)
    assert [one.name for one in declared.declared()] == ["moments"]


def test_a_failing_measure_does_not_harm_training() -> None:
    """A measure of the wrong shape, or that writes to the gradient, is a counted failure, and training goes on."""

    def wrong(block: FloatArray) -> FloatArray:
        return np.zeros((len(block), 1))

    def writing(block: FloatArray) -> FloatArray:
        block *= 2
        return _host(block)

    for host in (wrong, writing):
        module = model()
        with register(replace(TOY, host=host)), start_exporter(module, port=None, every=1) as exporter:
            kept = [p.detach().clone() for p in module.parameters()]
            train(module, torch.optim.SGD(module.parameters(), lr=0.01), 3)
            assert errors(exporter) == {"capture": 3}
            assert not any(map(torch.equal, kept, module.parameters()))
            assert not value(exporter, "torch_grad_exporter_captures_total")


# Each declared statistic against its definition

EVERYTHING = Layout.of([moments.STATISTIC, TOY])

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: some((40, 30)),
    "scalar": lambda: torch.tensor(-3.0),
    "bfloat16": lambda: some((300, 1000), torch.bfloat16),
    "complex": lambda: some((4, 3), torch.complex64),
    "transposed": lambda: some((1000, 300)).t(),
    "a type of one byte": lambda: some((40, 30)).to(torch.float8_e5m2).float(),
    "not finite": lambda: torch.tensor([[NAN, 0.0], [INF, 1.0], [-INF, INF], [0.0, 0.0]]),
    "sparse": lambda: sparse(torch.tensor([[0, 0, 2]]), -torch.ones(3, 4), (50, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistics", "rel"),
    [(EagerStatistics(1, EVERYTHING), 1e-6), (ON_DEVICE(1, EVERYTHING), 1e-6), (NARROW(1, EVERYTHING), 1e-5)],
    ids=["host", "device", "no float64"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_column_agrees_with_its_reference(kind: str, statistics: EagerStatistics, rel: float) -> None:
    """Every declared column agrees with its reference on the CPU, on devices, and without float64."""
    gradient = KINDS[kind]()
    module = torch.nn.Embedding(50, 4, sparse=True) if gradient.is_sparse else Bare(gradient.shape, dtype=gradient.dtype)
    table = plan_of(module)
    row = by_position(statistics.measure(table, [(0, gradient)], 1))[0]
    every = elements(gradient, table.tracked[0].units)
    expected = [v for one in EVERYTHING.statistics for v in one.reference(every)]
    assert len(row) == len(expected) == EVERYTHING.width == 14
    size = sum(abs(v) for v in every.flat)
    for key, found, wanted in zip(EVERYTHING.keys, row, expected, strict=True):
        rounding = rel * size if key == "moments.sum" and math.isfinite(size) else 0
        assert found == pytest.approx(wanted, rel=rel, abs=rounding, nan_ok=True), key
