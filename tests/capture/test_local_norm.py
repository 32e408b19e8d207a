"""Two ranks: the norm of each one's own gradient, against float64 on that rank, and how long it waits for the other.

Two processes run all loops and record what they showed and what a float64 copy, or a shared clock, gave.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import gc
import itertools
import math
import pickle
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.capture.scenes import OFF
from tests.matrix.distributed import Branches, Checkpointed, data, warning_of_torch
from tests.support.models import Perceptron
from tests.support.ranks import PATIENCE, run_ranks
from tests.support.scrape import errors, value, values
from torch_grad_exporter import Exporter, start_exporter

STEPS = 4
UNKNOWN = None
"""Expected where a local norm cannot be known."""


@dataclass
class Finding:
    """What one rank saw. `shown`, `expected`: local norms by step; `end`: the trained parameters."""

    shown: list[float | None] = field(default_factory=list)
    expected: list[float | None] = field(default_factory=list)
    end: list[torch.Tensor] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    failed: str = ""


class Loop:
    """One run of a loop on one rank, with an exporter if `on`."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.found = Finding()
        self.exporter: Exporter | None = None

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module | dict[str, Any], **options: object) -> Iterator[None]:
        """Start the exporter for the block."""
        with contextlib.ExitStack() as stack:
            if self.on:
                options = {"every": 1, "collectors": OFF, "ranks": "all", "local_norm": True, **options}
                self.exporter = stack.enter_context(start_exporter(model, port=None, **options))
            yield
            for one in model.values() if isinstance(model, dict) else [model]:
                self.found.end += [p.detach().clone() for p in one.parameters()]
            if self.exporter is not None:
                self.found.errors = errors(self.exporter)

    def check(self, expected: float | None, optimizer: str = "") -> None:
        """Record what is shown after a step and what is expected."""
        if self.exporter is None:
            return
        scrape = {name: v for (name, labels), v in values(self.exporter).items() if dict(labels).get("optimizer", "") == optimizer}
        self.found.shown.append(scrape.get("torch_grad_local_norm"))
        self.found.expected.append(expected)


def alone(model: torch.nn.Module, *losses: Callable[[torch.nn.Module], torch.Tensor]) -> float:
    """Return the norm of the gradients of these losses, in float64 and on this rank alone."""
    with torch.no_grad():
        twin = copy.deepcopy(model).double()
    twin.zero_grad()
    for loss in losses:
        loss(twin).backward()
    return math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in twin.parameters() if p.grad is not None))


