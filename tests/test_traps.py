"""The traps of the field, one test each: the trap on bare torch or prometheus_client, and that the exporter avoids it.

Where a regime of `tests/matrix` has the trap, its float64 record says that.

The first half of a test also fails when a new torch has removed the trap.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import io
import itertools
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from tests.matrix import REGIMES
from tests.matrix.harness import Way
from tests.matrix.loops import CallsSuper
from tests.matrix.outcomes import Branches
from tests.matrix.test_matrix import unchanged, without_exporter
from tests.support import real_prometheus
from tests.support.catalogue import CATALOGUE
from tests.support.loops import train
from tests.support.models import Perceptron, batch, sgd
from tests.support.ranks import of_ranks
from tests.support.record import Recorder, gradients_of, norm, wide
from tests.support.scrape import errors, key, value, values
from tests.support.tools import REPOSITORY, eventually, find
from tests.support.torch_hooks import tensor_hooks
from tests.support.torch_versions import VERSION, CommDebugMode, enable_compiled_autograd, fully_shard, get_total_norm, need
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.metrics.families import Kind

NONFINITE = "torch_grad_nonfinite_steps_total"
ELEMENTS = "torch_grad_nonfinite_elements_total"
QUEUE_CALLBACK = torch.autograd.Variable._execution_engine.queue_callback  # private: the trap is this function
GRAPH_TASK = torch._C._current_graph_task_id  # private: the trap is seen by it


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def watching(model: torch.nn.Module, port: int | None = None, **options: object) -> Exporter:
    """Start an exporter that samples every round and by default serves nothing."""
    return start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})


def holds(regime: str) -> None:
    """Assert that all numbers of a regime of the matrix are those of its float64 record, and its training is unchanged."""
    assert unchanged(REGIMES[regime].run(Way.EVERYTHING), without_exporter(regime)) == []


class Given(torch.nn.Module):
    """A weight whose gradient is what is given to the forward, whatever the weight is."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.inner.weight * gradient).sum()


def give(model: Given, gradient: torch.Tensor) -> None:
    """Run one backward and one step that does not move the weight."""
    optimizer = sgd(model, lr=0.0)
    optimizer.zero_grad()
    model(gradient).backward()
    optimizer.step()


class FiredHooks:
    """Counts the steps that PyTorch's global optimizer hook reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, object]] = []

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self.steps.append(dict(vars(optimizer))))
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


# PyTorch


def test_full_backward_hook_wraps_outputs() -> None:
    """A full backward hook breaks an in-place ReLU beside it and fires too early; the exporter registers none."""
    broken = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 3))
    broken[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        broken(batch())
    early, seen = torch.nn.Linear(6, 8), []
    early.register_full_backward_hook(lambda module, *_: seen.append(module.weight.grad))
    with pytest.warns(UserWarning, match="no inputs require gradients") if VERSION >= (2, 9) else contextlib.nullcontext():
        early(batch()).sum().backward()
    assert seen == [None]
    holds("inplace_activations")


class Scales(torch.nn.Module):
    """Two layers whose gradients differ from rank to rank as their inputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def of_ddp(rank: int) -> dict[str, object]:
    """Return what a post-accumulate hook, a first engine callback and the exporter see under DDP."""
    torch.manual_seed(0)
    model = Scales()
    seen: dict[str, float] = {}

    def look(name: str) -> Callable[..., None]:
        return lambda *_: seen.__setitem__(name, float(model.first.weight.grad.double().norm()))

    model.first.weight.register_post_accumulate_grad_hook(look("accumulated"))
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model, lr=0.0)
    with watching(wrapped) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            out = wrapped(torch.full((1, 4), 1.0 + 3 * rank))
            out.register_hook(lambda _: QUEUE_CALLBACK(look("first callback")))
            out.sum().backward()
            look("reduced")()
            optimizer.step()
        return {**seen, "exporter": value(exporter, "torch_grad_norm", layer="first"), "errors": errors(exporter)}


def of_fsdp2(_rank: int) -> dict[str, object]:
    """Return which hooks set before and after `fully_shard` fire, and what an exporter that was started before it shows."""
    torch.manual_seed(0)
    model = Scales()
    fired = {"tensor": 0, "post-accumulate": 0}

    def count(name: str) -> Callable[..., None]:
        return lambda *_: fired.__setitem__(name, fired[name] + 1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count("post-accumulate"))
    with watching(model) as exporter:
        fully_shard(model)
        for parameter in model.parameters():
            parameter.register_hook(count("tensor"))
        optimizer = sgd(model)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        shards = {n: p.grad.to_local() for n, p in model.named_parameters()}
        return {
            **fired,
            "right": norm([wide(shards["first.weight"])]),
            "exporter": value(exporter, "torch_grad_shard_norm", layer="first"),
            "hooks on parameters": len([hook for p in model.parameters() for hook in tensor_hooks(p)]) - 2,
            "errors": errors(exporter),
        }


