"""Training loops made by chance, and the float64 record that each keeps of what its numbers should be.

The record knows what autograd accumulated from hooks of its own. It shares no code with the exporter.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import nn

from tests.support.scrape import OFF, Key, errors, key, lost, values
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.statistics.eager import EagerStatistics

CLOSE = 1e-5

Edit = Callable[[list[nn.Parameter], random.Random], None]
Layers = dict[str, float]


# What a loop may do to gradients


def clip(parameters: list[nn.Parameter], chance: random.Random) -> None:
    """By the global norm."""
    nn.utils.clip_grad_norm_(parameters, chance.choice([0.05, 0.3]))


def clip_by_value(parameters: list[nn.Parameter], _chance: random.Random) -> None:
    """Each element."""
    nn.utils.clip_grad_value_(parameters, 0.02)


def with_gradients(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those that have one."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def divide(parameters: list[nn.Parameter], chance: random.Random) -> None:
    """By the number of tokens."""
    tokens = chance.randint(2, 600)
    for parameter in with_gradients(parameters):
        parameter.grad /= tokens


def add_noise(parameters: list[nn.Parameter], _chance: random.Random) -> None:
    """As differential privacy does."""
    for parameter in with_gradients(parameters):
        parameter.grad += 0.01 * torch.randn_like(parameter.grad)


def project(parameters: list[nn.Parameter], _chance: random.Random) -> None:
    """Centres the gradients of matrices."""
    for parameter in with_gradients(parameters):
        if parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)


def replace(parameters: list[nn.Parameter], _chance: random.Random) -> None:
    """Puts other tensors in the places of the gradients."""
    for parameter in with_gradients(parameters):
        parameter.grad = 0.7 * parameter.grad


EDITS: tuple[Edit, ...] = (clip, clip_by_value, divide, add_noise, project, replace)


# What is trained


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(5, 6), nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 2)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.middle(torch.relu(self.trunk(x))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


@dataclass(frozen=True)
class Style:
    """How one loop goes.

    Attributes:
        counts: Micro-batches of the rounds, in turn.
        auxiliary_from: When backwards over a part begin.
        cleared: Share of the rounds that begin with backwards whose gradients are cleared.
        acts: Whether another thread runs forwards, also in the middle of steps.
        by_hand: Whether the loop writes gradients itself, so that they are read at the step.
        fails: Share of the exporter's readings that fail.
    """

    kind: str
    every: int
    set_to_none: bool
    clear_after: bool
    counts: tuple[int, ...]
    edits: tuple[Edit, ...]
    edits_between: bool
    skips: float
    freezes: float
    evaluates: bool
    auxiliary_from: int
    auxiliary_first: bool
    twice: bool
    toggles: bool
    rounds: int
    cleared: float
    acts: bool
    by_hand: bool
    fails: float

    @classmethod
    def drawn(cls, chance: random.Random) -> Style:
        counts = chance.choice([(1,), (1,), (2,), (4, 4, 4, 1), (1, 2, 3), (3, 3, 2), (1, 1, 1, 4)])
        by_hand = chance.random() < 0.15
        return cls(
            kind=chance.choice(["one", "one", "two", "in turn", "in turn"]),
            every=chance.choice([1, 1, 1, 2, 3]),
            set_to_none=chance.random() < 0.6,
            clear_after=chance.random() < 0.5,
            counts=counts,
            edits=tuple(chance.sample(EDITS, chance.choice([0, 0, 1, 1, 2, 3]))),
            edits_between=chance.random() < 0.2,
            skips=chance.choice([0.0, 0.0, 0.1, 0.3]),
            freezes=0.0 if by_hand else chance.choice([0.0, 0.0, 0.15]),
            evaluates=chance.random() < 0.3,
            auxiliary_from=chance.choice([10**9, 10**9, 0, 5, 12]),
            auxiliary_first=chance.random() < 0.4,
            twice=chance.random() < 0.15,
            toggles=chance.random() < 0.5,
            rounds=chance.choice([16, 20, 28]),
            cleared=chance.choice([0.0, 0.0, 0.0, 0.3, 1.0]),
            acts=chance.random() < 0.3,
            by_hand=by_hand,
            fails=chance.choice([0.0, 0.0, 0.0, 0.1]),
        )


# The record


@dataclass
class Truth:
    """What one round should be shown as, for one optimizer: norms by layer, their whole, and the norms that the step saw.

    `due`: False for a backward whose gradients were cleared, which may look like a skipped step.
    """

    steps: int
    layers: Layers
    whole: float
    seen: Layers
    due: bool = True

    def agrees(self, shown: Layers, hidden: set[str], zeros: set[str]) -> bool:
        """Return whether these are the norms; those of layers that are frozen now, `hidden`, may be absent.

        Those in `zeros` may be 0: of them nothing is left since the last step but gradients that were cleared to zeros.
        """
        if not shown.keys() <= self.layers.keys() | zeros or not self.layers.keys() <= shown.keys() | hidden:
            return False
        return all(close(norm, self.layers.get(name, 0.0)) for name, norm in shown.items())

    def after(self, shown: Layers) -> float | None:
        """Return the norm that the step saw of the layers of the round and of those that are shown; None without a step."""
        return math.hypot(*(norm for name, norm in self.seen.items() if name in self.layers.keys() | shown)) if self.seen else None


def close(shown: float, true: float) -> bool:
    """Return whether a number is right."""
    return math.isclose(shown, true, rel_tol=CLOSE, abs_tol=1e-12)


def norm_of(tensors: list[torch.Tensor]) -> float:
    """In float64."""
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


@dataclass
class Record:
    """Keeps what autograd has accumulated, by hooks on the parameters, and what the steps make of it."""

    names: dict[nn.Parameter, str]
    owned: dict[str, list[nn.Parameter]]
    fired: set[nn.Parameter] = field(default_factory=set)
    left: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """The gradients that the last backward has left, of what got one in this round."""
    over: bool = False
    truths: dict[str, list[Truth]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = dict.fromkeys(self.owned, 0)
        self.truths = {name: [] for name in self.owned}
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.fired.add)

    def backward(self, run: Callable[[], None]) -> None:
        """A backward; one after a step begins a round."""
        if self.over:
            self.left, self.over = {}, False
        self.fired.clear()
        run()
        for parameter in {*self.left, *self.fired}:
            if parameter.grad is not None:
                self.left[parameter] = parameter.grad.detach().clone()

    def cleared(self, optimizers: Iterable[str]) -> None:
        """The gradients of these optimizers are cleared without a step."""
        for parameter in [p for name in optimizers for p in self.owned[name]]:
            self.left.pop(parameter, None)

    def end(self, optimizer: str, *, stepped: bool, due: bool = True, at_step: bool = False) -> None:
        """An optimizer is about to step, or would have been. `at_step`: the gradients are read only now."""
        mine = [parameter for parameter in self.owned[optimizer] if parameter in self.left]
        if at_step:
            self.left |= {p: p.grad.clone() for p in mine if p.grad is not None}
        layers: dict[str, list[torch.Tensor]] = {}
        for parameter in mine:
            layers.setdefault(self.names[parameter], []).append(self.left[parameter])
        seen: dict[str, list[torch.Tensor]] = {}
        for parameter in self.owned[optimizer] if stepped else ():
            if parameter.grad is not None:
                seen.setdefault(self.names[parameter], []).append(parameter.grad)
        self.steps[optimizer] += stepped
        if mine:
            norms, saw = ({name: norm_of(gradients) for name, gradients in some.items()} for some in (layers, seen))
            whole = norm_of([self.left[p] for p in mine])
            self.truths[optimizer].append(Truth(self.steps[optimizer], norms, whole, saw, due))
        self.over |= stepped


# The loop


class Loop:
    """One training by chance. `run` yields whenever a scrape is to be compared."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.style = Style.drawn(self.chance)
        torch.manual_seed(seed)
        if self.style.kind == "in turn":
            networks = {"g": nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5)), "d": Heads()}
            self.models: dict[str, nn.Module] = dict(networks)
            owned = {name: [*network.parameters()] for name, network in networks.items()}
        else:
            self.models = {"": Heads()}
            model = self.models[""]
            owned = {"": [*model.parameters()]}
            if self.style.kind == "two":
                right = [*model.right.parameters()]
                owned = {"body": [p for p in model.parameters() if all(p is not q for q in right)], "right": right}
        self.optimizers = {
            name: torch.optim.SGD(parameters, lr=0.02) if index else torch.optim.AdamW(parameters, lr=0.01)
            for index, (name, parameters) in enumerate(owned.items())
        }
        named = {
            parameter: ".".join(part for part in (prefix, name.rpartition(".")[0]) if part)
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
        }
        self.record = Record(named, owned)
        for optimizer in self.optimizers.values() if self.style.acts else ():
            optimizer.register_step_pre_hook(lambda *_: self._act())

    @property
    def target(self) -> nn.Module | dict[str, nn.Module]:
        """What an exporter is started with."""
        return self.models.get("", self.models)

    def state(self) -> list[torch.Tensor]:
        """What the models hold."""
        return [*itertools.chain.from_iterable(model.state_dict().values() for model in self.models.values())]

    def run(self) -> Iterator[None]:
        for number in range(self.style.rounds):
            if self.style.kind == "in turn":
                yield from self._half("d", number)
                yield from self._half("g", number)
            else:
                yield from self._round(number, [*self.optimizers])

    def _half(self, name: str, number: int) -> Iterator[None]:
        """A round of one network in turn with another."""
        other = self.models["d" if name == "g" else "g"]
        other.requires_grad_(not self.style.toggles)
        yield from self._round(number, [name])
        other.requires_grad_(True)

    def _round(self, number: int, optimizers: list[str]) -> Iterator[None]:
        style, chance = self.style, self.chance
        self._freeze()
        if not style.clear_after:
            self._clear(optimizers)
        while chance.random() < style.cleared * 0.6:
            self._throw_away(number, optimizers)
        for count in range(style.counts[number % len(style.counts)]):
            if count and style.edits_between and chance.random() < 0.5:
                self._edit(optimizers)
            self._backwards(number, optimizers[0])
        if style.edits and chance.random() < 0.8:
            self._edit(optimizers)
        self._act()
        self._end(optimizers, skipped=chance.random() < style.skips)
        if style.evaluates and chance.random() < 0.3:
            with torch.no_grad():
                for model in self.models.values():
                    model(torch.randn(2, 5 if isinstance(model, Heads) else 3))
        yield

    def _throw_away(self, number: int, optimizers: list[str]) -> None:
        """Backwards whose gradients are cleared before those of the round."""
        self._backwards(number, optimizers[0])
        for name in self.optimizers:
            self.record.end(name, stepped=False, due=False)
        self._clear(optimizers)
        self.record.cleared(optimizers)

    def _act(self) -> None:
        """Another thread may run a forward, with a graph or without."""
        if self.style.acts and self.chance.random() < 0.3:
            model = self.chance.choice([*self.models.values()])
            x = torch.randn(2, 5 if isinstance(model, Heads) else 3)
            forward = self.chance.choice([model, torch.no_grad()(model)])
            actor = threading.Thread(target=forward, args=(x,))
            actor.start()
            actor.join()

    def _backwards(self, number: int, optimizer: str) -> None:
        """Those of one micro-batch."""
        joins = number >= self.style.auxiliary_from
        if joins and self.style.auxiliary_first:
            self._backward(self._auxiliary(optimizer))
        self._main(optimizer)
        if joins and not self.style.auxiliary_first:
            self._backward(self._auxiliary(optimizer))

    def _end(self, optimizers: list[str], *, skipped: bool) -> None:
        """The steps, or none."""
        for name in optimizers:
            self.record.end(name, stepped=not skipped, due=not (skipped and self.style.by_hand), at_step=self.style.by_hand)
            if not skipped:
                self.optimizers[name].step()
        if skipped or self.style.clear_after:
            self._clear([*self.optimizers])
        if skipped:
            self.record.cleared(self.optimizers)

    def _main(self, optimizer: str) -> None:
        loss = self._loss(optimizer)
        if self.style.twice:
            self._backward(loss, retain_graph=True)
        self._backward(loss)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        if self.style.by_hand:
            self.record.backward(lambda: self._write(loss, retain_graph=retain_graph))
        else:
            self.record.backward(lambda: loss.backward(retain_graph=retain_graph))

    def _write(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Adds to gradients what a backward would."""
        parameters = [parameter for parameter in self.record.names if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                self.record.fired.add(parameter)

    def _loss(self, optimizer: str) -> torch.Tensor:
        if self.style.kind != "in turn":
            left, right = self.models[""](torch.randn(4, 5))
            return left.square().mean() + right.abs().mean()
        fake = self.models["g"](torch.randn(4, 3))
        if optimizer == "g":
            left, right = self.models["d"](fake)
            return (left.mean() - right.mean()).square()
        left, right = self.models["d"](fake.detach())
        real, _ = self.models["d"](torch.randn(4, 5))
        return (left.square().mean() + right.abs().mean() - real.mean()).exp()

    def _auxiliary(self, optimizer: str) -> torch.Tensor:
        """A loss of a part of the model, which is called by itself."""
        if self.style.kind == "in turn" and optimizer == "g":
            return self.models["g"][0](torch.randn(4, 3)).square().mean()
        model = self.models.get("d", self.models.get(""))
        return model.right(model.body(torch.randn(4, 5))).square().mean()

    def _edit(self, optimizers: list[str]) -> None:
        for edit in self.style.edits:
            for name in optimizers:
                edit(self.record.owned[name], self.chance)

    def _clear(self, optimizers: list[str]) -> None:
        for name in optimizers if self.style.kind == "in turn" else self.optimizers:
            self.optimizers[name].zero_grad(set_to_none=self.style.set_to_none)

    def _freeze(self) -> None:
        """Now and then a layer is frozen, or all are thawed."""
        if self.style.kind != "in turn" and self.chance.random() < self.style.freezes:
            model = self.models[""]
            frozen = self.chance.choice([None, model.middle, model.trunk])
            for module in (model.middle, model.trunk):
                module.requires_grad_(module is not frozen)


# The comparison


@dataclass
class Verdict:
    """`wrong`: numbers that are not those of any round that could be shown. `state`: what the models hold in the end."""

    wrong: list[str] = field(default_factory=list)
    shown: int = 0
    due: int = 0
    state: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Comparison:
    """Compares each scrape with the record: what is shown is right, in each gauge, and in what is added up."""

    loop: Loop
    exporter: Exporter
    verdict: Verdict = field(default_factory=Verdict)
    before: dict[Key, float] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    """By optimizer, the number of rounds up to the one that is shown."""

    def look(self) -> None:
        found = values(self.exporter)
        record = self.loop.record
        several = len(record.owned) > 1
        for name in record.owned:
            label = name if several else ""
            count = found.get(key("torch_grad_global_norm_distribution_count", optimizer=label), 0.0)
            before = self.before.get(key("torch_grad_global_norm_distribution_count", optimizer=label), 0.0)
            if key("torch_grad_global_norm", optimizer=label) in found:
                self._judge(name, label, found, new=int(count - before))
            elif count != before:
                self._say(f"{label}: counted and not shown")
        self._steps(found)
        self.before = found

    def _judge(self, name: str, label: str, found: dict[Key, float], *, new: int) -> None:
        step = found.get(key("torch_grad_sample_step", optimizer=label))
        layers = {
            layer: norm
            for layer in {self.loop.record.names[p] for p in self.loop.record.owned[name]}
            if (norm := found.get(key("torch_grad_norm", layer=layer))) is not None
        }
        whole = found[key("torch_grad_global_norm", optimizer=label)]
        hidden = {self.loop.record.names[p] for p in self.loop.record.owned[name] if not p.requires_grad or self.loop.style.toggles}
        frozen = [p for p in self.loop.record.owned[name] if not p.requires_grad and p.grad is not None and not p.grad.any()]
        zeros = {self.loop.record.names[p] for p in frozen}
        candidates = [one for one in self.loop.record.truths[name] if one.steps == step and one.agrees(layers, hidden, zeros)]
        truth = next((one for one in candidates if close(whole, one.whole)), None)
        if truth is None:
            near = [one for one in self.loop.record.truths[name] if one.steps == step]
            self._say(f"{label} step {step}: shown {whole} {layers}, recorded {near}")
            return
        if new == 1:  # where a skipped step was known of late there are two
            self._added(label, found, truth)
        last = self.last.get(name, 0)
        self.last[name] = self.loop.record.truths[name].index(truth) + 1
        self.verdict.shown += min(new, sum(one.due for one in self.loop.record.truths[name][last : self.last[name]]))
        self._clipping(label, found, truth.whole, truth.after(layers))

    def _added(self, label: str, found: dict[Key, float], truth: Truth) -> None:
        """What the new sample has added to histogram, squares and captures."""
        for one, expected in [
            (key("torch_grad_global_norm_distribution_sum", optimizer=label), truth.whole),
            *((key("torch_grad_norm_squared_accumulated_total", layer=n), norm**2) for n, norm in truth.layers.items()),
            *((key("torch_grad_norm_distribution_sum", layer=n), norm) for n, norm in truth.layers.items()),
            *((key("torch_grad_captures_total", layer=n), 1.0) for n in truth.layers),
        ]:
            if one not in found and one[0].startswith("torch_grad_global"):
                continue
            added = found[one] - self.before.get(one, 0.0)
            if not math.isclose(added, expected, rel_tol=1e-4, abs_tol=1e-7 * max(1.0, found[one])):
                self._say(f"{one}: {added} were added, recorded {expected}")

    def _clipping(self, label: str, found: dict[Key, float], whole: float, true: float | None) -> None:
        after = found.get(key("torch_grad_global_norm_after_clip", optimizer=label))
        if after is not None and (true is None or not math.isclose(after, true, rel_tol=2e-3, abs_tol=1e-9)):
            self._say(f"{label}: norm after clipping {after}, recorded {true}")
        coefficient = found.get(key("torch_grad_clip_coefficient", optimizer=label))
        if coefficient is not None and not math.isclose(coefficient, (true or 0.0) / whole, rel_tol=2e-3):
            self._say(f"{label}: coefficient {coefficient}, recorded {true} / {whole}")
        clipped = found.get(key("torch_grad_clipped_steps_total", optimizer=label))
        if clipped and not {clip, clip_by_value, project, replace, add_noise} & {*self.loop.style.edits}:
            self._say(f"{label}: {clipped} clipped steps in a loop that does not clip")

    def _steps(self, found: dict[Key, float]) -> None:
        steps = {dict(labels)["optimizer"]: value for (name, labels), value in found.items() if name == "torch_train_steps_total"}
        recorded = self.loop.record.steps
        if sum(steps.values()) != sum(recorded.values()):
            self._say(f"steps {steps}, recorded {recorded}")
        for (name, labels), value in self.before.items():
            grows = name.endswith(("_total", "_count", "_sum")) and (name, labels)
            absent = value if name == "torch_grad_clipped_steps_total" else -1.0  # while it is unknown
            if grows and found.get(grows, absent) < value - 1e-12:
                self._say(f"{name}{labels}: fell from {value} to {found.get(grows)}")

    def _say(self, what: str) -> None:
        self.verdict.wrong.append(what)


@contextlib.contextmanager
def failing_readings(share: float, seed: int) -> Iterator[None]:
    """A share of the readings and of the norms at a step run out of memory."""
    chance = random.Random(seed)

    def failing(method: Callable[..., object]) -> Callable[..., object]:
        def measure(*arguments: object, **named: object) -> object:
            if chance.random() < share:
                raise MemoryError
            return method(*arguments, **named)

        return measure

    with contextlib.ExitStack() as stack:
        for name in ("read", "norms") if share else ():
            stack.enter_context(mock.patch.object(EagerStatistics, name, failing(getattr(EagerStatistics, name))))
        yield


def verdict(seed: int) -> Verdict:
    """Trains one loop under an exporter and compares it round by round."""
    loop = Loop(seed)
    named = {"optimizers": loop.optimizers} if len(loop.optimizers) > 1 else {}
    with (
        start_exporter(loop.target, port=None, every=loop.style.every, collectors=OFF, **named) as exporter,
        failing_readings(loop.style.fails, seed),
    ):
        comparison = Comparison(loop, exporter)
        for _ in loop.run():
            comparison.look()
        found = comparison.verdict
        if (failures := errors(exporter)) and not loop.style.fails:
            found.wrong.append(f"errors: {failures}")
        absent = lost(exporter)
        due = sum(truth.due for truths in loop.record.truths.values() for truth in truths) - int(absent.pop("failed", 0))
        found.due = due if loop.style.every == 1 else found.shown + int(sum(absent.values()))
    found.state = loop.state()
    return found


def trained(seed: int) -> list[torch.Tensor]:
    """Trains one loop without an exporter, and returns what its models hold in the end."""
    loop = Loop(seed)
    for _ in loop.run():
        pass
    return loop.state()
