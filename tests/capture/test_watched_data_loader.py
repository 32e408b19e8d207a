"""A watched `DataLoader` is one for everything that looks at it, trains as it does without us, and counts its waits.

The clock of these tests goes on only while a batch is made, so the time that is counted is known exactly.
"""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from tests.support.models import Perceptron
from torch_grad_exporter import start_exporter
from torch_grad_exporter.capture.phases import DATA, OUTSIDE
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.watched_data_loader import watched
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.transfer.events import Mailbox

SECONDS = 0.25
"""What one example takes."""


class Slow(Dataset[int]):
    """Numbers, each of which takes `SECONDS` of its own clock."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.time = 0.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        self.time += SECONDS
        return number


def clock_of(data: Slow) -> StepClock:
    """One that shows the time of the examples."""
    return StepClock(Mailbox(), clock=lambda: data.time)


def watch(loader: Any, data: Slow | None = None) -> tuple[Any, StepClock]:  # noqa: ANN401 - any loader
    """The loader, watched, and the clock that its waits go to."""
    clock = clock_of(data or Slow())
    return watched(loader, clock, ErrorLog(("observe",))), clock


def waited(clock: StepClock) -> float:
    """Seconds in the phase `data` up to now."""
    clock.switch(OUTSIDE)
    return clock.phases.seconds[DATA]


def lists(loader: Any) -> list[list[int]]:  # noqa: ANN401 - any loader of tensors
    """Its batches."""
    return [batch.tolist() for batch in loader]


def test_it_is_a_data_loader() -> None:
    """Type, name, signature, attributes and length are those of the loader, and writes to one are seen in the other."""
    given: DataLoader[int] = DataLoader(Slow(), batch_size=4)
    one, _ = watch(given)
    assert isinstance(one, DataLoader)
    assert (type(one).__name__, type(one).__module__) == (DataLoader.__name__, DataLoader.__module__)
    assert inspect.signature(type(one).__init__) == inspect.signature(DataLoader.__init__)
    assert vars(one) is vars(given)
    assert isinstance(one.sampler, SequentialSampler)
    assert one.batch_sampler is given.batch_sampler
    assert one.multiprocessing_context is None
    assert len(one) == 3
    one.mark = 1
    assert given.mark == 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="batch_size attribute should not be set after DataLoader is initialized"):
        one.batch_size = 5


def test_it_counts_the_waits() -> None:
    """The phase `data` is the time of the examples, over two epochs, one of them broken off."""
    data = Slow()
    one, clock = watch(DataLoader(data, batch_size=4), data)
    assert lists(one) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for _ in one:
        data.time += 100.0  # the loop's own
        break
    assert waited(clock) == 14 * SECONDS


def test_one_made_from_its_class_counts_too() -> None:
    """A loader that a framework makes by calling the class is watched, and copied and pickled as one of the plain class."""
    data = Slow()
    one, clock = watch(DataLoader(data, batch_size=4), data)
    made = type(one)(data, batch_size=5)
    assert lists(made) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert waited(clock) == 10 * SECONDS
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301 - our own
        assert type(copied) is DataLoader
        assert lists(copied) == lists(made)


def test_random_numbers_are_drawn_as_without_us() -> None:
    """`iter` draws its seed at once: what is drawn between it and the first batch stays the same."""

    def drawn(loader: Any) -> tuple[float, list[list[int]]]:  # noqa: ANN401 - any loader
        torch.manual_seed(3)
        batches = iter(loader)
        return torch.rand(()).item(), lists(batches)

    def shuffled() -> DataLoader[int]:
        return DataLoader(Slow(), batch_size=4, shuffle=True)

    assert drawn(watch(shuffled())[0]) == drawn(shuffled())


def test_persistent_workers_stay_and_end_with_the_loader() -> None:
    """Two epochs have the same worker, which is known to both objects, and which ends when both are dropped."""
    given: DataLoader[int] = DataLoader(
        Slow(), batch_size=5, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    one, _ = watch(given)
    assert lists(one) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    worker = given._iterator._workers[0]  # type: ignore[union-attr]
    assert lists(one) == lists(given)
    assert one._iterator is given._iterator
    assert given._iterator._workers[0] is worker  # type: ignore[union-attr]
    gc.disable()
    try:
        del one, given
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_two_iterators_at_once() -> None:
    """Each has its own place, a length, and the attributes of the loader's."""
    one, _ = watch(DataLoader(Slow(4)))
    first, second = iter(one), iter(one)
    assert [next(first).item(), next(first).item(), next(second).item()] == [0, 1, 0]
    assert len(first) == 4
    assert first._num_yielded == 2
    assert [batch.item() for batch in first] == [2, 3]
    assert next(first, None) is None


