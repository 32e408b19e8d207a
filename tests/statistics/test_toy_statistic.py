"""A statistic from outside of the package, in one file: declared, measured on every path, added up by layer, and shown."""

from __future__ import annotations

import contextlib
import math
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.aggregation.test_gradients import PLAN, captured, closed
from tests.statistics.test_device_chunks import NARROW, ON_DEVICE
from tests.statistics.test_statistics import INF, NAN, Bare, plan_of, some, sparse
from tests.support.scrape import errors, value, values
from tests.support.statistics import by_position, elements
from tests.support.tools import PATIENCE
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.aggregation.gradients import GradientAggregation, GradientSnapshot
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, FloatArray, LabelRows
from torch_grad_exporter.statistics import Column, declared, moments
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Elements, Statistic, found_in, register
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import Layout, Packing
from torch_grad_exporter.transfer.events import Part
from torch_grad_exporter.transfer.transfer import Arrived

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
    """Shows the columns by layer."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        snapshot = self._snapshots.latest.gradients
        rows = LabelRows(tuple((layer,) for layer in snapshot.table.layers))
        for column, spec in SPECS.items():
            shown = snapshot.declared[f"toy.{column}"]
            yield Family(spec, shown, rows, ~np.isnan(shown))


def _make(context: CollectorContext) -> ToyCollector:
    return ToyCollector(context.snapshots)


COLLECTOR = Declaration("toy", (METRICS,), _make)


def scraped(exporter: Exporter) -> dict[tuple[str, str], float]:
    """The toy's series in `/metrics`, by column and layer."""
    assert exporter.url is not None
    with urllib.request.urlopen(exporter.url, timeout=PATIENCE) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families if family.name.startswith("toy_") for sample in family.samples]
    return {(sample.name.removeprefix("toy_"), sample.labels["layer"]): sample.value for sample in samples}


def collected(exporter: Exporter) -> dict[tuple[str, str], float]:
    """The same of the families themselves."""
    toys = {(name.removeprefix("toy_"), labels): number for (name, labels), number in values(exporter).items() if "toy_" in name}
    return {(column, dict(labels)["layer"]): number for (column, labels), number in toys.items() if column in SPECS}


def by_layer(gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[tuple[str, str], float]:
    """The toy's columns of each layer by its definition, from the gradients of its parameters."""
    found = {}
    for layer, members in gradients.items():
        flat = torch.cat([g.reshape(-1) for g in members]).double().tolist()
        found |= {(column, layer): v for column, v in zip(SPECS, _reference(Elements(flat)), strict=True)}
    return found


def model() -> torch.nn.Sequential:
    """Two layers with two parameters each, and one that has one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1, bias=False))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, list[torch.Tensor]]:
    """So many steps; the gradients of the last one by layer."""
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


def test_a_statistic_of_ones_own_is_in_the_scrape() -> None:
    """Registered from outside, it is measured for each layer on each sampled round, and `/metrics` shows what it is."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with (
        register(TOY),
        contextlib.closing(REGISTRY.register(COLLECTOR)),
        start_exporter(module, 0, addr="127.0.0.1", every=1) as exporter,
    ):
        assert collected(exporter) == {}
        for steps in (1, 1, 3):
            expected = by_layer(train(module, optimizer, steps))
            assert len(expected) == 15
            assert collected(exporter) == pytest.approx(expected, rel=1e-5)
        assert scraped(exporter) == pytest.approx(expected, rel=1e-5)  # an answer is kept for a while: this is the first one
        assert errors(exporter) == {}


