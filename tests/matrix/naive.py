"""Captures that read gradients in a naive place: the exporter with that one thing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.matrix.harness import Naive
from torch_grad_exporter.capture.build import Capture
from torch_grad_exporter.capture.ladder import Ladder
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.transfer.outcomes import Mode


class AtStep(Ladder):
    """Reads in the optimizer's pre-hook, in its post-hook where there is a closure."""

    def __init__(self, *stages: Any) -> None:  # noqa: ANN401 - those of the original
        super().__init__(*stages[:3], mode=Mode.OPTIMIZER)


class AtAccumulation(StepWatch):
    """Copies each gradient in a post-accumulate-grad hook that was registered at the start; reads the last copy at the step."""

    def __init__(self, parts: Parts, *stages: Any) -> None:  # noqa: ANN401 - as above
        super().__init__(parts, *stages)
        self._copies: dict[int, torch.Tensor] = {}
        HANDLES.extend(p.register_post_accumulate_grad_hook(self._copy) for p in parts.index.table.parameters() or ())

    def _copy(self, parameter: torch.Tensor) -> None:
        self._copies[id(parameter)] = parameter.grad.detach().clone()

    def _read(self, optimizer: int) -> None:
        table = self._parts.index.refresh()
        owners = self._parts.optimizers.owners(table, {optimizer})
        parameters = table.parameters() or []
        kept = [p.grad for p in parameters]
        try:
            for parameter in parameters:
                parameter.grad = self._copies.get(id(parameter))
            super()._read(optimizer)
        finally:
            for parameter, gradient, owner in zip(parameters, kept, owners, strict=True):
                parameter.grad = gradient
                if owner == optimizer:
                    self._copies.pop(id(parameter), None)


HANDLES: list[Any] = []
"""Of hooks on parameters, until the capture is closed."""


class Closing(Capture):
    """Removes those hooks too."""

    def close(self) -> None:
        """As the exporter's."""
        super().close()
        while HANDLES:
            HANDLES.pop().remove()


@contextlib.contextmanager
def naive_capture(way: Naive) -> Iterator[None]:
    """Exporters that are started meanwhile read in this naive place."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch_grad_exporter.capture.parts.Ladder", AtStep))
        if way is Naive.ACCUMULATE:
            stack.enter_context(mock.patch("torch_grad_exporter.capture.build.StepWatch", AtAccumulation))
            stack.enter_context(mock.patch("torch_grad_exporter.stages.Capture", Closing))
        yield
