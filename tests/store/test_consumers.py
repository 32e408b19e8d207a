"""Several readers at their own pace: scrapes, a push of differences, the history and actions each get every sample once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.support import Training
from tests.support.otlp_receiver import HttpReceiver
from tests.support.scrape import OFF, errors, value, values

FULL = 600
"""Samples of which each has a record in the history by itself."""


@pytest.fixture
def pushing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of an exporter that pushes differences, to `endpoint`."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    return {"otlp_interval": 1.0, "collectors": OFF}


@pytest.mark.slow
def test_all_readers_see_every_sample(pushing: dict[str, Any], tmp_path: Path) -> None:
    """Beside scrapes at every seventh step, pushed differences add up to the totals, and the history has each sample."""
    norms = np.exp(np.random.default_rng(0).normal(0.0, 1.0, 40)).tolist()
    last: dict[str, float] = {}
    with HttpReceiver() as receiver, Training(otlp_endpoint=receiver.endpoint, **pushing) as training:
        for number, norm in enumerate(norms, 1):
            training.round(b=norm)
            training.exporter.observe(loss=2 * norm)
            if number % 7 == 0:
                assert training.layer("captures_total", "b") == number
                now = training.exporter.values("torch_grad_.*(_total|_count|_sum)")
                assert all(now[name] >= before for name, before in last.items())
                last = now
        saved = training.saved(tmp_path)
        assert receiver.total("torch_grad_captures_total") == receiver.total("torch_train_steps_total") == len(norms)
        assert receiver.total("torch_grad_norm_squared_accumulated_total") == pytest.approx(math.fsum(n * n for n in norms))
        lines = saved["run"]["recent"]
        for name, told in (("norm", norms), ("loss", [2 * norm for norm in norms])):
            found = [(step, number) for step, number in zip(lines["steps"], lines[name], strict=True) if number is not None]
            assert found == [(step, pytest.approx(number, rel=1e-5)) for step, number in enumerate(told, 1)]
        assert errors(training.exporter) == {}


@pytest.mark.full
def test_a_full_history_keeps_the_largest_norm(tmp_path: Path) -> None:
    """When samples share a record, it has the largest of their norms and a mark of what was not finite, whoever scrapes between."""
    with Training() as training:
        for number in range(1, FULL + 31):
            training.round(b={FULL + 10: 1000.0, FULL + 20: math.nan}.get(number, 1.0))
            if number % 50 == 3 or number > FULL + 8:
                values(training.exporter)
        lines = training.saved(tmp_path)["run"]["recent"]
    late = [place for place, step in enumerate(lines["steps"]) if step > FULL]
    assert max(lines["norm"][place] or 0.0 for place in late) == pytest.approx(1000, rel=1e-5)
    assert set(lines["nonfinite"]["norm"]) <= set(late)
    assert lines["nonfinite"]["norm"]
    assert len(late) < 30


def test_a_norm_beyond_32_bits_stays_a_number(tmp_path: Path) -> None:
    """A finite norm of 1e39 is the largest number of the history, and not infinity."""
    with Training() as training:
        training.round(b=1e39)
        assert value(training.exporter, "torch_grad_norm", layer="b") == 1e39
        lines = training.saved(tmp_path)["run"]["recent"]
    assert lines["norm"] == [pytest.approx(3.4e38, rel=0.01)]
    assert not lines["nonfinite"]