def test_the_gradients_are_left_alone() -> None:
    """Training beside the toy comes out bit for bit as it does without."""
    ends = []
    for toys in ([], [TOY]):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        with contextlib.ExitStack() as stack:
            for one in toys:
                stack.enter_context(register(one))
            stack.enter_context(start_exporter(module, port=None, every=1))
            train(module, optimizer, 5)
        ends.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_loss_scale_is_divided_out_by_its_power() -> None:
    """Under a gradient scaler a count stays, what is proportional to the gradient is divided by the scale, a cube by its cube."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with register(TOY), start_exporter(module, port=None, every=1, grad_scaler=scaler) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(module(torch.randn(7, 6)).square().sum()).backward()
            weight = module[3].weight.grad
            assert weight is not None
            expected = _reference(Elements((weight / 1024).reshape(-1).tolist()))
            scaled = _reference(Elements(weight.reshape(-1).tolist()))
            scaler.step(optimizer)
            scaler.update()
        found = exporter._host.snapshot().gradients
    row = found.table.layers.index("3")
    columns = {key.removeprefix("toy."): float(column[row]) for key, column in found.declared.items()}
    by_name = dict(zip(SPECS, expected, strict=True)) | {"tiny": scaled[1]}  # a threshold knows no scale
    assert columns == pytest.approx(by_name, rel=1e-5)


def test_it_is_measured_by_exporters_that_start_while_it_is_registered() -> None:
    """Those from before and those from after do not have it; closing twice is closing once."""
    snapshots = {}
    modules = [model() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        exporters = [stack.enter_context(start_exporter(modules[0], port=None, every=1))]
        registration = register(TOY)
        exporters.append(stack.enter_context(start_exporter(modules[1], port=None, every=1)))
        registration.close()
        registration.close()
        exporters.append(stack.enter_context(start_exporter(modules[2], port=None, every=1)))
        for number, (module, exporter) in enumerate(zip(modules, exporters, strict=True)):
            train(module, torch.optim.SGD(module.parameters(), lr=0.01), 2)
            snapshots[number] = exporter._host.snapshot().gradients.declared
            assert value(exporter, "torch_grad_captures_total", layer="0") == 2
    assert [len(one) for one in snapshots.values()] == [0, 5, 0]
    assert np.isfinite(snapshots[1]["toy.positive"]).all()


def test_a_later_registration_outlives_the_closing_of_an_earlier_one() -> None:
    """Closing a registration ends that one only, also where another statistic has its name by now."""
    first = register(TOY)
    first.close()
    with register(replace(TOY, columns=TOY.columns[:1])) as _:
        first.close()
        assert [one.name for one in declared.declared()] == ["moments", "toy"]
    assert [one.name for one in declared.declared()] == ["moments"]


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
    """A name that is taken, a missing measure and columns that cannot be told apart are refused at once, and nothing is kept."""
    with pytest.raises(ValueError, match=message):
        register(wrong)
    with register(TOY), pytest.raises(ValueError, match="close its registration"):
        register(TOY)
    assert [one.name for one in declared.declared()] == ["moments"]


def test_an_option_switches_a_statistic_on() -> None:
    """One with an option is measured where that is on, and only there."""
    shy = replace(TOY, opt_in="toys")
    with register(shy):
        assert declared.chosen({"moments": False, "toys": False}) == []
        assert declared.chosen({"moments": True}) == [moments.STATISTIC]
        assert declared.chosen({"toys": True}) == [shy]


def test_a_file_of_a_package_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package finds its own statistics by their files: each module with a `STATISTIC` adds one, others none."""
    folder = tmp_path / "toy_statistics"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "kernels" / "__init__.py").write_text("raise RuntimeError('not looked at')")
    (folder / "helper.py").write_text("STATISTIC = 'not one'")
    (folder / "toy.py").write_text("from tests.statistics.test_toy_statistic import TOY as STATISTIC")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(found_in("toy_statistics", [str(folder)])) == [TOY]
    for name in [name for name in sys.modules if name.startswith("toy_statistics")]:
        monkeypatch.delitem(sys.modules, name)
    assert declared.of_the_package() == {"moments": moments.STATISTIC}


def test_a_measure_that_fails_costs_samples_and_not_the_training() -> None:
    """Values of the wrong shape, and writing to the block, which may be the gradient itself, are failures of the capture."""

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
            assert exporter._host.snapshot().gradients.samples == 0


def test_a_device_measure_of_the_wrong_shape_is_told() -> None:
    """It is no other column's value that is then shown."""
    wrong = replace(TOY, device=lambda chunk, wide: torch.zeros(len(chunk), 4, dtype=wide))
    with pytest.raises(ValueError, match=r"'toy': expected values of shape \(gradients, 5\), got \(1, 4\)"):
        ON_DEVICE(9, Layout.of([wrong])).measure(plan_of(Bare((3, 2))), [(0, torch.ones(3, 2))], 1)


