"""Updates that bf16 rounds away are found in a real training, those that are kept are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.support.scrape import OFF
from torch_grad_exporter import start_exporter

PARTS = {"bf16": (torch.bfloat16, 1e-5), "float32": (torch.float32, 1e-5), "a large rate": (torch.bfloat16, 1e-2)}


@pytest.mark.parametrize(("dtype", "rate"), PARTS.values(), ids=PARTS)
def test_updates_that_rounding_loses(dtype: torch.dtype, rate: float, tmp_path: Path) -> None:
    """`UpdatesLost` fires for both layers in bf16 with a small learning rate, and for none otherwise."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    inputs, target = torch.randn(64, 32, dtype=dtype), torch.randn(64, 4, dtype=dtype)
    with start_exporter(model, None, every=1, weights=True, collectors=OFF) as exporter:
        for _ in range(160):
            optimizer.zero_grad()
            (model(inputs) - target).square().mean().backward()
            optimizer.step()
        exporter.save(tmp_path / "run.json.gz")
    wrong = json.loads(gzip.decompress((tmp_path / "run.json.gz").read_bytes()))["judged"]["wrong"]
    layers = {problem["layer"] for problem in wrong if problem["alert"] == "UpdatesLost"}
    assert layers == ({"0", "2"} if dtype is torch.bfloat16 and rate < 1e-3 else set())
