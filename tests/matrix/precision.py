"""Precision: mixed precision, loss scales, and the types of parameters and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from tests.matrix.harness import AFTER, OF_THE_STEP, Run, regime
from tests.support.models import Perceptron, batch, sgd
from tests.support.torch_versions import clip_grads_with_norm_, get_total_norm

TOLD = ["given", "found"]
"""Whether the scaler is given to the exporter or found among the callers of the optimizer's step."""

SIZES = (
    "torch_grad_norm", "torch_grad_norm_squared", "torch_grad_norm_recent_max", "torch_grad_max_magnitude", "torch_grad_mean",
    "torch_grad_stddev", "torch_grad_min", "torch_grad_max", "torch_grad_global_norm", *AFTER,
)  # fmt: skip
"""What is proportional to the gradient, and so must be absent where the loss scale is not known."""

SUMS_OF_SIZES = (
    "torch_grad_norm_distribution", "torch_grad_global_norm_distribution", "torch_grad_norm_squared_accumulated_total",
)  # fmt: skip


def new_scaler(scale: float = 2.0**14, growth_interval: int = 3, **options: bool | float) -> torch.amp.GradScaler:
    """A gradient scaler for the CPU."""
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, **options)


def backward(run: Run, scaler: torch.amp.GradScaler, loss: torch.Tensor) -> None:
    """A backward of the scaled loss."""
    scaled = scaler.scale(loss)
    run.unscale(1 / scaler.get_scale())
    run.backward(scaled)


def tell_before_each_step(run: Run, optimizer: torch.optim.Optimizer, name: str = "") -> None:
    """Tells the run of steps that a scaler takes after it has unscaled the gradients itself."""
    optimizer.register_step_pre_hook(lambda *_: run.stepping(name))


class TwoParts(torch.nn.Module):
    """Two layers that share no gradient: what overflows in the one leaves the other finite."""

    def __init__(self) -> None:
        super().__init__()
        self.safe = torch.nn.Linear(6, 4)
        self.risky = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, overflow: bool = False) -> torch.Tensor:
        risky = self.risky(x * math.inf if overflow else x)
        return self.safe(x).square().mean() + risky.mean()


# Scalers


@regime(told=TOLD)
def autocast(run: Run, told: str) -> None:
    """Under autocast to bfloat16 the gradients of float32 parameters are float32; a disabled scaler is like none."""
    autocast_loop(run, new_scaler(enabled=False), told)


@regime(told=TOLD)
def autocast_and_scaler(run: Run, told: str) -> None:
    """Autocast to bfloat16 with a scaler that does scale."""
    autocast_loop(run, new_scaler(), told)


def rounds(
    run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, steps: int,
    *, told: str, reports: bool = False, **check: Iterable[str],
) -> Iterator[int]:  # fmt: skip
    """Clears before each round, and steps by the scaler and checks after it. `reports`: the body calls `run.stepping` itself."""
    if not reports:
        tell_before_each_step(run, optimizer)
    with run.watching(model, optimizer, grad_scaler=scaler if told == "given" else None):
        for step in range(steps):
            optimizer.zero_grad()
            run.skips = False
            yield step
            scaler.step(optimizer)
            scaler.update()
            if not run.skips:  # a skip is known when the next backward begins
                run.check(**check)


def autocast_loop(run: Run, scaler: torch.amp.GradScaler, told: str) -> None:
    """The loop of PyTorch's own recipe for mixed precision."""
    model = Perceptron()
    for _ in rounds(run, model, sgd(model), scaler, 5, told=told):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).float().square().mean()
        backward(run, scaler, loss)


@regime(told=TOLD)
def scale_that_grows(run: Run, told: str) -> None:
    """A scale that doubles every third step is divided out of each sample as it was at its backward."""
    model = Perceptron()
    scaler = new_scaler()
    scales: list[float] = []
    for _ in rounds(run, model, sgd(model), scaler, 8, told=told):
        if scales:
            run.shows(scales[-1], "torch_train_loss_scale")
        scales.append(scaler.get_scale())
        backward(run, scaler, model(batch()).square().mean())


