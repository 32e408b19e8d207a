"""AttentionProbe: what `start_exporter(attention=True)` asks for, the logits of attention in the forwards of sampled rounds.

The functions that attention is computed with are observed while the forward of a root runs, so queries, keys, mask and scale are
those of the training, whatever module calls. Calls within a backward, such as those of a checkpoint, do not count. A call is
pending until a backward has passed through it, so a forward without a backward counts for nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.torch_hooks import Removable
from torch_grad_exporter.errors import warn
from torch_grad_exporter.inspection.attention_values import WIDTH, of_call, of_logits
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, InnerHooks
from torch_grad_exporter.inspection.layer_rows import KEPT
from torch_grad_exporter.inspection.measuring import InspectionContext, MeasurementTimer, VectorSender, by_device
from torch_grad_exporter.inspection.modules import InnerModules, ModuleKind
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, capturing_graph, graph_task, on_node_of, within_transform
from torch_grad_exporter.torch_compat.compiler import compiles_backwards, something_is_compiled
from torch_grad_exporter.torch_compat.functions import ObservedFunction, without_function_modes

SOURCE = "attention"

# Calls of a round that are measured, and kept until they are confirmed, at most.
CALLS = 1 << 12

COMPILED = "attention is not shown: this process uses torch.compile, and observing attention would make it compile again"
REPLACED = "attention is not shown, since another library has replaced torch.nn.functional.scaled_dot_product_attention"
UNSEEN = (
    "no attention was seen in the forward of a sampled step: modules have to call scaled_dot_product_attention, or softmax "
    "with four dimensions, of torch.nn.functional; kernels of other libraries are not seen"
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is shown of a layer, of its calls in the sample of this number; None where it is unknown. `entropy`: mean, in nats."""

    bound: float | None
    max_logit: float | None
    entropy: float | None
    sample: int


class AttentionTotals:
    """The values by layer, without those of layers that were not called for a while.

    Belongs to the worker, but for `rows`, which is replaced and never changed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: Mapping[str, LayerAttention] = {}
        self._samples = 0
        self._labels: dict[str, str] = {}  # of all modules that were seen

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the calls of a round; the data are the names of the modules that made them."""
        assert isinstance(record.data, tuple)  # noqa: S101 - only `AttentionProbe` sends records of this name
        if not self._labels.keys() >= {*record.data}:
            known = [*dict.fromkeys([*self._labels, *record.data])]
            self._labels = dict(zip(known, fold(known, self._most), strict=True))
        calls: dict[str, list[FloatArray]] = {}
        for name, row in zip(record.data, np.concatenate(values).reshape(-1, WIDTH), strict=True):
            calls.setdefault(self._labels[name], []).append(row)
        number = self._samples = self._samples + 1
        recent = {layer: row for layer, row in self.rows.items() if number - row.sample < KEPT}
        self.rows = recent | {label: _row(np.array(several), number) for label, several in calls.items()}


def _row(calls: FloatArray, sample: int) -> LayerAttention:
    bound, most = np.fmax.reduce(calls[:, :2])
    entropy, rows = calls[:, 2:].sum(axis=0)
    values = bound, most, entropy / rows if rows else np.nan
    bound, most, mean = (None if np.isnan(value) or value == -np.inf else float(value) for value in values)
    return LayerAttention(bound, most, mean, sample)


@dataclass(slots=True, eq=False)
class _Call:
    """What was measured of a call. `hooked`: a backward through it shows; `reached`: one did; `old`: a step came since."""

    name: str
    values: torch.Tensor
    hooked: bool = False
    reached: bool = False
    old: bool = False

    def backward_came(self, _gradients: object) -> None:
        """Note that a backward has reached the first tensor of the call."""
        self.reached = True


