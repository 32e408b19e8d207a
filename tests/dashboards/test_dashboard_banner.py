"""The first row of the training overview agrees with the alerts on the same series."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import yaml

from tests.support.grafana import ALL, EVERYTHING, dashboards, interpolated, panels
from tests.support.tools import PATIENCE, REPOSITORY, find

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMETHEUS = REPOSITORY / "dashboards" / "prometheus"
QUERIES = {(query.dashboard, query.panel, query.ref): query.expr for board in dashboards().values() for query in panels(board)}
ALERTS = {
    rule["alert"]: rule["expr"]
    for path in PROMETHEUS.glob("*.alerts.yml")
    for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
TRAINING, GONE, DOWN, FAILED = 3, 6, 8, 9
NEVER = -1
STATES = ("initialising", "training", "evaluating", "finished", "failed")


def panel(title: str, ref: str = "A", *, span: str = "1h", dashboard: str = "Training overview", job: str = ALL) -> str:
    """Return the query of a panel with all variables at All but `job`."""
    chosen = EVERYTHING | {"job": job}
    return interpolated(QUERIES[dashboard, title, ref], chosen, "4m", span=span)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of run a in Prometheus, from the minute of its first scrape to that of its last one."""

    instance: str
    first: int
    last: int
    state: str = "training"
    rank: int = 0
    world: int = 1
    started: int | None = None
    active: int | None = None
    slowest: str = "1"
    answers: bool = True
    counted: tuple[tuple[str, float | str], ...] = ()

    def values(self, value: object) -> str:
        """Return the same value at each scrape, and then none."""
        return f"{f'_x{self.first} ' if self.first else ''}{value}x{self.last - self.first} stale"

    def gauges(self) -> Iterator[tuple[str, str]]:
        """Yield its gauges apart from the state."""
        start = 60 * (self.first if self.started is None else self.started)
        yield "torch_train_world_size", self.values(self.world)
        yield "torch_train_start_timestamp_seconds", self.values(start)
        yield "torch_train_slowest_step_seconds", self.values(self.slowest)
        yield "torch_train_last_step_timestamp_seconds", self.values(start + 1)
        growing = f"{'_x' + str(self.first) + ' ' if self.first else ''}{60 * self.first}+60x{self.last - self.first} stale"
        if self.active != NEVER:
            yield "torch_train_last_activity_timestamp_seconds", growing if self.active is None else self.values(60 * self.active)

    def series(self) -> Iterator[dict[str, str]]:
        """Yield its series and `up` of its target, which is 0 after the last scrape."""
        target = f'job="{self.instance.partition(":")[0]}", instance="{self.instance}"'
        own = f'run="a", rank="{self.rank}", {target}'
        for state in STATES:
            yield {"series": f'torch_train_state{{{own}, state="{state}"}}', "values": self.values(int(state == self.state))}
        for name, values in self.gauges():
            yield {"series": f"{name}{{{own}}}", "values": values}
        for name, value in self.counted:
            plain, _, labels = name.partition("{")
            yield {"series": f"{plain}{{{own}, {labels or '}'}", "values": self.values(value)}
        if self.answers:
            up = f"{f'_x{self.first} ' if self.first else ''}1x{self.last - self.first} 0x300"
            yield {"series": f"up{{{target}}}", "values": up}


Series = list[dict[str, str]]
Asked = dict[str, dict[str, float]]
Scene = tuple[Series, int, Asked]
SCENES: dict[str, Callable[[], Iterator[Scene]]] = {}
"""Cases by name: series, a minute, and the samples that each expression then yields."""


def scene(function: Callable[[], Iterator[Scene]]) -> Callable[[], Iterator[Scene]]:
    """Register a case."""
    SCENES[function.__name__] = function
    return function


