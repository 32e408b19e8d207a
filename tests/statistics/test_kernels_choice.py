"""When the programs are trusted and when not, by programs of numpy: what Triton's do is shown in tests/kernels and on a GPU."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from tests.support.programs_by_numpy import Programs
from tests.support.statistics import WITH_MOMENTS, by_definition, by_position
from torch_grad_exporter import start_exporter
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Statistic
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels import tables
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.kernels.launch import Launcher
from torch_grad_exporter.statistics.kernels.probe import probe
from torch_grad_exporter.statistics.layout import Layout

PROBE = len(probe(torch.device("cpu"))[1])
"""Gradients of the first comparison."""


class Post:
    """Carries vectors to the host. They arrive at once, or with `late` when `deliver` is called; with `full` none is taken."""

    def __init__(self, *, late: bool = False) -> None:
        self.late = late
        self.full = False

    def send(self, vector: torch.Tensor) -> Callable[[], FloatArray | None] | None:
        """Takes a vector."""
        copy = vector.double().numpy().copy()
        return None if self.full else lambda: None if self.late else copy


class Scene:
    """A model with gradients, on the CPU in place of a GPU, and statistics that may measure them by programs."""

    def __init__(
        self,
        programs: Programs,
        post: Post | None = None,
        layout: Layout = WITH_MOMENTS,
        kinds: frozenset[str] = frozenset({"cpu"}),
        model: torch.nn.Module | None = None,
    ) -> None:
        self.programs, self.errors = programs, ErrorLog(())
        self.model = model or torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Conv2d(2, 3, 3), torch.nn.ConvTranspose2d(4, 6, 3, groups=2)
        )
        self.table = LayerIndex({"": self.model}).table
        self.kernels = Kernels(
            layout,
            self.errors.boundary("kernels"),
            (post or Post()).send,
            kinds=kinds,
            load=lambda: programs,  # type: ignore[arg-type]
        )
        self.statistics = EagerStatistics(3, layout, on_host=frozenset(), kernels=self.kernels)
        self.samples = 0
        self.renew()

    def renew(self, kind: torch.dtype = torch.float32) -> None:
        """Other gradients."""
        torch.manual_seed(self.samples)
        self.gradients = [(i, torch.randn(p.shape).to(kind)) for i, p in enumerate(self.table.parameters() or ())]
        self.gradients[0][1][1] = 0

    def sample(self) -> int:
        """Measures a sample, by whatever, and all is right: gives how many gradients the programs have read, also to compare."""
        before = sum(self.programs.launches)
        self.samples += 1
        found = by_position(self.statistics.measure(self.table, self.gradients, self.samples))
        assert sorted(found) == [position for position, _ in self.gradients]
        for position, gradient in self.gradients:
            expected, row = by_definition(gradient, self.table.tracked[position].units), found[position]
            assert row[Column.NORM] == pytest.approx(expected.norm, rel=1e-6)
            assert (row[Column.ZEROS], row[Column.ZERO_UNITS]) == (expected.zeros, expected.zero_units)
            assert (row[Column.MIN], row[Column.MAX]) == (expected.min, expected.max)
            assert row[Column.SUM] == pytest.approx(expected.sum, abs=1e-5 * expected.elements)
        read = sum(self.programs.launches) - before
        again = by_position(self.statistics.norms(self.table, self.gradients))
        assert {position: row[0] for position, row in again.items()} == {p: found[p][Column.NORM] for p, _ in self.gradients}
        return read


OF_THE_MODEL = 5
"""Gradients of the model that the programs can read: not that of the transposed convolution of two groups."""


def test_they_are_trusted_after_two_comparisons(caplog: pytest.LogCaptureFixture) -> None:
    """The first sample tries a probe, the second one compares its own gradients; from the third on the programs measure."""
    caplog.set_level(logging.INFO)
    scene = Scene(Programs())
    assert [scene.sample() for _ in range(5)] == [PROBE, OF_THE_MODEL, OF_THE_MODEL, OF_THE_MODEL, OF_THE_MODEL]
    assert len([record for record in caplog.records if "gradients on cpu from now on" in record.getMessage()]) == 1
    assert scene.programs.launches[2:] == [OF_THE_MODEL] * 2 * 3  # of the third sample and those after it, the norms too
    assert scene.errors.counts() == {}


def test_norms_have_the_bits_of_their_sample() -> None:
    """What has measured a sample measures its norms again: `Scene.sample` compares them, at each turn of the decision."""
    scene = Scene(Programs(), post := Post(late=True))
    assert [scene.sample(), scene.sample()] == [PROBE, 0]
    readings = scene.statistics.read(scene.table, scene.gradients)
    post.late = False
    scene.statistics.finish([*readings, *scene.statistics.read(scene.table, [])], 7)
    again = by_position(scene.statistics.norms(scene.table, scene.gradients))
    assert len(scene.programs.launches) == 1
    assert len(again) == len(scene.gradients)


def test_nothing_waits_for_the_verdict() -> None:
    """As long as a comparison is under way, and where it cannot be sent, torch's operations measure."""
    scene = Scene(Programs(), post := Post(late=True))
    assert [scene.sample() for _ in range(4)] == [PROBE, 0, 0, 0]
    post.late, post.full = False, True
    assert [scene.sample() for _ in range(3)] == [OF_THE_MODEL] * 3  # compared, and not sent
    post.full, post.late = False, True
    assert [scene.sample() for _ in range(3)] == [OF_THE_MODEL, 0, 0]
    post.late = False
    launches = len(scene.programs.launches)
    assert scene.sample() == OF_THE_MODEL
    assert len(scene.programs.launches) == launches + 2  # its norms as well


