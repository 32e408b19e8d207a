"""Decides for each device whether the programs measure its gradients, or torch's own operations.

They do from the sample on after two comparisons: of gradients that take each way through the programs, then of one sample of the
training's own. Until the numbers of both have arrived, which is looked at when a sample is read and never waited for, those by
torch's operations count. What fails before that, be it Triton's import, the compilation or a comparison, decides for torch's
operations for good. Later failures cost the sample its speed, and ten in a row switch the programs off.

All of it runs on the training thread, the compilation too, which takes a second or two once: a CUDA call of another thread
could spoil the capture of a CUDA graph. `once` tells of it, so that the interval between samples does not depend on it.
"""

from __future__ import annotations

import enum
import importlib.util
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch

from torch_grad_exporter.errors import Guard, logger, say
from torch_grad_exporter.metrics.families import BoolArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, Group
from torch_grad_exporter.statistics.device import ByTorch, GroupReading
from torch_grad_exporter.statistics.kernels import launch
from torch_grad_exporter.statistics.kernels.tables import Read
from torch_grad_exporter.statistics.kernels.trial import Send, Trial, probe
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.torch_compat.autograd import capturing_graph


class Implementation(enum.Enum):
    """What may measure gradients on a GPU."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"

    @property
    def by_programs(self) -> bool:
        """Whether programs are to measure; `AUTO`: on NVIDIA's GPUs, where they are known to be faster, if Triton is there."""
        if self is Implementation.AUTO:
            return torch.version.hip is None and importlib.util.find_spec("triton") is not None
        return self is Implementation.TRITON


class _Stage(enum.Enum):
    NEW = "nothing was tried"
    PROBING = "the probe is under way"
    PROBED = "the probe was read rightly"
    COMPARING = "a sample is under way"
    TRUSTED = "both were read rightly"
    OFF = "torch's operations, for good"


@dataclass(slots=True, eq=False)
class _Device:
    """How far the decision is. `trusted`: whether the programs read the present sample.

    `launcher`, `for_norms`: each keeps the tables of its last call. `seconds`: what the first comparison and all before it took.
    """

    stage: _Stage = _Stage.NEW
    launcher: launch.Launcher | None = None
    for_norms: launch.Launcher | None = None
    seconds: float = 0.0
    trial: Trial | None = None
    trusted: bool = False