def of(processes: list[Process], minute: int, asked: Asked) -> Scene:
    """Return what the expressions yield at a minute of these processes."""
    return [series for process in processes for series in process.series()], minute, asked


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run one promtool over all cases and return the complaints by case."""
    folder = tmp_path_factory.mktemp("banner")
    rules = [str(PROMETHEUS / name) for name in ("training.rules.yml", "ranks.rules.yml")]
    for name, function in SCENES.items():
        groups: dict[str, tuple[Series, list[dict[str, object]]]] = {}
        for series, minute, asked in function():
            # A group of the same series is evaluated once for all its minutes.
            _, expected = groups.setdefault(json.dumps(series), (series, []))
            expected += [
                {
                    "expr": expression,
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
                }
                for expression, samples in asked.items()
            ]
        tests = [{"interval": "1m", "input_series": series, "promql_expr_test": asked} for series, asked in groups.values()]
        text = json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": tests})
        (folder / f"{name}.yml").write_text(text, encoding="utf-8")
    command = [find("promtool"), "test", "rules", *sorted(folder.iterdir())]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"GOGC": "off", "GOMEMLIMIT": "400MiB"},
    )
    parts = re.split(r"^Unit Testing:  \S*/(\w+)\.yml$", done.stdout + done.stderr, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert said.keys() == SCENES.keys(), done.stdout + done.stderr
    return {name: text for name, text in said.items() if text.strip() != "SUCCESS"}


def state(number: int) -> dict[str, dict[str, float]]:
    """Return the run's state and the two alerts about a state, each of which fires in its own state only."""
    fired = {"TrainingTargetDown": DOWN, "TrainingFailed": FAILED}
    alerts = {f"group({ALERTS[name]})": {"{}": 1.0} if number == own else {} for name, own in fired.items()}
    return {panel("State"): {'{run="a"}': number}, **alerts}


FILE = Process("node:9100", 0, 300, "failed", active=10)
"""The text file of a rank that failed after 10 minutes."""

BEFORE = [Process(f"train:{rank}", 0, 100, rank=rank, world=2) for rank in (0, 1)]
ALONE = Process("train:2", 103, 300)
"""Rank 0 of a run that continues with one rank."""


def shown_rank(number: float) -> Asked:
    """Return the state of rank 0 in the panel of all ranks."""
    return {panel("State of each rank", dashboard="Ranks"): {'{as="a 000", run="a", rank="0", rank_name="rank 0"}': number}}


@scene
def restarted_rank_is_training() -> Iterator[Scene]:
    """A rank that trains is Training, beside the text file of its failed predecessor."""
    yield of([FILE, Process("train:1", 20, 300)], 60, state(TRAINING) | shown_rank(2.0))


@scene
def failed_rank_is_failed() -> Iterator[Scene]:
    """A failed rank is Failed, also while the other rank waits for it."""
    yield of([FILE], 60, state(FAILED) | shown_rank(5.0))
    yield of([FILE, Process("train:1", 0, 300, rank=1, world=2, active=10)], 60, state(FAILED))


@scene
def failure_before_an_elastic_restart_is_hidden() -> Iterator[Scene]:
    """A failure after which the run continued is not shown."""
    left = Process("node:9101", 0, 300, "failed", rank=1, active=10)
    yield of([left, Process("train:2", 20, 300)], 60, state(TRAINING))


@scene
def unreachable_rank_is_down() -> Iterator[Scene]:
    """One or both unreachable ranks are Down, and Gone without a target; after an hour the other rank decides."""
    processes = [BEFORE[0], Process("train:1", 0, 300, rank=1, world=2)]
    for minute, number in ((110, DOWN), (159, DOWN), (162, TRAINING)):
        yield of(processes, minute, state(number))
    yield of(BEFORE, 110, state(DOWN))
    yield of([Process("train:0", 0, 100, answers=False)], 110, state(GONE))


@scene
def ranks_left_by_a_restart_are_not_down() -> Iterator[Scene]:
    """Old targets do not count once all ranks of the new world size run."""
    yield of([*BEFORE, ALONE], 110, state(TRAINING))


@scene
def older_run_of_a_target_is_gone() -> Iterator[Scene]:
    """Of two runs served by one address the later is Down."""
    old, new = ([row for row in process.series() if "up{" not in row["series"]] for process in (
        Process("train:1", 0, 50), Process("train:1", 60, 100, started=60)))  # fmt: skip
    renamed = [row | {"series": row["series"].replace('run="a"', 'run="b"')} for row in new]
    up = {"series": 'up{job="train", instance="train:1"}', "values": "1x50 0x8 1x40 0x100"}
    yield [*old, *renamed, up], 102, {panel("State"): {'{run="a"}': GONE, '{run="b"}': DOWN}}


