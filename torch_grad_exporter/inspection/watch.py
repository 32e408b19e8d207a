"""WatchedTensors: the gradients of tensors that `exporter.watch` was given; clipped on request, which changes the training.

Gradients are measured in sampled rounds, and clipped in every backward, by a tensor hook that returns the gradient times a factor.
The factor stays on the device, and is exactly 1 where nothing is to be clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.compiler import is_compiling

from torch_grad_exporter.arguments import check_number, shown
from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender, by_device, dense, without_autocast
from torch_grad_exporter.inspection.round_tallies import RoundTallies, TallyKey
from torch_grad_exporter.inspection.tallies import SentTallies
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task, on_node_of, within_transform
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling

# Names that are shown, at most, and the name under which all others are shown together.
NAMES, FOLDED = 100, "(folded)"

# Folded names that are counted, at most.
COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class WatchedGradient:
    """What is shown of a name; None where it is unknown. `clipped`: gradients that were clipped, if they may be."""

    nans: float = 0.0
    infs: float = 0.0
    norm: float | None = None
    zero_ratio: float | None = None
    clipped: float | None = None


class WatchTotals:
    """The values by name. `label` belongs to the training thread, what takes records to the worker, `snapshot` to any.

    Mappings are replaced and never changed, so there is no lock.
    """

    def __init__(self) -> None:
        self._watched: Mapping[str, WatchedGradient] = {}  # without values, of all names that are shown
        self._values: Mapping[str, WatchedGradient] = {}
        self._folded: set[str] = set()

    def label(self, name: str) -> str:
        """Return under which name it is shown: its own, or that of the rest where there are too many."""
        if name in self._watched:
            return name
        if len(self._watched) - (FOLDED in self._watched) < NAMES and name != FOLDED:
            self._watched = {**self._watched, name: WatchedGradient()}
            return name
        self._watched = {**self._watched, FOLDED: WatchedGradient()}
        if len(self._folded) < COUNTED:
            self._folded.add(name)
        return FOLDED

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take what was measured in a sampled round; or how often gradients were clipped since the start, by label and device."""
        changed: dict[str, WatchedGradient] = {}
        if isinstance(record.data, SentTallies):
            scale = record.data.scale(values)
            for label, tally in record.data.by_label(values).items():
                before = self._values.get(label, WatchedGradient())
                changed[label] = replace(
                    before,
                    nans=before.nans + tally.nans,
                    infs=before.infs + tally.infs,
                    norm=None if scale is None else tally.norm / scale,
                    zero_ratio=tally.zeros / tally.elements,
                )
        elif isinstance(record.data, tuple):
            labels, counts = np.array(record.data), np.concatenate(values)
            for label in dict.fromkeys(record.data):
                before = self._values.get(label, WatchedGradient())
                changed[label] = replace(before, clipped=float(counts[labels == label].sum()))
        self._values = {**self._values, **changed}

    def snapshot(self) -> tuple[dict[str, WatchedGradient], int]:
        """Return the values by name, and how many names are folded."""
        return {**self._watched, **self._values}, len(self._folded)


SOURCE = "watch"


