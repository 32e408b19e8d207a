"""`watch_loader`: what it returns behaves, is copied and is pickled like the loader, and counts its waits as the phase `data`."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter

SECONDS = 0.002
"""How long one example takes."""


@pytest.fixture
def model() -> Perceptron:
    """Make a model for each test."""
    return Perceptron()


@pytest.fixture
def exporter(model: Perceptron) -> Iterator[Exporter]:
    """Start an exporter that serves nothing."""
    with start_exporter(model, port=None) as exporter:
        yield exporter


class Slow(Dataset[int]):
    """Numbers, each of which takes `SECONDS`; `spent` is the time they took."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.spent = 0.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        begin = time.perf_counter()
        time.sleep(SECONDS)
        self.spent += time.perf_counter() - begin
        return number


def waited(exporter: Exporter, model: Perceptron) -> float:
    """Return the seconds in the phase `data` after a step."""
    model(batch()).sum().backward()
    sgd(model).step()
    return value(exporter, "torch_train_phase_seconds_total", phase="data") or 0.0


def lists(loader: Any) -> list[list[int]]:  # noqa: ANN401 - any loader of tensors
    """Return its batches."""
    return [batch.tolist() for batch in loader]


def test_it_is_a_data_loader(exporter: Exporter) -> None:
    """Type, name, signature, attributes and length are those of the loader, and writes to one are seen in the other."""
    given: DataLoader[int] = DataLoader(Slow(), batch_size=4)
    one = exporter.watch_loader(given)
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


def test_the_waits_are_the_phase_data(exporter: Exporter, model: Perceptron) -> None:
    """The phase `data` has the time of the examples over an epoch and a part of one, and not that of the loop."""
    data = Slow()
    one = exporter.watch_loader(DataLoader(data, batch_size=4))
    begin = time.perf_counter()
    assert lists(one) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for _ in one:
        own = time.perf_counter()
        time.sleep(0.05)
        own = time.perf_counter() - own
        break
    assert data.spent <= waited(exporter, model) <= time.perf_counter() - begin - own


def test_a_loader_of_a_watched_class_counts_too(exporter: Exporter, model: Perceptron) -> None:
    """A loader that a framework makes from the class of a watched one is watched, and copied as one of the plain class."""
    data = Slow()
    made = type(exporter.watch_loader(DataLoader(data)))(data, batch_size=5)
    assert lists(made) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert waited(exporter, model) >= data.spent > 0
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301 - our own
        assert type(copied) is DataLoader
        assert lists(copied) == lists(made)


def test_random_numbers_are_drawn_as_without_us(exporter: Exporter) -> None:
    """`iter` draws its seed at once, like without the exporter."""

    def drawn(loader: Any) -> tuple[float, list[list[int]]]:  # noqa: ANN401 - any loader
        torch.manual_seed(3)
        batches = iter(loader)
        return torch.rand(()).item(), lists(batches)

    def shuffled() -> DataLoader[int]:
        return DataLoader(Slow(), batch_size=4, shuffle=True)

    assert drawn(exporter.watch_loader(shuffled())) == drawn(shuffled())


@pytest.mark.process
def test_persistent_workers_end_with_the_loader(exporter: Exporter) -> None:
    """Two epochs have the same worker process, which ends when the loader and the watched one are dropped."""
    given: DataLoader[int] = DataLoader(
        Slow(), batch_size=5, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    before = {process.pid for process in multiprocessing.active_children()}
    one = exporter.watch_loader(given)
    workers = []
    for _ in range(2):
        assert lists(one) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        workers.append([process for process in multiprocessing.active_children() if process.pid not in before])
    assert [process.pid for process in workers[0]] == [process.pid for process in workers[1]]
    gc.disable()
    try:
        del one, given
        assert eventually(lambda: not workers[0][0].is_alive())
    finally:
        gc.enable()


class Epochs(DataLoader[Any]):
    """A loader with its own generator, which notes the ends of epochs."""

    def __init__(self, *arguments: Any, ended: list[str], **more: Any) -> None:  # noqa: ANN401 - as the loader's
        super().__init__(*arguments, **more)
        self.ended = ended

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
            self.ended.append("over")
        finally:
            self.ended.append("closed")


def test_a_loaders_own_generator_is_closed_at_once(exporter: Exporter) -> None:
    """An epoch that ends early closes the loader's own generator at once."""
    ended: list[str] = []
    one = exporter.watch_loader(Epochs(Slow(3), ended=ended))
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
    """A loader that ends what it has opened when it is freed, like that of Ultralytics."""

    ends: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.ends.append(id(self.dataset))


def test_a_loader_that_ends_something_does_so_once(exporter: Exporter) -> None:
    """`__del__` runs once, when the watched loader is freed."""
    Closing.ends.clear()
    data = Slow(2)
    one = exporter.watch_loader(Closing(data))
    assert lists(one) == [[0], [1]]
    assert Closing.ends == []
    del one
    assert Closing.ends == [id(data)]


def test_watching_again(exporter: Exporter, model: Perceptron) -> None:
    """The same exporter again changes nothing; another exporter counts beside the first one."""
    data = Slow()
    with start_exporter(second := Perceptron(), port=None, run="other") as other:
        one = exporter.watch_loader(DataLoader(data))
        assert exporter.watch_loader(one) is one
        both = other.watch_loader(one)
        assert exporter.watch_loader(both) is both
        begin = time.perf_counter()
        assert len(list(both)) == 10
        elapsed = time.perf_counter() - begin
        for counted in (waited(exporter, model), waited(other, second)):
            assert data.spent <= counted <= elapsed
        assert type(copy.copy(both)) is DataLoader


def test_after_close_it_is_still_the_loader() -> None:
    """A loader that outlives its exporter yields its batches."""
    with start_exporter(Perceptron(), port=None) as exporter:
        one = exporter.watch_loader(DataLoader(Slow(2)))
    assert lists(one) == [[0], [1]]


def test_nothing_is_kept(exporter: Exporter) -> None:
    """The loader and the watched one are freed with the last reference, without the garbage collector."""
    given: DataLoader[int] = DataLoader(Slow())
    one = exporter.watch_loader(given)
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


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return ten examples in batches of four."""
    return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)


def batches(of: Any) -> list[list[float]]:  # noqa: ANN401 - any loader of these
    """Return what it yields."""
    return [batch.tolist() for (batch,) in of]


def pickled(one: object) -> object:
    """Return what its pickle loads as."""
    return pickle.loads(pickle.dumps(one))  # noqa: S301 - our own


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_one_of_the_loader(exporter: Exporter, way: str) -> None:
    """A copy of a watched DataLoader is a DataLoader with the same batches, one of a watched list the same list."""
    given, numbers = loader(), [1, 2, 3]
    watched = exporter.watch_loader(given)
    copied = COPIES[way](watched)
    assert type(copied) is DataLoader
    assert copied is not given
    assert batches(copied) == batches(given)
    assert (copied.dataset is given.dataset) == (way == "copy")
    of_list = exporter.watch_loader(numbers)
    assert COPIES[way](of_list) == numbers
    if way != "copy":
        for both in ((of_list, numbers), (watched, given)):
            first, second = COPIES[way](both)
            assert first is second
