"""Values on a device: copied to the host without a wait, and shown once the copy is done.

The device is a tensor subclass whose copies to the host arrive when the test says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.support.models import Perceptron
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter

LOSS, NONFINITE = "torch_train_loss", "torch_train_loss_nonfinite_total"
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf]


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a device. `under_way`: copies to the host that have been launched."""

    place: ClassVar[torch.device] = torch.device("xpu")
    under_way: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - of any function
        if func is torch.Tensor.copy_ and isinstance(args[1], cls):
            cls.under_way.append((args[0], args[1].as_subclass(torch.Tensor).clone()))
            return args[0]
        assert cls.place.type != "mps" or func is not torch.Tensor.double, "this device has no float64"
        return super().__torch_function__(func, types, args, kwargs or {})


def arrive(number: int | None = None) -> None:
    """Finish the first copies, or all of them."""
    for to, what in OnDevice.under_way[:number]:
        to.copy_(what)
    del OnDevice.under_way[:number]


def on_device(number: float | torch.Tensor) -> torch.Tensor:
    """Return a number on the device."""
    return torch.as_tensor(number).as_subclass(OnDevice)


@pytest.fixture(params=["xpu", "mps"])
def exporter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    """An exporter that observes values on the device."""
    monkeypatch.setattr(OnDevice, "place", torch.device(request.param))
    monkeypatch.setattr(OnDevice, "under_way", [])
    with start_exporter(Perceptron(), port=None) as exporter:
        yield exporter
        assert "observe" not in errors(exporter)


def test_a_value_is_shown_when_it_has_arrived(exporter: Exporter) -> None:
    """A value is absent, or the one before it, until its copy is done; then it is shown without a further step."""
    shown = None
    for number in (0.5, 0.0, -0.25, float(np.float32(1e-45))):
        exporter.observe(loss=on_device(number))
        assert value(exporter, LOSS) == shown
        arrive()
        assert value(exporter, LOSS) == number
        shown = number


def test_any_number_arrives(exporter: Exporter) -> None:
    """NaN and infinities of any origin and type arrive as such, and none is mistaken for a copy under way."""
    zero = torch.zeros(())
    numbers = [torch.tensor(number, dtype=kind) for number in SPECIAL for kind in (torch.float32, torch.bfloat16, torch.float16)]
    for count, number in enumerate([*numbers, zero / zero, 1 / zero - 1 / zero, -(zero / zero) * 2], start=1):
        exporter.observe(loss=on_device(number))
        arrive()
        assert value(exporter, NONFINITE) == count


@pytest.mark.slow
def test_a_reused_buffer_does_not_show_its_last_value(exporter: Exporter) -> None:
    """A value that is under way is never taken for the one that was copied before it."""
    for count in range(1, 10):
        exporter.observe(loss=on_device(math.nan))
        arrive()
        assert value(exporter, NONFINITE) == count
        exporter.observe(loss=on_device(0.5))
        assert value(exporter, NONFINITE) == count
        arrive()
        assert value(exporter, LOSS) == 0.5


def test_values_under_way_are_bounded(exporter: Exporter) -> None:
    """While the device is behind only some values are sent; they all arrive, each as it is, and later ones too."""
    for number in range(300):
        exporter.observe(loss=on_device(math.nan if number % 2 else 0.5))
    sent = len(OnDevice.under_way)
    assert 8 <= sent < 200
    arrive(6)
    assert value(exporter, NONFINITE) == 3
    arrive()
    assert value(exporter, NONFINITE) == sent // 2
    exporter.observe(loss=on_device(0.125))
    arrive()
    assert value(exporter, LOSS) == 0.125
