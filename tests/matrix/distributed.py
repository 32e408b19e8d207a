"""Several ranks: gradients that are reduced over two ranks, and gradients of which each rank has a part.

These regimes need a process group of two ranks, so they have a table of their own: `tests/matrix/test_distributed.py` runs them.
All ranks begin with the same seed and train on different data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.matrix.harness import CUMULATIVE, Regime, Run, regime
from tests.support.models import Perceptron, sgd
from tests.support.record import norm, wide
from tests.support.torch_versions import VERSION, CPUOffloadPolicy, Replicate, Shard, fully_shard, need

REGIMES: dict[str, Regime] = {}


two_ranks = functools.partial(regime, REGIMES)


def data(step: int, rank: int | None = None, size: int = 5, inputs: int = 6) -> torch.Tensor:
    """A rank's batch of a step, by default this rank's."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(size, inputs, generator=torch.Generator().manual_seed(100 * step + rank))


@contextlib.contextmanager
def warning_of_torch(*messages: str) -> Iterator[None]:
    """Lets torch warn of what a regime does on purpose."""
    with warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield


# Replicas


class Replicas:
    """What a single process computes in float64: the mean over the ranks of their gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._twin = copy.deepcopy(model).double()

    def norms(self, step: int) -> dict[str, float]:
        """The norm of each layer's averaged gradient, with the weights as they are now."""
        with torch.no_grad():
            for mine, theirs in zip(self._twin.parameters(), self._model.parameters(), strict=True):
                mine.copy_(theirs)
        self._twin.zero_grad()
        for rank in range(2):
            (self._twin(data(step, rank).double()).square().mean() / 2).backward()
        return {
            name: math.sqrt(sum(float(p.grad.square().sum()) for p in layer.parameters()))
            for name, layer in self._twin.named_children()
        }


DDP_OPTIONS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "buckets_as_views": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
}


@two_ranks(kind=DDP_OPTIONS)
def ddp(run: Run, kind: str) -> None:
    """The norms are those of the mean over the ranks, as a single process computes it from the data of both."""
    model = Perceptron()
    alone = Replicas(model)
    wrapped = DistributedDataParallel(model, **DDP_OPTIONS[kind])
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            expected = alone.norms(step)
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()
            for layer, norm in expected.items():
                run.shows(pytest.approx(norm, rel=1e-5), "torch_grad_norm", layer=layer)
    if kind.startswith("buckets"):
        sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # private: torch shows the buckets nowhere else
        assert sizes.count(",") > 0, f"one bucket only, of {sizes} bytes"


@two_ranks(started=["on the inner module", "before wrapping"])
def ddp_where_started(run: Run, started: str) -> None:
    """An exporter that watches the module inside of DDP, from before or after it was wrapped, sees reduced gradients too."""
    model = Perceptron()
    wrapped = DistributedDataParallel(model) if started == "on the inner module" else None
    for step in run.rounds(model, 5):
        wrapped = wrapped or DistributedDataParallel(model)
        run.backward(wrapped(data(step)).square().mean())


