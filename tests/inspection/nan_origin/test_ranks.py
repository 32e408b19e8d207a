"""Two ranks of which one makes a NaN: each reports what it can know."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.inspection.nan_origin.causes import NAN, Function, around
from tests.inspection.nan_origin.test_planted import found
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.process


def places(rank: int, wrapper: str, where: str) -> list[tuple[object, ...]]:
    """Return the places after two steps, in the second of which rank 1 makes a NaN in its batch or in a module's backward."""
    torch.manual_seed(0)
    inner = around(Function(lambda x: x * 1))
    if wrapper == "fsdp2":
        fully_shard(inner[0])
        model: nn.Module = fully_shard(inner)
    else:
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with start_exporter(model, None, every=1, collectors=OFF, nan_origin="always", run="ranks") as exporter:
        for step in range(2):
            data = torch.randn(4, 8)
            if step and rank and where == "batch":
                data[0] = NAN
            if step and rank and where == "backward":
                inner[3].function = lambda x: (x * 0).sqrt()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not errors(exporter)
        return [(*place,) for place in found(exporter)]


@pytest.mark.parametrize(("wrapper", "where"), [("ddp", "batch"), ("fsdp2", "backward")])
def test_a_nan_of_another_rank(wrapper: str, where: str) -> None:
    """The rank that made a NaN names the place; the other rank says that it came with the reduction."""
    innocent, guilty = of_ranks(places, wrapper, where)
    assert [stage for _, stage, _ in innocent] == ["reduction"]
    assert [place[:2] for place in guilty] == [("batch", "batch") if where == "batch" else ("3", "backward")]
