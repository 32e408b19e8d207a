"""`start_exporter(clip=)` clips gradients right before each step, in every kind of loop, as float64 references say."""

from __future__ import annotations

import functools
import gc
import io
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.actions import references
from tests.support.models import Perceptron, batch
from tests.support.scrape import OFF, errors, value, values
from tests.support.torch_hooks import all_hooks, optimizer_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, LayerScale, MaxNorm, MaxValue, SkipNonFinite, ZClip

POLICIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "MaxNorm": (MaxNorm(0.1), lambda: references.MaxNorm(0.1)),
    "MaxNorm by layer": (MaxNorm(0.05, scope="layer"), lambda: references.MaxNorm(0.05, "layer")),
    "MaxNorm by unit": (MaxNorm(0.02, scope="unit"), lambda: references.MaxNormOfUnits(0.02)),
    "MaxValue": (MaxValue(0.01), lambda: references.MaxValue(0.01)),
    "LayerScale": (LayerScale({"first": 0.25, "second": 3}), lambda: references.LayerScale({"first": 0.25, "second": 3.0})),
    "AutoClip": (AutoClip(25, history_size=5), lambda: references.AutoClip(25, 5)),
    "ZClip by layer": (ZClip(0.9, 0.5, 3, scope="layer"), lambda: references.ZClip(0.9, 0.5, 3, scope="layer")),
    "AGC": (AGC(0.01), lambda: references.AGC(0.01, 1e-3)),
}

start = functools.partial(start_exporter, port=None, every=1, collectors=OFF)


