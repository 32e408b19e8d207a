"""Planted causes of NaN and Inf, each named by module, pass and kind in its first step."""

from __future__ import annotations

import pytest
import torch

from tests.inspection.nan_origin.causes import CAUSES, Cause
from tests.support.scrape import OFF, errors, values
from torch_grad_exporter import Exporter, start_exporter

pytestmark = pytest.mark.slow

Place = tuple[str, str, str]


def found(exporter: Exporter) -> dict[Place, float]:
    """Return layer, pass and kind of each origin, with its step."""
    scrape = ((name, dict(labels), number) for (name, labels), number in values(exporter).items())
    steps = ((labels, number) for name, labels, number in scrape if name == "torch_nonfinite_origin_step")
    return {(labels["layer"], labels["pass"], labels["kind"]): number for labels, number in steps}


def train(model: torch.nn.Module, cause: Cause, **options: object) -> dict[Place, float]:
    """Return the origins after one step from a planted cause."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with start_exporter(model, None, collectors=OFF, **options) as exporter:
        given = cause.batch()
        output = model(*given) if isinstance(given, tuple) else model(given)
        cause.loss(output).backward()
        optimizer.step()
        assert not errors(exporter)
        return found(exporter)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_planted_cause_is_named(cause: Cause) -> None:
    """The first step has one origin: the module, the pass and the kind that were planted."""
    torch.manual_seed(1)
    origins = list(train(cause.make(), cause, every=1, nan_origin="always"))
    assert [(layer, stage) for layer, stage, _ in origins] == [cause.place]
    assert not cause.kind or origins[0][2] == cause.kind
