"""Copies of a model on several ranks: rank 0 names the layer that differs and the rank, and nothing while all are equal."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Perceptron
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, values
from tests.support.tools import eventually
from tests.support.torch_versions import fully_shard
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.torch_compat.replicas import default_store

pytestmark = pytest.mark.process

STEPS = 9
"""Of these, at least the first, the fifth and the ninth are compared, with weights and buffers in the first and the ninth."""

KEYS = "torch_grad_exporter/replicas"
"""Where the keys of each run are in the job's store."""

ODD = 2
"""The rank with a fault, among four; of two it is the second."""


class Normed(torch.nn.Module):
    """A perceptron with batch norm, whose statistics are those of a rank's own data, and a buffer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()) * self.scale


class HalfWrapped(torch.nn.Module):
    """A wrapped part and another one that was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = DistributedDataParallel(Perceptron()), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@dataclass
class Case:
    """A training. `model`: makes it; `fault`: is called before each step of the rank with the fault, with its number."""

    model: Callable[[], torch.nn.Module]
    fault: Callable[[torch.nn.Module, int], None] = lambda model, step: None
    micro_batches: int = 1
    scaled: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD


def wrapped(*, broadcast: bool = True, model: type[torch.nn.Module] = Normed) -> DistributedDataParallel:
    """Return a wrapped model."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return DistributedDataParallel(model(), broadcast_buffers=broadcast)


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit of one element, as a faulty processor does: a high one, which the next update does not round away."""
    tensor.detach().view(torch.int32)[1, 2] ^= 1 << 22


def flip_gradient(model: torch.nn.Module, step: int) -> None:
    """Flip a bit of a reduced gradient, once: in the fifth step."""
    if step == 4:
        flip(model.module.second.weight.grad)


def flip_weight(model: torch.nn.Module, step: int) -> None:
    """Flip a bit of a weight, once: in the sixth step."""
    if step == 5:
        flip(model.module.second.weight)


def forget_buffer(model: torch.nn.Module, step: int) -> None:
    """Write a buffer on one rank only."""
    model.module.scale.fill_(1.0 + (step > 0) / 4)


HEALTHY: Mapping[str, Case] = {
    "plain": Case(lambda: wrapped(model=Perceptron)),
    "buffers that are broadcast": Case(wrapped),
    "gradient accumulation": Case(wrapped, micro_batches=3, optimizer=torch.optim.AdamW),
    "skipped steps": Case(lambda: wrapped(model=Perceptron), scaled=True),
    "compiled": Case(lambda: DistributedDataParallel(torch.compile(Perceptron(), backend="eager"))),
}
FAULTY: Mapping[str, tuple[Case, dict[tuple[str, str], bool]]] = {
    "gradient": (Case(wrapped, flip_gradient), {("second", "gradient"): True, ("second", "weights"): True}),
    "weight": (Case(wrapped, flip_weight), {("second", "weights"): True}),
    "buffer": (Case(lambda: wrapped(broadcast=False), forget_buffer), {("scale", "buffers"): True, ("norm", "buffers"): False}),
    "outside": (Case(HalfWrapped), {("head", "gradient"): False, ("head", "weights"): False}),
}
"""Faults with what differs, by layer and kind, and whether it is the odd rank's alone."""


@dataclass
class Shown:
    """What a rank shows at its end: the series of replicas, what was logged, failures, its state, and keys that are left of it."""

    series: dict[tuple[str, ...], float] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    state: str = ""
    left: list[str] = field(default_factory=list)

    @property
    def differing(self) -> set[tuple[str, str]]:
        """Return the layers and kinds that differ."""
        return {key[1:] for key, number in self.series.items() if key[0] == "torch_replicas_differ_total" and number}

    @property
    def odd(self) -> set[str]:
        """Return the ranks that differ from the others."""
        return {key[1] for key in self.series if key[0] == "torch_replica_odd_total"}

    def compared(self, what: str) -> float:
        """Return how often this was compared."""
        return self.series.get(("torch_replicas_compared_total", what), 0.0)


def shown_by(exporter: Exporter) -> dict[tuple[str, ...], float]:
    """Return the series of replicas, each under its name and labels."""
    found = {}
    for (name, labels), number in values(exporter).items():
        if name.startswith("torch_replica"):
            found[(name, *(dict(labels)[label] for label in ("layer", "what", "replica") if label in dict(labels)))] = number
    return found


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the lines that the package logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_grad_exporter")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def loss_of(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    """Return the loss of a batch of a rank's own."""
    return model(torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + number))).square().mean()


def train(rank: int, case: Case, odd: int, model: torch.nn.Module) -> None:
    """Train; a scaler skips the third step on all ranks."""
    optimizer = case.optimizer(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, init_scale=256.0)
    for step in range(STEPS + case.scaled):
        optimizer.zero_grad()
        for part in range(case.micro_batches):
            last = part == case.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, rank, 10 * step + part)
                scaler.scale(loss * (float("inf") if case.scaled and step == 2 else 1.0)).backward()
        if rank == odd:
            case.fault(model, step)
        scaler.step(optimizer)
        scaler.update()


def work(rank: int, ranks: int, cases: Mapping[str, Case], *, watched: bool = True) -> dict[str, Shown]:
    """Return what one rank shows at the end of each training."""
    return {name: trained(rank, ranks, name, case, watched=watched) for name, case in cases.items()}


