"""The layers that an action has frozen: written by `Freeze`, read by the collector `gradients`."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class FrozenLabels:
    """The layers that actions freeze. From any thread: values are replaced, never changed.

    `in_use`: whether any action may freeze layers; only then there is a metric of it.
    """

    def __init__(self) -> None:
        self._labels: Mapping[str, bool] = {}
        self._shown: frozenset[str] = frozenset()
        self.in_use = False

    @property
    def frozen(self) -> frozenset[str]:
        """The layers that are frozen now."""
        return frozenset(label for label, frozen in self._labels.items() if frozen)

    @property
    def shown(self) -> Mapping[str, bool]:
        """Each layer that this rank reports and that was ever frozen, with whether it is now."""
        return {label: frozen for label, frozen in self._labels.items() if label in self._shown}

    def add(self, labels: Collection[str], shown: Collection[str]) -> None:
        """Note layers as frozen. `shown`: those that this rank reports. For one thread at a time, like `remove`."""
        self._labels, self._shown = {**self._labels, **dict.fromkeys(labels, True)}, self._shown.union(shown)

    def remove(self, labels: Collection[str], kept: Collection[str]) -> None:
        """Note layers as trained again. `kept`: layers that exist; one that neither exists nor is frozen is forgotten."""
        known = {**self._labels, **dict.fromkeys(labels, False)}
        self._labels = {label: frozen for label, frozen in known.items() if frozen or label in kept}
        self._shown = self._shown.intersection(self._labels)