class Branches(torch.nn.Module):
    """Three branches of which a forward takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(6, 4)
        self.sometimes = torch.nn.Linear(6, 4)
        self.never = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, taken: Iterable[str]) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in taken]).sum(0)


NEVER = ("module.never.weight", "module.never.bias")


@two_ranks(set_to_none=[True, False])
def ddp_unused_parameters(run: Run, set_to_none: bool) -> None:
    """What no rank used has no gradient, though one of zeros or of an earlier step is still there; all ranks agree on that."""
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in run.rounds(wrapped, 7, clear=False):
        for parameter in wrapped.module.always.parameters():
            parameter.grad = None if set_to_none or parameter.grad is None else parameter.grad.zero_()
        taken = ["always", "never"] if step == 0 else ["always", "sometimes"] if step % 3 else ["always"]
        unused = {"always", "sometimes", "never"} - set(taken)
        loss = wrapped(data(step), taken).square().mean()
        run.backward(loss, unused=[f"module.{name}.{part}" for name in unused for part in ("weight", "bias")])


@two_ranks(as_views=[False, True])
def ddp_no_sync(run: Run, as_views: bool) -> None:
    """Two backwards that stay on their rank and one that is reduced are one sample, of the reduced sum."""
    wrapped = DistributedDataParallel(Perceptron(), gradient_as_bucket_view=as_views)
    for step in run.rounds(wrapped, 5):
        for part in range(3):
            with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                run.backward(wrapped(data(3 * step + part)).square().mean() / 3)


LOCAL_NORM = "torch_grad_local_norm"


@two_ranks()
def ddp_no_sync_of_a_large_layer(run: Run) -> None:
    """The same for a layer whose local sums are measured in pieces."""
    wrapped = DistributedDataParallel(Perceptron(hidden=1 << 15))
    rare = ["torch_grad_max_magnitude", "torch_grad_zero_ratio", "torch_grad_min", "torch_grad_max", "torch_grad_stddev"]
    for step in run.rounds(wrapped, 4, without=rare):  # of a model that is not small these are not of every sample
        for part in range(3):
            with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                run.backward(wrapped(data(3 * step + part)).square().mean() / 3)


@two_ranks()
def ddp_each_backward_reduced(run: Run) -> None:
    """Where each of three backwards is reduced, the sum of this rank's own gradients is not in `.grad`: its norm is absent."""
    wrapped = DistributedDataParallel(Perceptron())
    for step in run.rounds(wrapped, 4):
        for part in range(3):
            run.backward(wrapped(data(3 * step + part)).square().mean() / 3)
        run.shows(None, LOCAL_NORM)


@two_ranks()
def ddp_thrown_away(run: Run) -> None:
    """Gradients that are zeroed in place before the last backward are not part of this rank's own."""
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = sgd(wrapped)
    unknown = ["torch_train_", *CUMULATIVE]  # whether such a backward is a skipped step shows later
    for step in run.rounds(wrapped, 4, optimizer, set_to_none=False, without=unknown):
        with wrapped.no_sync():
            run.backward(wrapped(data(2 * step)).square().mean())
        optimizer.zero_grad(set_to_none=False)
        run.backward(wrapped(data(2 * step + 1)).square().mean())


@two_ranks()
def ddp_averaged_by_the_user(run: Run) -> None:
    """After an average with the other rank before the last backward, the norm of this rank's own gradients is absent."""
    wrapped = DistributedDataParallel(Perceptron())
    for step in run.rounds(wrapped, 4):
        with wrapped.no_sync():
            run.backward(wrapped(data(2 * step)).square().mean())
        for parameter in wrapped.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        run.backward(wrapped(data(2 * step + 1)).square().mean())
        run.shows(None, LOCAL_NORM)


@two_ranks()
def ddp_an_old_gradient(run: Run) -> None:
    """Where an old gradient of a branch that this rank did not take goes into the mean, its own norm is absent."""
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in run.rounds(wrapped, 4, set_to_none=False):
        mine = step == 0 or dist.get_rank() == 1
        run.backward(wrapped(data(step), ["always", "sometimes"] if mine else ["always"]).square().mean(), unused=NEVER)


@two_ranks()
def ddp_sparse(run: Run) -> None:
    """Sparse gradients of an embedding with repeated tokens."""
    wrapped = DistributedDataParallel(torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))
    for step in run.rounds(wrapped, 4):
        tokens = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        run.backward(wrapped(tokens).square().mean())


@two_ranks(hook=["fp16", "powersgd"])
def ddp_compressed(run: Run, hook: str) -> None:
    """Where a communication hook compresses gradients, those that came back from it are shown."""
    wrapped = DistributedDataParallel(Perceptron())
    if hook == "powersgd":
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 0.5}
        wrapped.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    else:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step in run.rounds(wrapped, 5):
        run.backward(wrapped(data(step)).square().mean())