def of_dtensors(_rank: int) -> dict[str, object]:
    """Return the collectives of a bare norm, of a step alone, and of a step with an exporter."""

    def collectives(step: Callable[[], object]) -> int:
        with CommDebugMode() as counted:
            step()
        return counted.get_total_counts()

    model = Scales()
    fully_shard(model.first)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    alone = collectives(step)
    bare = collectives(lambda: get_total_norm([p.grad for p in model.first.parameters()]))
    mixed = ""
    try:
        get_total_norm([p.grad for p in model.parameters()])
    except RuntimeError as error:
        mixed = str(error)
    with watching(model) as exporter:
        watched = [collectives(step) for _ in range(4)]
        gradients = {n: wide(p.grad) for n, p in model.named_parameters()}
        return {
            "alone": alone,
            "watched": watched,
            "bare": bare,
            "mixed": mixed,
            "right": [norm([gradients["first.weight"]]), norm([gradients["second.weight"]])],
            "exporter": [
                value(exporter, "torch_grad_shard_norm", layer="first"),
                value(exporter, "torch_grad_norm", layer="second"),
            ],
            "errors": errors(exporter),
        }


def looked(rank: int) -> dict[str, dict[str, object]]:
    """Return the reports of one rank."""
    os.environ["TORCH_GRAD_EXPORTER_RANKS"] = "all"
    return {look.__name__: look(rank) for look in (of_ddp, of_fsdp2, of_dtensors) if look is of_ddp or VERSION >= (2, 7)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, object]]]:
    """Return the reports of two gloo ranks."""
    return of_ranks(looked)


@pytest.mark.process
def test_ddp_post_accumulate_hook_sees_local_gradient(ranks: list[dict[str, dict[str, object]]]) -> None:
    """A post-accumulate hook and a first callback read before DDP has reduced; the exporter reads after it."""
    found = [rank["of_ddp"] for rank in ranks]
    reduced = found[0]["reduced"]
    for one in found:
        assert one["reduced"] == reduced
        assert one["accumulated"] != pytest.approx(reduced, rel=0.1)
        assert one["first callback"] != pytest.approx(reduced, rel=0.1)
        assert one["exporter"] == pytest.approx(reduced, rel=1e-5)
        assert one["errors"] == {}


@pytest.mark.process
def test_fsdp2_loses_hooks(ranks: list[dict[str, dict[str, object]]]) -> None:
    """Under FSDP2 tensor hooks never fire and older post-accumulate hooks are lost; the exporter looks for the parameters again."""
    need(2, 7, "FSDP2 on a CPU")
    for found in (rank["of_fsdp2"] for rank in ranks):
        assert (found["tensor"], found["post-accumulate"]) == (0, 0)
        assert found["exporter"] == pytest.approx(found["right"], rel=1e-5)
        assert found["errors"] == {}


@pytest.mark.process
def test_fsdp2_offload_waits_for_a_hook(ranks: list[dict[str, dict[str, object]]]) -> None:
    """FSDP2 copies a gradient to the CPU with the device waiting if its parameter has such a hook; the exporter sets none."""
    need(2, 13, "a copy of FSDP2 that such a hook makes wait")
    spec = importlib.util.find_spec("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    assert spec is not None
    source = Path(spec.origin or "").read_text()
    assert "and not has_post_acc_grad_hook" in source
    assert [rank["of_fsdp2"]["hooks on parameters"] for rank in ranks] == [0, 0]


class Checkpointed(torch.nn.Module):
    """Three blocks, each under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(y).tanh(), x, use_reentrant=True)
        return x


def test_reentrant_checkpoint_nests_backwards() -> None:
    """Under a reentrant checkpoint backwards run within the backward, forwards twice; one sample holds the whole of it."""
    model = Checkpointed()
    tasks, forwards = [], []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: forwards.append(GRAPH_TASK()))
        block.weight.register_hook(lambda _: tasks.append(GRAPH_TASK()))
    model(batch()).square().mean().backward()
    assert len(set(tasks)) == 3
    assert len(forwards) == 6
    assert forwards.count(-1) == 3
    holds("checkpointed_blocks[around=_reentrant]")


def test_grad_left_from_an_earlier_step() -> None:
    """A parameter that this backward did not use still has a `.grad`; it counts as missing and not in the norm."""
    model = Branches()
    model(batch(), right=False).square().mean().backward()
    model(batch(), right=True).square().mean().backward()
    assert len(gradients_of(model)) == len([*model.parameters()])
    holds("alternating_branches")


def test_clipping_spreads_a_nan_to_every_gradient() -> None:
    """One NaN element and `clip_grad_norm_` make every gradient NaN; the one before is counted."""
    model = Perceptron()
    model.second.bias.register_hook(lambda g: torch.cat((g[:1] * math.nan, g[1:])))
    model(batch()).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    holds("nonfinite_before_clipping[value=nan]")


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_grad_scaler_skips_a_step(fused: bool) -> None:
    """On an overflow no hook of a plain optimizer fires, and that of a fused one does; both are one skipped step."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with FiredHooks() as fired:
        for step in range(3):
            before = model.first.weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(model(batch()).square().mean() * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.first.weight) == (step == 1)
    assert len(fired.steps) == (3 if fused else 2)
    # A fused optimizer divides by the scale itself: what it has been given is still scaled.
    assert ["grad_scale" in step for step in fired.steps] == [fused] * len(fired.steps)
    holds("fused_overflow[kind=SGD]" if fused else "overflow[at=in a row]")


def test_closures_run_the_backward_within_the_step() -> None:
    """LBFGS runs many backwards in one step and has no gradients before it; that is one sample, of the last backward."""
    model, inputs, before, calls = Perceptron(), batch(), [], itertools.count()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)

    def closure() -> torch.Tensor:
        next(calls)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    handle = register_optimizer_step_pre_hook(lambda *_: before.append(len(gradients_of(model))))
    optimizer.step(closure)
    handle.remove()
    assert before == [0]
    assert next(calls) > 2
    holds("lbfgs[search=None]")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["not stepped", "exception", "hang"])
