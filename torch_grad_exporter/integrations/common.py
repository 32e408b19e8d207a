"""What several integrations share: the version of their framework, the loss of a round, and the end without an event."""

from __future__ import annotations

import importlib
import numbers
import re
from collections.abc import Mapping
from types import ModuleType
from typing import TypeGuard

import torch

from torch_grad_exporter.capture.observations import Number

# How the names of the exporter's own metrics begin.
OURS = ("torch_grad_", "torch_train_")


class TrainingInterrupted(Exception):  # noqa: N818 - shown as what has ended a run; it names no error
    """A training ended without its last event: it raised, and the framework has no event that says what."""


class RoundLosses:
    """The losses of batches until the optimizer steps. They stay on their device: nothing waits for it."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: object) -> None:
        """Add the loss of one batch, a number or a tensor of one element; anything else is left out."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()).float())  # a mean of bfloat16 is rounded
        elif isinstance(loss, float | int) and not isinstance(loss, bool):
            self._losses.append(torch.tensor(loss, dtype=torch.float64))

    def round_over(self) -> torch.Tensor | None:
        """Return the mean over the batches since the last step, None if there were none."""
        losses, self._losses = self._losses, []
        if len(losses) < 2:
            return losses[0] if losses else None
        return torch.stack(losses).mean()


def numbers_of(values: Mapping[str, object]) -> dict[str, Number]:
    """Return the numbers among what a framework logs, for `Exporter.log`; without those that are the exporter's own."""
    return {name: value for name, value in values.items() if _is_number(value) and not name.startswith(OURS)}


def _is_number(value: object) -> TypeGuard[Number]:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


def require(module: str, at_least: str, *, extra: str, instead: str = "", package: str = "") -> ModuleType:
    """Return a package's module, such as `transformers`, in this version or a newer one.

    Raises `ImportError` if it is not installed, or older; the message says what to run. `extra`: the integration that needs it.
    `instead`: another package that would do as well. `package`: what installs it, by default the name of the module.
    """
    needs = f"torch_grad_exporter.integrations.{extra} needs {module} {at_least} or newer"
    wanted = f"'{package or module}>={at_least}'"
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is installed, and lacks something itself
        other = f" (or {instead})" if instead else ""
        message = f"{needs}{other}, which is not installed; run: pip install {wanted}"
        raise ModuleNotFoundError(message, name=error.name) from None
    version = str(getattr(imported, "__version__", ""))
    if _numbers(version) and _numbers(version) < _numbers(at_least):
        message = f"{needs}, and {version} is installed; run: pip install --upgrade {wanted}"
        raise ImportError(message, name=module)
    return imported


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, such as (5, 1, 0) of `5.1.0rc1`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
