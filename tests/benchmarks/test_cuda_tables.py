"""The tables of `make bench-cuda`, which no test can measure here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cuda

CPU = torch.device("cpu")
WHOLE = ["all default statistics", "norms alone"]


@pytest.mark.parametrize(
    "table", [lambda: cuda.small_tensors(CPU, 20), lambda: cuda.large_model(CPU, 32, 1)], ids=["small", "large"]
)
def test_a_table_is_made_without_a_gpu(table: object) -> None:
    """Each way to read the same gradients has a row: what any way must take, what others take, and both of the exporter's."""
    found = table()  # type: ignore[operator]
    names = [row[0] for row in found["rows"]]
    assert names[:4] == [cuda.READ, cuda.COPY, "torch._foreach_norm", "clip_grad_norm_"]
    assert [name for name in names if "by the programs" in name] == [f"{name} by the programs" for name in WHOLE]
    assert all(row[1] is not None for row in found["rows"])
    assert found["rows"][0][2] == 1
