"""BlackBoxRecorder: writes a black box when something goes wrong for the first time, three in a run at most.

A thread of its own looks each second at what the rules have found: the history lets them judge every 15 seconds and after each few
samples, and this thread at once while a NaN or Inf is new. The training thread takes no part in it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_grad_exporter.actions.black_box.box import FORMAT, PART, boxes_below, plain_batch, samples_of, write
from torch_grad_exporter.capture.capture import Capture
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.errors import BusyError, Guard, warn
from torch_grad_exporter.inspection.black_box.kept import SOURCE, BatchRing, KeptBatch
from torch_grad_exporter.inspection.black_box.suspects import LOSS, NONFINITE, NORM, Suspects
from torch_grad_exporter.inspection.nan_origin.origins import SOURCE as ORIGIN
from torch_grad_exporter.inspection.nan_origin.origins import Origins
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.rules import RULES, Problem
from torch_grad_exporter.rules.catalogue import JUDGED
from torch_grad_exporter.store.journal import Journal, JournalEvent

# Boxes of a run and rank, at most; those that are in the folder when it starts count.
BOXES = 3

# Which batches a problem is about. What other rules of ours find, such as a slow loader, comes from no single batch; what those of
# other packages find may.
KINDS = {
    ORIGIN: NONFINITE,
    "TrainingNonFiniteLoss": NONFINITE,
    "TrainingNonFiniteGradients": NONFINITE,
    "TrainingFailed": NONFINITE,
    "LossSpike": LOSS,
    "GradientExploding": NORM,
    "SpikeAhead": NORM,
    "AttentionLogitsGrowing": NORM,
}
OTHERS = frozenset(rule.name for rules in JUDGED.values() for rule in rules) - KINDS.keys()

AT_END = Problem("TrainingNonFiniteGradients", "critical", "Gradients were NaN or Inf when the run ended.")

LOOK_SECONDS = 1.0

# How long a box waits for the last samples, which the history takes every five seconds, and for batches to come from a device.
WAIT_SECONDS, POLL_SECONDS = 10.0, 0.05

# How long the end waits for a box; the second if a user or a launcher waits for it.
CLOSE_SECONDS, HURRIED_SECONDS = 5.0, 2.0


class BlackBoxRecorder:
    """Writes boxes, from `start` until `close`.

    Args:
        folder: Of this run and rank.
        about: The process and its options, as JSON can hold them.
        ring, suspects: The batches, and which of them are needed.
        view: The history, and what was wrong.
        origins: What `nan_origin` has found, None if it is off.
        capture, clock: Count samples and steps.
        guard: Of each box.
        journal: Takes each box as an event, None for nothing.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        *,
        ring: BatchRing,
        suspects: Suspects,
        view: View,
        origins: Origins | None,
        capture: Capture,
        clock: StepClock,
        guard: Guard,
        journal: Journal | None = None,
    ) -> None:
        self._folder, self._about, self._ring, self._suspects = folder, about, ring, suspects
        self._view, self._origins, self._capture, self._clock, self._guard = view, origins, capture, clock, guard
        self._journal = journal
        self._left, self._seen, self._origin_step = BOXES - len(boxes_below(folder)), 0, -1
        self._nonfinite_written = False
        self._ring.full = self._left <= 0
        self._loop = BackgroundLoop("black-box", self._look, guard=guard, pause=LOOK_SECONDS, last=self._look_at_end)

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no thread can be started."""
        for part in self._folder.glob(f".*{PART}"):  # what a process of this run and rank that was killed has left
            shutil.rmtree(part, ignore_errors=True)
        self._log_if_full()
        self._loop.start()

    def close(self, *, hurried: bool) -> None:
        """Look for the last time, and wait a limited time for a box; then drop all batches. Idempotent."""
        self._loop.close(HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        self._ring.clear()

    # The thread

    def _look(self) -> None:
        if self._left > 0 and self._suspects.of(NONFINITE) and not self._loop.stopping:
            with contextlib.suppress(BusyError):
                self._view.live.remember()
        for problem, step in self._new_problems():
            if self._left > 0:
                self._guard(self._record, problem, step)

    def _look_at_end(self) -> None:
        """Look once more. Rules judge by samples, and a run that ends right after a NaN or Inf may have no sample of it."""
        self._look()
        if self._left > 0 and self._suspects.of(NONFINITE) and not self._suspects.finite:
            self._guard(self._record, AT_END, self._clock.number)

    def _new_problems(self) -> Iterator[tuple[Problem, int]]:
        """Yield what was not wrong at the last call, and at which step it was found."""
        origin = None if self._origins is None else self._origins.latest
        if origin is not None and origin.step != self._origin_step:
            self._origin_step = origin.step
            yield Problem(ORIGIN, "critical", f"At step {origin.step} {origin.text}.", origin.layer), origin.step
        wrong = self._view.live.wrong
        new, self._seen = wrong[self._seen :], len(wrong)
        first_steps = {rule.name: rule.first_steps for rule in RULES}
        for each in new:
            if each.alert not in OTHERS:
                text = first_steps.get(each.alert, "")
                yield Problem(each.alert, each.severity, each.text, each.layer, each.others, text), each.first

    def _record(self, problem: Problem, step: int) -> None:
        """Write a box, unless the batches of the problem were written with another one."""
        kind = KINDS.get(problem.alert, "")
        forwards = self._suspects.of(kind)
        if not forwards and kind == NONFINITE and (problem.alert == "TrainingFailed" or self._nonfinite_written):
            return
        ring = self._ring.batches
        batches = [ring[number] for number in forwards or self._ring.latest() if number in ring]
        self._wait_for(batches)
        self._suspects.written(kind)
        content = {"batches": [plain_batch(batch) for batch in batches], "samples": samples_of(self._view.history)}
        about = {**FORMAT, "problem": asdict(problem), "found_at_step": step, "lost": self._ring.lost, "time": time.time()}
        step = about["step"] = batches[-1].step if batches else step
        path = write(self._folder, f"{problem.alert}-step-{step}", {**about, **self._about}, content)
        self._left -= 1
        self._nonfinite_written |= kind == NONFINITE
        text = f"{SOURCE}: {problem.text.rstrip('.')}; what it takes to see it again is in {path}"
        warn("%s", text)
        if self._journal is not None:
            facts = {"alert": problem.alert, "layer": problem.layer, "step": step, "path": str(path)}
            self._journal.add(JournalEvent(time.time(), "torch.black_box", "warning", text, facts))
        self._ring.full = self._left <= 0
        self._log_if_full()

    def _log_if_full(self) -> None:
        if self._ring.full:
            warn("%s: %s has %d boxes, no more are written for this run and no batches are kept", SOURCE, self._folder, BOXES)

    def _wait_for(self, batches: list[KeptBatch]) -> None:
        """Wait until the history has the last sample, and the host has the batches; for a limited time, and not at the end."""
        samples, end = self._capture.samples, time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end and not self._loop.stopping:
            if self._view.history.samples >= samples and all(batch.on_host for batch in batches):
                return
            time.sleep(POLL_SECONDS)
