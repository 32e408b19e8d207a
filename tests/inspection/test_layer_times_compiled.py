"""Under `torch.compile` the times of layers add no graph break and no compilation; what is compiled is absent, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.inspection.test_activations_compiled import (
    Step,
    Two,
    a_block,
    a_block_in_place,
    a_forward,
    a_function_around,
    a_function_inside,
    in_place,
    train,
    whole,
)
from tests.matrix.compiled import compilations, dynamo
from tests.support.models import sgd
from tests.support.scrape import errors, values
from torch_grad_exporter import start_exporter


@pytest.fixture(autouse=True)
def scene() -> Iterator[None]:
    """Nothing was compiled before, and nothing may be compiled a second time."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("compiled", [whole, in_place, a_block, a_block_in_place, a_forward, a_function_around, a_function_inside])
def test_nothing_is_compiled_anew(compiled: Callable[[Two], Step], every: int) -> None:
    """As many graphs, breaks and compilations as without an exporter, with hooks that come and go."""
    counts, shown = [], {}
    for watched in (False, True):
        torch._dynamo.reset()
        before = compilations()
        torch.manual_seed(0)
        model = Two()
        optimizer = sgd(model)
        if watched:
            with start_exporter(model, None, every=every, layer_times=True) as exporter:
                train(compiled(model), optimizer)
                assert errors(exporter) == {}
                shown = values(exporter)
        else:
            train(compiled(model), optimizer)
        counts.append({name: count - before[name] for name, count in compilations().items()})
    assert counts[0] == counts[1]
    layers = {dict(labels)["layer"] for name, labels in shown if name == "torch_layer_seconds_total"}
    assert layers == (set() if compiled in (whole, in_place, a_function_around) else {"head"})


def test_what_is_compiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once how many layers are not timed."""
    model = Two()
    step, optimizer = a_block(model), sgd(model)
    with caplog.at_level(logging.WARNING), start_exporter(model, None, every=1, layer_times=True):
        train(step, optimizer)
    said = [record.message for record in caplog.records if "are not timed" in record.message]
    assert said == [
        "torch_grad_exporter: 2 layers are not timed, since they are compiled; a hook in compiled code would compile it anew"
    ]