def alerting(name: str, severity: str, run: str, more: str = "") -> Series:
    """Return the series of a firing alert."""
    labels = f'alertname="{name}", severity="{severity}", run="{run}"{more}'
    return [
        {"series": f'ALERTS{{{labels}, alertstate="firing"}}', "values": "1x10"},
        {"series": f"ALERTS_FOR_STATE{{{labels}}}", "values": "60x10"},
    ]


def world(run: str, job: str) -> dict[str, str]:
    """Return the world size of a run, which shows its job."""
    return {"series": f'torch_train_world_size{{job="{job}", instance="h:1", run="{run}", rank="0"}}', "values": "1x10"}


@scene
def alerts_of_the_chosen_jobs() -> Iterator[Scene]:
    """The list has the alerts whose run was seen in a chosen job."""
    series = [row for run, job in (("a", "one"), ("b", "two")) for row in (world(run, job),
        *alerting("TrainingStalled", "critical", run))]  # fmt: skip
    row = '{alertname="TrainingStalled", layer="All", rank="All", run="a"}'
    yield series, 5, {panel("Firing alerts", ref, job="one"): {row: value} for ref, value in (("A", 3.0), ("B", 60_000.0))}


@scene
def dead_layer_is_listed_once() -> Iterator[Scene]:
    """Of both severities of LayerDead the higher is listed, without GradientVanishing of that layer."""
    series = [world("a", "t")]
    for name, severity, layer in (("LayerDead", "warning", "l"), ("LayerDead", "info", "l"),
        ("GradientVanishing", "warning", "l"), ("GradientVanishing", "warning", "m")):  # fmt: skip
        series += alerting(name, severity, "a", f', layer="{layer}"')
    listed = {f'{{alertname="{name}", layer="{layer}", rank="All", run="a"}}': 2.0
        for name, layer in (("LayerDead", "l"), ("GradientVanishing", "m"))}  # fmt: skip
    yield series, 5, {panel("Firing alerts"): listed}


COUNTED = (
    ('torch_grad_nonfinite_steps_total{optimizer="x", outcome="stepped"}', "A", "TrainingNonFiniteGradients"),
    ('torch_grad_nonfinite_steps_total{optimizer="x", outcome="skipped"}', "B", None),
    ("torch_train_loss_nonfinite_total", "C", "TrainingNonFiniteLoss"),
)


@scene
def nan_before_the_first_scrape() -> Iterator[Scene]:
    """NaN counted at the first scrape shows for 10 minutes, and while the range holds the start of the process."""
    title = "NaN and Inf"
    for name, ref, alert in COUNTED:
        process = Process("train:1", 200, 300, started=199, counted=((name, 3),))
        for span, minute, seen in (("1h", 204, 1.0), ("5m", 208, 1.0), ("1h", 240, 1.0), ("5m", 240, 0.0)):
            fired: Asked = {f"group({ALERTS[alert]})": {"{}": 1.0} if minute < 209 else {}} if alert else {}
            yield of([process], minute, {panel(title, ref, span=span): {"{}": seen}} | fired)
        quiet: Asked = {f"group({ALERTS[alert]})": {}} if alert else {}
        none = Process("train:1", 200, 300, counted=((name, 0),))
        yield of([none], 204, {panel(title, ref): {"{}": 0.0}} | quiet)


def counter(name: str, values: str) -> Series:
    """Return a counter of run a, a minute from scrape to scrape, and its run."""
    return [world("a", "t"), {"series": f'{name}{{job="t", instance="h:1", run="a", rank="0"}}', "values": values}]