class Checkpointed(torch.nn.Module):
    """Layers whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.first(x).relu(), x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.second, x, use_reentrant=True)


@two_ranks()
def ddp_checkpointed(run: Run) -> None:
    """Backwards within the backward, as checkpoints run them, are no samples of their own."""
    wrapped = DistributedDataParallel(Checkpointed())
    for step in run.rounds(wrapped, 5):
        run.backward(wrapped(data(step)).square().mean())


@two_ranks()
def ddp_clip_grad_norm(run: Run) -> None:
    """Norms are those of the reduced gradients before clipping."""
    wrapped = DistributedDataParallel(Perceptron())
    for step in run.rounds(wrapped, 7):
        run.backward(wrapped(data(step)).square().mean() * (10.0 if step % 3 else 0.001))
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)


def overflow_loop(
    run: Run, model: torch.nn.Module, scaler: torch.amp.GradScaler, loss_of: Callable[[torch.Tensor, bool], torch.Tensor]
) -> None:
    """Trains under a scaler with overflows in two steps, which both ranks skip."""
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(9):
            overflow = step in (3, 6)
            optimizer.zero_grad()
            loss = loss_of(model(data(step)), overflow)
            run.unscale(1 / scaler.get_scale())
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            run.skipped() if overflow else run.stepping()
            scaler.step(optimizer)
            scaler.update()
            if not overflow:  # a skip is known when the next backward begins
                run.check()


def infinite_on_rank_1(output: torch.Tensor, overflow: bool) -> torch.Tensor:
    """Return a loss that is infinite on one rank where it overflows."""
    return output.square().mean() * (math.inf if overflow and dist.get_rank() == 1 else 1.0)


@two_ranks()
def ddp_overflow_on_one_rank(run: Run) -> None:
    """An overflow on the other rank is one here as well: both count it, and both skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    overflow_loop(run, DistributedDataParallel(Perceptron()), scaler, infinite_on_rank_1)


@two_ranks()
def ddp_uneven_inputs(run: Run) -> None:
    """Under `join` a rank whose data is at an end sees nothing more; the other one's mean has nothing of that rank."""
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer), wrapped.join():
        for step in range(4 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(around=["inner", "wrapper"])
def ddp_compiled(run: Run, around: str) -> None:
    """A compiled module inside of DDP, and DDP itself compiled."""
    torch.compiler.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager")
    wrapped = DistributedDataParallel(compiled(Perceptron()) if around == "inner" else Perceptron())
    wrapped = compiled(wrapped) if around == "wrapper" else wrapped
    for step in run.rounds(wrapped, 5):
        run.backward(wrapped(data(step)).square().mean())


@two_ranks()
def zero_redundancy_optimizer(run: Run) -> None:
    """An optimizer that steps only this rank's part of the parameters: the gradients are those of all of them."""
    with warning_of_torch(".*torch.jit.*"):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns at import
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.05)
    for step in run.rounds(wrapped, 5, optimizer):
        run.backward(wrapped(data(step)).square().mean())


# Shards


def shard(model: torch.nn.Module, layers: Iterable[torch.nn.Module] = (), **options: object) -> torch.nn.Module:
    """FSDP2 on each of the layers, and on the model for what is left."""
    need(2, 7, "FSDP2 on a CPU")
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def even() -> Perceptron:
    """A model whose parameters all split into two equal parts."""
    return Perceptron(6, 8, 4)


@two_ranks(kind=["resharded", "root only, kept"])
def fsdp(run: Run, kind: str) -> None:
    """Each rank shows its part; whether the parameters are given back after the forward makes no difference."""
    model = even()
    layers = [] if kind.startswith("root") else [model.first, model.second]
    shard(model, layers, reshard_after_forward=not kind.endswith("kept"))
    for step in run.rounds(model, 5):
        run.backward(model(data(step)).square().mean())


