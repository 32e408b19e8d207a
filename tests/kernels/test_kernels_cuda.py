"""On a GPU: samples are measured by the programs, nothing waits for the device, and the training is the same to the last bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.capture.test_cuda import nothing_waits, settled, spin
from tests.support.models import Perceptron
from tests.support.scrape import errors, value
from tests.support.statistics import WITH_MOMENTS
from torch_grad_exporter import start_exporter
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.statistics.kernels.choice import Kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a CUDA device, and no interpreter"
    ),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


TRUSTED = "gradients on cuda:0 from now on"
"""Logged once the programs measure."""


def host(measured: list[Measurement]) -> dict[int, np.ndarray]:
    """The row of each position."""
    vectors = [one.vector.cpu() for one in measured]
    return {
        position: row
        for one, vector in zip(measured, vectors, strict=True)
        for position, row in zip(one.positions.tolist(), one.packing.rows(vector.numpy(), len(one.positions)), strict=True)
    }


def trained(steps: int, **options: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the parameters after this many steps, with an exporter if there are options."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(steps, 4, 3, 8, 8)
    exporter = start_exporter(model, port=None, every=1, **options) if options else None
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs[step]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.synchronize()
    if exporter is not None:
        assert settled(exporter, steps)
        assert errors(exporter) == {}
        exporter.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_training_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Bit by bit: without an exporter, with torch's operations, with the programs, which measure from the third sample on."""
    caplog.set_level(logging.INFO)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = trained(12)
        by_torch = trained(12, statistics="torch")
        assert TRUSTED not in caplog.text
        by_programs = trained(12, moments=True)
        assert TRUSTED in caplog.text
    finally:
        torch.use_deterministic_algorithms(False)
    for other in (by_torch, by_programs):
        assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))


def test_nothing_waits_for_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    """A busy device does not hold up the training thread, with gradients at new addresses in each step."""
    caplog.set_level(logging.INFO)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    inputs = torch.randn(5, 6)
    with start_exporter(model, port=None, every=1) as exporter:
        for _ in range(6):  # libraries initialise themselves, the programs are compiled and compared
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
        assert TRUSTED in caplog.text
        kept = []
        with nothing_waits():
            spin(200_000_000)
            for _ in range(5):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                kept.append([parameter.grad for parameter in model.parameters()])
                optimizer.step()
        torch.cuda.synchronize()
        assert errors(exporter) == {}
        assert value(exporter, "torch_grad_exporter_captures_total")


def sent(vector: torch.Tensor) -> Callable[[], FloatArray]:
    """Copy a vector of a comparison to the host."""
    numbers = vector.double().cpu().numpy()
    return lambda: numbers


@pytest.fixture
def statistics() -> EagerStatistics:
    """What measures, after the comparisons."""
    failures = ErrorLog(())
    kernels = Kernels(WITH_MOMENTS, failures.boundary("kernels"), sent)
    one = EagerStatistics(3, WITH_MOMENTS, kernels=kernels)
    model = torch.nn.Linear(7, 5)
    for sample in range(3):
        one.measure(LayerIndex({"": model}).table, [(0, torch.randn(5, 7))], sample)
        torch.cuda.synchronize()
    assert one.taken_once()
    assert failures.counts() == {}
    return one


def test_ten_thousand_small_gradients(statistics: EagerStatistics) -> None:
    """All in one launch, as torch's operations measure them."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 + i % 13, 3)) for i in range(10_000)])
    table = LayerIndex({"": model}).table
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    gradients = [(i, torch.randn(p.shape).to(kinds[i % 3])) for i, p in enumerate(table.parameters() or ())]
    found, expected = (host(one.measure(table, gradients, 9)) for one in (statistics, EagerStatistics(3, WITH_MOMENTS)))
    rows, others = (np.stack([measured[i] for i in range(10_000)]) for measured in (found, expected))
    same = [place for place in Column if place != Column.DEAD_UNITS]
    np.testing.assert_allclose(rows[:, same], others[:, same], rtol=1e-6, atol=1e-12)
    norms = host(statistics.norms(table, gradients))
    assert all(norms[i][0] == found[i][Column.NORM] for i in range(10_000))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_more_elements_than_32_bits_count(statistics: EagerStatistics, kind: torch.dtype) -> None:
    """The last elements of a gradient of more than 2**31 are read; four gigabytes of zeros are before them."""
    rows, columns = 2**15 + 1, 2**16
    if torch.cuda.mem_get_info()[0] < 5 * rows * columns:
        pytest.skip("needs 10 GB of the device's memory")
    gradient = torch.zeros(rows, columns, dtype=kind)
    gradient[-1, -3:] = torch.tensor([3.0, -4.0, 0.0], dtype=kind)
    with torch.device("meta"):
        model = torch.nn.Linear(columns, rows, bias=False)
    (found,) = host(statistics.measure(LayerIndex({"": model}).table, [(0, gradient)], 9)).values()
    wanted = {
        Column.NORM: 5,
        Column.ZEROS: rows * columns - 2,
        Column.MIN: -4,
        Column.MAX: 3,
        Column.SUM: -1,
        Column.ZERO_UNITS: rows - 1,
    }
    assert {column: found[column] for column in wanted} == wanted


def test_other_gradients_need_no_other_compilation(statistics: EagerStatistics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes and how many, one compilation of each program serves all: one in the middle of a run would be felt."""
    triton = pytest.importorskip("triton")
    compiled: list[object] = []
    knobs = getattr(triton, "knobs", None)
    holder, name = (triton.runtime.JITFunction, "cache_hook") if knobs is None else (knobs.runtime, "jit_cache_hook")
    monkeypatch.setattr(holder, name, lambda *_, **named: compiled.append(named))
    for sample, shapes in enumerate(([(1, 1)], [(16, 16)] * 16, [(5, 4099)] * 7, [(300, 300), (3, 2)], [(2048, 1024)] * 3)):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
        table = LayerIndex({"": model}).table
        gradients = [(i, torch.randn(shape)) for i, shape in enumerate(shapes)]
        statistics.measure(table, gradients, 10 + sample)
        statistics.norms(table, gradients[:1])
    assert compiled == []