@scene
def counts_are_exact() -> Iterator[Scene]:
    """Seven events within a window are 7, not the 9 of an extrapolation; of a counter that began again, about as many."""
    exact = {
        "torch_train_loss_nonfinite_total": (("NaN and Inf", "C"), "{}"),
        "torch_train_loss_spikes_total": (("Spikes", "B"), "{}"),
        "torch_train_skipped_steps_total": (("Skipped steps and loss scale", "A"), '{run="a"}'),
    }
    for name, (title, labels) in exact.items():
        yield counter(name, "0x2 7x60"), 4, {panel(*title, span="5m"): {labels: 7.0}}
        yield counter(name, "700x2 1407x60"), 4, {panel(*title, span="5m"): {labels: 707.0}}
    yield counter("torch_train_skipped_steps_total", "5 9 2 3x60"), 3, {panel("Skipped steps and loss scale"): {'{run="a"}': 9.0}}
    errors = 'torch_grad_exporter_errors_total{source="x", '
    series = [row | {"series": row["series"].replace("torch_grad_exporter_errors_total{", errors)}
        for row in counter("torch_grad_exporter_errors_total", "0x2 7x60")]  # fmt: skip
    yield series, 4, {panel("Errors", dashboard="Exporter"): {'{run="a", source="x"}': 7.0}}


@scene
def states_of_many_runs_are_counted() -> Iterator[Scene]:
    """Of more than four runs State has how many are in each state, of fewer the name of each."""
    names = ["a", "b", "c", "d", "e"]
    every = [
        row | {"series": row["series"].replace('run="a"', f'run="{name}"').replace("train:", f"{name}:")}
        for place, name in enumerate(names)
        for row in Process("train:1", 0, 100, "finished" if place == 0 else "training").series()
    ]
    yield every, 50, {panel("State"): {}, panel("State", "B"): {'{state="1"}': 1.0, '{state="3"}': 4.0}}
    few = [row for row in every if 'run="e"' not in row["series"]]
    named = {f'{{run="{name}"}}': 1.0 if name == "a" else 3.0 for name in names[:4]}
    yield few, 50, {panel("State"): named, panel("State", "B"): {}}


@scene
def stopped_run_is_told_apart() -> Iterator[Scene]:
    """A run that Stop() ended is not a clean end, also once its target is gone."""
    stop = 'torch_grad_exporter_actions_total{action="Stop", result="done"}'
    for minute in (50, 120):
        for counted, number in ((((stop, 1),), 0.0), ((), 1.0)):
            ended = Process("train:1", 0, 100, "finished", counted=counted, answers=False)
            yield of([ended], minute, {panel("State"): {'{run="a"}': number}})


def stalled(seconds: float) -> Asked:
    """Return the stall by panel and by alert; the panel shows 0 where the alert is silent."""
    return {
        panel("Stalled for"): {f'{{run="{"a" if seconds else "every run"}"}}': seconds},
        ALERTS["TrainingStalled"]: {'{run="a"}': seconds} if seconds else {},
    }


@scene
def stall_is_shown_with_its_alert() -> Iterator[Scene]:
    """A stall is shown at the same minute in which the alert holds, and slow checkpoints allow for longer pauses."""
    for kind, slowest, since, quiet in (
        ("training", "1", 100, 5), ("training", "100", 100, 8), ("training", "1000", 100, 30), ("training", "1600", 100, 40),
        ("evaluating", "1", 100, 30), ("evaluating", "1600", 100, 40), ("training", "1000x10 1", 150, 25),
    ):  # fmt: skip
        process = Process("train:1", 0, 300, kind, active=since, slowest=slowest)
        yield of([process], since + quiet, stalled(0.0))
        yield of([process], since + quiet + 1, stalled(60.0 * (quiet + 1)))


@scene
def falling_norm_is_no_spike() -> Iterator[Scene]:
    """A norm that falls by decades after the start has no largest spike; with a counted spike there is one."""
    below_one = {"0.1": "0", "1": "0x30 0+1", "1000": "0+1", "+Inf": "0+1"}
    buckets = tuple((f'torch_grad_global_norm_distribution_bucket{{le="{le}"}}', values) for le, values in below_one.items())
    for spikes, shown in (("0", {}), ("0x60 1", {"{}": 1.0})):
        process = Process("train:1", 0, 100, counted=(*buckets, ("torch_grad_global_norm_spikes_total", spikes)))
        yield of([process], 90, {f"group({panel('Spikes', 'C', span='2h')})": shown})


@pytest.mark.parametrize("name", SCENES)
def test_overview_agrees_with_the_alerts(failures: dict[str, str], name: str) -> None:
    """The first row of the overview and the alerts agree, case by case."""
    assert name not in failures, failures[name]
