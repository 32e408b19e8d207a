"""WatchedLoader: a loader that counts the time that the training loop waits for its batches.

A `DataLoader` of PyTorch is watched by `watched_data_loader.py`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch_grad_exporter.capture.phases import DATA, OUTSIDE
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.errors import ErrorLog

_Batch = TypeVar("_Batch")
_Fetched = TypeVar("_Fetched")

# Of the standard library, so that a pickle that calls it loads where this package is not installed.
the_only_one = operator.itemgetter(0)


class Waits:
    """Counts what a loader takes as the phase `data`. `watchers`: the clock and the errors of each exporter that watches it."""

    def __init__(self, watchers: tuple[tuple[StepClock, ErrorLog], ...]) -> None:
        self.watchers = watchers

    def __call__(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        """Return what `fetch` returns, or raise what it raises."""
        self._switch(DATA)
        try:
            return fetch()
        finally:
            self._switch(OUTSIDE)

    def _switch(self, phase: str) -> None:
        for clock, errors in self.watchers:
            try:
                start = clock.clock()
                clock.switch(phase)
                clock.spent(clock.clock() - start)
            except Exception as error:  # noqa: BLE001 - the boundary: what fails is ours, not the loader
                errors.count("observe", error)


class WatchedLoader(Generic[_Batch]):
    """Iterates over a loader and counts the time that the loop waits for it; otherwise like the loader.

    A copy of it, and what a pickle of it loads as, is one of the loader: it counts nothing, and needs no exporter.
    """

    def __init__(self, loader: Iterable[_Batch], waits: Waits) -> None:
        self._loader = loader
        self._waits = waits

    def __iter__(self) -> Iterator[_Batch]:
        return counted(lambda: iter(self._loader), self._waits)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the loader has
        if name == "_loader":  # of an object made without `__init__`, where asking itself would never end
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __copy__(self) -> Iterable[_Batch]:
        return copy.copy(self._loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterable[_Batch]:
        return copy.deepcopy(self._loader, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return the_only_one, ((self._loader,),)


def counted(iterate: Callable[[], Iterator[_Batch]], waits: Waits) -> Iterator[_Batch]:
    """Return an iterator over batches that counts the waits for them, and otherwise is like that of `iterate`.

    `iterate` is called at once and not with the first batch: it may draw random numbers, whose order is that without us.
    """
    batches = waits(iterate)
    return (_SizedBatches if hasattr(type(batches), "__len__") else _Batches)(batches, waits)


class _Batches(Iterator[_Batch]):
    __slots__ = ("_batches", "_waits")

    def __init__(self, batches: Iterator[_Batch], waits: Waits) -> None:
        self._batches = batches
        self._waits = waits

    def __next__(self) -> _Batch:
        return self._waits(self._batches.__next__)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the iterator has
        if name in _Batches.__slots__:  # of an object made without `__init__`
            raise AttributeError(name)
        return getattr(self._batches, name)


class _SizedBatches(_Batches[_Batch]):
    """The same where the loader's iterator has a length."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
