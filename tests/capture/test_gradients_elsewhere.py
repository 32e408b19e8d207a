"""A loop whose gradients are not those of the parameters: it reports steps and norms, and layers are absent."""

from __future__ import annotations

import pytest
import torch

from tests.support.scrape import errors, value, values
from torch_grad_exporter import start_exporter


def test_reported_steps_and_norms() -> None:
    """Backwards and examples count; steps, skipped steps and norms are those that the loop reports."""
    model = torch.nn.Linear(3, 2)
    with start_exporter(model, port=None, every=1) as exporter:
        exporter.gradients_elsewhere()
        for number in range(1, 7):
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                model.zero_grad()
            if number % 3 == 0:
                exporter.step_skipped()
            else:
                exporter.observe(grad_norm=float(number))
                exporter.step()
                assert value(exporter, "torch_grad_global_norm") == number
        assert value(exporter, "torch_train_steps_total", optimizer="manual") == 4
        assert value(exporter, "torch_train_skipped_steps_total") == 2
        assert value(exporter, "torch_train_backward_passes_total") == 12
        assert value(exporter, "torch_train_samples_total") == 48
        shown = {name for name, _ in values(exporter)}
        assert not shown & {"torch_grad_norm", "torch_grad_zero_ratio", "torch_grad_exporter_sampling_interval_steps"}
        assert value(exporter, "torch_grad_exporter_captures_total") == 0
        assert sum(found for (name, _), found in values(exporter).items() if "captures_skipped" in name) == 0
        assert errors(exporter) == {}
        assert exporter.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("budgeted", [False, True])
def test_an_optimizer_steps_all_the_same(budgeted: bool) -> None:
    """Where an optimizer of the model steps, every step counts and nothing is sampled."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start_exporter(model, port=None, **({} if budgeted else {"every": 1})) as exporter:
        exporter.gradients_elsewhere()
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 300
        assert value(exporter, "torch_train_backward_passes_total") == 300
        assert value(exporter, "torch_grad_exporter_captures_total") == 0
        assert errors(exporter) == {}


def test_after_the_end() -> None:
    """After the end both calls do nothing."""
    exporter = start_exporter(torch.nn.Linear(3, 2), port=None)
    exporter.close()
    exporter.gradients_elsewhere()
    exporter.step_skipped()
