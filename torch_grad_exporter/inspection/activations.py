"""Activations: what `start_exporter(activations=)` asks for, the outputs of inner modules and their gradients in sampled rounds.

A forward hook measures an output at once, since the next module may modify it in place, and hooks the node that made it for the
gradient. What forwards gave is pending until a backward of their round has ended, so a forward without a backward counts for
nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, SampledHooks
from torch_grad_exporter.inspection.layer_rows import KEPT, LayerRows
from torch_grad_exporter.inspection.measuring import InspectionContext, dense, tensors_in
from torch_grad_exporter.inspection.modules import InnerModules
from torch_grad_exporter.inspection.round_tallies import RoundTallies, Tallies, TallyKey
from torch_grad_exporter.inspection.tallies import SentTallies
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task, on_node_of
from torch_grad_exporter.torch_compat.compiler import compiles_backwards

SOURCE = "activations"

# Forwards at most of which something is kept before it is known whether they are of the round.
FORWARDS = 64

COMPILED = "activations of %d modules are not shown, since they are compiled; a hook in compiled code would compile it again"


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What is shown of a layer; None where it is unknown. Totals are over `captures` samples, the last one in `sample`."""

    captures: int = 0
    nans: float = 0.0
    infs: float = 0.0
    rms: float | None = None
    max_magnitude: float | None = None
    zero_ratio: float | None = None
    dead_ratio: float | None = None
    grad_norm: float | None = None
    kurtosis: float | None = None
    channel_ratio: float | None = None
    sample: int = 0

    def only_counts(self) -> LayerActivations:
        """Return the same without what is of a single sample."""
        return LayerActivations(self.captures, self.nans, self.infs, sample=self.sample)

    def with_totals_of(self, other: LayerActivations) -> LayerActivations:
        """Return the totals of both, without what is of a single sample."""
        return LayerActivations(self.captures + other.captures, self.nans + other.nans, self.infs + other.infs)


@dataclass(frozen=True, slots=True)
class ActivationSnapshot:
    """All values at one moment. `samples`: how many there were; `folded`: modules; `left_out`: modules by the reason."""

    layers: Mapping[str, LayerActivations]
    samples: int
    folded: int
    left_out: Mapping[str, int]


class ActivationTotals:
    """The totals of the outputs of at most `most` layers. Belongs to the worker, but for `snapshot` and `left_out`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._table = LayerRows(LayerActivations())
        self._samples = 0
        self._left_out: tuple[int, Mapping[str, int]] = 0, {}

    def left_out(self, folded: int, by_reason: Mapping[str, int]) -> None:
        """Set how many modules share a row, and how many are left out. From the training thread."""
        self._left_out = folded, by_reason

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Count a sample."""
        assert isinstance(record.data, SentTallies)  # noqa: S101 - only `Activations` sends records of this name
        self._samples += 1
        changed: dict[str, LayerActivations] = {}
        scale = record.data.scale(values)
        for layer, tally in record.data.by_label(values).items():
            known = self._table.get(layer)
            changed[layer] = LayerActivations(
                captures=known.captures + 1,
                nans=known.nans + tally.nans,
                infs=known.infs + tally.infs,
                rms=tally.norm / math.sqrt(tally.elements),
                max_magnitude=tally.peak,
                zero_ratio=tally.zeros / tally.elements,
                dead_ratio=tally.dead / tally.units if tally.units else None,
                grad_norm=tally.gradient / scale if tally.graded and scale is not None else None,
                kurtosis=tally.kurtosis if math.isfinite(tally.kurtosis) else None,
                channel_ratio=tally.spread if math.isfinite(tally.spread) else None,
                sample=self._samples,
            )
        self._table.enter(changed, most=self._most)

    def snapshot(self) -> ActivationSnapshot:
        """Return all values at this moment; of layers that were not called for a while only totals. From any thread."""
        rows, samples = self._table.rows, self._samples
        layers = {layer: row if samples - row.sample < KEPT else row.only_counts() for layer, row in rows.items()}
        return ActivationSnapshot(layers, samples, *self._left_out)


# Modules whose channels come before this many dimensions of space.
_SPATIAL: dict[type[torch.nn.Module], int] = {
    getattr(torch.nn, f"{kind}{dims}d"): dims
    for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool") for dims in (1, 2, 3)
}  # fmt: skip

_CHANNELS_SECOND = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, torch.nn.GroupNorm,
    torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d, torch.nn.LocalResponseNorm,
)  # fmt: skip
_FEATURES_LAST = (
    torch.nn.Linear, torch.nn.Bilinear, torch.nn.LayerNorm, torch.nn.Embedding, torch.nn.EmbeddingBag,
    torch.nn.MultiheadAttention, torch.nn.RNNBase,
)  # fmt: skip


