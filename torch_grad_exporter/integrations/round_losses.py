"""The loss of a round, where a framework tells that of each of its batches."""

from __future__ import annotations

import torch


class RoundLosses:
    """Keeps the losses of batches until the optimizer steps. They stay on their device: nothing waits for it."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: object) -> None:
        """Takes the loss of one batch, a number or a tensor of one element; anything else is no loss, and is left out."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()).float())  # a mean of bfloat16 is rounded
        elif isinstance(loss, float | int) and not isinstance(loss, bool):
            self._losses.append(torch.tensor(loss, dtype=torch.float64))

    def round_over(self) -> torch.Tensor | None:
        """The mean over the batches since the last step; `None` if there were none."""
        losses, self._losses = self._losses, []
        if len(losses) < 2:
            return losses[0] if losses else None
        return torch.stack(losses).mean()