def double(x: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Return inputs in the type of the model."""
    return x.double() if next(model.parameters()).dtype is torch.float64 else x


def squared(step: int, factor: float = 1.0) -> Callable[[torch.nn.Module], torch.Tensor]:
    """Return the loss of a step."""
    return lambda model: model(double(data(step), model)).square().mean() * factor


def simple(
    run: Loop,
    model: torch.nn.Module,
    *,
    hook: Callable[[], tuple[Any, Any]] | None = None,
    factor: float = 1.0,
    **options: object,
) -> None:
    """Run a plain loop around a wrapped model."""
    wrapped: Any = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
    with run.watching(wrapped):
        for step in range(STEPS):
            optimizer.zero_grad()
            expected = alone(model, squared(step, factor))
            squared(step, factor)(wrapped).backward()
            optimizer.step()
            run.check(expected)


def rounds(
    run: Loop,
    model: torch.nn.Module,
    body: Callable[[int, Any, torch.optim.Optimizer], float | None],
    *,
    set_to_none: bool = True,
    **options: object,
) -> None:
    """Train; `body` runs the backwards of a step and returns the norm to expect."""
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with run.watching(wrapped):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            expected = body(step, wrapped, optimizer)
            optimizer.step()
            run.check(expected)


def no_sync(run: Loop, *, hidden: int = 8, synchronised: bool = False) -> None:
    """Run three backwards per step of which the last is reduced; if each is, the norm is unknown."""
    model = Perceptron(hidden=hidden)

    def body(step: int, wrapped: Any, _: object) -> float | None:  # noqa: ANN401 - a wrapper
        losses = [squared(3 * step + part, 1 / 3) for part in range(3)]
        expected = alone(model, *losses)
        for part, loss in enumerate(losses):
            with wrapped.no_sync() if part < 2 and not synchronised else contextlib.nullcontext():
                loss(wrapped).backward()
        return UNKNOWN if synchronised else expected

    rounds(run, model, body)


def thrown_away(run: Loop) -> None:
    """Set gradients to zero in place before the last backward: its norm is shown."""
    model = Perceptron()

    def body(step: int, wrapped: Any, optimizer: torch.optim.Optimizer) -> float | None:  # noqa: ANN401 - a wrapper
        with wrapped.no_sync():
            squared(2 * step)(wrapped).backward()
        optimizer.zero_grad(set_to_none=False)
        expected = alone(model, squared(2 * step + 1))
        squared(2 * step + 1)(wrapped).backward()
        return expected

    rounds(run, model, body, set_to_none=False)


def averaged_by_the_user(run: Loop) -> None:
    """Average with the other rank before the last backward: the norm is unknown."""
    model = Perceptron()

    def body(step: int, wrapped: Any, _: object) -> float | None:  # noqa: ANN401 - a wrapper
        with wrapped.no_sync():
            squared(2 * step)(wrapped).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        squared(2 * step + 1)(wrapped).backward()
        return UNKNOWN

    rounds(run, model, body)


def branches(run: Loop, *, old_gradient: bool = False) -> None:
    """Take a branch on one rank: it has no part in the norm of the other, unless its old gradient goes into the mean."""
    model = Branches()

    def body(step: int, wrapped: Any, _: object) -> float | None:  # noqa: ANN401 - a wrapper
        rank = dist.get_rank()
        mine = (step == 0 or rank) if old_gradient else (step + rank) % 2
        taken = ["always", "sometimes"] if mine else ["always"] if old_gradient else ["always", "never"]

        def loss(m: torch.nn.Module) -> torch.Tensor:
            return m(double(data(step), m), taken).square().mean()  # type: ignore[no-any-return]

        expected = alone(model, loss)
        loss(wrapped).backward()
        return expected if mine or not old_gradient else UNKNOWN

    rounds(run, model, body, set_to_none=not old_gradient, find_unused_parameters=True)


def scaled(run: Loop) -> None:
    """Scale the loss; an overflow on one rank is infinite only there."""
    model = Perceptron()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    with run.watching(wrapped, grad_scaler=scaler):
        for step in range(STEPS):
            optimizer.zero_grad()
            expected = alone(model, squared(step))
            scaler.scale(squared(step)(wrapped)).backward()
            scaler.step(optimizer)
            scaler.update()
            run.check(expected)


def sparse(run: Loop) -> None:
    """Use sparse gradients of an embedding with repeated tokens."""
    model = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum")

    def body(step: int, wrapped: Any, _: object) -> float | None:  # noqa: ANN401 - a wrapper
        tokens = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        expected = alone(model, lambda m: m(tokens).square().mean())
        wrapped(tokens).square().mean().backward()
        return expected

    rounds(run, model, body)


def powersgd() -> tuple[Any, Any]:
    """Return a hook that compresses."""
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    return powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook


LOOPS: dict[str, Callable[[Loop], None]] = {
    "plain": lambda run: simple(run, Perceptron()),
    "buckets as views": lambda run: simple(run, Perceptron(), bucket_cap_mb=1e-4, gradient_as_bucket_view=True),
    "static graph": lambda run: simple(run, Perceptron(), static_graph=True),
    "powersgd hook": lambda run: simple(run, Perceptron(), hook=powersgd),
    "reentrant checkpoint": lambda run: simple(run, Checkpointed(use_reentrant=True)),
    "checkpoint": lambda run: simple(run, Checkpointed(use_reentrant=False)),
    "beyond float32 squares": lambda run: simple(run, Perceptron(), factor=1e25),
    "no_sync": no_sync,
    "no_sync, a large layer": lambda run: no_sync(run, hidden=1 << 15),  # its sums are measured in pieces
    "each backward reduced": lambda run: no_sync(run, synchronised=True),
    "thrown away": thrown_away,
    "averaged by the user": averaged_by_the_user,
    "used on one rank": branches,
    "an old gradient": lambda run: branches(run, old_gradient=True),
    "loss scale": scaled,
    "sparse": sparse,
}


def observed(loop: Callable[[Loop], None], *, on: bool) -> Finding:
    """Run a loop, seeded."""
    torch.manual_seed(0)
    run = Loop(on=on)
    with warnings.catch_warnings(), warning_of_torch(".*find_unused_parameters=True was specified.*", ".*torch.jit.*"):
        try:
            loop(run)
        except Exception:  # noqa: BLE001 - a run that fails is a finding like others
            run.found.failed = traceback.format_exc()
    return run.found


# Waits

SLOW = 0.15
"""Seconds that rank 1 sleeps in each step."""
WARM = 3
"""Steps before what is measured: in the first ones the wrapper gathers the sizes of its buckets in the forward."""

WAITING: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "plain": (Perceptron, 1),
    "no_sync": (Perceptron, 1),
    "each backward reduces": (Perceptron, 1),
    "seldom sampled": (Perceptron, 1000),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), 1),
    "alone": (Perceptron, 1),
}
"""Models, and of how many rounds one is sampled."""


@dataclass
class Step:
    """The begin, last gradient and end of the reducing backwards of a step, and the wait and its count after it."""

    began: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    wait: float = 0.0
    rounds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return how long the backwards took."""
        return sum(self.ended) - sum(self.began)

    def waits_for(self, other: Step) -> float:
        """Return how long this rank was idle, at least, before the other one began."""
        return sum(max(0.0, theirs - mine) for mine, theirs in zip(self.done, other.began, strict=True))


@dataclass
class Waited:
    """The record of one rank. `shown`: the wait and its count at the end."""

    steps: list[Step]
    phases: dict[str, float]
    elapsed: float
    errors: dict[str, float]
    shown: tuple[float | None, float | None]


def waiting(kind: str, rank: int) -> Waited:
    """Train for some steps."""
    make, every = WAITING[kind]
    model = make()
    wrapped = model if kind == "alone" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0.0

    def note(_: torch.Tensor) -> None:
        nonlocal done
        done = time.monotonic()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    steps = []
    start = time.monotonic()
    with start_exporter(wrapped, port=None, every=every, collectors=OFF) as exporter:
        for _ in range(WARM + STEPS):
            steps.append(step := Step())
            optimizer.zero_grad()
            for part in range(2):
                later = kind == "no_sync" and part == 0
                with wrapped.no_sync() if later else contextlib.nullcontext():
                    loss = wrapped(torch.ones(5, 6)).square().mean()
                    time.sleep(SLOW * rank * (part == 1))
                    if later:
                        loss.backward()
                    elif part == 1 or kind == "each backward reduces":
                        step.began.append(time.monotonic())
                        loss.backward()
                        step.ended.append(time.monotonic())
                        step.done.append(done)
            optimizer.step()
            names = ("torch_train_gradient_wait_seconds_total", "torch_train_gradient_waits_total")
            shown = (value(exporter, names[0]), value(exporter, names[1]))
            step.wait, step.rounds = shown[0] or 0.0, shown[1] or 0.0
        phases = {
            phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) or 0.0 for phase in ("backward", "outside")
        }
        return Waited(steps, phases, time.monotonic() - start, errors(exporter), shown)


