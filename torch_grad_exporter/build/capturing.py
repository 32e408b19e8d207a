"""The stage on the thread that trains."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from torch_grad_exporter.capture.capture import Capture
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.capture.interruptions import COMPILING
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.measuring import InspectionContext
from torch_grad_exporter.lifecycle import THREAD_TIME
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.resources.devices import DeviceMemory, built_for_devices
from torch_grad_exporter.statistics.declared import chosen
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.records import Mailbox
from torch_grad_exporter.torch_compat.compile_events import CompileEvents
from torch_grad_exporter.torch_compat.optimizers import LossScale


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStage:
    """What runs on the thread that trains: hooks, rounds, sampling, and the gradients' numbers."""

    errors: ErrorLog
    mailbox: Mailbox
    layout: Layout
    events: EventPool
    hooks: Hooks
    clock: StepClock
    schedule: SamplingSchedule
    cost: SampleCost
    optimizers: Optimizers
    loss_scale: LossScale
    reader: GradientReader
    memory: DeviceMemory
    requests: Requests
    compile_events: CompileEvents
    capture: Capture

    @property
    def context(self) -> InspectionContext:
        """What inspections work with."""
        return InspectionContext(self.hooks, self.clock, self.cost, self.mailbox, self.loss_scale)


def build_capture(checked: Checked, errors: ErrorLog) -> CaptureStage:
    """Make what watches the training. Nothing is hooked yet."""
    settings, mailbox = checked.settings, Mailbox()
    enabled = {field.name: getattr(settings, field.name) is True for field in fields(settings)}
    layout = Layout(chosen(enabled))
    events = EventPool(errors.boundary("timing"))
    hooks = Hooks(errors)
    clock = StepClock(mailbox, events=events)
    guard, interruptions = errors.boundary("timing", "compilations"), clock.interruptions
    compile_events = CompileEvents(
        functools.partial(guard, interruptions.begin, COMPILING), functools.partial(guard, interruptions.end, COMPILING)
    )
    schedule = SamplingSchedule(settings.interval, settings.overhead_budget, THREAD_TIME)
    optimizers = Optimizers(checked.index, checked.arguments.optimizers)
    kernels = None
    if settings.statistics.by_programs:
        kernels = Kernels(layout, errors.boundary("kernels"), HostTransfer(ring=1).post)
    cost = SampleCost(clock, schedule, events, kernels)
    loss_scale = LossScale(checked.arguments.grad_scaler)
    reader = GradientReader(
        optimizers=optimizers, statistics=EagerStatistics(settings.dead_window, layout, kernels=kernels), clock=clock,
        cost=cost, mailbox=mailbox, errors=errors, loss_scale=loss_scale,
    )  # fmt: skip
    memory = DeviceMemory(used=lambda: reader.devices)
    requests = Requests()
    refresh = None
    if built_for_devices() and REGISTRY.reads_devices(settings.enabled_collectors):
        refresh = functools.partial(errors.boundary("devices"), memory.refresh)
    capture = Capture(
        index=checked.index, optimizers=optimizers, clock=clock, cost=cost, schedule=schedule,
        reader=reader, loss_scale=loss_scale, hooks=hooks, mailbox=mailbox, requests=requests, errors=errors,
        periodic=refresh,
    )  # fmt: skip
    return CaptureStage(
        errors=errors, mailbox=mailbox, layout=layout, events=events, hooks=hooks, clock=clock, schedule=schedule, cost=cost,
        optimizers=optimizers, loss_scale=loss_scale, reader=reader, memory=memory, requests=requests,
        compile_events=compile_events, capture=capture,
    )  # fmt: skip
