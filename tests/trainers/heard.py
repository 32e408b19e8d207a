"""A record of a training whose loop is a package's own: what is heard of its backwards and steps from outside.

`Tensor.backward` is wrapped, parameters tell when a gradient is accumulated into them, and optimizers tell when they
step. What each of them leaves is told to a `Recorder`, and each step's norms are kept by themselves in float64.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.record import Recorder, named_parameters, norm, wide
from tests.support.scrape import Key, key

KNOWN_AFTER = 4
"""Clipped steps after which the limit of a clipping is known, at the latest."""


@dataclass(frozen=True)
class Step:
    """A step of an optimizer: by layer the norm of what it owns there before clipping, and of all of it before and after.

    `after` is of what it stepped with.
    """

    layers: Mapping[str, float]
    whole: float
    after: float

    @property
    def clipped(self) -> bool:
        """Return whether it stepped with less."""
        return self.after < self.whole * (1 - 1e-6)


class Heard(Recorder):
    """The recorder of a training that it hears. `between`: called before the first backward after a step."""

    def __init__(self, model: Any, *, between: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(model, {}, **options)
        self.steps: dict[str, list[Step]] = {}
        self._names: dict[int, str] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._between = between
        self._reached: set[int] = set()
        self._hooked: dict[int, torch.nn.Parameter] = {}
        self._stepped = True
        self._stepping: torch.optim.Optimizer | None = None

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Hears of whatever trains in this process meanwhile."""
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def heard(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
            self._begins()
            backward(tensor, *arguments, **options)
            self.passed(unused=[n.name for n in named_parameters(self.models) if id(n.parameter) not in self._reached])
            self._frozen_since()

        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._behind)
        torch.Tensor.backward = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()

    def _begins(self) -> None:
        if self._stepped:
            self._between()
            self._reached.clear()
        self._stepped = False
        for one in named_parameters(self.models):
            if id(one.parameter) not in self._hooked:
                self._hooked[id(one.parameter)] = one.parameter  # held, so that no other one has its id
                one.parameter.register_post_accumulate_grad_hook(lambda parameter: self._reached.add(id(parameter)))

    def _frozen_since(self) -> None:
        """What an earlier backward of the round has reached belongs to the round, also where it is frozen by now."""
        for one in named_parameters(self.models, frozen=True):
            if not one.parameter.requires_grad and id(one.parameter) in self._reached and one.parameter.grad is not None:
                self._seen.append(one)
                self._gradients[id(one.parameter)] = wide(one.parameter.grad) * self.unscale

    def _before(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if self._stepping is None and self._concerns(optimizer):
            self._stepping = optimizer
            if not any(map(callable, (*arguments, *options.values()))):
                self._steps_now(optimizer)

    def _behind(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if self._stepping is optimizer:
            if any(map(callable, (*arguments, *options.values()))):  # it has called the backward itself
                self._steps_now(optimizer)
            self._stepping = None

    def _steps_now(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are as the optimizer sees them."""
        name = self._name(optimizer)
        if self._stepped and (
            name in self._after or (name in self.steps and not self._after)
        ):  # there was no backward since its last step
            self._settle("stepped")
            self.optimizers[name].steps += 1
            self.steps[name].append(Step({}, 0.0, 0.0))
            return
        self._stepped = True
        self.stepping(name)
        mine: dict[str, list[torch.Tensor]] = {}
        owned = self.optimizers[name].owned()
        for one in self._seen:
            if id(one.parameter) in owned and id(one.parameter) in self._gradients:
                mine.setdefault(one.layer, []).append(self._gradients[id(one.parameter)])
        layers = {layer: norm(gradients) for layer, gradients in mine.items()}
        whole, after = norm(g for gradients in mine.values() for g in gradients), norm(self._after.get(name, {}).values())
        self.steps.setdefault(name, []).append(Step(layers, whole, after))

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(one.parameter) in owned for one in named_parameters(self.models, frozen=True))

    def _name(self, optimizer: torch.optim.Optimizer) -> str:
        """The name that the exporter gives it: its type's, with a number where there are several."""
        if id(optimizer) not in self._names:
            kind, taken = type(optimizer).__name__, [*self._names.values()]
            more = sum(name == kind or name.startswith(f"{kind}-") for name in taken)
            self._names[id(optimizer)] = f"{kind}-{more + 1}" if more else kind
            self._optimizers.append(optimizer)  # held, so that no other one has its id
            self.use({self._names[id(optimizer)]: optimizer})
        return self._names[id(optimizer)]

    def expected(self) -> dict[Key, float]:
        """As the recorder's, with the labels that are shown."""
        return {(one[0], self._labels(one[1])): value for one, value in super().expected().items()}

    def _labels(self, labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Labels as they are shown: an optimizer that is alone has no name."""
        return tuple(label for label in labels if len(self.optimizers) > 1 or label[0] != "optimizer")

    # Of one step

    def wrong_norms(self, scrape: Mapping[Key, float], rel: float = 1e-5) -> list[str]:
        """What the norms of a scrape show otherwise than those of the steps that they are said to be of."""
        wrong = []
        expected: dict[Key, float] = {}
        for name, steps in self.steps.items():
            shown_as = name if len(self.steps) > 1 else ""
            number = scrape.get(key("torch_grad_sample_step", optimizer=shown_as))
            if number is None:
                continue
            step = steps[int(number) - 1]
            expected[key("torch_grad_global_norm", optimizer=shown_as)] = step.whole
            expected.update({key("torch_grad_norm", layer=layer): value for layer, value in step.layers.items()})
        for one, value in expected.items():
            shown = scrape.get(one)
            if shown is None or abs(shown - value) > rel * value:
                wrong.append(f"{one[0]}{dict(one[1])}: shown {shown}, recorded {value}")
        for one, shown in scrape.items():
            if one[0] == "torch_grad_norm" and one not in expected:
                wrong.append(f"{one[0]}{dict(one[1])}: shown {shown}, nothing recorded")
        return wrong

    def wrong_clipping(self, scrape: Mapping[Key, float], *, by_limit: bool) -> list[str]:
        """What a scrape says of clipping that is not so. `by_limit`: it is by the global norm, so that it becomes known.

        A limit is known by the norms that come out of it, so that it is unknown at first: then there is no coefficient, and no
        number of clipped steps.
        """
        wrong = []
        for name, steps in self.steps.items():
            shown_as = name if len(self.steps) > 1 else ""
            number = int(scrape.get(key("torch_grad_sample_step", optimizer=shown_as), 0))
            if not number:
                continue
            step, earlier = steps[number - 1], [one.after for one in steps[: number - 1] if one.clipped]
            unknown = step.clipped and sum(abs(one - step.after) < 1e-4 * step.after for one in earlier) < KNOWN_AFTER
            shown, right = scrape.get(key("torch_grad_clip_coefficient", optimizer=shown_as)), step.after / step.whole
            if not (unknown or not by_limit if shown is None else abs(shown - right) <= 1e-2 * right):
                wrong.append(f"torch_grad_clip_coefficient of {name}: shown {shown}, recorded {right}")
            counted, clipped = (
                scrape.get(key("torch_grad_clipped_steps_total", optimizer=shown_as)),
                sum(one.clipped for one in steps),
            )
            if counted is not None and not (clipped - KNOWN_AFTER if by_limit else 0) <= counted <= clipped:
                wrong.append(f"torch_grad_clipped_steps_total of {name}: shown {counted}, recorded {clipped}")
        return wrong
