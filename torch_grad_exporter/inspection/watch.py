"""WatchedTensors: the gradients of tensors that `exporter.watch` was given; clipped on request, which changes the training.

Gradients are measured in sampled rounds, and clipped in every backward, by a tensor hook that returns the gradient times a factor.
The factor stays on the device, and is exactly 1 where nothing is to be clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.arguments import check_number, shown
from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.round_tallies import RoundTallies, TallyKey
from torch_grad_exporter.inspection.tallies import without_autocast
from torch_grad_exporter.inspection.tensors import dense
from torch_grad_exporter.inspection.watch_totals import ClipCounts, WatchTotals
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.records import Inspected, Mailbox
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task, on_node_of, within_transform
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling

SOURCE = "watch"


class PartOfGradientError(RuntimeError):
    """A gradient of which this rank has only a part, so its norm is unknown and it cannot be clipped."""


class WatchedTensors(Inspection):
    """The inspection of watched tensors, which clips them as well. Belongs to the training thread, and to that of the backward.

    `sampled`: whether the gradients of what is watched now are to be measured. A gradient for which the clipping fails stays
    unchanged.
    """

    def __init__(
        self,
        *,
        hooks: Hooks,
        loss_scale: LossScale,
        cost: SampleCost,
        mailbox: Mailbox,
        totals: WatchTotals,
        errors: ErrorLog,
        sampled: bool,
    ) -> None:
        self._loss_scale, self._cost, self._mailbox = loss_scale, cost, mailbox
        self._totals = totals
        self._guard = errors.boundary(SOURCE, "gradients of watched tensors are no longer clipped")
        self._measuring = errors.boundary(SOURCE, "gradients of watched tensors are no longer measured")
        self._tallies = RoundTallies(SOURCE, loss_scale, cost, mailbox)
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._on_gradient = hooks.guarded(SOURCE, self._gradient_came)
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
        sent = [(labels, self._transfer.send(torch.cat([*counts]))) for labels, counts in self._counts_by_device()]
        arriving = [(labels, ticket) for labels, ticket in sent if ticket is not None]
        if arriving and len(arriving) == len(sent):
            names, tickets = zip(*arriving, strict=True)
            self._mailbox.append(Inspected(SOURCE, number, tickets, ClipCounts(names)))

    def step_over(self, *, sampled: bool) -> None:
        """Assign what is watched from here on to the next round."""
        self._sampled = sampled
        self._tallies.forget_backwards()

    def release(self) -> None:
        """Forget what was measured until now; idempotent, from any thread."""
        self._sampled = False
        self._tallies.forget()

    def close(self) -> None:
        """Measure and clip nothing from here on; takes no lock."""
        self._closed = True

    def _counts_by_device(self) -> Iterator[tuple[tuple[str, ...], tuple[torch.Tensor, ...]]]:
        for device in {device for _, device in self._counts}:
            own = {label: count for (label, of), count in self._counts.items() if of == device}
            yield tuple(own), tuple(own.values())

    # Hooks

    def _gradient_came(self, label: str, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Measure the gradient of a watched tensor: that at `place` of those of its node."""
        gradient, task = gradients[place], graph_task()
        if gradient is not None and task != -1 and not capturing_graph():
            self._measure(label, gradient, task)

    def _measure(self, label: str, gradient: torch.Tensor, task: int) -> None:
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
            task = graph_task()
            if measured and task != -1 and not capturing_graph():
                self._measuring(self._measure, label, gradient, task)
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
            raise PartOfGradientError("the gradient of a watched tensor is sparse or sharded over ranks, so that it is not clipped")
        with without_autocast(values.device.type):
            norm = torch.linalg.vector_norm(values, dtype=wide(values.device))
            scale = self._loss_scale.value
            limit = max_norm if scale is None else max_norm * scale.to(norm.dtype)
            within = (norm <= limit) | ~norm.isfinite()
            factor = torch.where(within, torch.ones_like(norm), limit / norm)
            self._count(label, values.device, within)
            return factor

    def _count(self, label: str, device: torch.device, within: torch.Tensor) -> None:
        key = label, device
        count = self._counts.get(key)
        new = (~within).to(wide(device)).reshape(1)
        # Never in place: on the CPU the host's side reads the memory of what was sent.
        self._counts[key] = new if count is None else count + new


never_compile(WatchedTensors._clip_hook)


def check(name: object, tensor: object, max_norm: object) -> None:
    """Check the arguments of `watch`.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument is wrong; likewise.
    """
    if not isinstance(name, str):
        raise TypeError(f"watch(name={shown(name)}): expected a name")
    if not 1 <= len(name) <= 200:
        raise ValueError(f"watch(name={name[:20]!r}): expected a name of 1 to 200 characters")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"watch({name!r}, tensor={type(tensor).__name__}): expected a tensor")
    if max_norm is not None:
        check_number(f"watch({name!r}, max_norm={shown(max_norm)})", max_norm, above=0, example=1.0)
