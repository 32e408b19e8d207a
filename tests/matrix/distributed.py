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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.matrix.harness import CUMULATIVE, NOTHING, Naive, Regime, Run, enter_into
from tests.support.models import Perceptron, sgd
from tests.support.torch_versions import CPUOffloadPolicy, MixedPrecisionPolicy, Replicate, Shard, fully_shard, need

REGIMES: dict[str, Regime] = {}


def two_ranks(catches: Naive = NOTHING, **variants: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `regime`, for a function that each of two ranks runs."""
    return enter_into(REGIMES, catches, variants)


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
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "buckets": {"bucket_cap_mb": 1e-4},
    "buckets_as_views": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
}


@two_ranks(Naive.ACCUMULATE, kind=DDP_OPTIONS)
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
        sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert sizes.count(",") > 0, f"one bucket only, of {sizes} bytes"


@two_ranks(Naive.ACCUMULATE, started=["on the inner module", "before wrapping"])
def ddp_where_started(run: Run, started: str) -> None:
    """An exporter that watches the module inside of DDP, from before or after it was wrapped, sees reduced gradients too."""
    model = Perceptron()
    wrapped = DistributedDataParallel(model) if started == "on the inner module" else None
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        wrapped = wrapped or DistributedDataParallel(model)
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


class Branches(torch.nn.Module):
    """Three branches of which a forward takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(6, 4)
        self.sometimes = torch.nn.Linear(6, 4)
        self.never = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, taken: Iterable[str]) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in taken]).sum(0)


@two_ranks(Naive.ACCUMULATE | Naive.STEP, set_to_none=[True, False])
def ddp_unused_parameters(run: Run, set_to_none: bool) -> None:
    """What no rank used has no gradient, though one of zeros or of an earlier step is still there; all ranks agree on that."""
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(8):
            for parameter in wrapped.module.always.parameters():
                parameter.grad = None if set_to_none or parameter.grad is None else parameter.grad.zero_()
            taken = ["always", "never"] if step == 0 else ["always", "sometimes"] if step % 3 else ["always"]
            unused = {"always", "sometimes", "never"} - set(taken)
            loss = wrapped(data(step), taken).square().mean()
            run.backward(loss, unused=[f"module.{name}.{part}" for name in unused for part in ("weight", "bias")])
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE)
def ddp_used_on_one_rank(run: Run) -> None:
    """A parameter that only the other rank used has the mean of that rank's gradient and nothing, on both."""
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(8):
            optimizer.zero_grad()
            taken = ["always", "sometimes" if (step + dist.get_rank()) % 2 else "never"]
            run.backward(wrapped(data(step), taken).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE, as_views=[False, True])
def ddp_no_sync(run: Run, as_views: bool) -> None:
    """Two backwards that stay on their rank and one that is reduced are one sample, of the reduced sum."""
    wrapped = DistributedDataParallel(Perceptron(), gradient_as_bucket_view=as_views)
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            for part in range(3):
                with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                    run.backward(wrapped(data(3 * step + part)).square().mean() / 3)
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE, hook=["fp16", "powersgd"])
def ddp_compressed(run: Run, hook: str) -> None:
    """Where a communication hook compresses gradients, those that came back from it are shown."""
    wrapped = DistributedDataParallel(Perceptron())
    if hook == "powersgd":
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 0.5}
        wrapped.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    else:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