class AttentionProbe(Inspection, ForwardObserver):
    """The inspection of attention. Belongs to the training thread, and to that of the backward."""

    def __init__(self, context: InspectionContext, models: Mapping[str, torch.nn.Module], layers: LayerFilter) -> None:
        hooks, self._layers, self._cost = context.hooks, layers, context.cost
        self._modules = InnerModules(models, LayerFilter(), ModuleKind.ANY, sys.maxsize)
        self._hooks = InnerHooks(hooks, SOURCE, self)
        self._sender, self._timed = VectorSender(SOURCE, context), MeasurementTimer(context)
        fused, eager = (hooks.guarded(SOURCE, called) for called in (self._attention_called, self._softmax_called))
        self._observed = ObservedFunction("scaled_dot_product_attention", fused), ObservedFunction("softmax", eager)
        self._handle: Removable | None = None
        self._root_left = hooks.guarded(SOURCE, self._over)
        self._on_backward = hooks.guarded(SOURCE, _Call.backward_came)
        self._pending: list[_Call] = []
        self._confirmed: list[_Call] = []
        self._number = -1
        self._followed = False
        self._said: set[str] = set()

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Observe attention in the forward of a sampled round."""
        if not sampled:
            self._pending = []
        if self._hooks.running:  # it is called within the forward of another root
            return
        self._end()
        if not sampled or not BACKWARDS_ARE_SEEN or within_transform() or capturing_graph():
            return
        if something_is_compiled():  # it is guarded by the identity of the functions that it calls
            self._say(COMPILED)
            return
        self._followed = all(observed.begin() for observed in self._observed)
        if not self._followed:
            self._end()
            self._say(REPLACED)
            return
        self._handle = root.register_forward_hook(self._root_left, always_call=True)  # also where the forward raises
        self._hooks.arm(root, self._modules.selected().by_root.get(id(root), ()))

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Count what forwards have shown as part of the round."""
        if current.sampled:
            if self._number != current.number:
                self._number, self._confirmed = current.number, []
            self._confirmed += (call for call in self._pending if call.reached or not call.hooked)
            self._pending = [call for call in self._pending if call.hooked and not call.reached]
        else:
            self._pending = []

    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round has shown to the host."""
        if number == self._number and kept:
            devices = by_device((call.name, call.values) for call in self._confirmed).values()
            with torch.no_grad():
                vectors = [torch.cat([values for _, values in calls]) for calls in devices]
            self._sender.send(number, vectors, tuple(name for calls in devices for name, _ in calls))
            if self._followed and not self._confirmed:
                self._say(UNSEEN)
        self._confirmed, self._followed = [], False
        self._timed.sample_over()

    def step_over(self, *, sampled: bool) -> None:
        """Observe nothing until the next forward."""
        self._end()
        self._hooks.disarm()
        # A call from before the step may get its backward after it, as that of a generator; but not after two steps.
        self._pending = [call for call in self._pending if sampled and not call.old]
        for call in self._pending:
            call.old = True

    def release(self) -> None:
        """Observe nothing and forget what is not sent; idempotent, from any thread."""
        self._end()
        self._hooks.disarm()
        self._pending, self._confirmed = [], []

    def _over(self, *_: object) -> None:
        """Observe no functions any more: the forward of the root has returned or raised."""
        self._hooks.running = []
        for observed in self._observed:
            observed.end()

    def _end(self) -> None:
        self._over()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message)

    # Calls of functions

    def _attention_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with without_function_modes():
            self._measure(args[0] if args else kwargs["query"], lambda _module: of_call(*args, **kwargs))

    def _softmax_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logits, dim = _logits(*args, **kwargs)

        def measure(module: torch.nn.Module) -> torch.Tensor | None:
            return of_logits(logits) if logits.dim() == 4 or isinstance(module, torch.nn.MultiheadAttention) else None

        with without_function_modes():
            if 3 <= logits.dim() <= 4 and dim in (-1, logits.dim() - 1):
                self._measure(logits, measure)

    def _measure(self, first: torch.Tensor, measure: Callable[[torch.nn.Module], torch.Tensor | None]) -> None:
        """Measure a call, if it counts, under the name of the innermost module that made it. `first`: its first tensor."""
        if graph_task() != -1 or within_transform() or capturing_graph() or len(self._pending) + len(self._confirmed) >= CALLS:
            return
        start = self._cost.now()
        inner = self._hooks.running[-1].inner if self._hooks.running else None
        if inner is not None and (module := inner.module()) is not None and self._layers.accepts(inner.label):
            with torch.no_grad(), self._timed.measuring(first.device):
                values = measure(module)
            if values is not None:
                call = _Call(inner.label, values)
                call.hooked = not compiles_backwards() and on_node_of(first, functools.partial(self._on_backward, call))
                self._pending.append(call)
        self._cost.spent(start, sampled=True)


def _logits(input: torch.Tensor, dim: int | None = None, *_others: object, **_more: object) -> tuple[torch.Tensor, int | None]:  # noqa: A002
    """Return these of the parameters of `softmax`."""
    return input, dim