@two_ranks(layerwise=[True, False])
def fsdp_started_before(run: Run, layerwise: bool) -> None:
    """An exporter that was started before `fully_shard` put other parameters in the place of those that it knew."""
    model = even()
    with run.watching(model, sgd(model)):
        shard(model, [model.first, model.second] if layerwise else [])
        optimizer = sgd(model)
        run.uses(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            if step:  # the first round is absent: in its forward and backward only gathered parameters are to be seen
                run.check(without=[*CUMULATIVE, "torch_train_backward_passes_total"])


@two_ranks(kind=["wrapper", "reentrant function"])
def fsdp_checkpointed(run: Run, kind: str) -> None:
    """Layers whose parameters are gathered again within the backward, for the activations to be computed again."""
    if kind == "wrapper":
        model = even()
        model.first, model.second = wrappers.checkpoint_wrapper(model.first), wrappers.checkpoint_wrapper(model.second)
    else:
        model = Checkpointed()
    shard(model, [model.first, model.second])
    for step in run.rounds(model, 5):
        with warning_of_torch(".*reentrant.*"):
            output = model(data(step).requires_grad_())
        run.backward(output.square().mean())


@two_ranks(kind=["synchronised", "not synchronised"])
def fsdp_accumulation(run: Run, kind: str) -> None:
    """Three backwards to a step are one sample, whether each is reduced or only the last one is."""
    model = even()
    shard(model, [model.first, model.second])
    for step in run.rounds(model, 5):
        for part in range(3):
            if kind != "synchronised":
                model.set_requires_gradient_sync(part == 2)
            run.backward(model(data(3 * step + part)).square().mean() / 3)


@two_ranks()
def fsdp_clip_grad_norm(run: Run) -> None:
    """`clip_grad_norm_` knows the norm over all ranks; what is shown is the part before it, and the whole where it is observed."""
    model = even()
    shard(model, [model.first, model.second])
    for step in run.rounds(model, 5):
        run.backward(model(data(step)).square().mean() * 10)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@two_ranks()
def fsdp_observed_norm(run: Run) -> None:
    """The whole norm is shown where the loop gives it, and is the same on all ranks."""
    model = even()
    shard(model)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean() * 10)
            whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
            run.observe(grad_norm=whole)
            run.step(optimizer)
            # The record of this rank knows its part alone.
            run.check(without=["torch_grad_global_norm", "torch_grad_clip"])
            run.shows(step + 1.0 if step > 1 else None, "torch_grad_clipped_steps_total")
            run.shows(float(whole), "torch_grad_global_norm")


@two_ranks()
def fsdp_offloaded(run: Run) -> None:
    """Gradients that FSDP2 brings to the host."""
    model = even()
    shard(model, [model.first, model.second], offload_policy=CPUOffloadPolicy(pin_memory=False))
    for step in run.rounds(model, 5):
        run.backward(model(data(step)).square().mean())


class Lopsided(torch.nn.Module):
    """Parameters of 7, 5 and 1 rows: rank 1 has a smaller part of the first layers and nothing of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 7)
        self.second = torch.nn.Linear(7, 5)
        self.last = torch.nn.Linear(5, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).relu()) * self.scale


@two_ranks(layerwise=[True, False])
def fsdp_uneven(run: Run, layerwise: bool) -> None:
    """Parts of different sizes, and empty ones: sizes and units are those of this rank's part."""
    model = Lopsided()
    shard(model, [model.first, model.second, model.last] if layerwise else [])
    for step in run.rounds(model, 5):
        run.backward(model(data(step)).square().mean())


@two_ranks()
def fsdp_beside_replicated(run: Run) -> None:
    """A layer that is left out of the sharding is whole on each rank; the global norm is still absent."""
    need(2, 7, "FSDP2 on a CPU")
    model = even()
    fully_shard(model.first)
    for step in run.rounds(model, 5):
        run.backward(model(data(step)).square().mean())


# Shards of flat parameters

FLAT = {
    "flat": {},
    "original": {"use_orig_params": True},
    "flat, whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "original, whole": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
}
"""How `FullyShardedDataParallel` keeps parameters."""


def flatten(model: torch.nn.Module, layers: Iterable[type] = (torch.nn.Linear,), **options: object) -> torch.nn.Module:
    """The older FSDP on each layer of these classes, and on the model for what is left."""
    need(2, 7, "the reduction of shards on a CPU")
    with warning_of_torch(".*"):
        policy = ModuleWrapPolicy(set(layers)) if layers else None
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