@pytest.mark.parametrize("column", [Column.NORM, Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX, Column.SUM])
def test_a_wrong_number_decides_against_them(column: Column, caplog: pytest.LogCaptureFixture) -> None:
    """A number that is off in one column, and be it of the training's gradients only, is said once; torch measures for good."""

    def change(row: np.ndarray) -> None:
        row[column] += 1e-3 * max(1.0, abs(row[column]))

    for wrong in ("the probe", "the sample"):
        caplog.clear()
        scene = Scene(Programs())
        if wrong == "the sample":
            scene.sample()
        scene.programs.change = change
        scene.sample()
        assert [scene.sample() for _ in range(4)] == [0] * 4
        assert scene.errors.counts() == {"kernels": 1}
        assert len(caplog.records) == 1
        assert f"WrongNumbersError: {column.name}" in caplog.text


def test_a_wrong_flag_decides_against_them() -> None:
    """So does a flag of a unit."""
    scene = Scene(programs := Programs())
    right = programs.read[0,]

    def wrong(owners: torch.Tensor, entries: torch.Tensor, addresses: torch.Tensor, *rest: torch.Tensor, **named: object) -> None:
        right(owners, entries, addresses, *rest, **named)
        rest[1][:] = 1

    programs.read._run = wrong
    assert [scene.sample() for _ in range(3)] == [PROBE, 0, 0]
    assert scene.errors.counts() == {"kernels": 1}


def test_what_cannot_be_compiled_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A compilation that fails, or a Triton that cannot be imported, costs one try, one line and no sample."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("ptxas")

    for where in ("the program", "the import"):
        caplog.clear()
        scene = Scene(Programs())
        scene.programs.read._run = fails
        if where == "the import":
            scene.kernels._load = fails  # type: ignore[assignment]
        assert [scene.sample() for _ in range(4)] == [0] * 4
        assert scene.errors.counts() == {"kernels": 1}
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_failure_later_costs_no_sample() -> None:
    """Once trusted, a launch that fails is made up for by torch; ten in a row are the last ones."""
    scene = Scene(Programs())
    for _ in range(3):
        scene.sample()
    right, left = scene.programs.read._run, [1]

    def fails(*arguments: object, **named: object) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("out of memory")
        right(*arguments, **named)

    scene.programs.read._run = fails
    assert [scene.sample(), scene.sample()] == [0, OF_THE_MODEL]
    left[0] = LIMIT
    assert [scene.sample() for _ in range(LIMIT + 2)] == [0] * (LIMIT + 2)
    assert scene.errors.counts() == {"kernels": LIMIT + 1}