def test_nan_and_then_no_step(ending: str) -> None:
    """After a NaN often no step comes, so no optimizer hook fires; it is counted at the backward, its outcome later."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = watching(model)
    with FiredHooks() as fired:
        train(model, optimizer, 2)
        optimizer.zero_grad()
        (model(batch()).square().mean() * math.nan).backward()
        if ending == "not stepped":
            train(model, optimizer)
        elif ending == "exception":
            with contextlib.suppress(FloatingPointError), exporter:
                raise FloatingPointError
        assert len(fired.steps) == (3 if ending == "not stepped" else 2)
        outcome = "skipped" if ending == "not stepped" else "unknown"
        assert eventually(lambda: value(exporter, NONFINITE, outcome=outcome) == 1)
        assert value(exporter, ELEMENTS, layer="first", kind="nan") == 6 * 8 + 8
        optimizer.step()
    exporter.close()
    assert value(exporter, ELEMENTS, layer="first", kind="nan") == 6 * 8 + 8
    assert sum(value(exporter, NONFINITE, outcome=o) or 0 for o in ("stepped", "skipped", "unknown")) == 1


@pytest.mark.parametrize("turns", [("one", "two"), ("two", "two", "two", "one")], ids="-".join)
def test_step_counter_misses_alternating_optimizers(turns: tuple[str, ...]) -> None:
    """Every n-th of all steps always hits the same of optimizers that take turns; scattered rounds sample each of them."""
    every, rounds = 4, 64
    assert len({turns[step % len(turns)] for step in range(0, rounds, every)}) == 1

    models = {"one": Perceptron(), "two": Perceptron()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    with start_exporter(models, None, every=every, optimizers=optimizers) as exporter:
        for step in range(rounds):
            name = turns[step % len(turns)]
            train(models[name], optimizers[name])
        sampled = {name: value(exporter, "torch_grad_captures_total", layer=f"{name}.first") or 0 for name in models}
        assert sum(sampled.values()) <= rounds / every + 2
        for name in models:
            steps = rounds * turns.count(name) // len(turns)
            assert value(exporter, "torch_train_steps_total", optimizer=name) == steps
            assert sampled[name] >= min(4, steps / every - 1)
            assert (value(exporter, "torch_grad_sample_step", optimizer=name) or 0) > steps - 4 - len(turns)


def test_super_step_fires_the_global_hooks_twice() -> None:
    """A subclass whose `step` calls `super().step()` fires the hooks twice; it has stepped once."""
    model = Perceptron()
    with FiredHooks() as fired:
        train(model, CallsSuper(model.parameters(), lr=0.05))
    assert len(fired.steps) == 2
    holds("step_that_calls_super")


@pytest.mark.slow
@pytest.mark.parametrize("unversioned", [False, True])
def test_duck_typed_optimizer_fires_no_hook(unversioned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A hand-made optimizer fires no hook: its steps are not counted, and a line names `exporter.step()`."""
    model = Perceptron()
    with FiredHooks() as fired, watching(model) as exporter:
        for _ in range(150):
            model(batch()).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    # Writing to `.data` does not count in the parameter's own version.
                    (parameter.data if unversioned else parameter).sub_(0.05 * parameter.grad)
                    parameter.grad = None
        assert fired.steps == []
        assert value(exporter, "torch_train_steps_total", optimizer="manual") is None
        assert value(exporter, "torch_train_skipped_steps_total") == 0
    told = [record.message for record in caplog.records if "exporter.step()" in record.message]
    assert len(told) == len(caplog.records) == 1
    holds("duck_typed_optimizer[numbered=False]")


