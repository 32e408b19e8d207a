"""On a GPU: the batch of a NaN comes to the host without waiting, and replays. Needs CUDA (`-m cuda`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.actions.black_box.planted import model
from tests.capture.test_cuda import nothing_waits
from tests.support.scrape import OFF, errors
from tests.support.tools import eventually
from torch_grad_exporter import load_black_box, start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]


@pytest.mark.parametrize("rows", [1, 1 << 14], ids=["copied", "held"])
def test_the_batch_of_a_nan_on_a_gpu(rows: int, tmp_path: Path) -> None:
    """The box has the batch and the state of the GPU's generator, and no step waits for the device."""
    trained = model().cuda()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    wrong = torch.rand(rows, 64, device="cuda") * (torch.arange(64, device="cuda") == 0)

    def step(data: torch.Tensor) -> None:
        with nothing_waits():
            trained(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def is_there() -> bool:
        step(torch.rand(rows, 64, device="cuda"))
        torch.cuda.synchronize()
        return any(tmp_path.glob("*/*/about.json"))

    with start_exporter(trained, None, collectors=OFF, black_box=tmp_path) as exporter:
        for _ in range(10):
            step(torch.rand(rows, 64, device="cuda"))
        while trained[2].weight.isfinite().all():
            step(wrong)
        assert eventually(is_there)
        assert not errors(exporter)
    batch = load_black_box(tmp_path).batches[-1].to("cuda")
    assert torch.equal(batch.args[0], wrong)
    again = model().cuda()
    with batch.random_states():
        assert not again(*batch.args).isfinite().all()


def test_a_run_on_a_gpu_that_raises_at_once(tmp_path: Path) -> None:
    """The batch comes to the host although no forward follows."""
    trained = model().cuda()

    def loop() -> None:
        for step in range(20):
            trained(torch.rand(4, 64, device="cuda") * (step != 12)).square().mean().backward()
            if step == 12:
                raise FloatingPointError

    with pytest.raises(FloatingPointError), start_exporter(trained, None, every=1, collectors=OFF, black_box=tmp_path):
        loop()
    assert not load_black_box(tmp_path).batches[-1].args[0].any()
