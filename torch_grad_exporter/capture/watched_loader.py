"""Loaders that count the time that the training loop waits for their batches.

Frameworks look at the type of a `DataLoader`, and at what is in it: Accelerate shards only a `DataLoader`, Lightning calls its
class again. So what is watched there is an object of a subclass that shares the attributes of the loader that was given, and
differs from it only in how it is iterated over. A copy or a pickle of it is one of the loader.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from types import MemberDescriptorType
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from torch_grad_exporter.capture.progress import DATA, OUTSIDE, StepClock
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
                if phase != DATA or not clock.is_interrupted:  # as by an evaluation, which has its own loader
                    clock.phases.enter(phase)
                clock.spent(start)
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


_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def watched(loader: Any, clock: StepClock, errors: ErrorLog) -> Any:  # noqa: ANN401 - see `Exporter.watch_loader`
    """Return the loader, with the waits for its batches counted by the clock; unchanged if they are already.

    Raises:
        TypeError: The attributes of a `DataLoader` cannot be shared, like those in `__slots__`.
    """
    if not isinstance(loader, DataLoader):
        return WatchedLoader(loader, Waits(((clock, errors),)))
    if not isinstance(loader, _Watched):
        return _stand_in(loader, Waits(((clock, errors),)))
    watchers = loader._torch_grad_exporter_waits.watchers
    if any(clock is watching for watching, _ in watchers):
        return loader
    return _stand_in(loader._torch_grad_exporter_plain(), Waits((*watchers, (clock, errors))))


def _stand_in(given: _Loader, waits: Waits) -> _Loader:
    """Return an object of a subclass of the loader's class, made for it under the same name, with the attributes of the loader."""
    base = type(given)
    if any(isinstance(value, MemberDescriptorType) for each in base.__mro__ for value in vars(each).values()):
        raise TypeError(f"{base.__name__} has __slots__, which no other object can share; its batches are not timed")
    namespace: dict[str, object] = {
        "__slots__": ("_torch_grad_exporter_given",),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_torch_grad_exporter_class": base,
        "_torch_grad_exporter_waits": waits,
    }
    if hasattr(base, "__del__"):
        namespace["__del__"] = _end
    # Runs no code of the loader's metaclass.
    make: Callable[..., Any] = abc.ABCMeta.__new__ if isinstance(base, abc.ABCMeta) else type.__new__
    made = make(type(base), base.__name__, (_Watched, base), namespace)
    stand_in: _Loader = object.__new__(made)
    object.__setattr__(stand_in, "__dict__", given.__dict__)
    made._torch_grad_exporter_given.__set__(stand_in, given)
    return stand_in


class _Watched:
    """What a subclass adds to the class of a loader.

    `_torch_grad_exporter_given` is the loader that an object stands for, and lives as long: its `__del__` may end its workers. It
    is a slot, since `__dict__` is that of the loader.
    """

    __slots__ = ()
    _torch_grad_exporter_given: Any
    _torch_grad_exporter_class: type[DataLoader[Any]]
    _torch_grad_exporter_waits: Waits

    def __init_subclass__(cls) -> None:
        """End here: the loader's class may list its subclasses by name, where this one would take its place."""

    def __iter__(self) -> Iterator[Any]:
        return counted(super().__iter__, self._torch_grad_exporter_waits)  # type: ignore[misc]

    def __copy__(self) -> Any:  # noqa: ANN401 - of the loader's class
        return copy.copy(self._torch_grad_exporter_plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - of the loader's class
        return copy.deepcopy(self._torch_grad_exporter_plain(), memo)

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return the_only_one, ((self._torch_grad_exporter_plain(),),)

    def _torch_grad_exporter_plain(self) -> Any:  # noqa: ANN401 - of the loader's class
        """Return the loader that this one stands for; of one that was made from the class, one with the same attributes."""
        plain = _given(self)
        if plain is None:
            plain = object.__new__(self._torch_grad_exporter_class)
            object.__setattr__(plain, "__dict__", self.__dict__)
            type(self)._torch_grad_exporter_given.__set__(self, plain)
        return plain


def _given(watched: Any) -> DataLoader[Any] | None:  # noqa: ANN401 - a `_Watched`
    """Return the loader that this one stands for; None if a framework has made it from its class."""
    try:
        # Not `watched._torch_grad_exporter_given`, which may ask a `__getattr__` of the loader's class.
        given: DataLoader[Any] = type(watched)._torch_grad_exporter_given.__get__(watched)
    except AttributeError:
        return None
    return given


def _end(watched: Any) -> None:  # noqa: ANN401 - a `_Watched` whose class has a `__del__`
    """Do what the loader's class does; but a loader that is stood for has its own end."""
    if _given(watched) is None:
        watched._torch_grad_exporter_class.__del__(watched)