class Heads(torch.nn.Module):
    """Seven parameters, one of which, neither the first nor the middle nor the last, has a far larger gradient.

    That of the first is far smaller than the others.
    """

    FACTORS = (1e-4, 0.01, 0.01, 0.01, 100.0, 0.01, 0.01)

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(head(x).square().mean() * factor for head, factor in zip(self.heads, self.FACTORS, strict=True))


def test_three_gradients_hide_a_clip_by_value() -> None:
    """Three fixed gradients agree on a coefficient of 1 while the big layer is cut; the coefficient shown is that of all."""
    model = Heads()
    optimizer = sgd(model, lr=1e-6)
    with watching(model) as exporter:
        for step in range(12):
            optimizer.zero_grad()
            model(batch(inputs=3)).backward()
            before = gradients_of(model)
            if step >= 2:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            after = gradients_of(model)
            optimizer.step()
            names = list(before)
            assert [norm([after[n]]) / norm([before[n]]) for n in (names[0], names[3], names[-1])] == [1, 1, 1]
            whole = norm(after.values()) / norm(before.values())
            assert (whole < 0.9) == (step >= 2)
            assert value(exporter, "torch_grad_clipped_steps_total") == max(0, step - 1)
            assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(whole, rel=1e-5)


def test_float32_norm_of_tiny_and_huge_rows() -> None:
    """The float32 norm of 1e-24 is 0 and of 2e19 infinite; the one is no zero row and the other no overflow."""
    rows = torch.tensor([[1e-24] * 4, [2e19] * 4, [0.0] * 4, [1.0] * 4])
    assert torch.linalg.vector_norm(rows, dim=1)[:2].tolist() == [0, math.inf]
    with watching(model := Given(4, 4)) as exporter:
        give(model, rows)
        assert value(exporter, "torch_grad_norm", layer="inner") == pytest.approx(norm([rows.double()]), rel=1e-6)
        assert value(exporter, "torch_grad_zero_units_ratio", layer="inner") == 1 / 4
        assert value(exporter, ELEMENTS, layer="inner", kind="inf") == 0
    with watching(model := Given(1, 4)) as exporter:
        give(model, rows[:1])
        assert value(exporter, "torch_grad_norm", layer="inner") == pytest.approx(2e-24, rel=1e-6)


@pytest.mark.slow
def test_six_sigma_on_raw_norms_is_a_false_alarm() -> None:
    """Norms vary by factors, so 6 sigma of raw ones are false alarms; on logarithms, with 5 x the median, real spikes count."""
    generator = np.random.default_rng(0)
    norms = np.exp(generator.normal(0.0, 0.9, 300)).astype(np.float32)
    raw = 0
    for i in range(20, len(norms)):
        past = norms[max(0, i - 128) : i]
        median = np.median(past)
        raw += norms[i] > median + 6 * 1.4826 * np.median(np.abs(past - median))
    assert raw >= 5
    with watching(model := Given(1, 1)) as exporter:
        for one in norms:
            give(model, torch.full((1, 1), float(one)))
        assert value(exporter, "torch_grad_norm_spikes_total", layer="inner") == 0
        give(model, torch.full((1, 1), 1e4))
        assert value(exporter, "torch_grad_norm_spikes_total", layer="inner") == 1


@pytest.mark.slow
@pytest.mark.parametrize("started", ["before", "after"])
def test_optimizer_in_backward_leaves_no_gradient(started: str) -> None:
    """An optimizer that steps and clears within the backward leaves later hooks no `.grad`; the exporter reads before it."""
    model, found = Perceptron(), []

    def step(parameter: torch.Tensor) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.05)
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
        parameter.register_post_accumulate_grad_hook(lambda p: found.append(p.grad))
    model(batch()).square().mean().backward()
    assert found == [None] * 4
    holds(f"optimizers_within_the_backward{'_from_before' if started == 'after' else ''}[recipe=step_each]")


def test_hook_on_a_frozen_parameter_raises() -> None:
    """Registering a hook on a frozen parameter raises; it is skipped, and watched when it is unfrozen."""
    weight = Perceptron().requires_grad_(False).first.weight
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            register(lambda _: None)
    holds("unfrozen_one_by_one")