@regime(told=TOLD)
def scaler_and_clipping(run: Run, told: str) -> None:
    """Clipping after `unscale_` shows its own factor and not the scale's, even one that is a power of two."""
    model = Perceptron()
    optimizer = sgd(model)
    scaler = new_scaler()
    for step in rounds(run, model, optimizer, scaler, 8, told=told, reports=True):
        backward(run, scaler, model(batch()).square().mean())
        scaler.unscale_(optimizer)
        total = get_total_norm([p.grad for p in model.parameters()])
        clip_grads_with_norm_(model.parameters(), (1.0, 0.01, float(total) / 64)[step % 3], total)
        run.stepping()


def overflowing(run: Run, told: str, at: str) -> None:
    """A loop some of whose steps overflow in one of two parts."""
    model = TwoParts()
    optimizer = sgd(model)
    scaler = new_scaler()
    tell_before_each_step(run, optimizer)
    with run.watching(model, optimizer, grad_scaler=scaler if told == "given" else None):
        for step in range(9):
            optimizer.zero_grad()
            backward(run, scaler, model(batch(), overflow=step in OVERFLOWS[at]))
            if step in OVERFLOWS[at]:
                run.skipped()
            scaler.step(optimizer)
            scaler.update()
            if step not in OVERFLOWS[at]:  # a skip is known when the next backward begins
                # A clearing before the first step may be another pass of that; a whole round that has none tells.
                run.check(without=["torch_train_skipped_steps_total"] if at == "first" and step < 5 else ())
    # After `close`, which ends the last round: it cannot tell a skipped step from one that is yet to come.
    run.check(without=["torch_train_skipped_steps_total", "torch_grad_nonfinite_steps_total"] if at == "last" else ())


OVERFLOWS = {"in a row": (3, 4, 5), "first": (0, 1, 2), "last": (8,)}


@regime(at=OVERFLOWS)
def overflow(run: Run, at: str) -> None:
    """Steps that a given scaler skips are counted, with their infinities, and the scale that backs off is divided out."""
    overflowing(run, "given", at)


@regime(at=["in a row", "last"])
def overflow_with_a_scaler_that_is_not_given(run: Run, at: str) -> None:
    """The same where the scaler was found among the callers of the first step."""
    overflowing(run, "found", at)


@regime()
def overflow_before_the_scaler_is_found(run: Run) -> None:
    """Before the first step the scale cannot be known: all sizes are absent, the infinities are counted, the rest is right."""
    model = TwoParts()
    optimizer = sgd(model)
    scaler = new_scaler()
    tell_before_each_step(run, optimizer)
    # What no scale was known of may be in no sum and no histogram, or be unscaled later.
    uncertain = [*SUMS_OF_SIZES, "torch_grad_captures_total", "torch_grad_norm_recent_max"]
    with run.watching(model, optimizer):
        for step in range(8):
            overflow = step < 3
            optimizer.zero_grad()
            # The smaller ones come first, so that the largest of late is known in any case.
            backward(run, scaler, model(batch(), overflow=overflow) * (0.1 if overflow else 1.0))
            if overflow:
                run.skipped()
            scaler.step(optimizer)
            scaler.update()
            if not overflow:
                # A clearing before the first step may be another pass of that; a whole round that has none tells.
                run.check(without=[*uncertain, *(["torch_train_skipped_steps_total"] if step < 5 else [])])
            elif step:
                run.check(
                    optional=[*SIZES, "torch_grad_zero", "torch_grad_dead", "torch_grad_missing"],
                    without=[*uncertain, "torch_train_", "torch_grad_nonfinite"],
                )