class WatchedTensors(Inspection):
    """The inspection of watched tensors, which clips them as well. Belongs to the training thread, and to that of the backward.

    `sampled`: whether the gradients of what is watched now are to be measured. A gradient for which the clipping fails stays
    unchanged.
    """

    def __init__(self, context: InspectionContext, totals: WatchTotals, errors: ErrorLog, *, sampled: bool) -> None:
        self._loss_scale, self._cost, self._totals = context.loss_scale, context.cost, totals
        self._guard = errors.boundary(SOURCE, "gradients of watched tensors are no longer clipped")
        self._measuring = errors.boundary(SOURCE, "gradients of watched tensors are no longer measured")
        self._tallies, self._sender = RoundTallies(SOURCE, context), VectorSender(SOURCE, context)
        self._on_gradient = context.hooks.guarded(SOURCE, self._gradient_came)
        self._sampled = sampled
        # How often gradients were clipped, shape (1,), on their device.
        self._counts: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._closed = False

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None) -> torch.Tensor:
        """Hook the tensor and return it; for a leaf, an alias that is hooked in its place. The arguments are checked."""
        if self._closed or not tensor.requires_grad or not torch.is_grad_enabled() or within_transform():
            return tensor
        if not self._sampled and max_norm is None:
            return tensor
        if tensor.grad_fn is None:
            # A hook at a leaf would stay there for good. Not `view_as`, whose backward takes no sparse gradient.
            tensor = torch.ops.aten.alias(tensor)
        label = self._totals.label(name)
        if max_norm is None:
            on_node_of(tensor, functools.partial(self._on_gradient, label, tensor.output_nr))
        else:
            hook = functools.partial(self._clip_hook, label, max_norm, self._sampled)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    # The moments of a round

    def forward_began(self, _root: object, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Assign what is watched from here on to this round."""
        self._sampled = sampled

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Confirm what the backward has shown."""
        if current.sampled:
            self._tallies.backward_ended(current.number)
        else:
            self._tallies.forget_backwards()

    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round has shown, and the counts, to the host."""
        self._tallies.round_over(number, kept=kept)
        devices = by_device((label, count) for (label, _), count in self._counts.items()).values()
        vectors = [torch.cat([count for _, count in counts]) for counts in devices]
        self._sender.send(number, vectors, tuple(label for counts in devices for label, _ in counts))

    def step_over(self, *, sampled: bool) -> None:
        """Assign what is watched from here on to the next round."""
        self._sampled = sampled
        self._tallies.forget_backwards()

    def release(self) -> None:
        """Forget what was measured until now; idempotent, from any thread."""
        self._sampled = False
        self._tallies.forget()

    def close(self) -> None:
        """Measure and clip nothing from here on."""
        self._closed = True

    # Hooks

    def _gradient_came(self, label: str, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Measure the gradient of a watched tensor: that at `place` of those of its node."""
        if (gradient := gradients[place]) is not None:
            self._measure(label, gradient)

    def _measure(self, label: str, gradient: torch.Tensor) -> None:
        task = graph_task()
        if task == -1 or capturing_graph():
            return
        start = self._cost.now()
        values = dense(gradient)
        if values is not None:
            key = TallyKey(label, label, values.device)
            self._tallies.measure(key, values, None, self._tallies.backward(task).tallies)
        self._cost.spent(start, sampled=True)

    def _clip_hook(self, label: str, max_norm: float, measured: bool, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the clipped gradient to PyTorch, None to leave it unchanged. `measured`: measure it before."""
        if is_compiling() or is_tracing() or self._closed:
            return None
        compiler = stop_compiling()
        try:
            if measured:
                self._measuring(self._measure, label, gradient)
            factor = self._guard.result(self._factor, label, max_norm, gradient)
            return None if factor is None else gradient * factor
        finally:
            compile_again(compiler)

    def _factor(self, label: str, max_norm: float, gradient: torch.Tensor) -> torch.Tensor:
        """Return the factor for a gradient, shape (): 1 where its norm is small enough, or is not finite."""
        values = dense(gradient)
        if values is None or values.shape != gradient.shape:
            if gradient.numel() == 0:
                return torch.ones((), dtype=gradient.dtype, device=gradient.device)
            # Of a part, the norm of the whole is unknown.
            raise RuntimeError("the gradient of a watched tensor is sparse or sharded over ranks, so that it is not clipped")
        with without_autocast(values.device.type):
            norm = torch.linalg.vector_norm(values, dtype=wide(values.device))
            scale = self._loss_scale.value
            limit = max_norm if scale is None else max_norm * scale.to(norm.dtype)
            within = (norm <= limit) | ~norm.isfinite()
            factor = torch.where(within, torch.ones_like(norm), limit / norm)
            new, count = (~within).to(norm.dtype).reshape(1), self._counts.get((label, values.device))
            # Never in place: on the CPU the host's side reads the memory of what was sent.
            self._counts[label, values.device] = new if count is None else count + new
            return factor


never_compile(WatchedTensors._clip_hook)


def check_watched(name: object, tensor: object, max_norm: object) -> None:
    """Check the arguments of `watch`; raise `TypeError` or `ValueError`."""
    if not isinstance(name, str):
        raise TypeError(f"watch(name={shown(name)}): expected a name")
    if not 1 <= len(name) <= 200:
        raise ValueError(f"watch(name={name[:20]!r}): expected a name of 1 to 200 characters")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"watch({name!r}, tensor={type(tensor).__name__}): expected a tensor")
    if max_norm is not None:
        check_number(f"watch({name!r}, max_norm={shown(max_norm)})", max_norm, above=0, example=1.0)