class Kernels:
    """Measures gradients of devices by the programs where they are trusted, else by torch. Belongs to the training thread.

    `guard`: counts what fails. `send`: starts copies to the host. `kinds`: of devices that have the programs. `load`: gives these.
    `capturing`: whether a CUDA graph is being captured, in which nothing may be compiled or sent.
    """

    def __init__(
        self,
        layout: Layout,
        guard: Guard,
        send: Send,
        *,
        kinds: frozenset[str] = frozenset({"cuda"}),
        load: Callable[[], ModuleType] = launch.programs,
        capturing: Callable[[], bool] = capturing_graph,
    ) -> None:
        self._layout = layout
        self._guard = guard
        self._send = send
        self._kinds = kinds
        self._load = load
        self._capturing = capturing
        self._devices: dict[torch.device, _Device] = {}
        self._between = True
        """Whether no gradient was read since a sample was finished: within one nothing changes, so that its norms compare."""
        self._once = False

    @property
    def trusted(self) -> frozenset[torch.device]:
        """The devices that have passed both comparisons."""
        return frozenset(where for where, state in self._devices.items() if state.stage is _Stage.TRUSTED)

    def taken_once(self) -> bool:
        """Return whether work was done since the last call that samples to come do not need."""
        once, self._once = self._once, False
        return once

    def finished(self) -> None:
        """All gradients of a sample are read; their norms may follow."""
        self._between = True

    def read(self, group: Group, parts: Sequence[Batch], by_torch: ByTorch) -> list[GroupReading]:
        """All that can be said of the gradients of one device without their past."""
        if group.device.type not in self._kinds or self._capturing():
            return [by_torch.read(group, parts)]
        if self._between:
            self._between = False
            for where, known in self._devices.items():
                self._settle(where, known)
        state = self._devices.setdefault(group.device, _Device())
        if state.stage is _Stage.NEW:
            self._try(state, self._begin, state, group.device, by_torch)
        run = state.launcher
        if run is None or not (state.trusted or state.stage is _Stage.PROBED):
            return [by_torch.read(group, parts)]
        (own, mine), left = split(group, parts, run)
        rest = [by_torch.read(*left)] if left else []
        if not mine:
            return rest
        if state.trusted and (found := self._guard.result(self._launched, run, own, mine)) is not None:
            return [found, *rest]
        state.trusted = False
        reading = by_torch.read(own, mine)
        if state.stage is _Stage.PROBED:
            self._try(state, self._compare, state, reading, mine)
        return [reading, *rest]

    def norms(self, group: Group, parts: Sequence[Batch], by_torch: ByTorch) -> list[GroupReading]:
        """Only the norms, by what has read the last sample."""
        state = self._devices.get(group.device)
        run = None if state is None or not state.trusted or self._capturing() else state.for_norms
        if run is None:
            return [by_torch.read(group, parts)]
        (own, mine), left = split(group, parts, run)
        rest = [by_torch.read(*left)] if left else []
        if not mine:
            return rest
        found = self._guard.result(run, gradients_of(mine), same(own, mine))
        if found is None:
            return [by_torch.read(own, mine), *rest]
        rows = found.rows[:, Column.NORM : Column.NORM + 1]
        return [GroupReading(own, [1] * len(rows), rows, found.zero, found.alive), *rest]

    def _try(self, state: _Device, action: Callable[..., None], *arguments: object) -> None:
        """A step of the decision; if it fails, the decision is for torch."""
        if not self._guard(action, *arguments):
            state.stage, state.trial = _Stage.OFF, None

    def _begin(self, state: _Device, where: torch.device, by_torch: ByTorch) -> None:
        self._once, start = True, time.perf_counter()
        programs = self._load()
        state.launcher, state.for_norms = (launch.Launcher(where, self._layout, programs) for _ in range(2))
        group, parts = probe(where)
        self._compare(state, by_torch.read(group, parts), parts)
        state.seconds = time.perf_counter() - start

    def _compare(self, state: _Device, expected: GroupReading, parts: Sequence[Batch]) -> None:
        """Begin a trial, if it can be sent now."""
        self._once = True
        if state.launcher is None:
            return
        trial = Trial.of(expected, self._launched(state.launcher, expected.group, parts), self._layout, self._send)
        if trial is not None:
            state.stage = _Stage.PROBING if state.stage is _Stage.NEW else _Stage.COMPARING
            state.trial = trial

    def _settle(self, where: torch.device, state: _Device) -> None:
        """Between two samples: the trial may be over, and the next sample is read by what is trusted then."""
        if state.trial is not None:
            self._try(state, self._judge, where, state, state.trial)
        state.trusted = state.stage is _Stage.TRUSTED and not self._guard.off

    def _judge(self, where: torch.device, state: _Device, trial: Trial) -> None:
        if trial.passed():
            state.trial = None
            if state.stage is _Stage.PROBING:
                state.stage = _Stage.PROBED
                return
            state.stage = _Stage.TRUSTED
            message = "programs in Triton measure the gradients on %s from now on; compiling and trying them took %.1f s, once"
            say(logger, logging.INFO, message, where, state.seconds)

    def _launched(self, run: launch.Launcher, group: Group, parts: Sequence[Batch]) -> GroupReading:
        found = run(gradients_of(parts), same(group, parts))
        return GroupReading(group, [1] * len(found.rows), found.rows, found.zero, found.alive)


Part = tuple[Group, tuple[Batch, ...]]


def gradients_of(parts: Sequence[Batch]) -> list[Read]:
    """All gradients of batches, each with its units."""
    return [(tensor, batch.layout) for batch in parts for tensor in batch.tensors]


def same(group: Group, parts: Sequence[Batch]) -> Group | None:
    """Return what stands for gradients that differ from those before in their memory alone, if they are contiguous: their group."""
    return group if all(tensor.is_contiguous() for batch in parts for tensor in batch.tensors) else None


def split(group: Group, parts: Sequence[Batch], run: launch.Launcher) -> tuple[Part, Part | None]:
    """Return those gradients that the programs can read, and the others, if there are any."""
    mask = np.array(run.readable(gradients_of(parts), group), dtype=np.bool_)
    if mask.all():
        return (group, tuple(parts)), None
    return _only(group, parts, mask), _only(group, parts, ~mask)


def _only(group: Group, parts: Sequence[Batch], mask: BoolArray) -> Part:
    """Return a part of a group."""
    members = tuple(member for member, wanted in zip(group.members, mask.tolist(), strict=False) if wanted)
    numbers = {name: getattr(group, name)[mask] for name in ("positions", "elements", "units", "implied")}
    left, batches = mask.tolist(), []
    for batch in parts:
        wanted, left = left[: len(batch.tensors)], left[len(batch.tensors) :]
        if any(wanted):
            positions, tensors = itertools.compress(batch.positions, wanted), itertools.compress(batch.tensors, wanted)
            batches.append(replace(batch, positions=tuple(positions), tensors=tuple(tensors)))
    return replace(group, members=members, **numbers), tuple(batches)