@regime(told=TOLD)
def two_optimizers_and_one_scaler(run: Run, told: str) -> None:
    """Of two optimizers under one scaler only that one is skipped whose gradients overflowed, and these are counted."""
    model = TwoParts()
    optimizers = {"safe": sgd(model.safe), "risky": torch.optim.Adam(model.risky.parameters(), lr=0.01)}
    scaler = new_scaler()
    for name, optimizer in optimizers.items():
        tell_before_each_step(run, optimizer, name)
    with run.watching(model, optimizers, optimizers=optimizers, grad_scaler=scaler if told == "given" else None):
        for step in range(9):
            overflow = step in (3, 6, 7)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            backward(run, scaler, model(batch(), overflow=overflow))
            if overflow:
                run.skipped(name="risky")
            for optimizer in optimizers.values():
                scaler.step(optimizer)
            scaler.update()
            if not overflow:  # that no other will step is known when the next backward begins
                run.check()


def clipped(
    run: Run, optimizer: torch.optim.Optimizer, model: torch.nn.Module, scaler: torch.amp.GradScaler, most: float = 0.1
) -> None:
    """A scaled backward whose gradients are unscaled and clipped."""
    backward(run, scaler, model(batch()).square().mean())
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    run.stepping()


@regime(told=[*TOLD, "found and kept"])
def a_new_scaler_every_epoch(run: Run, told: str) -> None:
    """A scaler that takes the place of the first one, as where a function that trains an epoch makes it, is found again."""
    model = Perceptron()
    optimizer = sgd(model)
    scalers = [new_scaler()]
    with run.watching(model, optimizer, grad_scaler=scalers[0] if told == "given" else None):
        for epoch in range(3):
            if epoch:
                scalers = [new_scaler(2.0 ** (14 - 2 * epoch)), *(scalers if told == "found and kept" else ())]
            for _ in range(3):
                optimizer.zero_grad()
                clipped(run, optimizer, model, scalers[0])
                scalers[0].step(optimizer)
                scalers[0].update()
                run.check()


# Fused optimizers divide by the scale themselves, and leave their update out themselves

FUSED = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
}


@regime(kind=[*FUSED, "AdamW, found"])
def fused_under_a_scaler(run: Run, kind: str) -> None:
    """A fused optimizer that divides by the scale in its step has clipped nothing, whether the scaler is given or found."""
    name, _, found = kind.partition(", ")
    model = Perceptron()
    optimizer = FUSED[name](model.parameters())
    scaler = new_scaler()
    with run.watching(model, optimizer, grad_scaler=None if found else scaler):
        for step in range(6):
            optimizer.zero_grad()
            backward(run, scaler, model(batch()).square().mean())
            run.stepping()
            scaler.step(optimizer)
            scaler.update()
            # The record looks before the step, where the gradients are still scaled.
            run.check(without=AFTER)
            run.shows(1.0, "torch_grad_clip_coefficient")
            run.shows(0.0, "torch_grad_clipped_steps_total")
            run.shows(step + 1, "torch_train_steps_total", optimizer=name)


@regime(told=TOLD)
def fused_and_clipping(run: Run, told: str) -> None:
    """A fused optimizer whose gradients were unscaled and clipped before shows the factor of the clipping."""
    model = Perceptron()
    optimizer = FUSED["AdamW"](model.parameters())
    scaler = new_scaler()
    for _ in rounds(run, model, optimizer, scaler, 6, told=told, reports=True):
        clipped(run, optimizer, model, scaler, 0.05)


@regime(kind=["SGD", "AdamW"])
def fused_overflow(run: Run, kind: str) -> None:
    """A step that a fused optimizer runs and leaves without effect is a skipped one, as with any other optimizer."""
    model = TwoParts()
    scaler = new_scaler()
    for step in rounds(run, model, FUSED[kind](model.parameters()), scaler, 8, told="given", reports=True, without=AFTER):
        overflow = step in (2, 5, 6)
        if step in (1, 4):
            run.shows(1.0, "torch_grad_clip_coefficient")
        backward(run, scaler, model(batch(), overflow=overflow))
        run.skipped() if overflow else run.stepping()


# Loss scales that are not a scaler's