def test_autograd_grad_fires_tensor_hooks() -> None:
    """`torch.autograd.grad` fires tensor hooks like a backward, and no post-accumulate ones; it does not count as a backward."""
    model = Perceptron()
    fired: list[str] = []
    model.first.weight.register_hook(lambda _: fired.append("tensor"))
    model.first.weight.register_post_accumulate_grad_hook(lambda _: fired.append("post-accumulate"))
    torch.autograd.grad(model(batch()).sum(), model.first.weight)
    assert fired == ["tensor"]
    holds("gradient_penalty")


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_gives_gradients_with_a_graph() -> None:
    """After `backward(create_graph=True)` gradients carry a graph; what is measured is detached and keeps none of it."""
    model = Perceptron(hidden=6000)  # large enough to be measured where it lies, in no copy
    optimizer = sgd(model)
    record = Recorder(model, optimizer, moments=True)
    with watching(model, moments=True, weights=True) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            graph = weakref.ref(loss)
            record.backward(loss, create_graph=True)
            assert model.first.weight.grad.grad_fn is not None
            record.step(optimizer)
            record.check(exporter)
        gradient = weakref.ref(model.first.weight.grad)
        optimizer.zero_grad()
        del loss
        assert (graph(), gradient()) == (None, None)


def test_tied_weights_counted_twice() -> None:
    """A weight that two modules share has one gradient; summed once per module it is wrong, so it counts under its first name."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    model(batch()).square().mean().backward()
    once, twice = norm(gradients_of(model).values()), norm(wide(m.weight.grad) for m in (model[0], model[2]))
    assert twice == pytest.approx(once * math.sqrt(2))
    holds("tied_layers[uses=3]")


def test_fp16_norm_overflows_to_inf_with_finite_values() -> None:
    """The norm of finite fp16 values is infinite in fp16; the exporter accumulates in float32."""
    assert torch.linalg.vector_norm((torch.randn(64, 64) * 2000).half()).item() == math.inf
    holds("norms_beyond_the_type[dtype=float16]")


def test_sparse_gradients_raise_and_mislead() -> None:
    """The usual functions raise on sparse gradients, and the norm of uncoalesced values is 3.0 for 3.873; they are coalesced."""
    model = torch.nn.Embedding(10, 1, sparse=True)
    model(torch.tensor([0, 0, 1, 1, 2, 2, 3, 4, 5])).sum().backward()
    gradient = model.weight.grad
    norms = (torch.linalg.vector_norm, lambda g: torch._foreach_norm([g])) if VERSION < (2, 15) else ()
    for function in (*norms, torch.isfinite):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(gradient)
    assert norm([gradient._values().double()]) == 3.0  # private: the public `values` needs a coalesced tensor
    assert norm([gradient.to_dense().double()]) == pytest.approx(math.sqrt(15))
    holds("sparse_embeddings[clear=True]")


@pytest.mark.process
def test_norm_of_dtensors_hides_a_collective(ranks: list[dict[str, dict[str, object]]]) -> None:
    """`get_total_norm` over DTensors communicates and raises beside plain tensors; the exporter measures the local parts alone."""
    need(2, 7, "FSDP2 on a CPU")
    for found in (rank["of_dtensors"] for rank in ranks):
        assert found["bare"] > 0 or VERSION < (2, 10)
        assert "mixed torch.Tensor and DTensor" in found["mixed"]
        assert found["watched"] == [found["alone"]] * 4
        assert found["exporter"] == pytest.approx(found["right"], rel=1e-5)
        assert found["errors"] == {}


def test_nan_drops_out_of_comparisons() -> None:
    """NaN is neither zero nor below nor above a limit; it is counted first, and in no ratio or bucket."""
    rows = torch.tensor([[math.nan, 0.0], [math.nan, math.nan], [0.0, 0.0], [1.0, 2.0]])
    assert not ((rows == 0) | (rows <= 1) | (rows > 1)).all()
    with watching(model := Given(4, 2), dead_window=3) as exporter:
        for _ in range(4):
            give(model, rows)
        assert value(exporter, ELEMENTS, layer="inner", kind="nan") == 4 * 3
        assert value(exporter, "torch_grad_zero_ratio", layer="inner") == 3 / 8
        assert value(exporter, "torch_grad_zero_units_ratio", layer="inner") == 1 / 4
        assert value(exporter, "torch_grad_dead_ratio", layer="inner") == 1 / 4
        assert value(exporter, "torch_grad_norm_distribution_count", layer="inner") == 0
        assert value(exporter, NONFINITE, outcome="stepped") == 4
        assert math.isnan(value(exporter, "torch_grad_norm", layer="inner") or 0)


def test_hook_that_holds_the_model_keeps_it() -> None:
    """A hook on a parameter that holds the model is never collected; that ours hold none is shown in `test_nothing_left.py`."""
    model = Perceptron()
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda _, model=model: model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is not None
    handle.remove()


class Locked:
    """A hook that holds a lock, as any that talks to another thread does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *_: object) -> None:
        return