def norm_of(model: torch.nn.Module) -> float:
    """Return the norm of all gradients, in float64."""
    return references.whole(references.arrays({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))


def large(step: int) -> float:
    """Return the factor of a step's loss: each fourth gradient is a spike."""
    return 10.0 if step % 4 == 3 else 1.0


@dataclass
class Loop:
    """A training that keeps its gradients before each use and after the step."""

    model: torch.nn.Module = field(default_factory=Perceptron)
    before: list[dict[str, references.Array]] = field(default_factory=list)
    weights: list[dict[str, references.Array]] = field(default_factory=list)
    after: list[dict[str, references.Array]] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    """For each step, how many looks before there were until then."""

    def backward(self, step: int, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Run a backward."""
        loss: torch.Tensor = self.model(batch() if inputs is None else inputs).square().mean() * large(step)
        loss.backward()
        return loss

    def gradients(self, scale: float = 1.0) -> dict[str, references.Array]:
        """Return the gradients divided by the scale."""
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: array / scale for name, array in references.arrays(named).items()}

    def look(self, scale: float = 1.0) -> None:
        """Keep the gradients that the optimizer is about to use, before clipping."""
        self.before.append(self.gradients(scale))
        self.weights.append(references.arrays(dict(self.model.named_parameters())))

    def stepped(self, scale: float = 1.0) -> None:
        """Keep the gradients that the optimizer has used."""
        self.after.append(self.gradients(scale))
        self.uses.append(len(self.before))

    def agrees(self, reference: Any) -> None:  # noqa: ANN401 - the references have no common base
        """Compare all steps with a reference that begins now."""
        expected = [reference.step(*pair)[0] for pair in zip(self.before, self.weights, strict=True)]
        assert len(self.after) > 8
        for step, (use, after) in enumerate(zip(self.uses, self.after, strict=True)):
            wanted = expected[use - 1]
            assert after.keys() == wanted.keys()
            for name, gradient in after.items():
                np.testing.assert_allclose(gradient, wanted[name], rtol=1e-5, atol=1e-9, err_msg=f"step {step}, {name}")
        pairs = zip(expected, self.before, strict=True)
        some = (np.allclose(used[name], raw[name], rtol=1e-4) for used, raw in pairs for name in used)
        assert not all(some)  # some are clipped


Training = Callable[[Loop], None]


def train(
    loop: Loop,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    parts: int = 1,
    scaled: bool = False,
    unscaled: bool = False,
    forward: Callable[..., torch.Tensor] | None = None,
    compiled: bool = False,
) -> None:
    """Train in a loop with `parts` backwards to a step. `unscaled`: the loop divides by the scale itself."""
    optimizer = optimizer or torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=scaled)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for number in range(12):
        optimizer.zero_grad()
        for _ in range(parts):
            loss = (loop.model if forward is None else forward)(batch()).square().mean() * (large(number) / parts)
            scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        loop.look(1.0 if unscaled else scaler.get_scale())
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            step()
        loop.stepped()


def adamw(loop: Loop, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer of the loop's model."""
    return torch.optim.AdamW(loop.model.parameters(), lr=0.01, fused=fused)


def plain(loop: Loop) -> None:
    """One backward, one step."""
    train(loop)


def scaled_and_fused(loop: Loop) -> None:
    """A gradient scaler, and an optimizer that divides in its own step, after the clipping."""
    train(loop, adamw(loop, fused=True), scaled=True)


def closure(loop: Loop, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The backward runs within the step, of some optimizers many times."""
    optimizer = optimizer or torch.optim.SGD(loop.model.parameters(), lr=0.05)
    for step in range(12):
        inputs = batch()

        def evaluate(step: int = step, inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.backward(step, inputs)
            loop.look()
            return loss

        optimizer.step(evaluate) if step % 2 else optimizer.step(closure=evaluate)
        loop.stepped()


def hooked(loop: Loop) -> None:
    """The loop's own hooks before the step change gradients, and clipping comes last."""
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05)

    def double(*_: object) -> None:
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2
        loop.look()

    for step in range(12):
        if step == 3:
            optimizer.register_step_pre_hook(double)
        optimizer.zero_grad()
        loop.backward(step)
        if step < 3:
            loop.look()
        optimizer.step()
        loop.stepped()


def lbfgs(loop: Loop) -> None:
    """The backward runs many times within the step."""
    closure(loop, torch.optim.LBFGS(loop.model.parameters(), lr=0.01, max_iter=4, line_search_fn="strong_wolfe"))


def groups(loop: Loop) -> None:
    """Parameter groups in another order than the model's."""
    second, first = [*loop.model.second.parameters()], [*loop.model.first.parameters()]
    train(loop, torch.optim.SGD([{"params": second, "lr": 0.1}, {"params": first}], lr=0.05))


LOOPS: dict[str, Training] = {
    "plain": plain,
    "accumulating": lambda loop: train(loop, adamw(loop), parts=3),
    "scaled": lambda loop: train(loop, adamw(loop), scaled=True),
    "scaled and fused": scaled_and_fused,
    "unscaled before, and fused": lambda loop: train(loop, adamw(loop, fused=True), scaled=True, unscaled=True),
    "closure": closure,
    "lbfgs": lbfgs,
    "hooked": hooked,
    "compiled": lambda loop: train(loop, forward=torch.compile(loop.model, backend="aot_eager")),
    "compiled step": lambda loop: train(loop, compiled=True),
    "groups": groups,
}
CASES = [
    *(("plain", policy) for policy in POLICIES),
    *(("scaled and fused", policy) for policy in ("MaxNorm by unit", "MaxValue", "ZClip by layer")),
    *((name, "AutoClip" if number % 2 else "AGC") for number, name in enumerate(LOOPS) if name != "plain"),
]
"""Each policy in a plain loop, each that divides by the loss scale itself, and each loop with a memory or with weights."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what compiles steps
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_each_loop(name: str, policy: str) -> None:
    """Each step uses what the policy's published formula makes of the loop's gradients, in float64."""
    torch.manual_seed(0)
    loop, (chosen, reference) = Loop(), POLICIES[policy]
    with start(loop.model, clip=chosen) as exporter:
        LOOPS[name](loop)
        assert errors(exporter) == {}
    loop.agrees(reference())


UserClip = Callable[[torch.nn.Module], Callable[[], object]]


def trained(make: UserClip | None, steps: int = 20, **options: Any) -> list[torch.Tensor]:  # noqa: ANN401 - as `start_exporter`
    """Return the parameters after some steps, clipped by the made function or by an exporter with these options."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = None if make is not None else start(model, **options)
    clip = make(model) if make is not None else lambda: None
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().sum().backward()
        clip()
        optimizer.step()
    if exporter is not None:
        assert errors(exporter) == {}
        exporter.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["MaxNorm", "ZClip by layer", "AGC"])
def test_it_equals_a_clipper_in_the_loop(policy: str) -> None:
    """`clip=` leaves the same bits as a `Clipper` that the loop calls, which has those of `clip_grad_norm_`."""
    chosen, _ = POLICIES[policy]
    ours, hands = trained(None, clip=chosen), trained(lambda model: Clipper(model, chosen))
    assert all(torch.equal(a, b) for a, b in zip(ours, hands, strict=True))


@pytest.mark.slow
def test_dry_run_changes_nothing() -> None:
    """Candidates leave every bit as it is, with and without a policy that clips."""
    tried = [MaxNorm(0.5), ZClip(), AGC(), AutoClip()]
    alone, unclipped = trained(None, dry_run=tried), trained(lambda _model: lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(alone, unclipped, strict=True))
    beside, clipped = trained(None, clip=MaxNorm(1.0), dry_run=tried), trained(None, clip=MaxNorm(1.0))
    assert all(torch.equal(a, b) for a, b in zip(beside, clipped, strict=True))


# Several optimizers


def test_each_optimizer_by_itself() -> None:
    """Two optimizers that share a backward are clipped separately, each with its own memory."""
    torch.manual_seed(0)
    model = Perceptron()
    first, second = torch.optim.SGD(model.first.parameters(), lr=0.05), torch.optim.Adam(model.second.parameters(), lr=0.01)
    own = {"first": references.AutoClip(25, 5), "second": references.AutoClip(25, 5)}
    with start(model, clip=AutoClip(25, history_size=5), optimizers={"head": second}) as exporter:
        for step in range(12):
            model.zero_grad()
            (model(batch()).square().mean() * large(step)).backward()
            before = references.arrays({name: p.grad for name, p in model.named_parameters()})
            first.step()
            second.step()
            for layer, reference in own.items():
                expected, _ = reference.step({n: g for n, g in before.items() if n.startswith(layer)}, {})
                for name, gradient in expected.items():
                    seen = model.get_parameter(name).grad
                    np.testing.assert_allclose(seen.double().numpy(), gradient, rtol=1e-5)
        assert {*exporter.state_dict()["clip"]} == {"SGD", "head"}
        assert errors(exporter) == {}


def test_other_models_are_not_clipped() -> None:
    """Optimizers of other models and parameters outside the model are not clipped."""
    torch.manual_seed(0)
    model, other, extra = Perceptron(), Perceptron(), torch.nn.Parameter(torch.ones(3))
    mine = torch.optim.SGD([*model.parameters(), extra], lr=0.05)
    theirs = torch.optim.SGD(other.parameters(), lr=0.05)
    with start(model, clip=MaxNorm(1e-3)) as exporter:
        for _ in range(3):
            model(batch()).square().mean().backward()
            other(batch()).square().mean().backward()
            (extra * 5).sum().backward()
            untouched = [p.grad.clone() for p in other.parameters()]
            mine.step()
            theirs.step()
            assert norm_of(model) == pytest.approx(1e-3, rel=1e-2)
            assert all(torch.equal(p.grad, before) for p, before in zip(other.parameters(), untouched, strict=True))
            assert extra.grad.tolist() == [5.0] * 3
            mine.zero_grad()
            theirs.zero_grad()
        assert errors(exporter) == {}


def test_a_model_that_changes_is_followed() -> None:
    """A replaced parameter and an added one are clipped from the next step on, even if they are not shown."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    with start(model, clip=MaxNorm(1e-3), include="first") as exporter:
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": [*model.second.parameters()]})
            if step == 2:
                model.second = torch.nn.Linear(8, 3)
                optimizer.param_groups[1]["params"] = [*model.second.parameters()]
            model.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
            owned = ("first",) if step == 0 else ("first", "second")
            named = {n: p.grad for n, p in model.named_parameters() if n.startswith(owned)}
            assert references.whole(references.arrays(named)) == pytest.approx(1e-3, rel=1e-2)
        assert errors(exporter) == {}


# What is shown


@pytest.mark.slow
@pytest.mark.parametrize("loop", [plain, scaled_and_fused, hooked], ids=lambda loop: loop.__name__)
def test_norms_before_and_after(loop: Training) -> None:
    """Norms before and after, coefficients and counts of each sampled step, also by layer, are those of the loop."""
    torch.manual_seed(0)
    seen = Loop()
    with start(seen.model, clip=ZClip(0.9, 0.5, 3)) as exporter:
        clipped, check = {"": 0, "first": 0, "second": 0}, seen.stepped

        def shown(name: str, **labels: str) -> Any:  # noqa: ANN401 - for approx
            return value(exporter, f"torch_grad_{name}", **labels)

        def checked(scale: float = 1.0) -> None:
            check(scale)
            for layer in ("", "first", "second"):
                raw, used = (
                    references.whole({n: g for n, g in gradients[-1].items() if n.startswith(layer)})
                    for gradients in (seen.before, seen.after)
                )
                clipped[layer] += used < raw * (1 - 1e-6)
                if layer:
                    assert shown("layer_clip_coefficient", layer=layer) == pytest.approx(used / raw, rel=1e-5)
                    assert shown("layer_clipped_steps_total", layer=layer) == clipped[layer]
                    continue
                assert shown("global_norm_after_clip") == pytest.approx(used, rel=1e-5)
                assert shown("clipped_steps_total") == clipped[layer]
                if loop is not hooked:  # where the loop doubles them, before is as the backward left them
                    assert shown("global_norm") == pytest.approx(raw, rel=1e-5)
                    assert shown("clip_coefficient") == pytest.approx(used / raw, rel=1e-5)

        seen.stepped = checked  # type: ignore[method-assign]
        loop(seen)
        assert errors(exporter) == {}
        assert clipped[""] > 2


def test_thresholds_and_candidates() -> None:
    """Each policy's threshold and the number of steps that each candidate would have clipped are those of the references."""
    torch.manual_seed(0)
    loop, tried = Loop(), [MaxNorm(0.1), ZClip(0.9, 0.5, 3), AGC(0.01), MaxValue(0.01)]
    exporter = start(loop.model, clip=AutoClip(25, history_size=5), dry_run=tried)
    plain(loop)
    exporter.close()
    zclip_name = "ZClip(alpha=0.9, z_thresh=0.5, warmup_steps=3)"
    auto, zclip, agc = references.AutoClip(25, 5), references.ZClip(0.9, 0.5, 3), references.AGC(0.01, 1e-3)
    active = [(auto.step(before, {}), before) for before in loop.before]
    last = active[-1][0][1][0]
    of_zclip = [(zclip.step(before, {}), before) for before in loop.before]
    of_layers = {layer: {n: g for n, g in loop.before[-1].items() if n.startswith(layer)} for layer in ("first", "second")}
    shown = {(name, *dict(labels).values()): number for (name, labels), number in values(exporter).items()}
    assert {key[1:]: number for key, number in shown.items() if key[0] == "torch_grad_clip_threshold"} == pytest.approx(
        {
            ("AutoClip(percentile=25, history_size=5)",): last,
            ("MaxNorm(0.1)",): 0.1,
            (zclip_name,): of_zclip[-1][0][1][0],
            **{(layer, "AGC()"): min(agc.step(own, loop.weights[-1])[1]) for layer, own in of_layers.items()},
            ("MaxValue(0.01)",): 0.01,
        },
        rel=1e-5,
    )
    (clipped_steps,) = (number for key, number in shown.items() if key[0] == "torch_grad_clip_policy_steps_total")
    assert clipped_steps == sum(references.whole(clipped) < references.whole(before) for (clipped, _), before in active)
    counts = {key[-1]: number for key, number in shown.items() if key[0] == "torch_grad_clip_candidates_total"}
    assert counts.pop("AGC()") > 0
    assert counts == {
        "MaxNorm(0.1)": sum(references.whole(before) > 0.1 for before in loop.before),
        "MaxValue(0.01)": sum(any(np.abs(g).max() > 0.01 for g in before.values()) for before in loop.before),
        zclip_name: sum(references.whole(clipped) < references.whole(before) for (clipped, _), before in of_zclip),
    }


# Failures


class Failing(MaxNorm):
    """A policy that fails."""

    def decide(self, measured: Any, memory: Any, /) -> Any:  # noqa: ANN401 - as its base
        raise RuntimeError("on purpose")


def test_ten_failures_leave_training_unclipped(caplog: pytest.LogCaptureFixture) -> None:
    """Ten failures in a row end the clipping, and the training is the same as without it."""

    def run(**options: Any) -> tuple[list[torch.Tensor], dict[str, float]]:  # noqa: ANN401 - as `start_exporter`
        torch.manual_seed(0)
        loop = Loop()
        with start(loop.model, **options) as exporter:
            plain(loop)
            failed = errors(exporter)
        return [p.detach() for p in loop.model.parameters()], failed

    clipped, failed = run(clip=Failing(1e-3))
    plainly, _ = run()
    assert all(torch.equal(a, b) for a, b in zip(clipped, plainly, strict=True))
    assert failed == {"clip": 10}
    assert "clip (gradients are no longer clipped) failed 10 times in a row and is switched off" in caplog.text


@pytest.mark.parametrize("loop", [plain, closure], ids=lambda loop: loop.__name__)
def test_on_failure_raise(loop: Training) -> None:
    """With `on_failure='raise'` the step raises before it changes a weight."""
    torch.manual_seed(0)
    scene = Loop()
    weights = [p.detach().clone() for p in scene.model.parameters()]
    with start(scene.model, clip=Failing(1.0), on_failure="raise") as exporter:
        with pytest.raises(RuntimeError, match="the gradients of this step cannot be clipped: on purpose"):
            loop(scene)
        assert errors(exporter) == {}  # the exception says it
    assert all(torch.equal(a, b) for a, b in zip(weights, scene.model.parameters(), strict=True))


def test_steps_within_the_backward_are_refused() -> None:
    """Steps within the backward count as failures, since the norm is not known, and the training goes on."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = [p.detach().clone() for p in model.parameters()]
    with start(model, clip=MaxNorm(1e-3)) as exporter:
        model(batch()).square().mean().backward()
        assert errors(exporter) == {"clip": 4}
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "clips"),
    [
        ({"clip": MaxNorm(1e-3)}, True),
        ({"clip": MaxNorm(1e-3), "dry_run": [AGC()]}, False),
        ({"clip": [SkipNonFinite(), MaxNorm(1e-3)]}, False),
    ],
)
def test_a_memory_in_a_captured_step_is_refused(options: dict[str, Any], clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured, only a policy without a memory clips; others count as failures, and so does reading."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with start(model, **options) as exporter:
        model(batch()).square().mean().backward()
        optimizer.step()
        assert (norm_of(model) < 1.1e-3) is clips
        assert errors(exporter) == ({} if clips else {"clip": 1})


# What is remembered


@pytest.mark.slow
def test_save_and_go_on() -> None:
    """A run that goes on from a file, read by the loader that runs no code, has the bits of a run without the break."""

    def run(breaks: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, chosen = Perceptron(), POLICIES["ZClip by layer"][0]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        exporter = start(model, clip=chosen, dry_run=[MaxNorm(0.1)])
        for step in range(20):
            if breaks and step == 10:
                file = io.BytesIO()
                torch.save(exporter.state_dict(), file)
                file.seek(0)
                exporter.close()
                exporter = start(model, clip=chosen, dry_run=[MaxNorm(0.1)])
                exporter.load_state_dict(torch.load(file, weights_only=True))
            optimizer.zero_grad()
            (model(batch()).square().mean() * large(step)).backward()
            optimizer.step()
        memory = exporter.state_dict()["clip"]["Adam"]
        assert errors(exporter) == {}
        exporter.close()
        return [*model.parameters(), *memory["memory"].values(), memory["candidates"][0]["clipped_steps"]]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


# The end


def test_close_ends_it() -> None:
    """After the end gradients are left alone, the optimizer has no hook, and before it nothing keeps the model alive."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for ended in (True, False):
        exporter = start(model, clip=MaxNorm(1e-3), dry_run=[ZClip()])
        for closed in (False, True)[: 1 + ended]:
            model.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
            assert (norm_of(model) > 1e-2) is closed
            if ended:
                exporter.close()
                assert optimizer_hooks(optimizer) == []
    references_to = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references_to] == [None, None]
    exporter.close()


# Wrong arguments


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"clip": 1.0}, TypeError, "clip=1.0: expected a policy, such as MaxNorm"),
        ({"dry_run": MaxNorm(1.0)}, TypeError, r"dry_run=MaxNorm.*expected a list of policies"),
        ({"dry_run": [MaxNorm(1.0), ZClip(), MaxNorm(1.0)]}, ValueError, r"duplicate policy MaxNorm\(1.0\)"),
        ({"clip": MaxNorm(1.0), "on_failure": "stop"}, ValueError, "on_failure='stop': expected 'continue' or 'raise'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Wrong arguments raise before anything is registered."""
    model = Perceptron()
    before = all_hooks(model)
    with pytest.raises(kind, match=message):
        start(model, **options)
    assert all_hooks(model) == before
