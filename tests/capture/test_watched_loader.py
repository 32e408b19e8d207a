"""What `watch_loader` returns behaves like the loader it was given, and is copied and pickled as that one."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from tests.support.models import Perceptron
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.watched_loader import WatchedLoader


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """An exporter that serves nothing."""
    with start_exporter(Perceptron(), port=None) as one:
        yield one


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Ten examples in batches of four."""
    return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)


def batches(of: Any) -> list[list[float]]:  # noqa: ANN401 - any loader of these
    """What it yields."""
    return [batch.tolist() for (batch,) in of]


def pickled(one: object) -> object:
    """What its pickle loads as."""
    return pickle.loads(pickle.dumps(one))  # noqa: S301 - our own


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_one_of_the_loader(exporter: Exporter, way: str) -> None:
    """`copy`, `deepcopy` and `pickle` of a watched DataLoader give a DataLoader that yields the same batches."""
    given = loader()
    copied = COPIES[way](exporter.watch_loader(given))
    assert type(copied) is DataLoader
    assert copied is not given
    assert batches(copied) == batches(given)
    assert (copied.dataset is given.dataset) == (way == "copy")


class Careful:
    """A loader that says itself how it is copied and pickled."""

    def __init__(self, history: tuple[str, ...] = ()) -> None:
        self.history = history

    def __iter__(self) -> Iterator[str]:
        return iter(self.history)

    def __copy__(self) -> Self:
        return type(self)((*self.history, "copy"))

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return type(self)((*self.history, "deepcopy"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ((*self.history, "pickle"),)


@pytest.mark.parametrize("way", COPIES)
def test_a_loaders_own_way_of_being_copied_is_taken(exporter: Exporter, way: str) -> None:
    """A loader's own `__copy__`, `__deepcopy__` and `__reduce__` decide what becomes of the watched one."""
    copied = COPIES[way](exporter.watch_loader(Careful()))
    assert type(copied) is Careful
    assert copied.history == (way,)


@pytest.mark.parametrize("way", COPIES)
def test_any_iterable_is_copied(exporter: Exporter, way: str) -> None:
    """A watched list is copied as a list, one within a structure beside the list itself as the same list."""
    numbers = [1, 2, 3]
    watched = exporter.watch_loader(numbers)
    assert COPIES[way](watched) == numbers
    if way != "copy":
        first, second = COPIES[way]((watched, numbers))
        assert first is second
        assert first == numbers


def test_what_cannot_be_pickled_says_so_itself(exporter: Exporter) -> None:
    """A loader that cannot be pickled or copied raises what it raises itself."""
    watched = exporter.watch_loader(number for number in range(3))
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="generator"):
            way(watched)


def test_a_pickle_loads_without_the_package(exporter: Exporter, tmp_path: Path) -> None:
    """A pickled watched loader is loaded by a process in which the package cannot be imported."""
    path = tmp_path / "loader.pickle"
    path.write_bytes(pickle.dumps(exporter.watch_loader(loader())))
    script = f"""
import pickle, sys
sys.modules["torch_grad_exporter"] = None
print([batch.tolist() for (batch,) in pickle.load(open({str(path)!r}, "rb"))])
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(batches(loader()))


def test_an_empty_one_has_no_attributes() -> None:
    """One that was made without what it watches, as some libraries make objects, has no attribute: it raises `AttributeError`."""
    empty: WatchedLoader[int] = WatchedLoader.__new__(WatchedLoader)
    assert not hasattr(empty, "batch_size")
    assert not hasattr(empty, "__setstate__")


def test_attributes_are_those_of_the_loader(exporter: Exporter) -> None:
    """Length, attributes and the sampler are the loader's, and batches come again in each epoch."""
    given = loader()
    watched = exporter.watch_loader(given)
    assert len(watched) == 3
    assert watched.batch_size == 4
    assert watched.dataset is given.dataset
    assert isinstance(watched.sampler, SequentialSampler)
    assert batches(watched) == batches(watched) == batches(given)
