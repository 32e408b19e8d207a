"""A statistic from outside the package: declared in one file, measured on every path, and shown by layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.statistics.test_device_chunks import NARROW, ON_DEVICE
from tests.statistics.test_statistics import INF, NAN, Bare, plan_of, some, sparse
from tests.support.scrape import errors, value, values
from tests.support.statistics import by_position, elements, own_columns
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, FloatArray, LabelRows
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import MOMENTS, ColumnSpec, Elements, Statistic, chosen, register
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import Layout

# The statistic: all that an author writes


def _reference(elements: Elements) -> tuple[float, ...]:
    positive = sum(v > 0 for v in elements.flat)
    steepest = NAN if any(map(math.isnan, elements.flat)) else max(elements.flat, default=0.0)
    return float(positive), steepest, sum(abs(v) ** 3 for v in elements.flat)


def _host(block: FloatArray) -> FloatArray:
    cubes = (np.abs(block.astype(np.float64)) ** 3).sum(axis=1)
    return np.stack([(block > 0).sum(axis=1), block.max(axis=1), cubes], axis=1).astype(np.float64)


def _device(chunk: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    cubes = chunk.abs().to(wide).pow(3).sum(dim=1)
    return torch.stack([column.to(wide) for column in ((chunk > 0).sum(dim=1), chunk.amax(dim=1), cubes)], dim=1)


TOY = Statistic(
    "toy",
    (
        ColumnSpec("positive", Combine.SUM),
        ColumnSpec("steepest", Combine.MAX, power=1, whole_only=True),
        ColumnSpec("cubes", Combine.SUM, power=3),
    ),
    _reference,
    _host,
    _device,
)

# Its metric

METRICS = Section("A toy statistic")

SPECS = {
    column: METRICS.gauge(f"toy_{column}", f"Toy column {column} of the layer.", "layer")
    for column in ("positive", "steepest", "cubes")
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


def shown() -> contextlib.closing[Any]:
    """Register the collector for the block."""
    return contextlib.closing(REGISTRY.register(COLLECTOR))


def collected(exporter: Exporter) -> dict[tuple[str, str], float]:
    """Return the series of the toy by column and layer."""
    toys = {(name.removeprefix("toy_"), labels): number for (name, labels), number in values(exporter).items() if "toy_" in name}
    return {(column, dict(labels)["layer"]): number for (column, labels), number in toys.items() if column in SPECS}


def model() -> torch.nn.Sequential:
    """Return two layers with two parameters each, and one with one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1, bias=False))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[tuple[str, str], float]:
    """Train for some steps; return the columns of each layer by their definitions, from the gradients of the last step."""
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(7, 6)).square().sum().backward()
        gradients: dict[str, list[float]] = {}
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(name.rpartition(".")[0], []).extend(parameter.grad.flatten().double().tolist())
        optimizer.step()
    columns = {layer: zip(SPECS, _reference(Elements(flat)), strict=True) for layer, flat in gradients.items()}
    return {(column, layer): number for layer, found in columns.items() for column, number in found}


# From the declaration to the scrape


def test_a_users_statistic_is_in_the_scrape() -> None:
    """A registered statistic is measured and shown for each layer in each sampled round."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with register(TOY), shown(), start_exporter(module, port=None, every=1) as exporter:
        assert collected(exporter) == {}
        for steps in (1, 1, 3):
            expected = train(module, optimizer, steps)
            assert len(expected) == 9
            assert collected(exporter) == pytest.approx(expected, rel=1e-5)
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
            scaler.step(optimizer)
            scaler.update()
        columns = {column: number for (column, layer), number in collected(exporter).items() if layer == "3"}
    assert columns == pytest.approx(dict(zip(SPECS, expected, strict=True)), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(TOY, name="moments"), "there is one of this name"),
        (replace(TOY, host=None), "give it a measure for the host"),
        (replace(TOY, device=None), "and one for devices"),
        (replace(TOY, columns=TOY.columns[:1] * 2), "columns of different names"),
    ],
    ids=["a name that is taken", "no host", "no device", "one column twice"],
)
def test_what_cannot_be_measured_is_not_registered(wrong: Statistic, message: str) -> None:
    """A duplicate name, a missing measure and duplicate columns are refused."""
    with pytest.raises(ValueError, match=message):
        register(wrong)
    with register(TOY), pytest.raises(ValueError, match="close its registration"):
        register(TOY)
    assert [one.name for one in chosen({"moments": True})] == ["moments"]


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

EVERYTHING = Layout([MOMENTS, TOY])

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: some((40, 30)),
    "complex": lambda: some((4, 3), torch.complex64),
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
    expected = [*own_columns(every), *TOY.reference(every)]
    assert len(row) == len(expected) == EVERYTHING.width == 12
    size = sum(abs(v) for v in every.flat)
    for key, found, wanted in zip(EVERYTHING.keys, row, expected, strict=True):
        rounding = rel * size if key == "moments.sum" and math.isfinite(size) else 0
        assert found == pytest.approx(wanted, rel=rel, abs=rounding, nan_ok=True), key
