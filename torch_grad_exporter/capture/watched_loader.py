"""WatchedLoader: a loader that counts the time that the training loop waits for its batches.

One that is a `DataLoader` of PyTorch is in `watched_data_loader.py`.
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

the_only_one = operator.itemgetter(0)
"""Of the standard library, so that a pickle that calls it loads where this package is not installed."""


class Waits:
    """Counts what a loader takes as the phase `data`. `outer`: those of another exporter that watches the same loader."""

    def __init__(self, clock: StepClock, errors: ErrorLog, outer: Waits | None = None) -> None:
        self._clock = clock
        self._errors = errors
        self._outer = outer

    def counts_for(self, clock: StepClock) -> bool:
        """Whether these go to a clock already."""
        return clock is self._clock or (self._outer is not None and self._outer.counts_for(clock))

    def __call__(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        """What `fetch` returns, or raises."""
        self._switch(DATA)
        try:
            return fetch() if self._outer is None else self._outer(fetch)
        finally:
            self._switch(OUTSIDE)

    def _switch(self, phase: str) -> None:
        clock = self._clock
        try:
            start = clock.clock()
            clock.switch(phase)
            clock.spent(clock.clock() - start)
        except Exception as error:  # noqa: BLE001 - the boundary: what fails is ours, not the loader
            self._errors.count("observe", error)


class WatchedLoader(Generic[_Batch]):
    """Iterates over a loader and counts the time that the loop waits for it; else it is as the loader.

    A copy of it, and what a pickle of it loads as, is one of the loader: it counts nothing, and needs no exporter.
    """

    def __init__(self, loader: Iterable[_Batch], waits: Waits) -> None:
        self._loader = loader
        self._waits = waits

    def __iter__(self) -> Iterator[_Batch]:
        batches = self._waits(lambda: iter(self._loader))
        while True:
            try:
                batch = self._waits(lambda: next(batches))
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the loader has
        if name == "_loader":  # of one that was made without `__init__`, where asking itself would never end
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __copy__(self) -> Iterable[_Batch]:
        return copy.copy(self._loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterable[_Batch]:
        return copy.deepcopy(self._loader, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return the_only_one, ((self._loader,),)