# Each declared statistic against its definition

EVERYTHING = Layout.of([moments.STATISTIC, TOY])

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: some((40, 30)),
    "vector": lambda: some((17,)),
    "scalar": lambda: torch.tensor(-3.0),
    "large": lambda: some((300, 1000)),
    "bfloat16": lambda: some((300, 1000), torch.bfloat16),
    "float16": lambda: some((6, 5), torch.float16),
    "complex": lambda: some((4, 3), torch.complex64),
    "transposed": lambda: some((1000, 300)).t(),
    "a type of one byte": lambda: some((40, 30)).to(torch.float8_e5m2).float(),
    "tiny": lambda: some((40, 30)) * 1e-12,
    "not finite": lambda: torch.tensor([[NAN, 0.0], [INF, 1.0], [-INF, INF], [0.0, 0.0]]),
    "sparse": lambda: sparse(torch.tensor([[0, 0, 2]]), -torch.ones(3, 4), (50, 4)),
}


@pytest.mark.parametrize(
    ("statistics", "rel"),
    [(EagerStatistics(1, EVERYTHING), 1e-6), (ON_DEVICE(1, EVERYTHING), 1e-6), (NARROW(1, EVERYTHING), 1e-5)],
    ids=["host", "device", "no float64"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_declared_column_is_what_its_reference_says(kind: str, statistics: EagerStatistics, rel: float) -> None:
    """Of the package's own and of the toy, on the CPU, on devices and on those without float64, for every kind of gradient."""
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


def test_the_places_of_the_packages_own_columns_follow_from_their_declarations() -> None:
    """`Column` names them in the order in which they are declared, whatever else is measured."""
    for layout in (Layout.of(), Layout.of([TOY]), EVERYTHING):
        names = [key.rpartition(".")[2] for key in layout.keys]
        assert names[: len(Column)] == [column.name.lower() for column in Column]
        assert [layout.columns[column].combine for column in (Column.NORM, Column.MIN, Column.MAX)] == [
            Combine.ROOT_OF_SQUARES, Combine.MIN, Combine.MAX,
        ]  # fmt: skip


# By layer


def snapshot_of(rows: Mapping[int, Sequence[float]], sharded: Sequence[bool] = (False, False)) -> GradientSnapshot:
    """What the toy's columns of some parameters, of layers `a`, `a` and `b`, add up to."""
    layout = Layout.of([TOY])
    table = replace(PLAN, sharded=np.array(sharded))
    gradients = GradientAggregation(layout)
    gradients.use(table)
    positions = np.array(list(rows), dtype=np.int64)
    vector = np.concatenate([np.concatenate([np.zeros(len(Column)), row]) for row in rows.values()])
    part = Part(positions, PLAN.elements[positions], PLAN.units[positions], Arrived(vector), Packing(layout))
    gradients.apply(replace(captured(1, {}, table=table), parts=(part,)))
    gradients.apply(closed(1))
    return gradients.snapshot(1_800_000_000.0)


def test_parameters_combine_to_layers_as_declared() -> None:
    """Sums are added, the largest of a maximum is taken, and a layer that was not in the sample has no value."""
    found = snapshot_of({0: [3, 1, -5.0, 10, 20], 1: [4, 2, -7.0, 1, 2]}).declared
    assert {key: column[0] for key, column in found.items()} == {
        "toy.positive": 7, "toy.tiny": 3, "toy.steepest": -5.0, "toy.cubes": 11, "toy.absolute": 22,
    }  # fmt: skip
    assert all(np.isnan(column[1]) for column in found.values())


def test_what_is_said_of_the_whole_only_is_not_said_of_a_part() -> None:
    """Where this rank has a part of a layer, such a column has no value there, and the others have theirs."""
    found = snapshot_of({0: [3, 1, -5.0, 10, 20], 2: [1, 1, 2.0, 1, 1]}, sharded=(True, False)).declared
    assert found["toy.steepest"].tolist() == [pytest.approx(NAN, nan_ok=True), 2.0]
    assert found["toy.positive"].tolist() == [3, 1]