class Whole:
    """What a single process computes in float64 from the data of all ranks, of which each rank has a piece."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._twin = copy.deepcopy(model).double()

    def agrees(self, wrapped: torch.nn.Module, step: int, *, pieces: bool) -> None:
        """Asserts that the squares of the pieces of all ranks add up to that of the averaged gradient; then takes sgd's step."""
        self._twin.zero_grad()
        for rank in range(2):
            (self._twin(data(step, rank).double()).square().mean() / 2).backward()
        squares = torch.stack([wide(p.grad).square().sum() for p in wrapped.parameters() if p.grad is not None]).sum()
        if pieces:
            dist.all_reduce(squares)
        assert float(squares) == pytest.approx(sum(float(p.grad.square().sum()) for p in self._twin.parameters()), rel=1e-5)
        with torch.no_grad():
            for parameter in self._twin.parameters():
                parameter.sub_(0.05 * parameter.grad)


@two_ranks(kind=FLAT)
def fsdp1(run: Run, kind: str) -> None:
    """Each rank shows its piece of the flat parameters, or the first one the whole where nothing is cut."""
    model = Lopsided()
    alone = Whole(model)
    wrapped = flatten(model, **FLAT[kind])
    for step in run.rounds(wrapped, 5):
        run.backward(wrapped(data(step)).square().mean())
        alone.agrees(wrapped, step, pieces=not kind.endswith("whole"))


KEPT = ["flat", "original"]
GATHERED = ["flat", "flat, root only", "original, root only"]
"""Where the first forward shows none of the parameters."""

SEEN = ["original", "original, optimizer first"]


@two_ranks(kind=[*GATHERED, *SEEN])
def fsdp1_started_before(run: Run, kind: str) -> None:
    """An exporter that was started before wrapping watches the module within, whose forward sees gathered parameters only."""
    model = even()
    with run.watching(model, sgd(model)):
        optimizer = sgd(model)
        root_only = kind.endswith("root only")
        wrapped = flatten(model, () if root_only else (torch.nn.Linear,), use_orig_params=kind.startswith("original"))
        if not kind.endswith("optimizer first"):
            optimizer = sgd(wrapped)
        run.uses(optimizer)
        if run.record is not None:
            run.record.models = {"": wrapped}
        # Where the first forward shows only gathered parameters, its round is absent and counted.
        seen = kind in SEEN
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            if step or seen:
                run.check(without=[*CUMULATIVE, "torch_train_backward_passes_total"])
            run.shows(float(not seen), "torch_grad_exporter_captures_skipped_total", reason="gathered")


@two_ranks(kind=["flat, reduced", "original, not reduced"])
def fsdp1_accumulation(run: Run, kind: str) -> None:
    """Three backwards to a step are one sample, also where FSDP reduces the last one only."""
    wrapped = flatten(even(), **FLAT[kind.rpartition(", ")[0]])
    for step in run.rounds(wrapped, 5):
        for part in range(3):
            with wrapped.no_sync() if kind.endswith("not reduced") and part < 2 else contextlib.nullcontext():
                run.backward(wrapped(data(3 * step + part)).square().mean() / 3)


@two_ranks(kind=KEPT)
def fsdp1_clip_grad_norm(run: Run, kind: str) -> None:
    """FSDP's own clipping knows the norm over all ranks; it is shown where the loop gives it."""
    wrapped = flatten(even(), use_orig_params=kind == "original")
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            run.backward(wrapped(data(step)).square().mean() * 10)
            whole = wrapped.clip_grad_norm_(0.5)
            if step > 2:
                run.observe(grad_norm=whole)
            run.step(optimizer)
            # The record of this rank knows its piece alone.
            run.check(without=["torch_grad_global_norm", "torch_grad_clip"] if step > 2 else [])
            if step > 2:
                run.shows(float(whole), "torch_grad_global_norm")


@two_ranks(kind=["original", "original, whole"])
def fsdp1_frozen(run: Run, kind: str) -> None:
    """Of frozen parameters nothing is shown, until they are trained; a bias may be frozen beside a weight that is not."""
    model = even()
    model.first.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    wrapped = flatten(model, **FLAT[kind])
    for step in run.rounds(wrapped, 7):
        if step == 4:
            model.first.requires_grad_(True)
        run.backward(wrapped(data(step)).square().mean())


