"""What is kept of a batch, and how much memory that takes."""

from __future__ import annotations

import collections
import random
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.inspection.support import EachOperation, refuse_reads
from tests.support.scrape import OFF, errors
from torch_grad_exporter import load_black_box, start_exporter
from torch_grad_exporter.actions.black_box.box import KeptForward
from torch_grad_exporter.inspection.black_box.kept import RING_BYTES, BatchRing, KeptBatch


class Inputs(collections.UserDict):  # type: ignore[type-arg] - as BatchEncoding of Transformers
    """A mapping."""


class Pair(NamedTuple):
    """A tuple of a class."""

    left: torch.Tensor
    right: int


@dataclass
class Fields:
    """A dataclass."""

    tensor: torch.Tensor
    name: str


class Foreign:
    """Has to be left out."""


class Lazy(Mapping[str, int]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("a",))

    def __len__(self) -> int:
        return 1


class Root(nn.Module):
    """Multiplies by a number that is NaN in the last step; `act` is done with the first argument."""

    def __init__(self, act: Any = None) -> None:  # noqa: ANN401 - a callable
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(3)), act

    def forward(self, *args: Any, factor: float = 1.0, **_kwargs: object) -> torch.Tensor:  # noqa: ANN401
        if self.act is not None:
            self.act(args[0])
        return (self.weight * factor).sum()