@pytest.mark.parametrize("at", range(4))
def test_a_copy_that_fails_leaves_no_wrong_address(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of the copies of tables and addresses fails, the next sample sends them again: old addresses would be read."""
    scene = Scene(Programs())
    for _ in range(3):
        scene.sample()
    right, left = Launcher._copied, [at]

    def fails(self: Launcher, values: object) -> torch.Tensor:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("out of memory")
        return right(self, values)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "_copied", fails)
    scene.renew(torch.bfloat16)
    assert scene.sample() == 0
    kept = [gradient for _, gradient in scene.gradients]
    scene.renew(torch.bfloat16)
    assert scene.sample() == OF_THE_MODEL
    scene.renew(torch.float32)
    assert scene.sample() == OF_THE_MODEL
    assert len(kept) == 6
    assert scene.errors.counts() == {"kernels": 1}


def test_gradients_that_change() -> None:
    """Other types, other gradients and other memory need no further comparison; what the programs cannot read torch does."""
    scene = Scene(Programs())
    for _ in range(3):
        scene.sample()
    for kind, read in (
        (torch.bfloat16, OF_THE_MODEL),
        (torch.float16, OF_THE_MODEL),
        (torch.float64, 0),
        (torch.float32, OF_THE_MODEL),
    ):
        scene.renew(kind)
        assert scene.sample() == read
    scene.gradients = scene.gradients[1:3]
    assert scene.sample() == 2
    scene.gradients = [(1, scene.gradients[0][1].to_sparse()), (2, scene.gradients[1][1].double())]
    assert scene.sample() == 1  # the values of the sparse one are dense
    scene.renew()
    scene.gradients[2] = 2, torch.zeros(1).expand(3, 2, 3, 3)
    assert scene.sample() == OF_THE_MODEL - 1


def test_each_device_is_tried_for_itself() -> None:
    """What is known of one device says nothing of another, and a failure there leaves this one as it is."""
    scene = Scene(Programs(), kinds=frozenset({"cpu", "meta"}))
    for _ in range(3):
        scene.sample()
    scene.statistics.read(scene.table, [(i, g.to("meta") if i % 2 else g) for i, g in scene.gradients])
    assert scene.programs.launches == [PROBE, *[OF_THE_MODEL] * 3, 2]
    assert scene.errors.counts() == {"kernels": 1}  # the probe has no memory on `meta`
    scene.statistics.finish([], scene.samples)
    assert scene.sample() == OF_THE_MODEL


def test_devices_without_programs_are_left_alone() -> None:
    """On other kinds of devices nothing is tried, imported or said."""
    scene = Scene(Programs(), kinds=frozenset({"cuda"}))
    scene.kernels._load = pytest.fail  # type: ignore[assignment]
    assert [scene.sample() for _ in range(3)] == [0] * 3
    assert not scene.kernels.taken_once()


def test_nothing_is_launched_while_a_graph_is_captured() -> None:
    """A CUDA graph would take in what is launched, and compiling or sending would spoil it: torch measures, trusted or not."""
    capturing = [True]
    scene = Scene(Programs())
    scene.kernels._capturing = lambda: capturing[0]
    assert [scene.sample() for _ in range(3)] == [0] * 3
    assert not scene.kernels.taken_once()
    capturing[0] = False
    assert [scene.sample() for _ in range(3)] == [PROBE, OF_THE_MODEL, OF_THE_MODEL]
    assert scene.kernels.trusted == {torch.device("cpu")}
    capturing[0] = True
    assert scene.sample() == 0


def test_work_of_the_first_samples_is_told() -> None:
    """Compilation and comparisons are no part of what a sample costs."""
    scene = Scene(Programs())
    told = []
    for _ in range(4):
        scene.sample()
        told.append(scene.statistics.taken_once())
    assert told == [True, True, False, False]


LOUD = Statistic(
    "loud",
    (ColumnSpec("above", Combine.SUM), ColumnSpec("least", Combine.MIN)),
    lambda elements: (0.0, 0.0),
    lambda block: np.stack([(block > 1).sum(axis=1), np.abs(block).min(axis=1)], axis=1),
    lambda chunk, wide: torch.stack([(chunk > 1).sum(dim=1).to(wide), chunk.abs().amin(dim=1).to(wide)], dim=1),
)


def test_statistics_measured_apart_go_on() -> None:
    """What the programs do not know torch measures beside them, of large gradients in pieces, whose rows combine as ever."""
    layout = Layout.of([LOUD])
    scene = Scene(Programs(), layout=layout, model=torch.nn.Sequential(torch.nn.Linear(500, 300), torch.nn.Linear(7, 5)))
    scene.statistics = EagerStatistics(3, layout, on_host=frozenset(), chunk_elements=1, kernels=scene.kernels)
    for sample in range(4):
        (measured,) = scene.statistics.measure(scene.table, scene.gradients, sample)
    assert scene.programs.launches == [PROBE, 4, 4, 4]
    assert measured.packing.pieces is not None
    assert max(measured.packing.pieces) > 1
    found, plain = by_position([measured]), EagerStatistics(3, layout, on_host=frozenset())
    for position, row in by_position(plain.measure(scene.table, scene.gradients, 1)).items():
        same = [place for place in range(layout.width) if place != Column.DEAD_UNITS]
        np.testing.assert_allclose(found[position][same], row[same], rtol=1e-12)
    assert found[0][layout.places(LOUD).start] > 0


def test_the_probe_has_what_is_hard() -> None:
    """Among its gradients are NaN, Inf, subnormal values, addresses for no wide load, and units that are zero and that are not."""
    group, parts = probe(torch.device("cpu"))
    tensors = [batch.tensors[0] for batch in parts]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.bfloat16, torch.float16}
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        own = [tensor for tensor in tensors if tensor.dtype is kind]
        values = torch.cat([tensor.reshape(-1).double() for tensor in own])
        assert values.isnan().any()
        assert values.isinf().any()
        assert ((values != 0) & (values.abs() < torch.finfo(kind).smallest_normal)).any()
        assert {tensor.data_ptr() % 16 == 0 for tensor in own} == {True, False}
        assert any(math.isfinite(float(tensor.double().norm())) and tensor.numel() > 4096 for tensor in own)
    zero = torch.cat(
        [(batch.layout.rows(t).float() == 0).all(dim=1) for batch, t in zip(parts, tensors, strict=True) if batch.layout]
    )
    assert zero.any()
    assert not zero.all()
    assert group.positions.tolist() == list(range(len(parts)))


def test_what_is_kept_of_tiles_is_bounded() -> None:
    """Two numbers for each few elements, and never more than 64 MiB: 7 billion elements are one launch, and 70 billion several."""
    for layers, launches in ((32, 1), (3200, 5)):
        shapes = [(4096, 4096)] * 4 * layers + [(11_008, 4096)] * 3 * layers
        gradients = [(torch.empty(shape, dtype=torch.bfloat16, device="meta"), None) for shape in shapes]
        kept = [
            sum(tables.tiles(g.numel())[1] for g, _ in gradients[flight]) * tables.PARTIALS * 8
            for flight in tables.flights(gradients)
        ]
        assert len(kept) >= launches
        assert max(kept) <= 1 << 26
        assert sum(kept) <= sum(g.numel() for g, _ in gradients) / 50


@pytest.mark.parametrize(("chosen", "by_programs"), [("auto", True), ("torch", False)])
def test_the_option(chosen: Literal["auto", "torch"], by_programs: bool) -> None:
    """`statistics="torch"` leaves the programs out; without it they may be tried, where there is a device for them."""
    with start_exporter(torch.nn.Linear(2, 2), port=None, statistics=chosen) as exporter:
        assert (exporter._training.reader.statistics._kernels is not None) is by_programs


def test_triton_is_imported_by_nothing_but_a_gpu() -> None:
    """The package, and a run on the CPU, import neither Triton nor the programs."""
    code = (
        "import sys, torch, torch_grad_exporter as t; before = {m for m in sys.modules if 'triton' in m}\n"
        "model = torch.nn.Linear(3, 2)\n"
        "with t.start_exporter(model, port=None, every=1) as exporter:\n"
        "    model(torch.ones(1, 3)).sum().backward()\n"
        "after = {m for m in sys.modules if 'triton' in m or m.endswith('kernels.programs')}\n"
        "assert after == before, after - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