class Stream(IterableDataset[int]):
    """Numbers without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_has_no_length() -> None:
    """A loader over a stream yields it and raises `TypeError` for its length, as without us."""
    one, _ = watch(DataLoader(Stream(), batch_size=None))
    assert list(one) == [0, 1, 2]
    with pytest.raises(TypeError, match="has no len"):
        len(one)


class Epochs(DataLoader[Any]):
    """A loader with a generator of its own, which notes the ends of epochs."""

    def __init__(self, *arguments: Any, ended: list[str], **more: Any) -> None:  # noqa: ANN401 - as the loader's
        super().__init__(*arguments, **more)
        self.ended = ended

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
            self.ended.append("over")
        finally:
            self.ended.append("closed")


def test_a_loaders_own_generator_is_closed_at_once() -> None:
    """An epoch that is broken off ends the loader's own generator right then."""
    ended: list[str] = []
    one, _ = watch(Epochs(Slow(3), ended=ended))
    for _ in one:
        break
    assert ended == ["closed"]
    batches = iter(one)
    next(batches)
    batches.close()
    assert ended == ["closed", "closed"]
    assert len(list(one)) == 3
    assert ended[2:] == ["over", "closed"]
    with pytest.raises(TypeError):
        len(iter(one))


class Closing(DataLoader[int]):
    """A loader that ends what it has opened when it is freed, as Ultralytics' does."""

    ends: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.ends.append(id(self.dataset))


@pytest.mark.parametrize("how", ["watched", "made", "made and copied"])
def test_a_loader_that_ends_something_does_so_once(how: str) -> None:
    """`__del__` runs once, and only when the watched loader is freed."""
    Closing.ends.clear()
    data = Slow(2)
    one, _ = watch(Closing(data))
    assert Closing.ends == []
    if how != "watched":
        one = type(one)(other := Slow(2))
        assert Closing.ends == [id(data)]
        data = other
        Closing.ends.clear()
    if how == "made and copied":
        copied = copy.copy(one)
        assert Closing.ends == []
        assert lists(copied) == lists(one)
        del copied
        assert Closing.ends == [id(data)]
        Closing.ends.clear()
    assert lists(one) == [[0], [1]]
    assert Closing.ends == []
    del one
    assert Closing.ends == [id(data)]


class Registered(DataLoader[int]):
    """Lists its subclasses by name, as plug-in systems do, and wants an argument of theirs."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        cls.known[key] = cls


class Meta(abc.ABCMeta):
    """Lists the classes that it makes, and wants an argument of theirs."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, key: str) -> Any:  # noqa: ANN401
        cls.made.append(key)
        return super().__new__(cls, name, bases, namespace)

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, key: str) -> None:
        super().__init__(name, bases, namespace)


class OfMeta(DataLoader[int], metaclass=Meta, key="mine"):
    """A loader with a metaclass."""


def test_classes_that_list_subclasses_hear_of_none() -> None:
    """`__init_subclass__` and a metaclass of the user's are not called, and instance checks are right."""
    for kind in (Registered, OfMeta):
        one, _ = watch(kind(Slow(2)))
        assert isinstance(one, kind)
        assert lists(one) == [[0], [1]]
        assert not isinstance(kind(Slow(2)), type(one))
    assert Registered.known == {}
    assert Meta.made == ["mine"]


class Slotted(DataLoader[int]):
    """A loader some of whose attributes no other object can share."""

    __slots__ = ("mark",)


def test_a_class_that_cannot_be_shared_comes_back_as_it_is() -> None:
    """A loader with slots is returned itself, and the failure is counted."""
    given = Slotted(Slow(2))
    with start_exporter(Perceptron(), port=None) as exporter:
        assert exporter.watch_loader(given) is given
        assert exporter._errors.counts()["observe"] == 1


def test_watching_again_counts_once_for_each_clock() -> None:
    """The same clock again changes nothing; another exporter's counts beside the first one's."""
    data = Slow()
    first, second = clock_of(data), clock_of(data)
    errors = ErrorLog(("observe",))
    one = watched(DataLoader(data), first, errors)
    assert watched(one, first, errors) is one
    both = watched(one, second, errors)
    assert watched(both, first, errors) is both
    assert len(list(both)) == 10
    assert (waited(first), waited(second)) == (10 * SECONDS, 10 * SECONDS)
    assert type(copy.copy(both)) is DataLoader


def test_after_close_it_is_still_the_loader() -> None:
    """A loader that outlives its exporter yields its batches."""
    with start_exporter(Perceptron(), port=None) as exporter:
        one = exporter.watch_loader(DataLoader(Slow(2)))
    assert lists(one) == [[0], [1]]


def test_a_structure_keeps_one_object_one() -> None:
    """Deep copies and pickles of the loader beside the watched one have one loader twice."""
    given = DataLoader(TensorDataset(torch.arange(3)))
    one, _ = watch(given)
    for first, second in (copy.deepcopy((one, given)), pickle.loads(pickle.dumps((one, given)))):  # noqa: S301 - our own
        assert first is second


def test_nothing_is_kept() -> None:
    """The loader and the watched one are freed with the last reference, without the garbage collector."""
    given: DataLoader[int] = DataLoader(Slow())
    one, _ = watch(given)
    of_given, of_one = weakref.ref(given), weakref.ref(one)
    list(one)
    gc.disable()
    try:
        del given
        assert of_given() is not None
        del one
        assert (of_given(), of_one()) == (None, None)
    finally:
        gc.enable()