class UnitDims:
    """Along which dimension the units of outputs lie. Where a module's class does not show it, the last output of that shape does.

    So the ReLU after a convolution has channels, and the one after a linear layer features, whatever their dimensions.
    """

    MOST = 256  # shapes that are remembered

    def __init__(self) -> None:
        self._known: dict[torch.Size, int] = {}

    def of(self, module: torch.nn.Module, output: torch.Tensor) -> int | None:
        """Return the dimension, None if the output has fewer than two, so that its elements may be examples."""
        dims = output.dim()
        if dims < 2:
            return None
        unit_dim = self._by_class(module, dims)
        if unit_dim is None:
            return self._known.get(output.shape, 1 if dims >= 4 else dims - 1)
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[output.shape] = unit_dim
        return unit_dim

    def _by_class(self, module: torch.nn.Module, dims: int) -> int | None:
        for kind, spatial in _SPATIAL.items():
            if isinstance(module, kind):
                return max(0, dims - 1 - spatial)
        if isinstance(module, _CHANNELS_SECOND):
            return 1
        return dims - 1 if isinstance(module, _FEATURES_LAST) else None


@dataclass(slots=True, eq=False)
class _PendingForward:
    """What a forward of a model has shown. `hooked`: a backward through it shows; `old`: a step came since."""

    tallies: Tallies = field(default_factory=Tallies)
    hooked: bool = False
    old: bool = False


class Activations(Inspection, ForwardObserver):
    """The inspection of the outputs of inner modules. Belongs to the training thread, and to that of the backward."""

    def __init__(self, context: InspectionContext, modules: InnerModules, totals: ActivationTotals) -> None:
        self._cost, self._totals = context.cost, totals
        self._tallies = RoundTallies(SOURCE, context)
        self._hooks = SampledHooks(modules, context.hooks, SOURCE, self, COMPILED)
        self._on_gradient = context.hooks.guarded(SOURCE, self._gradient_came)
        self._hooks_gradients = True
        self._units = UnitDims()
        self._forward = 0  # the number of the last forward of a model
        self._pending: dict[int, _PendingForward] = {}  # by number, those of which no backward is known
        self._unmeasured: set[int] = set()  # modules, by `id`, whose last output could not be measured

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hook the model's modules for a sampled round."""
        if not self._hooks.due(sampled=sampled):
            self._pending = {}
        elif self._hooks.arm(root):
            self._forward += 1
            self._pending[self._forward] = _PendingForward()
            if len(self._pending) > FORWARDS:
                del self._pending[min(self._pending)]
            self._hooks_gradients = not compiles_backwards()
            self._report_left_out()

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Confirm the forwards that the backward has passed through, and those of which that cannot show."""
        if not current.sampled:
            self._tallies.forget_backwards()
            self._pending = {}
            return
        backward = self._tallies.backward_ended(current.number)
        confirmed = [number for number, forward in self._pending.items() if number in backward.forwards or not forward.hooked]
        for number in confirmed:
            self._tallies.confirm(self._pending.pop(number).tallies)

    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round has shown to the host."""
        self._hooks.round_over()
        self._report_left_out()
        self._tallies.round_over(number, kept=kept)

    def step_over(self, *, sampled: bool) -> None:
        """Remove all hooks; the next forward sets those that it needs."""
        self._hooks.round_over()
        self._hooks.disarm()
        self._tallies.forget_backwards()
        # One that came before the step may get its backward after it, as that of a generator; but not after two steps.
        self._pending = {number: forward for number, forward in self._pending.items() if sampled and not forward.old}
        for forward in self._pending.values():
            forward.old = True

    def release(self) -> None:
        """Remove all hooks and forget what is not sent; idempotent, from any thread."""
        self._hooks.disarm()
        self._pending = {}
        self._tallies.forget()

    # Hooks

    def left(self, label: str, module: torch.nn.Module, output: object, call: object) -> None:  # noqa: ARG002
        """Measure the output of a module."""
        start = self._cost.now()
        floats = (tensor for _, tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex())
        tensor = next(floats, None)
        values = None if tensor is None else dense(tensor)
        if tensor is None or values is None:
            self._unmeasured.add(id(module))
            return
        self._unmeasured.discard(id(module))
        key = TallyKey(id(module), label, values.device)
        forward = self._pending.setdefault(self._forward, _PendingForward())
        self._tallies.measure(key, values, self._units.of(module, values), forward.tallies)
        if tensor.requires_grad and self._hooks_gradients:
            hook = functools.partial(self._on_gradient, key, self._forward, tensor.output_nr)
            forward.hooked |= on_node_of(tensor, hook)
        self._cost.spent(start, sampled=True)

    def _gradient_came(self, key: TallyKey, forward: int, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Measure the gradient of an output of a forward: that at `place` of those of its node."""
        gradient, task = gradients[place], graph_task()
        if gradient is None or task == -1 or capturing_graph():
            return
        start = self._cost.now()
        values = dense(gradient)
        if values is not None:
            backward = self._tallies.backward(task)
            backward.forwards.add(forward)
            self._tallies.measure_gradient(key, values, backward.tallies)
        self._cost.spent(start, sampled=True)

    def _report_left_out(self) -> None:
        self._totals.left_out(self._hooks.folded, {"compiled": self._hooks.compiled, "output": len(self._unmeasured)})