@two_ranks(kind=KEPT)
def fsdp1_gathered_for_a_while(run: Run, kind: str) -> None:
    """Saving, and an evaluation with gradients but without a backward, leave parameters gathered or replaced for a while."""
    wrapped = flatten(even(), use_orig_params=kind == "original", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            wrapped(data(step))
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            with FullyShardedDataParallel.summon_full_params(wrapped):
                assert sum(p.numel() for p in wrapped.parameters()) > 60
            run.check()


# Pipelines

MICRO_BATCHES = 4
MOST = 0.05
"""To which norm a stage is clipped."""
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of the last stage."""
    return (output - target).square().mean()


class Stages:
    """What a single process computes in float64 with both stages, in one pass over the whole batch."""

    def __init__(self, stages: list[torch.nn.Module], *, divided: bool, clipped: bool) -> None:
        self._twins = copy.deepcopy(torch.nn.Sequential(*stages)).double()
        self._factor = 1 if divided else MICRO_BATCHES
        self._clipped = clipped

    def norm(self, inputs: torch.Tensor, target: torch.Tensor) -> float:
        """The norm of this rank's stage before clipping; then takes sgd's step."""
        self._twins.zero_grad()
        (mean_square(self._twins(inputs.double()), target.double()) * self._factor).backward()
        norms = [float(norm([p.grad for p in stage.parameters()])) for stage in self._twins]
        with torch.no_grad():
            for stage, whole in zip(self._twins, norms, strict=True):
                for parameter in stage.parameters():
                    parameter.sub_(0.05 * parameter.grad * (min(1.0, MOST / whole) if self._clipped else 1.0))
        return norms[dist.get_rank()]


@two_ranks(kind=["gpipe, divided, clipped", "1f1b, summed"])
def pipeline(run: Run, kind: str) -> None:
    """Norms are those of the mean over the micro-batches, by which the schedule has divided, and before clipping."""
    need(2, 7, "the division of gradients by a schedule")
    if VERSION == (2, 9):
        pytest.skip("torch 2.9 aborts in gloo, also in a pipeline of its own")
    stages = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh()), torch.nn.Linear(8, 4)]
    model, divided, clipped = stages[dist.get_rank()], "divided" in kind, "clipped" in kind
    alone = Stages(stages, divided=divided, clipped=clipped)
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = SCHEDULES[kind.partition(",")[0]](stage, MICRO_BATCHES, loss_fn=mean_square, scale_grads=divided)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        if run.record is not None:
            run.record.stages = True
        for step in range(6):
            optimizer.zero_grad()
            inputs, target = data(step, 0, size=8), data(step, 1, size=8, inputs=4)
            losses: list[torch.Tensor] = []
            schedule.step(inputs) if dist.get_rank() == 0 else schedule.step(target=target, losses=losses)
            run.losses += [loss.detach() for loss in losses]
            run.passed()
            if run.record is not None:
                run.record.backwards += MICRO_BATCHES - 1
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
            run.step(optimizer)
            run.check()
            run.shows(pytest.approx(alone.norm(inputs, target), rel=1e-4), "torch_grad_global_norm")


# Parallel tensors


@two_ranks()
def tensor_parallel(run: Run) -> None:
    """Weights that are split by rows and by columns: this rank's part, and the bias that all have, as a whole."""
    mesh = init_device_mesh("cpu", (2,))
    model = even()
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for step in run.rounds(model, 5):
        run.backward(model(data(step, rank=0)).square().mean())


class Normed(torch.nn.Module):
    """A normalisation that sees a part of the sequence on each rank, around parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(x)).relu())


@two_ranks()
def sequence_parallel(run: Run) -> None:
    """A replicated weight each rank of which has a part of the sum that its gradient is."""
    need(2, 6, "the backward of a layer norm under SequenceParallel")
    mesh = init_device_mesh("cpu", (2,))
    model = Normed()
    table = {
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1), use_local_output=True),
        "second": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, table)
    for step in run.rounds(model, 5):
        run.backward(model(data(step, rank=0).view(1, -1, 6)[:, :4].contiguous()).square().mean())
