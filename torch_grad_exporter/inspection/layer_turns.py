"""LayerTurns: which few layers a sample covers, where all of them would cost too much; over the samples each has its turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable

# Layers, and elements of parameters, that a sample covers at most; one layer at least.
LAYERS, ELEMENTS = 8, 1 << 24


class LayerTurns:
    """Remembers of each optimizer whose turn it is. Belongs to the training thread."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def take(self, table: ParameterTable, optimizer: int, owners: IntArray) -> Iterator[list[int]]:
        """Yield the positions of the parameters of each of the next layers, of those that the optimizer owns."""
        layers = np.unique(table.layer_of[owners == optimizer])
        elements = 0
        for number in range(min(LAYERS, len(layers))):
            place = self._next.get(optimizer, 0) % len(layers)
            members = np.flatnonzero((table.layer_of == layers[place]) & (owners == optimizer))
            elements += int(table.elements[members].sum())
            if number and elements > ELEMENTS:
                return
            self._next[optimizer] = place + 1
            yield members.tolist()