# Both ranks

Findings = list[dict[tuple[str, bool], Finding]]


def rank_main(rank: int, folder: str, names: list[str]) -> None:
    """Run all loops on one of the ranks, with an exporter and without, and those that wait."""
    gc.disable()  # as in `test_distributed.py`
    kept, found = [], {}

    @contextlib.contextmanager
    def group(name: str) -> Iterator[None]:
        store, patience = f"file://{folder}/store-{name}", dt.timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", init_method=store, timeout=patience, rank=rank, world_size=2)
        yield
        gc.collect()
        gc.freeze()
        dist.destroy_process_group()

    for number, name in enumerate(names):
        for on in (False, True):
            with group(f"{number}-{on}"):
                found[name, on] = observed(LOOPS[name], on=on)
                if "powersgd" in name:
                    kept.append(dist.group.WORLD)
    with group("waits"):
        waits = {kind: waiting(kind, rank) for kind in WAITING}
    Path(folder, str(rank)).write_bytes(pickle.dumps((found, waits)))


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, list[dict[str, Waited]]]:
    """Return what both ranks found in the selected loops, and how they waited."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = list(dict.fromkeys(spec.params["name"] for spec in callspecs if spec is not None and "name" in spec.params))
    folder = tmp_path_factory.mktemp("local")
    run_ranks(rank_main, str(folder), names)
    ranks = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]  # noqa: S301 - written by the processes above
    return [found for found, _ in ranks], [waits for _, waits in ranks]


@pytest.fixture(scope="module")
def findings(both: tuple[Findings, object]) -> Findings:
    """Return what both ranks found in the selected loops."""
    return both[0]


@pytest.fixture(scope="module")
def waits(both: tuple[object, list[dict[str, Waited]]]) -> list[dict[str, Waited]]:
    """Return how both ranks waited."""
    return both[1]


loops = pytest.mark.parametrize("name", LOOPS)


@pytest.mark.process
@loops
def test_local_norm(name: str, findings: Findings) -> None:
    """The norm of each rank is that of its own gradient in float64, or absent where that is unknown."""
    for rank, mine in enumerate(findings):
        found = mine[name, True]
        assert not found.failed, f"rank {rank}: {found.failed}"
        assert found.errors == {}
        assert len(found.shown) >= 3
        assert found.shown == [one if one is None else pytest.approx(one, rel=1e-5) for one in found.expected], f"rank {rank}"
    first, second = (mine[name, True].shown for mine in findings)
    assert first != second or name in ("each backward reduced", "averaged by the user")


@pytest.mark.process
@loops
def test_training_is_unchanged(name: str, findings: Findings) -> None:
    """The trained parameters are those of a run without an exporter, to the last bit."""
    for mine in findings:
        assert not mine[name, False].failed, mine[name, False].failed
        pairs = zip(mine[name, True].end, mine[name, False].end, strict=True)
        assert mine[name, True].end
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["plain", "no_sync", "each backward reduces"])
def test_the_fast_rank_waits(kind: str, waits: list[dict[str, Waited]]) -> None:
    """The fast rank waits while the slow one sleeps, the slow one waits at most its own backward, and each round counts once."""
    fast, slow = (mine[kind] for mine in waits)
    for rank in (fast, slow):
        assert rank.errors == {}
        for before, step in itertools.pairwise(rank.steps[WARM - 1 :]):
            assert step.rounds - before.rounds == 1
            assert 0 <= step.wait - before.wait <= step.seconds
    pairs = zip(itertools.pairwise(fast.steps[WARM - 1 :]), slow.steps[WARM:], strict=True)
    missed = [step.waits_for(other) - (step.wait - before.wait) for (before, step), other in pairs]
    assert statistics.median(missed) < 0.5 * SLOW  # between the last gradient and the clock of the wait it may be held up
    assert statistics.median(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True)) > 0.5 * SLOW


@pytest.mark.process
def test_a_wait_that_cannot_be_known(waits: list[dict[str, Waited]]) -> None:
    """With a reentrant checkpoint no round is counted, and without other ranks the metric is absent."""
    for mine in waits:
        assert mine["reentrant checkpoint"].shown == (0.0, 0.0)
        assert mine["alone"].shown == (None, None)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["plain", "seldom sampled"])
def test_the_wait_is_part_of_the_backward(kind: str, waits: list[dict[str, Waited]]) -> None:
    """The fast rank spends the wait in the phase `backward`, and the slow one sleeps outside of the phases."""
    fast, slow = (mine[kind] for mine in waits)
    idle = sum(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True))
    slept = SLOW * (STEPS + WARM)
    assert idle > 0.5 * slept
    assert fast.phases["backward"] >= idle
    assert fast.phases["outside"] <= fast.elapsed - idle
    assert slow.phases["outside"] >= 0.9 * slept
    assert slow.phases["backward"] <= sum(step.seconds for step in slow.steps)


def seldom(rank: int, folder: str) -> None:
    """Train for long enough that most rounds are only counted, and write the waits and the samples."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with start_exporter(wrapped, port=None, every=8, collectors=OFF) as exporter:
        for _ in range(200):
            optimizer.zero_grad()
            wrapped(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
        names = ("torch_train_gradient_waits_total", "torch_grad_exporter_captures_total")
        Path(folder, str(rank)).write_text(" ".join(str(value(exporter, name)) for name in names))
    dist.destroy_process_group()


@pytest.mark.process
def test_waits_between_counted_rounds(tmp_path: Path) -> None:
    """A sample behind rounds that were only counted has its wait."""
    run_ranks(seldom, str(tmp_path))
    for rank in range(2):
        waits, samples = map(float, (tmp_path / str(rank)).read_text().split())
        assert samples >= 20
        assert waits >= samples - WARM
