"""Freeze: layers that learn nothing stop being trained, and may be tried again."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch_grad_exporter.actions.act.measurements import Measurements, near
from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.freeze.layers import FrozenLayers, NothingLeftError, Plan
from torch_grad_exporter.actions.freeze.norms import LayerNorms, Windows
from torch_grad_exporter.errors import say
from torch_grad_exporter.rules import Rule

logger = logging.getLogger("torch_grad_exporter")

THRESHOLD, AFTER, REVIVE = 1e-3, 100, 1000
"""The defaults."""

VERSION = 1
"""Of the state."""


class Freeze(StepAction):
    """Stops training layers: their parameters get `requires_grad=False` and no gradient, so that no optimizer moves them.

    `exporter.on(Freeze(threshold, after, revive))` freezes a layer whose mean gradient norm over the last `after` optimizer steps,
    reduced over ranks, unscaled and before clipping, is below `threshold`; `layers` restricts it to the layers whose name the
    regular expression finds. `exporter.on(rule_or_condition, Freeze(layers=...))` freezes these layers at
    once when the rule or the condition holds, and without `layers` those that the rule's problems name.

    A layer is tried again `revive` optimizer steps later, never with `None`. One layer of each model and optimizer always stays.
    """

    has_cause = each_step = True

    def __init__(
        self,
        threshold: float = THRESHOLD,
        after: int = AFTER,
        revive: int | None = REVIVE,
        *,
        layers: str | re.Pattern[str] | None = None,
    ) -> None:
        self.threshold = _threshold(threshold)
        self.after = _steps("after", after)
        self.revive = None if revive is None else _steps("revive", revive, " or None for never")
        self.layers = _pattern(layers)
        self._frozen: dict[str, int] = {}
        """The layers that this one has frozen, and the step after which it did."""
        self._windows = Windows(self.after)
        self._layers: FrozenLayers | None = None
        self._norms: LayerNorms | None = None
        self._held: object = None
        """All layers that were frozen when it was last looked whether its own still are."""
        self._own = False
        self._steps = 0
        """Of optimizers since `on`."""
        self._before: int | None = None
        """Those of other actions before it."""
        self._waiting: Mapping[str, int] = {}
        """The layers of a state that was loaded before `on`, and how many steps ago they were frozen."""
        self._due: dict[str, float] = {}
        self._in_vain: object = None
        """With what there was nothing to be done, though layers were due."""
        self._revived: deque[str] = deque()

    def __repr__(self) -> str:
        chosen = [] if self.layers is None else [f"layers={self.layers.pattern!r}"]
        if self._own or not chosen:
            chosen = [f"threshold={self.threshold:g}", f"after={self.after}", *chosen]
        return f"Freeze({', '.join((*chosen, f'revive={self.revive}'))})"

    @property
    def frozen(self) -> Mapping[str, int]:
        """The layers that it has frozen, each with how many optimizer steps ago. Those of a loaded state count from `on` on."""
        return {layer: self._steps - step for layer, step in self._frozen.items()} or dict(self._waiting)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and texts: what is frozen, since how many steps, and the norms of the last `after` steps of the others."""
        frozen = dict(self.frozen)
        norms = {layer: window for layer, window in self._windows.state().items() if layer not in frozen}
        return {"version": VERSION, "frozen": frozen, "norms": norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state: its layers are frozen at once, or by the `exporter.on` that is yet to come.

        Call it between two steps, on all ranks. Raises `ValueError` where it is no such state or a layer is unknown, and
        `RuntimeError` where nothing would be left to train.
        """
        frozen, windows = _state(state, self.after)
        if self._layers is not None:
            self._freeze_again(self._layers, frozen)
        else:
            self._waiting = frozen
        self._windows = windows

    # What `exporter.on` calls

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """See `StepAction`."""
        layers = training.layers
        if layers is None:
            raise RuntimeError(f"action={self!r}: there is no model")
        if self._layers is not None:
            raise ValueError(f"action={self!r}: it is in use; make another one for each on(), since it has a memory")
        layers.refuse()
        self._check_known(layers, self._waiting)
        trained = layers.trained()
        if self.layers is not None and not any(map(self.layers.search, trained)):
            raise ValueError(f"layers={self.layers.pattern!r}: it matches no layer that is trained; there are {_some(trained)}")
        if own and layers.sharded().issuperset(trained):
            raise RuntimeError(
                f"action={self!r}: all layers are sharded, and no rank alone knows their norms; name layers instead: "
                "exporter.on(rule_or_condition, Freeze(layers=...))"
            )
        if own:
            return
        if (self.threshold, self.after) != (THRESHOLD, AFTER):
            raise ValueError(
                f"action={self!r}: threshold= and after= are for exporter.on(Freeze(...)), without a rule or a condition; "
                "what holds freezes at once"
            )
        if self.layers is not None:
            try:
                layers.plan(filter(self.layers.search, trained), self._follows)
            except NothingLeftError as error:
                raise ValueError(f"layers={self.layers.pattern!r}: {error}") from error
        elif rule is None or (rule.alerts and not any(alert.by_layer for alert in rule.alerts)):
            what = "a condition" if rule is None else f"the rule {rule.name}"
            raise ValueError(f"layers=None: {what} names no layer; write Freeze(layers=...) with a regular expression of names")

    def begin(self, training: Training, *, own: bool = False) -> None:
        """See `StepAction`."""
        layers = training.layers
        if layers is None:  # as `check` has said
            return
        norms = LayerNorms(training.worker) if own and training.worker is not None else None
        self._own, self._frozen, self._steps, self._before = own, {}, 0, None
        self._freeze_again(layers, self._waiting)
        layers.labels.in_use = True
        self._norms, self._waiting, self._layers = norms, {}, layers

    def end(self) -> None:
        """See `StepAction`: gives back what is frozen."""
        layers, self._layers, self._norms = self._layers, None, None
        if layers is not None:
            self._waiting = self.frozen  # for a `state_dict` after the end, and for another exporter
            self._frozen = {}
            layers.thaw(self._waiting)

    # The thread that judges

    def holds(self, _measurements: Measurements) -> bool:
        """Whether a layer's mean norm is below the threshold that can be frozen."""
        layers, norms = self._layers, self._norms
        if layers is None or norms is None:
            return False
        try:
            reading = norms.read()
        except TimeoutError:  # the host's side is busy: the next evaluation has them
            return False
        afresh = {self._revived.popleft() for _ in range(len(self._revived))}
        # One rank alone does not know the norm of a layer of which it has a part.
        self._windows.take(reading, layers.labels.frozen | layers.sharded(), afresh)
        due = self._windows.below(self.threshold)
        trained = layers.trained() if due else {}
        self._due = {one: mean for one, mean in due.items() if one in trained and (not self.layers or self.layers.search(one))}
        return bool(self._due) and self._state_of(layers) != self._in_vain

    def _state_of(self, layers: FrozenLayers) -> object:
        return frozenset(self._due), frozenset(layers.trained())

    def choose(self, _training: Training, _named: Sequence[str]) -> str | None:
        """The names of the layers, as JSON."""
        layers = self._layers
        if layers is None:
            return None
        trained = layers.trained()
        if self._own:
            plan = self._with_one_left(layers)
        else:
            wanted = (
                [one for one in trained if self.layers.search(one)] if self.layers else [one for one in trained if one in _named]
            )
            if not wanted and not self.layers and not _named:
                raise RuntimeError("the rule's problems name no layer; write Freeze(layers=...) with a regular expression of names")
            plan = layers.plan(wanted, self._follows)
        return json.dumps([*plan.layers]) if plan.layers else None

    def _with_one_left(self, layers: FrozenLayers) -> Plan:
        """Those that are due, without the ones with the largest norms where nothing would be left to train."""
        wanted = sorted(self._due, key=self._due.__getitem__)
        while wanted:
            try:
                plan = layers.plan(wanted, self._follows)
            except NothingLeftError:
                wanted.pop()
            else:
                break
        else:
            plan = Plan()
        self._in_vain = None if plan.layers else self._state_of(layers)
        return plan

    def prepare(self, _training: Training, choice: str) -> list[str]:
        """Return the layers to freeze. Raises `RuntimeError` if that would harm the training."""
        wanted: list[str] = json.loads(choice)
        if self._layers is not None:
            self._layers.plan(wanted, self._follows)
            self._layers.refuse()
        return wanted

    def _follows(self, layer: str) -> bool:
        """Whether a layer that has no norm of its own, since all its parameters are tied to others, goes with those."""
        return self._own or self.layers is None or self.layers.search(layer) is not None

    # The thread that trains

    def act(self, _training: Training, wanted: Sequence[str]) -> None:
        """Freeze by a new plan: meanwhile the script may have frozen others, and within a step FSDP2 shows other parameters."""
        layers = self._layers
        if layers is None:
            return
        frozen = layers.freeze(layers.plan(wanted, self._follows))
        self._frozen = self._frozen | dict.fromkeys(frozen, self._steps)
        if self._layers is not layers:  # it has just ended, and `end` may not have seen these
            layers.thaw(frozen)
        elif frozen:
            say(logger, logging.WARNING, "froze %s after %d steps", ", ".join(frozen), self._steps)

    def step_over(self, steps: int) -> None:
        """See `StepAction`: tries again what has been frozen for long enough."""
        if self._before is None:
            self._before = steps - 1
        self._steps = steps = steps - self._before
        layers = self._layers
        if layers is None or not self._frozen:
            return
        layers.look()
        self._drop_lost(layers)
        if self.revive is None:
            return
        over = [layer for layer, step in self._frozen.items() if steps - step >= self.revive]
        if over:
            layers.thaw(over)
            self._revived.extend(over)
            self._frozen = {layer: step for layer, step in self._frozen.items() if layer not in over}
            say(logger, logging.WARNING, "train %s again after %d steps", ", ".join(over), steps)

    def _drop_lost(self, layers: FrozenLayers) -> None:
        """Forgets what is not frozen any more, though this one has not thawed it: the script has, and any `Freeze` may notice."""
        if self._held is layers.held:
            return
        self._held = layers.held
        lost = [layer for layer in self._frozen if layer not in layers.held]
        self._frozen = {layer: step for layer, step in self._frozen.items() if layer not in lost}
        self._revived.extend(lost)

    # States

    def _check_known(self, layers: FrozenLayers, frozen: Mapping[str, int]) -> None:
        known = {*layers.trained(), *layers.labels.frozen}
        for layer in frozen:
            if layer not in known:
                raise ValueError(f"state: there is no layer {layer!r} that is trained{near(layer, known)}")

    def _freeze_again(self, layers: FrozenLayers, frozen: Mapping[str, int]) -> None:
        """Freezes what a state names, and nothing else. Raises as `load_state_dict`."""
        self._check_known(layers, frozen)
        layers.thaw([layer for layer in self._frozen if layer not in frozen])
        ours = self._frozen = {layer: step for layer, step in self._frozen.items() if layer in frozen}
        plan = layers.plan(frozen, self._follows)
        if plan.layers:
            layers.refuse()
            ours = ours | dict.fromkeys(layers.freeze(plan), 0)
        # What the script or another `Freeze` has frozen is theirs.
        self._frozen = {layer: self._steps - frozen[layer] for layer in ours}


def _state(state: Mapping[str, Any], after: int) -> tuple[dict[str, int], Windows]:
    """What a state has."""
    windows = Windows(after)
    try:
        if state["version"] != VERSION:
            raise ValueError(f"version={state['version']!r}: expected {VERSION}, that of this version of torch-grad-exporter")
        frozen = {str(layer): int(since) for layer, since in state["frozen"].items()}
        windows.load(state["norms"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"state={state!r}: expected what Freeze.state_dict() has returned") from error
    return frozen, windows


def _some(names: Mapping[str, object]) -> str:
    shown = [*names][:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _threshold(value: object) -> float:
    expected = "expected a norm, a number above 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"threshold={value!r}: {expected}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"threshold={value!r}: {expected}")
    return float(value)


def _steps(name: str, value: object, also: str = "") -> int:
    expected = f"expected a number of optimizer steps, a whole number above 0{also}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: {expected}")
    if value <= 0:
        raise ValueError(f"{name}={value!r}: {expected}")
    return value


def _pattern(layers: object) -> re.Pattern[str] | None:
    expected = "expected a regular expression that finds names of layers, such as 'encoder'"
    if layers is None:
        return None
    if isinstance(layers, re.Pattern) and isinstance(layers.pattern, str):
        return layers
    if not isinstance(layers, str):
        raise TypeError(f"layers={layers!r}: {expected}")
    try:
        return re.compile(layers)
    except re.error as error:
        raise ValueError(f"layers={layers!r}: {expected}: {error}") from error