def healthy(rank: int) -> list[dict[str, Shown]]:
    """Train with an exporter and without."""
    return [work(rank, 2, HEALTHY, watched=watched) for watched in (True, False)]


def faulty(rank: int, ranks: int) -> dict[str, Shown]:
    """Train with each of the faults."""
    return work(rank, ranks, {name: case for name, (case, _) in FAULTY.items()})


def trained(rank: int, ranks: int, name: str, case: Case, *, watched: bool) -> Shown:
    """Train one rank, and on rank 0 wait until what all ranks have sent is compared."""
    torch.manual_seed(0)
    model, shown = case.model(), Shown()
    with contextlib.ExitStack() as stack:
        shown.logged = stack.enter_context(logged())
        if watched:
            exporter = stack.enter_context(start_exporter(model, port=None, every=1, run=name, replicas=True, collectors=OFF))
        train(rank, case, min(ODD, ranks - 1), model)
        if watched:

            def enough() -> bool:
                shown.series = shown_by(exporter)
                return rank > 0 or (shown.compared("gradient") >= 3 and shown.compared("weights") >= 2)

            assert eventually(enough), shown.series
            shown.errors = errors(exporter)
        dist.barrier()
    dist.barrier()
    shown.left = [key for key in ("1", *(f"1/{rank}" for rank in range(ranks))) if default_store().check([f"{KEYS}/{name}/{key}"])]
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    shown.state = hashlib.sha256(state).hexdigest()
    return shown


@pytest.fixture(scope="module")
def all_healthy() -> list[list[dict[str, Shown]]]:
    """What each rank shows of all trainings without a fault, with an exporter and without."""
    return of_ranks(healthy)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    """Their number."""
    return int(request.param)


@pytest.fixture(scope="module")
def all_faulty(ranks: int) -> dict[str, Shown]:
    """What rank 0 shows of all trainings with a fault."""
    return of_ranks(faulty, ranks, ranks=ranks)[0]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_replicas_are_equal(name: str, all_healthy: list[list[dict[str, Shown]]]) -> None:
    """Nothing differs under DDP with buffers that are broadcast, accumulation, a skipped step; the training is bit-identical."""
    first, second = (watched[name] for watched, _ in all_healthy)
    assert first.differing == first.odd == set()
    assert all(("torch_replicas_differ_total", layer, "gradient") in first.series for layer in ("first", "second"))
    assert second.series == {}
    assert first.logged == second.logged == []
    assert first.errors == second.errors == {}
    assert first.left == second.left == []
    assert [alone[name].state for _, alone in all_healthy] == [first.state, second.state]


@pytest.mark.parametrize("name", FAULTY)
def test_fault_of_one_rank_is_found(name: str, ranks: int, all_faulty: dict[str, Shown]) -> None:
    """Rank 0 names the layers that differ and no other, and of four ranks the one with the fault."""
    first, expected = all_faulty[name], FAULTY[name][1]
    assert first.differing == set(expected)
    if ranks == 2:
        assert first.odd == set()
    elif all(expected.values()):
        assert first.odd == {str(ODD)}
    elif any(expected.values()):
        assert str(ODD) in first.odd
    assert first.errors == {}


def sharded(rank: int) -> Shown:
    """Train a model that FSDP2 shards, with a plain layer beside it."""
    del rank
    torch.manual_seed(0)
    model, shown = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)), Shown()
    fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    with logged() as shown.logged, start_exporter(model, port=None, every=1, run="x", replicas=True, collectors=OFF) as exporter:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()

        def enough() -> bool:
            shown.series = shown_by(exporter)
            return dist.get_rank() > 0 or shown.compared("weights") >= 2

        assert eventually(enough), shown.series
        dist.barrier()
    return shown


def test_sharded_parameters_are_left_out() -> None:
    """Parameters that FSDP2 shards are left out, which is said once; what is plain beside them is compared."""
    first, second = of_ranks(sharded)
    for shown in (first, second):
        assert [line for line in shown.logged if "replicas: 2 of 4 parameters are left out" in line] == shown.logged
    assert {key[1] for key in first.series if key[0] == "torch_replicas_differ_total"} == {"1"}
    assert first.differing == set()


def without_one(rank: int) -> Shown:
    """Train three ranks of which the last one does not take part, and the second one differs."""
    torch.manual_seed(0)
    model, shown = wrapped(model=Perceptron), Shown()
    with start_exporter(model, port=None, every=1, run="x", replicas=rank < 2, collectors=OFF) as exporter:
        train(rank, FAULTY["weight"][0], 1, model)

        def enough() -> bool:
            shown.series = shown_by(exporter)
            return rank > 0 or shown.compared("weights") >= 2

        assert eventually(enough), shown.series
        dist.barrier()
    return shown


@pytest.mark.slow
def test_rank_that_is_missing_is_not_waited_for() -> None:
    """Where a rank sends nothing the others are compared all the same."""
    assert of_ranks(without_one, ranks=3)[0].differing == {("second", "weights")}


def test_alone_there_is_nothing_to_compare() -> None:
    """Without other ranks that is said once, no metric appears, and the training goes on."""
    model = Perceptron()
    with logged() as lines, start_exporter(model, port=None, every=1, replicas=True, collectors=OFF) as exporter:
        for step in range(3):
            loss_of(model, 0, step).backward()
        assert shown_by(exporter) == {}
    assert len([line for line in lines if "replicas: there is nothing to compare" in line]) == 1
