"""Freeze: layers that learn nothing stop being trained, and may be tried again."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.freeze.layers import FrozenLayers, NothingLeftError
from torch_grad_exporter.actions.freeze.norms import LayerNorms
from torch_grad_exporter.arguments import check_number, check_whole, near, shown, some
from torch_grad_exporter.errors import BusyError, warn
from torch_grad_exporter.rules import Problem, Rule, Values

THRESHOLD, AFTER, REVIVE = 1e-3, 100, 1000  # the defaults
VERSION = 1  # of the state


class Freeze(StepAction):
    """Stops training layers: their parameters get `requires_grad=False` and no gradient, so that no optimizer moves them.

    `exporter.on(Freeze(threshold, after, revive))` freezes a layer whose mean gradient norm over the last `after` optimizer
    steps, reduced over ranks, unscaled and before clipping, is below `threshold`. `exporter.on(rule_or_condition,
    Freeze(layers=...))` freezes layers at once when the rule or the condition holds. One layer of each model and optimizer always
    stays, and so does each parameter that several layers have.

    Args:
        threshold: The norm below which a layer is frozen.
        after: Optimizer steps over which its mean is taken.
        revive: Optimizer steps after which a layer is tried again, None for never.
        layers: A regular expression that the names of the layers match. Without it a rule's problems name the layers.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong.
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
        steps = "a number of optimizer steps"
        self.threshold = check_number(f"threshold={shown(threshold)}", threshold, above=0.0, what="a norm", example=THRESHOLD)
        self.after = check_whole(f"after={shown(after)}", after, what=steps, example=AFTER)
        self.revive = revive
        if revive is not None:
            check_whole(f"revive={shown(revive)}", revive, what=f"None for never, or {steps}", example=REVIVE)
        self.layers = _pattern(layers)
        self._norms: LayerNorms | None = None  # if it acts by itself
        self._layers: FrozenLayers | None = None  # while it is in use
        # Optimizer steps since `on`, and those of other actions before it.
        self._steps = 0
        self._before: int | None = None
        # The layers that this one has frozen, with the step after which it did; all that are, when it last looked for lost ones.
        self._frozen: dict[str, int] = {}
        self._held: object = None
        # The layers of a state that was loaded before `on`, and how many steps ago they were frozen.
        self._loaded: Mapping[str, int] = {}
        self._due: dict[str, float] = {}
        self._revived: deque[str] = deque()

    def __repr__(self) -> str:
        chosen = [] if self.layers is None else [f"layers={self.layers.pattern!r}"]
        if self._norms is not None or not chosen:
            chosen = [f"threshold={self.threshold:g}", f"after={self.after}", *chosen]
        return f"Freeze({', '.join((*chosen, f'revive={self.revive}'))})"

    @property
    def frozen(self) -> Mapping[str, int]:
        """The layers that it has frozen, each with how many optimizer steps ago. Those of a loaded state count from `on` on."""
        return {layer: self._steps - step for layer, step in self._frozen.items()} or dict(self._loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and texts: what is frozen, since how many steps. Norms begin again after a restart."""
        return {"version": VERSION, "frozen": dict(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whose layers the next `exporter.on` freezes at once. Call it before that, on all ranks.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is not a state.
            RuntimeError: This one is in use.
        """
        if self._layers is not None:
            raise RuntimeError(f"{self!r}: it is in use; load a state before exporter.on")
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version={state['version']!r}: expected {VERSION}, that of this version of torch-grad-exporter")
            self._loaded = {str(layer): int(since) for layer, since in state["frozen"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state={state!r}: expected what Freeze.state_dict() has returned") from error

    # What `exporter.on` calls

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """See `StepAction`."""
        layers = training.layers
        if self._layers is not None:
            raise ValueError(f"action={self!r}: it is in use; make another one for each on(), since it has a memory")
        layers.refuse()
        trained = layers.trained()
        if self.layers is not None and not any(map(self.layers.search, trained)):
            raise ValueError(f"layers={self.layers.pattern!r}: it matches no layer that is trained; there are {some(trained, 8)}")
        if own:
            if layers.sharded().issuperset(trained):
                raise RuntimeError(
                    f"action={self!r}: all layers are sharded, and no rank alone knows their norms; name layers instead: "
                    "exporter.on(rule_or_condition, Freeze(layers=...))"
                )
        elif (self.threshold, self.after) != (THRESHOLD, AFTER):
            raise ValueError(
                f"action={self!r}: threshold= and after= are for exporter.on(Freeze(...)), without a rule or a condition; "
                "what holds freezes at once"
            )
        elif self.layers is not None:
            try:
                plan = layers.plan(filter(self.layers.search, trained))
            except NothingLeftError as error:
                raise ValueError(f"layers={self.layers.pattern!r}: {error}") from error
            if not plan:
                raise ValueError(f"layers={self.layers.pattern!r}: other layers have all of their parameters, which are not frozen")
        elif rule is None or (rule.alerts and not any(alert.by_layer for alert in rule.alerts)):
            cause = "a condition" if rule is None else f"the rule {rule.name}"
            raise ValueError(f"layers=None: {cause} names no layer; write Freeze(layers=...) with a regular expression of names")

    def begin(self, training: Training, *, own: bool = False) -> None:
        """See `StepAction`."""
        layers, loaded = training.layers, self._loaded
        known = {*layers.trained(), *layers.labels.frozen}
        for layer in loaded:
            if layer not in known:
                raise ValueError(f"state: there is no layer {layer!r} that is trained{near(layer, known)}")
        plan = layers.plan(loaded)
        self._norms = LayerNorms(self.after, training.worker) if own else None
        # What the script or another `Freeze` has frozen is theirs.
        self._frozen = {layer: -loaded[layer] for layer in layers.freeze(plan)}
        self._steps, self._before = 0, None
        layers.labels.in_use = True
        self._loaded, self._layers = {}, layers

    def end(self) -> None:
        """Give back what is frozen."""
        layers, self._layers = self._layers, None
        if layers is not None:
            self._loaded = self.frozen  # for a `state_dict` after the end, and for another exporter
            self._frozen = {}
            layers.thaw(self._loaded)

    # The thread that judges

    def judged(self, _values: Values, *, holds: bool) -> bool:
        """Return whether the cause holds, or by itself whether a layer that can be frozen has a mean norm below the threshold."""
        layers, norms = self._layers, self._norms
        if layers is None or norms is None:
            return holds and layers is not None
        revived = {self._revived.popleft() for _ in range(len(self._revived))}
        try:
            # One rank alone does not know the norm of a layer of which it has a part.
            norms.read(layers.labels.frozen | layers.sharded(), revived)
        except BusyError:  # the worker is busy: the next evaluation has them
            self._revived.extend(revived)
            return False
        due = norms.below(self.threshold)
        trained = layers.trained() if due else {}
        self._due = {name: mean for name, mean in due.items() if name in trained and (not self.layers or self.layers.search(name))}
        return bool(self._due)

    def choose(self, _training: Training, problems: Sequence[Problem]) -> list[str] | None:
        """Return the names of the layers."""
        layers = self._layers
        if layers is None:
            return None
        if self._norms is not None:
            wanted = sorted(self._due, key=self._due.__getitem__)
        else:
            named = {layer for problem in problems for layer in (problem.layer, *problem.others) if layer}
            if not self.layers and not named:
                raise RuntimeError("the rule's problems name no layer; write Freeze(layers=...) with a regular expression of names")
            wanted = [name for name in layers.trained() if (self.layers.search(name) if self.layers else name in named)]
        while wanted:
            try:
                planned = layers.plan(wanted)
            except NothingLeftError:
                if self._norms is None:
                    raise
                wanted.pop()  # the layer with the largest norm stays
            else:
                return [*planned] or None
        return None

    def prepare(self, _training: Training, wanted: list[str]) -> list[str]:
        """Return the layers to freeze. Raises `RuntimeError` if that would harm the training."""
        if self._layers is not None:
            self._layers.plan(wanted)
            self._layers.refuse()
        return wanted

    # The thread that trains

    def act(self, _training: Training, wanted: Sequence[str]) -> None:
        """Freeze by a new plan: meanwhile the script may have frozen others, and within a step FSDP2 shows other parameters."""
        layers = self._layers
        if layers is None:
            return
        frozen = layers.freeze(layers.plan(wanted))
        self._frozen = self._frozen | dict.fromkeys(frozen, self._steps)
        if self._layers is not layers:  # it has just ended, and `end` may not have seen these
            layers.thaw(frozen)
        elif frozen:
            warn("froze %s after %d steps", ", ".join(frozen), self._steps)

    def step_over(self, steps: int) -> None:
        """Try again what has been frozen for long enough, and forget what the script has thawed: any `Freeze` may notice."""
        if self._before is None:
            self._before = steps - 1
        self._steps = steps = steps - self._before
        layers = self._layers
        if layers is None or not self._frozen:
            return
        layers.look()
        if self._held is not layers.held:
            self._held = layers.held
            self._revived.extend(layer for layer in self._frozen if layer not in layers.held)
            self._frozen = {layer: step for layer, step in self._frozen.items() if layer in layers.held}
        over = [layer for layer, step in self._frozen.items() if self.revive is not None and steps - step >= self.revive]
        if over:
            layers.thaw(over)
            self._revived.extend(over)
            self._frozen = {layer: step for layer, step in self._frozen.items() if layer not in over}
            warn("train %s again after %d steps", ", ".join(over), steps)


def _pattern(layers: object) -> re.Pattern[str] | None:
    expected = f"layers={shown(layers)}: expected a regular expression that finds names of layers, such as 'encoder'"
    if layers is None or (isinstance(layers, re.Pattern) and isinstance(layers.pattern, str)):
        return layers
    if not isinstance(layers, str):
        raise TypeError(expected)
    try:
        return re.compile(layers)
    except re.error as error:
        raise ValueError(f"{expected}: {error}") from error
