"""A `DataLoader` that counts the time that the training loop waits for its batches, and is one for every framework.

Frameworks look at the type of a loader, and at what is in it: Accelerate shards only a `DataLoader`, Lightning calls its class
anew. So what is watched is an object of a subclass that shares the attributes of the loader that was given, and differs from it
only in how it is iterated over. A copy or a pickle of it is one of the loader.
"""

from __future__ import annotations

import abc
import copy
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.watched_loader import Waits, WatchedLoader, the_only_one
from torch_grad_exporter.errors import ErrorLog

_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def watched(loader: Any, clock: StepClock, errors: ErrorLog) -> Any:  # noqa: ANN401 - see `Exporter.watch_loader`
    """The loader, such that the waits for its batches go to the clock; as it is if they do so already.

    Raises a `TypeError` for a `DataLoader` whose attributes cannot be shared, as those in `__slots__`.
    """
    if not isinstance(loader, DataLoader):
        return WatchedLoader(loader, Waits(clock, errors))
    before = loader._torch_grad_exporter_waits if isinstance(loader, _Watched) else None
    if before is not None and before.counts_for(clock):
        return loader
    given = loader._torch_grad_exporter_plain() if isinstance(loader, _Watched) else loader
    return _stand_in(given, Waits(clock, errors, before))


def _stand_in(given: _Loader, waits: Waits) -> _Loader:
    """An object of a subclass of the loader's class, with the attributes of the loader."""
    if any(isinstance(value, types.MemberDescriptorType) for base in type(given).__mro__ for value in vars(base).values()):
        raise TypeError(f"{type(given).__name__} has __slots__, which no other object can share; its batches are not timed")
    made = _subclass(type(given), waits)
    stand_in: _Loader = object.__new__(made)
    object.__setattr__(stand_in, "__dict__", given.__dict__)
    made._torch_grad_exporter_given.keep(stand_in, given)
    return stand_in


class _Given:
    """For each watched loader the one that it stands for, which lives as long: its `__del__` may end its workers."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[DataLoader[Any], weakref.ref[DataLoader[Any]]]] = {}

    def keep(self, watched: DataLoader[Any], given: DataLoader[Any]) -> None:
        """Notes it until `watched` is freed."""
        key = id(watched)
        self._of[key] = given, weakref.ref(watched, lambda _: self._of.pop(key, None))

    def of(self, watched: DataLoader[Any]) -> DataLoader[Any] | None:
        """The loader; `None` for a watched one that a framework has made from its class."""
        found = self._of.get(id(watched))
        return None if found is None else found[0]


class _Watched:
    """What a subclass adds to the class of a loader."""

    __slots__ = ()
    _torch_grad_exporter_class: type[DataLoader[Any]]
    _torch_grad_exporter_given: _Given
    _torch_grad_exporter_waits: Waits

    def __init_subclass__(cls) -> None:
        """Ends here: the loader's class may list its subclasses by name, where this one would take its place."""

    def __iter__(self) -> Iterator[Any]:
        waits = self._torch_grad_exporter_waits
        # At once and not with the first batch: the order of random numbers is that without us.
        batches = waits(super().__iter__)  # type: ignore[misc]
        return (_SizedBatches if hasattr(type(batches), "__len__") else _Batches)(batches, waits)

    def __copy__(self) -> Any:  # noqa: ANN401 - of the loader's class
        return copy.copy(self._torch_grad_exporter_plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - of the loader's class
        return copy.deepcopy(self._torch_grad_exporter_plain(), memo)

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return the_only_one, ((self._torch_grad_exporter_plain(),),)

    def _torch_grad_exporter_plain(self: Any) -> Any:  # noqa: ANN401 - of the loader's class
        """The loader that this one stands for; of one that was made from the class, one with the same attributes."""
        kept = self._torch_grad_exporter_given
        plain = kept.of(self)
        if plain is None:
            plain = object.__new__(self._torch_grad_exporter_class)
            object.__setattr__(plain, "__dict__", self.__dict__)
            kept.keep(self, plain)
        return plain


class _WatchedWithEnd(_Watched):
    """The same for a class with a `__del__`: the loader that is stood for has its own."""

    __slots__ = ()

    def __del__(self: Any) -> None:
        if self._torch_grad_exporter_given.of(self) is None:
            super().__del__()  # type: ignore[misc]


def _subclass(base: type[DataLoader[Any]], waits: Waits) -> Any:  # noqa: ANN401 - a subclass of `base` and of `_Watched`
    """A class for one watched loader, under the name of its own. Runs no code of the loader's metaclass."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_torch_grad_exporter_class": base,
        "_torch_grad_exporter_given": _Given(),
        "_torch_grad_exporter_waits": waits,
    }
    mixin = _WatchedWithEnd if hasattr(base, "__del__") else _Watched
    make: Callable[..., Any] = abc.ABCMeta.__new__ if isinstance(base, abc.ABCMeta) else type.__new__
    return make(type(base), base.__name__, (mixin, base), namespace)


class _Batches:
    """An iterator over a loader; but for the counting it is as the loader's own."""

    __slots__ = ("_batches", "_waits")

    def __init__(self, batches: Iterator[Any], waits: Waits) -> None:
        self._batches = batches
        self._waits = waits

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - what the loader gives
        return self._waits(self._batches.__next__)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the iterator has
        if name in _Batches.__slots__:  # of one that was made without `__init__`
            raise AttributeError(name)
        return getattr(self._batches, name)


class _SizedBatches(_Batches):
    """The same where the loader's iterator has a length."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
