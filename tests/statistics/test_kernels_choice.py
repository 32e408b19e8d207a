"""When the programs are trusted, with programs of numpy; those in Triton are tested in tests/kernels and on a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.programs import Starter
from tests.support.programs_by_numpy import Program, Programs
from tests.support.statistics import WITH_MOMENTS, by_definition, by_position
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels.choice import Implementation, Kernels
from torch_grad_exporter.statistics.kernels.trial import probe

PROBE = len(probe(torch.device("cpu"))[1])
"""Gradients of the first comparison."""


def sent(vector: torch.Tensor) -> Callable[[], FloatArray | None]:
    """Carry a vector to the host at once."""
    copy = vector.double().numpy().copy()
    return lambda: copy


class Scene:
    """A model with gradients, on the CPU in place of a GPU, and statistics that may measure them by programs."""

    def __init__(
        self,
        programs: Programs,
        **options: Any,  # noqa: ANN401 - of `Kernels`
    ) -> None:
        self.programs, self.errors = programs, ErrorLog(())
        layers = torch.nn.Linear(5, 4), torch.nn.Conv2d(2, 3, 3), torch.nn.ConvTranspose2d(4, 6, 3, groups=2)
        self.model = torch.nn.Sequential(*layers)
        self.table = LayerIndex({"": self.model}).table
        boundary = self.errors.boundary("kernels")
        self.kernels = Kernels(WITH_MOMENTS, boundary, sent, kinds=frozenset({"cpu"}), **{"load": lambda: programs, **options})
        self.statistics = EagerStatistics(3, WITH_MOMENTS, on_host=frozenset(), kernels=self.kernels)
        self.samples = 0
        self.gradients = [(i, torch.randn(p.shape)) for i, p in enumerate(self.table.parameters() or ())]
        self.gradients[0][1][1] = 0

    def sample(self) -> int:
        """Measure a sample and check all numbers; return how many gradients the programs have read, comparisons included."""
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


def test_programs_are_trusted_after_two_comparisons(caplog: pytest.LogCaptureFixture) -> None:
    """The first sample tries a probe, the second compares its own gradients, and from the third on the programs measure."""
    caplog.set_level(logging.INFO)
    scene = Scene(Programs())
    assert [scene.sample() for _ in range(5)] == [PROBE, OF_THE_MODEL, OF_THE_MODEL, OF_THE_MODEL, OF_THE_MODEL]
    assert len([record for record in caplog.records if "gradients on cpu from now on" in record.getMessage()]) == 1
    assert scene.programs.launches[2:] == [OF_THE_MODEL] * 2 * 3  # of the third sample and those after it, the norms too
    assert scene.errors.counts() == {}


@pytest.mark.slow
@pytest.mark.parametrize("column", [Column.NORM, Column.NANS])
def test_a_wrong_number_decides_against_them(column: Column, caplog: pytest.LogCaptureFixture) -> None:
    """One wrong column, of the probe or of a sample, is logged once, and torch measures from then on."""

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


def test_what_cannot_be_compiled_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A failed compilation or import of Triton costs one attempt, one log line and no sample."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("ptxas")

    for where in ("the program", "the import"):
        caplog.clear()
        scene = Scene(Programs(), **({"load": fails} if where == "the import" else {}))
        scene.programs.read = Program(fails)
        assert [scene.sample() for _ in range(4)] == [0] * 4
        assert scene.errors.counts() == {"kernels": 1}
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_failure_later_costs_no_sample() -> None:
    """Once trusted, a failed launch is replaced by torch, and ten failures in a row disable the programs."""
    scene = Scene(Programs())
    for _ in range(3):
        scene.sample()
    right, left = scene.programs.read[0,], [1]

    def fails(*arguments: object, **named: object) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("out of memory")
        right(*arguments, **named)

    scene.programs.read = Program(fails)
    assert [scene.sample(), scene.sample()] == [0, OF_THE_MODEL]
    left[0] = LIMIT
    assert [scene.sample() for _ in range(LIMIT + 2)] == [0] * (LIMIT + 2)
    assert scene.errors.counts() == {"kernels": LIMIT + 1}


def test_nothing_is_launched_while_a_graph_is_captured() -> None:
    """During the capture of a CUDA graph torch measures, whether the programs are trusted or not."""
    capturing = [True]
    scene = Scene(Programs(), capturing=lambda: capturing[0])
    assert [scene.sample() for _ in range(3)] == [0] * 3
    assert not scene.kernels.taken_once()
    capturing[0] = False
    assert [scene.sample() for _ in range(3)] == [PROBE, OF_THE_MODEL, OF_THE_MODEL]
    assert scene.kernels.trusted == {torch.device("cpu")}
    capturing[0] = True
    assert scene.sample() == 0


@pytest.mark.parametrize(("hip", "installed", "chosen"), [(None, True, True), (None, False, False), ("6.4", True, False)])
def test_auto_is_triton_where_it_was_measured(
    hip: str | None, installed: bool, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default programs measure where torch is built for NVIDIA's GPUs and Triton can be imported."""
    if installed:
        (tmp_path / "triton.py").touch()
    else:
        monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported, also where torch brings it
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Implementation.AUTO.by_programs is chosen
    assert Implementation.TRITON.by_programs
    assert not Implementation.TORCH.by_programs


TRAINS = """
import sys, torch, torch_grad_exporter

before = set(sys.modules)
model = torch.nn.Linear(3, 2)
with torch_grad_exporter.start_exporter(model, port=None, every=1) as exporter:
    model(torch.ones(1, 3)).sum().backward()
assert not [name for name in set(sys.modules) - before if "triton" in name]
assert not [name for name in sys.modules if name.endswith("kernels.programs")]
"""


@pytest.mark.process
def test_triton_is_imported_for_a_gpu_only(starter: Starter) -> None:
    """A run on the CPU imports neither Triton nor the programs."""
    program = starter.start(TRAINS)
    assert program.wait() == 0, program.err.read_text()