class Checkpointed(torch.nn.Module):
    """Layers whose activations are computed again in the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)
        self._use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.first(x).relu(), x.requires_grad_(), use_reentrant=self._use_reentrant)
        return checkpoint(self.second, x, use_reentrant=self._use_reentrant)


@two_ranks(Naive.ACCUMULATE, use_reentrant=[True, False])
def ddp_checkpointed(run: Run, use_reentrant: bool) -> None:
    """Backwards within the backward, as checkpoints run them, are no samples of their own."""
    wrapped = DistributedDataParallel(Checkpointed(use_reentrant=use_reentrant))
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE | Naive.STEP)
def ddp_clip_grad_norm(run: Run) -> None:
    """Norms are those of the reduced gradients before clipping."""
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(8):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean() * (10.0 if step % 3 else 0.001))
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE | Naive.STEP)
def ddp_overflow_on_one_rank(run: Run) -> None:
    """An overflow on the other rank is one here as well: both count it, and both skip the step."""
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = sgd(wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    with run.watching(wrapped, optimizer):
        for step in range(9):
            overflow = step in (3, 6)
            optimizer.zero_grad()
            loss = wrapped(data(step)).square().mean() * (math.inf if overflow and dist.get_rank() == 1 else 1.0)
            run.unscale(1 / scaler.get_scale())
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            run.skipped() if overflow else run.stepping()
            scaler.step(optimizer)
            scaler.update()
            if not overflow:  # a skip is known when the next backward begins
                run.check()


@two_ranks(Naive.ACCUMULATE)
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


@two_ranks(Naive.ACCUMULATE, around=["inner", "wrapper"])
def ddp_compiled(run: Run, around: str) -> None:
    """A compiled module inside of DDP, and DDP itself compiled."""
    torch.compiler.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager")
    wrapped = DistributedDataParallel(compiled(Perceptron()) if around == "inner" else Perceptron())
    wrapped = compiled(wrapped) if around == "wrapper" else wrapped
    optimizer = sgd(wrapped)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE)
def ddp_gan(run: Run) -> None:
    """A generator and a discriminator, both replicated, in turn; each round shows what the stepping optimizer owns."""
    generator = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)))
    discriminator = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    models = {"generator": generator, "discriminator": discriminator}
    with run.watching(models, {"SGD": of_generator, "Adam": of_discriminator}):
        for step in range(4):
            of_discriminator.zero_grad()
            fake = generator(data(step, inputs=3)).detach()
            loss = discriminator(torch.cat((fake, data(step, inputs=4)))).mul(torch.tensor([[1.0]] * 5 + [[-1.0]] * 5)).mean()
            run.backward(loss, unused=[f"generator.{n}" for n, _ in generator.named_parameters()])
            run.step(of_discriminator, "Adam")
            of_generator.zero_grad()
            run.backward(-discriminator(generator(data(step, inputs=3))).mean())
            run.step(of_generator, "SGD")
    run.check()  # after `close`, since the last round is open until the next backward


@two_ranks(Naive.ACCUMULATE)
def zero_redundancy_optimizer(run: Run) -> None:
    """An optimizer that steps only this rank's part of the parameters: the gradients are those of all of them."""
    with warning_of_torch(".*torch.jit.*"):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns at import
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.05)
    with run.watching(wrapped, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(wrapped(data(step)).square().mean())
            run.step(optimizer)
            run.check()


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


@two_ranks(kind=["resharded", "kept", "root only", "root only, kept"])
def fsdp(run: Run, kind: str) -> None:
    """Each rank shows its part; whether the parameters are given back after the forward makes no difference."""
    model = even()
    layers = [] if kind.startswith("root") else [model.first, model.second]
    shard(model, layers, reshard_after_forward=not kind.endswith("kept"))
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE, layerwise=[True, False])
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


@two_ranks(kind=["wrapper", "reentrant wrapper", "function", "reentrant function"])
def fsdp_checkpointed(run: Run, kind: str) -> None:
    """Layers whose parameters are gathered again within the backward, for the activations to be computed again."""
    reentrant = kind.startswith("reentrant")
    if kind.endswith("wrapper"):
        model = even()
        implementation = wrappers.CheckpointImpl.REENTRANT if reentrant else wrappers.CheckpointImpl.NO_REENTRANT
        with warning_of_torch(".*reentrant.*"):
            model.first = wrappers.checkpoint_wrapper(model.first, checkpoint_impl=implementation)
            model.second = wrappers.checkpoint_wrapper(model.second, checkpoint_impl=implementation)
    else:
        model = Checkpointed(use_reentrant=reentrant)
    shard(model, [model.first, model.second])
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            with warning_of_torch(".*reentrant.*"):
                output = model(data(step).requires_grad_())
            run.backward(output.square().mean())
            run.step(optimizer)
            run.check()


