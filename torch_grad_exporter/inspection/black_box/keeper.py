"""BatchKeeper: keeps what roots are given, and sends, after each backward, what shows whether gradients are finite."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.black_box.kept import SOURCE, WRITTEN, BatchRing, KeptBatch
from torch_grad_exporter.inspection.black_box.random_states import random_states
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender, by_device, dense
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import capturing_graph, within_transform

# Parameters whose gradients are looked at after each backward, and the largest that they may be: a NaN of the loss is in all.
WITNESSES, LARGEST = 4, 1 << 14

# The end waits this long for batches that are copied from a device.
END_SECONDS = 2.0

# Why the next round is to be followed. Asked for in each forward, as none may be missed while batches are kept.
EACH = f"{SOURCE} (all rounds)"

UNREADABLE = "what the model was given could not be read"
FAILED, WAITS = "it could not be copied to the host", "to copy from such a device would wait"


class BatchKeeper(Inspection):
    """The inspection of all rounds. Belongs to the training thread, and to that of the backward.

    The mailbox gets a record of each forward with its number, and after a backward one of the largest magnitudes in some gradients.
    """

    def __init__(
        self, context: InspectionContext, ring: BatchRing, models: Mapping[str, torch.nn.Module], *, requests: Requests,
        rounds: RoundTracker, guard: Guard,
    ) -> None:  # fmt: skip
        self._clock, self._mailbox = context.clock, context.mailbox
        self._ring, self._requests, self._rounds, self._guard = ring, requests, rounds, guard
        self._names = [(weakref.ref(module), name) for name, module in models.items()]
        self._sender = VectorSender(SOURCE, context)
        self._table: ParameterTable | None = None
        self._witnesses: list[TrackedParameter] = []
        self._without_round: list[KeptBatch] = []
        self._copying: dict[int, list[torch.cuda.Event]] = {}  # by forward, what shows that its tensors are on the host
        self._number = -1
        requests.arm(1, EACH)

    def requested(self, rounds: Mapping[str, int]) -> None:
        """Sample the next round that can be: rules judge by samples, and the next that is due may be far."""
        if SOURCE in rounds and not self._ring.full and not self._rounds.current.sampled:
            self._rounds.postpone()

    @torch.no_grad()
    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:  # noqa: ARG002
        """Keep what the root is given."""
        if self._ring.full:
            self.release()
            self._copying.clear()
            self._ring.clear()
            return
        self._requests.arm(1, EACH)
        if capturing_graph() or within_transform():
            return
        self._number += 1
        # First, so that the worker knows of which forward a loss is that comes next.
        self._mailbox.append(Inspected(SOURCE, self._number, ()))
        for numbers in tuple(self._ring.pins.values()):
            self._fetch(numbers)
        name = next((name for model, name in self._names if model() is root), "")
        batch = KeptBatch(self._number, self._clock.number, name, {})
        if not self._guard(batch.fill, args, kwargs):
            batch.args, batch.kwargs, batch.tensors, batch.left_out = [], {}, [], {"args": UNREADABLE}
        # The model may move the batch itself.
        given = (kept.tensor for kept in batch.tensors)
        batch.states = random_states({each.device for each in (*given, next(root.parameters(), None)) if each is not None})
        self._without_round.append(batch)
        del self._without_round[:-2]
        self._ring.add(batch)

    @torch.no_grad()
    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Send the largest magnitude in the gradients of a few parameters, which is not finite if one of theirs is not."""
        if self._ring.full:
            return
        self._end_round(current)
        gradients = ((tracked, gradient) for tracked in self._chosen(current.table) if (gradient := tracked.gradient()) is not None)
        parts = ((tracked, part.reshape(-1)) for tracked, gradient in gradients if (part := dense(gradient)) is not None)
        # The largest magnitude does not overflow, as a norm of float16 would.
        devices = ([part for _, part in here] for here in by_device(parts).values())
        self._sender.send(self._number, [torch.linalg.vector_norm(torch.cat(here), torch.inf).reshape(1) for here in devices])

    def gradients_read(self, current: ArmedRound) -> None:
        """Note the round, where gradients are read at the step and no backward is seen."""
        self._end_round(current)

    @torch.no_grad()
    def training_over(self) -> None:
        """Bring the last batches to the host, and wait for that for a limited time."""
        numbers = {number for pinned in self._ring.pins.values() for number in pinned} | {*self._ring.latest()}
        end = time.monotonic() + END_SECONDS
        while self._fetch(numbers) and time.monotonic() < end:
            time.sleep(0.001)
        self._copying.clear()

    def release(self) -> None:
        """Drop what only a further round would need. The ring stays until the last box is written."""
        self._table, self._witnesses, self._without_round = None, [], []

    def _end_round(self, current: ArmedRound) -> None:
        for batch in self._without_round:
            batch.round = current.number
        self._without_round.clear()

    def _chosen(self, table: ParameterTable) -> list[TrackedParameter]:
        """Return small parameters from the whole length of the model, or else the smallest."""
        if table is not self._table:
            tracked = [parameter for parameter in table.tracked if parameter.elements]
            small = [parameter for parameter in tracked if parameter.elements <= LARGEST]
            chosen = small or sorted(tracked, key=lambda parameter: parameter.elements)[:1]
            spread = dict.fromkeys(np.linspace(0, len(chosen) - 1, WITNESSES).round().astype(int).tolist()) if chosen else {}
            self._table, self._witnesses = table, [chosen[place] for place in spread]
        return self._witnesses

    def _fetch(self, numbers: Iterable[int]) -> bool:
        """Begin to copy tensors of these forwards to the host, or see whether they are there; return whether some are not yet."""
        waits = False
        for number in numbers:
            batch = self._ring.batches.get(number)
            if batch is None or batch.on_host:
                continue
            if number not in self._copying:
                self._copying[number] = self._copies_of(batch)
            batch.on_host = all(event.query() for event in self._copying[number])  # type: ignore[no-untyped-call]
            waits |= not batch.on_host
            if batch.on_host:
                del self._copying[number]
        return waits

    def _copies_of(self, batch: KeptBatch) -> list[torch.cuda.Event]:
        """Put copies on the host in the place of tensors on devices; return what shows that they have arrived."""
        devices = set()
        for kept in batch.tensors:
            given = kept.tensor
            if given is None or given.device.type == "cpu":
                continue
            changed, kept.tensor, kept.version = kept.changed, None, None
            if changed or given.device.type != "cuda":
                batch.left_out[kept.place] = WRITTEN if changed else WAITS
                continue
            kept.tensor = self._guard.result(_begin_copy, given)
            if kept.tensor is None:
                batch.left_out[kept.place] = FAILED
            devices.add(given.device)
        events = [torch.cuda.Event() for _ in devices]  # type: ignore[no-untyped-call]
        for device, event in zip(devices, events, strict=True):
            event.record(torch.cuda.current_stream(device))
        return events


def _begin_copy(given: torch.Tensor) -> torch.Tensor:
    host = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
    return host.copy_(given, non_blocking=True)