def last_batch(folder: Path, *args: object, act: Any = None, faults: int = 0, **kwargs: object) -> KeptForward:  # noqa: ANN401
    """Return what is kept of a step with these arguments."""
    trained = Root(act)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    with start_exporter(trained, None, every=1, collectors=OFF, black_box=folder) as exporter:
        for factor in (1.0, 1.0, torch.nan):
            trained(*args, factor=factor, **kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
        exporter.close()
        assert errors(exporter) == ({"black_box": faults} if faults else {})
    return load_black_box(folder).batches[-1]


def test_containers_become_plain(tmp_path: Path) -> None:
    """Mappings, dataclasses and named tuples become plain containers; what is not plain data is left out and named."""
    tensor = torch.arange(3)
    kept = last_batch(
        tmp_path, Inputs(ids=tensor, masks=[tensor, None]), Pair(tensor, 3), Fields(tensor, "a"), Foreign(), (1.5, True),
        mixed={"x": Foreign(), "y": tensor, 4: 5}, sparse=tensor.float().to_sparse(), array=np.zeros(3),
        own=nn.Parameter(tensor.float()),
    )  # fmt: skip
    inputs, pair, fields, foreign, numbers = kept.args
    assert type(inputs) is dict
    assert torch.equal(inputs["ids"], tensor)
    assert torch.equal(inputs["masks"][0], tensor)
    assert inputs["masks"][1] is None
    assert type(pair) is tuple
    assert pair[1] == 3
    assert (type(fields), fields["name"], foreign, numbers) == (dict, "a", None, (1.5, True))
    assert (kept.kwargs["mixed"]["x"], kept.kwargs["mixed"][4], kept.kwargs["sparse"], kept.kwargs["array"]) == (
        None,
        5,
        None,
        None,
    )
    assert type(kept.kwargs["own"]) is torch.Tensor
    assert set(kept.left_out) == {"args.3", "kwargs.mixed.x", "kwargs.sparse", "kwargs.array"}
    assert kept.left_out["args.3"] == "it is a Foreign"


def test_small_tensors_are_copied(tmp_path: Path) -> None:
    """A tensor that the model writes to is kept as it was given, if it is small."""
    tensor = torch.zeros(3)
    kept = last_batch(tmp_path, tensor, act=lambda given: given.add_(1))
    assert kept.args[0].tolist() == [2.0] * 3
    assert tensor.tolist() == [3.0] * 3


@pytest.mark.parametrize("written", [False, True])
def test_large_tensors_are_held(written: bool, tmp_path: Path) -> None:
    """A large tensor is kept as it is, and left out if it was written to."""
    tensor = torch.rand(1 << 20)
    kept = last_batch(tmp_path, tensor, act=(lambda given: given[:1].add_(1)) if written else None)
    if written:
        assert kept.left_out == {"args.0": "it was written to after the forward had begun"}
        assert kept.args == (None,)
    else:
        assert torch.equal(kept.args[0], tensor)


def test_large_tensors_of_inference_mode(tmp_path: Path) -> None:
    """Only the large one of inference mode is left out, as it does not count what is written to it."""
    with torch.inference_mode():
        large, small = torch.rand(1 << 20), torch.arange(3)
    kept = last_batch(tmp_path, large, small)
    assert list(kept.left_out) == ["args.0"]
    assert kept.args[0] is None
    assert torch.equal(kept.args[1], small)


def test_no_batch_outlives_the_exporter(tmp_path: Path) -> None:
    """After `close` nothing holds a batch, also where no backward came after it."""
    trained, data = Root(), np.zeros(1 << 20, np.float32)
    alive = weakref.ref(data)
    with start_exporter(trained, None, every=1, collectors=OFF, black_box=tmp_path) as exporter:
        trained(torch.from_numpy(data))
        del data
        assert alive() is not None
        exporter.close()
        assert alive() is None


def test_what_is_too_large_is_left_out(tmp_path: Path) -> None:
    """A batch beyond the limit, and a large part of a much larger tensor, are left out and named."""
    huge = torch.empty(70_000_000)
    kept = last_batch(tmp_path / "a", huge, huge[:3])
    assert kept.left_out == dict.fromkeys(("args.0", "args.1"), "the batch is larger than 256 MiB")
    kept = last_batch(tmp_path / "b", huge[:1_000_000], huge[:3].zero_())
    assert list(kept.left_out) == ["args.0"]
    assert kept.args[1].tolist() == [0.0] * 3


def test_a_batch_that_cannot_be_read(tmp_path: Path) -> None:
    """Failures are counted, training goes on, and the box says so."""
    trained = Root()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    with start_exporter(trained, None, every=1, collectors=OFF, black_box=tmp_path) as exporter:
        for step in range(20):
            trained(Lazy(), factor=torch.nan if step == 4 else 1.0).backward()
            optimizer.step()
        exporter.close()
        assert errors(exporter) == {"black_box": 20}
    (*_, kept) = load_black_box(tmp_path).batches
    assert (kept.step, kept.args, list(kept.left_out)) == (4, (), ["args"])


def test_memory_is_limited() -> None:
    """Whatever the worker knows, the ring holds no more than its limit, and keeps what is pinned."""
    ring = BatchRing()
    for number in range(100):
        ring.add(KeptBatch(number, number, "", {}, nbytes=RING_BYTES // 8))
        ring.pins["nonfinite"] = (1, 2)
        assert sum(batch.nbytes for batch in ring.batches.values()) <= RING_BYTES
    assert list(ring.batches)[:2] == [1, 2]
    assert ring.latest() == (98, 99)


def test_batches_that_are_known_are_dropped() -> None:
    """Of small batches the last four stay once the worker knows the others."""
    ring = BatchRing()
    for number in range(100):
        ring.seen = number - 1
        ring.add(KeptBatch(number, number, "", {}))
    assert list(ring.batches) == [96, 97, 98, 99]


def test_random_states(tmp_path: Path) -> None:
    """A forward draws the same numbers again from all generators, and afterwards they go on as before."""
    drawn: list[tuple[float, float, float]] = []

    def draw(_given: object = None) -> None:
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))  # noqa: NPY002 - the global one

    kept = last_batch(tmp_path, torch.zeros(3), act=draw)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    draw()
    with kept.random_states():
        draw()
    draw()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    draw()
    draw()
    *_, last, first, again, second, expected_first, expected_second = drawn
    assert again == last
    assert (first, second) == (expected_first, expected_second)


def test_nothing_is_read_on_the_training_thread(tmp_path: Path) -> None:
    """To keep batches waits for no device."""
    trained = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    with start_exporter(trained, None, every=4, collectors=OFF, black_box=tmp_path) as exporter:
        for _ in range(12):
            with EachOperation(refuse_reads):
                trained(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
        assert not errors(exporter)