def test_hook_with_a_lock_breaks_deepcopy_and_pickle() -> None:
    """A module hook that holds a lock breaks deepcopy, pickle and `torch.save`, a lambda the latter two; the exporter's none."""
    ways = (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO()))
    for hook, broken in ((Locked(), ways), (lambda *_: None, ways[1:])):
        bare = Perceptron()
        bare.register_forward_hook(hook)
        for way in broken:
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                way(bare)
    model = Perceptron()
    with watching(model):
        train(model, sgd(model), 4)
        model(batch())
        for way in ways:
            way(model)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what was compiled before, and what is compiled here."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_module_hooks_and_compile(fresh_dynamo: None) -> None:
    """A hook added after the first compiled call is ignored, one with a side effect breaks the graph; the exporter's do neither."""
    model, fired = Perceptron(), []
    compiled = torch.compile(model, backend="eager")
    compiled(batch())
    model.first.register_forward_hook(lambda *_: fired.append(1))
    compiled(batch())
    assert fired == ([] if VERSION >= (2, 6) else [1])
    torch.compiler.reset()
    model = Perceptron()
    model.register_forward_hook(lambda *_: time.monotonic())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo says itself that it cannot trace the hook
        torch.compile(model, backend="eager")(batch())
    assert sum(counters["graph_break"].values()) > 0
    for how in ("compiled, then watched", "watched, then compiled"):
        holds(f"compiled_root[how={how}]")
    holds("compiled_and_watched")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_queue_callback_raises_under_compiled_autograd(fresh_dynamo: None) -> None:
    """Under compiled autograd a hook that queues a callback raises in the backward; the exporter reads at the step."""
    model = Perceptron()
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda _: QUEUE_CALLBACK(list))
    raises = pytest.raises((AssertionError, RuntimeError), match=r"queue_callback|Final callbacks")
    with raises, enable_compiled_autograd(torch.compile(backend="eager")):
        model(batch()).square().mean().backward()
    if VERSION >= (2, 6):
        assert model.first.weight.grad is None
    handle.remove()
    torch.compiler.reset()
    holds("compiled_autograd[whole=False]")


def test_removed_post_accumulate_hook_leaves_a_wrapper() -> None:
    """A removed post-accumulate hook leaves a table on its parameter, which costs in each backward; the exporter never sets one."""

    def wrapper_of(parameter: torch.nn.Parameter) -> object:
        return parameter._post_accumulate_grad_hooks  # private: an empty table is what is left

    bare = torch.nn.Parameter(torch.ones(1))
    assert wrapper_of(bare) is None
    bare.register_post_accumulate_grad_hook(lambda _: None).remove()
    assert wrapper_of(bare) is not None

    model = Perceptron()
    with watching(model):
        train(model, sgd(model), 6)
    assert [wrapper_of(parameter) for parameter in model.parameters()] == [None] * 4


class Treacherous(torch.nn.Parameter):
    """A parameter whose `.grad` raises at each read, while `armed`."""

    armed = False

    @property  # type: ignore[override]
    def grad(self) -> torch.Tensor | None:
        if type(self).armed:
            raise OSError("injected")
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, given: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, given)  # type: ignore[attr-defined]


def test_exception_in_a_hook_kills_the_backward() -> None:
    """What a hook raises ends the user's backward; the exporter's are guarded, and an ended backward leaves nothing stuck."""

    def fail(_gradient: torch.Tensor) -> None:
        raise OSError("injected")

    model = Perceptron()
    model.first.weight = Treacherous(model.first.weight.detach())
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            if step in (1, 3):
                hook = model.first.weight.register_hook(fail)
                with pytest.raises(OSError, match="injected"):
                    loss.backward()
                hook.remove()
                continue
            record.backward(loss)
            record.step(optimizer)
            record.check(exporter)
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        Treacherous.armed = True
        loss.backward()
        Treacherous.armed = False
        optimizer.step()
        assert sum(errors(exporter).values()) >= 1
        train(model, optimizer)
        expected = norm(gradients_of(model).values())
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)


def test_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is being captured nothing may be copied or asked; such a round is no sample, the next one is."""
    model = Perceptron()
    optimizer = sgd(model)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with watching(model, collectors={"cuda_memory": False, "gpu": False}) as exporter:
        train(model, optimizer, 2)
        capturing = True
        train(model, optimizer, 3)
        assert value(exporter, "torch_grad_captures_total", layer="first") == 2
        capturing = False
        train(model, optimizer, 2)
        assert value(exporter, "torch_grad_captures_total", layer="first") == 4
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 7
        assert errors(exporter) == {}


ASSERTS = """
import torch
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

model = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = start_exporter(model, None, every=1)
try:
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device="cuda") * (float("nan") if step == 3 else 1.0)).sum()
        loss.backward()
        torch.cuda.synchronize()
        if step < 3:
            optimizer.step()
    torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")].item()
except RuntimeError as error:
    print("device-side assert" in str(error), flush=True)
try:
    model(torch.ones(2, 4, device="cuda"))
except RuntimeError:
    print("dead", flush=True)
exporter.close()
print(value(exporter, "torch_grad_nonfinite_elements_total", layer="weight", kind="nan"), flush=True)
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_assert_with_evidence_in_flight() -> None:
    """After a device assert every CUDA call raises; what had been copied is read without one, and shown."""
    done = subprocess.run([sys.executable, "-c", ASSERTS], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.stdout.splitlines() == ["True", "dead", "16.0"], done.stderr


def test_generator_fills_discriminator_gradients() -> None:
    """A generator's backward writes into the discriminator's `.grad`; a round shows what its stepping optimizer owns."""
    generator, discriminator = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    discriminator(generator(torch.randn(5, 3)).detach()).mean().backward()
    own = norm(gradients_of(discriminator).values())
    discriminator(generator(torch.randn(5, 3))).mean().neg().backward()
    assert norm(gradients_of(discriminator).values()) != pytest.approx(own, rel=0.01)
    holds("gan_with_named_optimizers[critics=1]")


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Let a forked child, like a DataLoader's worker, live within the block."""
    ready, done = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside threads
        child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield
    finally:
        os.close(done[1])
        os.waitpid(child, 0)
        for end in (*ready, done[0]):
            os.close(end)


def can_bind(port: int) -> bool:
    """Return whether the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_forked_worker_holds_the_listening_socket() -> None:
    """A forked worker inherits a listening socket and keeps the port taken; the exporter's is closed in the child at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with forked():
        listener.close()
        assert not can_bind(port)
    assert can_bind(port)

    exporter = watching(Perceptron(), 0)
    port = exporter.port
    assert port is not None
    with forked():
        assert not can_bind(port)
        exporter.close()
        assert can_bind(port)


# Prometheus


def test_observed_nan_poisons_a_histogram_for_ever() -> None:
    """A client's histogram adds a NaN to its sum for ever, like a counter; the exporter's hold finite values only."""
    registry = CollectorRegistry()
    histogram, counter = Histogram("norm", "", registry=registry), Counter("elements", "", registry=registry)
    for given in (1.0, math.nan, 1.0):
        histogram.observe(given)
        counter.inc(given)
    assert math.isnan(registry.get_sample_value("norm_sum") or 0)
    assert math.isnan(registry.get_sample_value("elements_total") or 0)

    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        sums = []
        for factor in (1.0, math.nan, math.inf, 1.0):
            optimizer.zero_grad()
            loss = model(batch()).square().mean() * factor
            loss.backward()
            exporter.observe(loss=loss)
            if math.isfinite(factor):
                sums.append(norm(gradients_of(model).values()))
                optimizer.step()
        shown = values(exporter)
        gauges = {name for name, spec in CATALOGUE.items() if spec.kind is Kind.GAUGE}
        assert [k for k, v in shown.items() if not math.isfinite(v) and k[0] not in gauges] == []
        assert shown[key("torch_grad_global_norm_distribution_count")] == 2
        assert shown[key("torch_grad_global_norm_distribution_sum")] == pytest.approx(sum(sums), rel=1e-5)
        assert shown[key("torch_train_loss_nonfinite_total")] == 2


def test_bucket_bounds_from_numpy_float32() -> None:
    """A float32 bound prints as 9.999999747378752e-06; the exporter's bounds are Python floats and print as they were written."""
    registry = CollectorRegistry()
    Histogram("norm", "", buckets=np.array([1e-5], dtype=np.float32), registry=registry)
    assert 'le="9.999999747378752e-06"' in generate_latest(registry).decode()
    bounds = [bound for spec in CATALOGUE.values() for bound in spec.buckets]
    assert {type(bound) for bound in bounds} == {float}
    assert max(len(repr(bound)) for bound in bounds) <= len("3.16e-05")


@pytest.mark.slow
def test_last_value_gauge_misses_spikes() -> None:
    """A last-value gauge that is scraped every 75 steps shows few of 20 spikes; counter, histogram and recent maximum have all."""
    spikes = {30 + 13 * i for i in range(20)}
    shown = 0
    generator = np.random.default_rng(0)
    with watching(model := Given(1, 1)) as exporter:
        for step in range(300):
            give(model, torch.full((1, 1), 500.0 if step in spikes else float(np.exp(generator.normal(0, 0.1)))))
            if step % 75 == 74:
                shown += value(exporter, "torch_grad_norm", layer="inner") == 500
        assert shown <= 2
        found = values(exporter)
        buckets = {dict(k[1])["le"]: v for k, v in found.items() if k[0] == "torch_grad_norm_distribution_bucket"}
        assert buckets["+Inf"] - buckets["100.0"] == 20
        assert found[key("torch_grad_norm_spikes_total", layer="inner")] == 20
        assert found[key("torch_grad_norm_recent_max", layer="inner")] == 500


@pytest.mark.server
def test_run_and_rank_become_exported_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that a target has too are renamed to exported_*, but not with `honor_labels: true`, which the project sets."""
    both = real_prometheus.CONFIGURATION
    job = both[both.index("  - job_name") :].replace("training", "without").replace("honor_labels: true", "honor_labels: false")
    monkeypatch.setattr(real_prometheus, "CONFIGURATION", both + job.lstrip("\n"))

    def scraped(server: real_prometheus.Prometheus) -> bool:
        with contextlib.suppress(OSError):
            return [up for _, up in server.query("up")] == ["1", "1"]
        return False

    with (
        watching(Perceptron(), 0, run="r1", rank=0) as exporter,
        real_prometheus.prometheus(tmp_path, exporter.port or 0) as server,
    ):
        assert eventually(lambda: scraped(server))
        names = {
            labels["job"]: {n for n in labels if "run" in n or "rank" in n} for labels, _ in server.query("torch_train_world_size")
        }
    assert names == {"training": {"run", "rank"}, "without": {"run", "rank", "exported_run", "exported_rank"}}


@pytest.mark.server
def test_gauge_whose_name_ends_in_sum() -> None:
    """`promtool` refuses a gauge whose name ends in `_sum`; no metric of the exporter ends like the parts of a histogram."""
    text = "# HELP torch_grad_sum A gauge.\n# TYPE torch_grad_sum gauge\ntorch_grad_sum 1\n"
    done = subprocess.run([find("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "_sum" in done.stdout + done.stderr
    assert [name for name in CATALOGUE if name.endswith(("_sum", "_count", "_bucket"))] == []


def test_empty_label_value_is_dropped() -> None:
    """An empty label is no label, so a root's own parameters would have none; their layer is the parameter's own name."""

    class Root(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Root()
    (owner,) = (name for name, module in model.named_modules() if "scale" in dict(module.named_parameters(recurse=False)))
    assert owner == ""
    with watching(model) as exporter:
        train(model, sgd(model), 2)
        expected = norm([wide(model.scale.grad)])
        assert value(exporter, "torch_grad_norm", layer="scale") == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_grad_norm") is None


def test_numbers_in_a_label_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """PromQL computes with values and not with labels; world size and budget are gauges of their own."""
    for name, given in (("WORLD_SIZE", "8"), ("RANK", "3"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, given)
    with start_exporter(Perceptron(), None, overhead_budget=0.02) as exporter:
        assert value(exporter, "torch_train_world_size") == 8
        assert value(exporter, "torch_grad_exporter_overhead_budget_ratio") == 0.02
        info = [v for k, v in values(exporter).items() if k[0] == "torch_train_info"]
        assert info == [1]


def test_second_start_registers_twice() -> None:
    """The same metric twice in a registry raises, as in a notebook cell that is run again; a second start replaces the first."""
    registry = CollectorRegistry()
    Gauge("norm", "", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Gauge("norm", "", registry=registry)
    before = {metric.name for metric in prometheus_client.REGISTRY.collect()}
    model = Perceptron()
    with watching(model, registry=registry), watching(model, registry=registry) as second:
        train(model, sgd(model), 2)
        shown = registry.get_sample_value("torch_train_steps_total", {"optimizer": "SGD", "run": second.run, "rank": "0"})
        assert shown == 2
        assert {metric.name for metric in prometheus_client.REGISTRY.collect()} == before


def test_process_global_switches() -> None:
    """`disable_created_metrics` changes every metric of the process; the exporter leaves such switches alone."""

    def created() -> bool:
        registry = CollectorRegistry()
        Counter("steps", "", registry=registry)
        return any(sample.name == "steps_created" for metric in registry.collect() for sample in metric.samples)

    def of_ours(text: str) -> set[str]:
        return {sample.name for metric in parse(text) for sample in metric.samples if sample.name.endswith("_created")}

    try:
        for switch in (prometheus_client.disable_created_metrics, prometheus_client.enable_created_metrics):
            switch()
            wanted = created()
            registry = CollectorRegistry()
            model = Perceptron()
            with watching(model, registry=registry):
                train(model, sgd(model), 2)
                assert created() == wanted
                assert of_ours(generate_latest(registry).decode()) == set()
            assert created() == wanted
    finally:
        prometheus_client.enable_created_metrics()
