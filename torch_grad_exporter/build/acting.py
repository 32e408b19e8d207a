"""What rules and the user's conditions ask for."""

from __future__ import annotations

import threading

from torch_grad_exporter.actions.act.act import Act
from torch_grad_exporter.actions.act.decisions import JobOfRanks
from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.runner import StepActionRunner
from torch_grad_exporter.actions.act.sample_feed import SampleFeed
from torch_grad_exporter.actions.act.step_actions import Training
from torch_grad_exporter.actions.freeze.layers import FrozenLayers
from torch_grad_exporter.actions.notify.notify import JobReports, Notify
from torch_grad_exporter.actions.rollback.state import TrainingState
from torch_grad_exporter.build.capturing import CaptureStage
from torch_grad_exporter.build.inspecting import InspectionTotals
from torch_grad_exporter.build.scraping import ScrapeStage
from torch_grad_exporter.collectors.clipping import ClipReports
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.config.checked import Checked


class ActionStage:
    """What rules and the user's conditions ask for: actions, and messages of problems.

    Attributes:
        stop_requested: Set by `Stop()`.
        act: Runs the actions.
    """

    def __init__(self, stage: CaptureStage, totals: InspectionTotals, shown: ScrapeStage, checked: Checked) -> None:
        settings, identity, errors = checked.settings, checked.identity, stage.errors
        several = identity.world_size > 1
        feed = None
        if "gradients" in settings.enabled_collectors:
            of_samples = GradientCollector(
                shown.context.snapshots, stage.optimizers.names, dead_window=settings.dead_window,
                moments=settings.moments, local_norms=totals.local_norms,
                clip=None if checked.clip is None else ClipReports(),
            )  # fmt: skip
            feed = SampleFeed(shown.worker, of_samples, errors.boundary(SOURCE, "reading samples", limit=None))
        self.stop_requested = threading.Event()
        reports = ActionReports(errors, shown.acted, stage.clock)
        training = Training(
            stage.optimizers, self.stop_requested, FrozenLayers(checked.index, stage.optimizers, shown.frozen), shown.worker,
            TrainingState(checked.index, stage.optimizers, stage.loss_scale), stage.clock, stage.capture.rounds, shown.rollbacks,
            ranks=identity.world_size, ranks_here=identity.local_world_size,
        )  # fmt: skip
        job = JobOfRanks(checked.store, checked.run, identity.rank, identity.world_size) if several else None
        runner = StepActionRunner(training, reports, job, spent=stage.clock.spent)
        self.act = Act(shown.view.live, runner, reports, samples=feed)
        self._notify = None
        if shown.notified is not None:
            self._notify = Notify(
                checked.arguments.alerts, shown.view.live, shown.notified, errors,
                run=checked.run, rank=checked.rank, steps=stage.clock,
                job=JobReports(checked.store, checked.rank, identity.world_size) if several else None,
            )  # fmt: skip
        self._notify_guard = errors.boundary("notify", limit=None)

    def start(self) -> None:
        """Begin to judge and to send messages, if the user asked for them."""
        if self._notify is not None:
            self._notify_guard(self._notify.start)

    def close(self, *, hurried: bool) -> None:
        """Judge once more and end; what is being sent is waited for, for a limited time."""
        try:
            if self._notify is not None:
                self._notify.close(hurried=hurried)
        finally:
            self.act.close(hurried=hurried)

    def after_fork_in_child(self) -> None:
        """Give up what belongs to the parent process."""
        if self._notify is not None:
            self._notify.after_fork_in_child()
        self.act.after_fork_in_child()
