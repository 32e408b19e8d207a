"""What actions take of the training thread counts as the exporter's own time."""

from __future__ import annotations

import time

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze


def test_steps_under_an_action_cost_what_they_take() -> None:
    """The own time of a run that has frozen a layer is some of the time that has passed, and no more."""
    model = Perceptron()
    optimizer, began = sgd(model), time.perf_counter()
    with start_exporter(model, None, every=1) as exporter:
        exporter.on(lambda _: True, Freeze(layers="second"))

        def is_frozen() -> bool:
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
            return value(exporter, "torch_layer_frozen", layer="second") == 1

        assert eventually(is_frozen)
        for _ in range(5):
            is_frozen()
        own = value(exporter, "torch_grad_exporter_overhead_seconds_total")
        assert own is not None
        assert 0 < own < time.perf_counter() - began