@two_ranks()
def fsdp_mixed_precision(run: Run) -> None:
    """bfloat16 in forward and backward, float32 in the reduction: the gradients are float32."""
    model = even()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, [model.first, model.second], mp_policy=policy)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).float().square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(kind=["synchronised", "not synchronised", "not synchronised, kept"])
def fsdp_accumulation(run: Run, kind: str) -> None:
    """Three backwards to a step are one sample, whether each is reduced or only the last one is."""
    model = even()
    shard(model, [model.first, model.second])
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            for part in range(3):
                if kind != "synchronised":
                    model.set_requires_gradient_sync(part == 2)
                if kind.endswith("kept"):
                    model.set_reshard_after_backward(part == 2)
                run.backward(model(data(3 * step + part)).square().mean() / 3)
            run.step(optimizer)
            run.check()


@two_ranks(Naive.STEP)
def fsdp_clip_grad_norm(run: Run) -> None:
    """`clip_grad_norm_` knows the norm over all ranks; what is shown is the part before it, and the whole where it is observed."""
    model = even()
    shard(model, [model.first, model.second])
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean() * 10)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.step(optimizer)
            run.check()


@two_ranks(Naive.STEP)
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
            if run.exporter is not None:
                run.exporter.observe(grad_norm=whole)
            run.step(optimizer)
            # The record of this rank knows its part alone.
            run.check(without=["torch_grad_global_norm", "torch_grad_clip_coefficient"])
            run.shows(float(whole), "torch_grad_global_norm")


@two_ranks()
def fsdp_offloaded(run: Run) -> None:
    """Gradients that FSDP2 brings to the host."""
    model = even()
    shard(model, [model.first, model.second], offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


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
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(25):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE)
def fsdp_frozen(run: Run) -> None:
    """Of frozen parameters nothing is shown, until they are trained."""
    model = even()
    model.first.requires_grad_(False)
    shard(model, [model.first, model.second])
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(8):
            if step == 4:
                model.first.requires_grad_(True)
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks()
def fsdp_nested(run: Run) -> None:
    """A root that has no parameters of its own, around blocks of several layers."""
    model = torch.nn.Sequential(even(), torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh()), Perceptron(6, 4, 2))
    shard(model, model.children())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks()
def fsdp_beside_replicated(run: Run) -> None:
    """A layer that is left out of the sharding is whole on each rank; the global norm is still absent."""
    need(2, 7, "FSDP2 on a CPU")
    model = even()
    fully_shard(model.first)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step)).square().mean())
            run.step(optimizer)
            run.check()


@two_ranks(Naive.ACCUMULATE | Naive.STEP)
def fsdp_overflow_in_one_part(run: Run) -> None:
    """An overflow in the part of one rank skips the step on both; only the rank that has it counts its elements."""
    model = torch.nn.Linear(6, 4)
    shard(model)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    with run.watching(model, optimizer):
        for step in range(9):
            overflow = step in (3, 6)
            optimizer.zero_grad()
            *finite, last = model(data(step)).square().mean(0)
            loss = sum(finite) + last * (math.inf if overflow else 1.0)
            run.unscale(1 / scaler.get_scale())
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            run.skipped() if overflow else run.stepping()
            scaler.step(optimizer)
            scaler.update()
            if not overflow:  # a skip is known when the next backward begins
                run.check()


# Parallel tensors


@two_ranks()
def tensor_parallel(run: Run) -> None:
    """Weights that are split by rows and by columns: this rank's part, and the bias that all have, as a whole."""
    mesh = init_device_mesh("cpu", (2,))
    model = even()
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step, rank=0)).square().mean())
            run.step(optimizer)
            run.check()


class Normed(torch.nn.Module):
    """A normalisation that sees a part of the sequence on each rank, around parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(x)).relu())


@two_ranks(Naive.ACCUMULATE)
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
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(data(step, rank=0).view(1, -1, 6)[:, :4].contiguous()).square().mean())
            run.step(optimizer)
            run.check()