@regime(scale=[8.0, 1000.0, 32.0])
def scale_by_hand(run: Run, scale: float) -> None:
    """A loss scale that is not given and is no scaler's: norms are those of the scaled loss, and it shows in the norm after."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean() * scale)
        for parameter in model.parameters():
            parameter.grad.div_(scale)


# Types of parameters


def train_clipped(run: Run, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Trains with a limit; rounding to a type hides that the norm after clipping is the same again."""
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            run.backward(model(batch().to(dtype)).float().square().mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            run.step(optimizer)
            run.check(without=AFTER)
            run.check(optional=AFTER, rel=1e-2)


@regime(dtype=[torch.bfloat16, torch.float16, torch.float64])
def parameters_of(run: Run, dtype: torch.dtype) -> None:
    """Parameters, and so gradients, of another type than float32, clipped."""
    train_clipped(run, Perceptron().to(dtype), dtype)


class MixedTypes(torch.nn.Module):
    """Layers of three types, and one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Linear(6, 8, dtype=torch.bfloat16)
        self.normed = torch.nn.LayerNorm(8)
        self.large = torch.nn.Linear(8, 5, dtype=torch.float64)
        self.both = torch.nn.Linear(5, 3, dtype=torch.float16)
        self.both.bias = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.small(x.bfloat16()).float().relu())
        x = self.large(x.double()).float()
        return torch.nn.functional.linear(x, self.both.weight.float(), self.both.bias)


@regime()
def parameters_of_several_types(run: Run) -> None:
    """Norms over layers of several types, and over one layer with two of them."""
    train_clipped(run, MixedTypes())


@regime(dtype=[torch.float16, torch.float32])
def norms_beyond_the_type(run: Run, dtype: torch.dtype) -> None:
    """Gradients whose elements fit their type and whose norm does not, and some whose squares vanish in it."""
    model = torch.nn.Linear(40, 30, bias=False, dtype=dtype)
    optimizer = sgd(model, lr=0.0)
    signs = torch.randn(1, 30).sign().to(dtype)
    largest = torch.finfo(dtype).max
    sizes = (largest / 2, torch.finfo(dtype).tiny, 1.0, largest / 2)
    for step in run.rounds(model, len(sizes), optimizer):
        model(torch.ones(1, 40, dtype=dtype)).backward(signs * sizes[step])
        run.passed()


# Master weights: the optimizer owns float32 copies of the model's parameters


class MasterWeights:
    """Copies of a model's parameters in float32, which an ordinary optimizer updates."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = list(model.parameters())
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.model]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.05)

    def take_gradients(self) -> None:
        for master, parameter in zip(self.masters, self.model, strict=True):
            master.grad = parameter.grad.float()

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model, strict=True):
                parameter.copy_(master)


def with_master_weights(run: Run, clip: float, *, told: bool) -> Iterator[None]:
    """A loop whose masters' gradients are clipped; pauses after each step."""
    model = Perceptron().bfloat16()
    masters = MasterWeights(model)
    with run.watching(model, sgd(model)):
        for _ in range(5):
            model.zero_grad()
            run.backward(model(batch().bfloat16()).float().square().mean())
            masters.take_gradients()
            torch.nn.utils.clip_grad_norm_(masters.masters, clip)
            run.stepping()
            masters.step()
            if told:
                run.stepped()
            yield


@regime(told=[True, False])
def master_weights(run: Run, told: bool) -> None:
    """The model's gradients are shown and the masters' steps are counted, with `exporter.step()` and without."""
    for _ in with_master_weights(run, math.inf, told=told):
        run.check(optional=OF_THE_STEP)


@regime(told=[True, False])
def master_weights_that_are_clipped(run: Run, told: bool) -> None:
    """The masters' clipping cannot be seen in the model's gradients: its factor is absent, and never 1."""
    for _ in with_master_weights(run, 0.01, told=told):
        run.check(without=OF_THE_STEP)
        for metric in OF_THE_STEP:
            run.shows(None, metric)


# Other switches
