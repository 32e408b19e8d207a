"""The first row of the dashboard "Training overview" beside the alerts: of the same series they say the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.grafana import ALL, dashboards, interpolated, panels
from tests.support.tools import PATIENCE, REPOSITORY, find

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
    """What Grafana asks for a panel, with all variables at All but `job`."""
    chosen = {"job": job, "run": ALL, "rank": ALL, "layer": ALL}
    return interpolated(QUERIES[dashboard, title, ref], chosen, "4m", span=span)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of run a as Prometheus sees it, by the minute: from its first scrape up to its last one."""

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
    counted: tuple[tuple[str, float], ...] = ()

    def values(self, value: object) -> str:
        """The same value at each scrape, and then none."""
        return f"{f'_x{self.first} ' if self.first else ''}{value}x{self.last - self.first} stale"

    def gauges(self) -> Iterator[tuple[str, str]]:
        """What it shows beside its state."""
        start = 60 * (self.first if self.started is None else self.started)
        yield "torch_train_world_size", self.values(self.world)
        yield "torch_train_start_timestamp_seconds", self.values(start)
        yield "torch_train_slowest_step_seconds", self.values(self.slowest)
        yield "torch_train_last_step_timestamp_seconds", self.values(start + 1)
        growing = f"{'_x' + str(self.first) + ' ' if self.first else ''}{60 * self.first}+60x{self.last - self.first} stale"
        if self.active != NEVER:
            yield "torch_train_last_activity_timestamp_seconds", growing if self.active is None else self.values(60 * self.active)

    def series(self) -> Iterator[dict[str, str]]:
        """All of it, and `up` of its target, which is 0 once it no longer answers."""
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


def check(tmp_path: Path, processes: list[Process], minute: int, asked: dict[str, dict[str, float]]) -> None:
    """What each expression yields at a minute of these processes, by its labels, says promtool."""
    check_series(tmp_path, [one for process in processes for one in process.series()], minute, asked)


def check_series(tmp_path: Path, series: list[dict[str, str]], minute: int, asked: dict[str, dict[str, float]]) -> None:
    """The same of any series."""
    expected = [
        {
            "expr": expression,
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expression, samples in asked.items()
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    path = tmp_path / "test.yml"
    rules = [str(PROMETHEUS / name) for name in ("training.rules.yml", "ranks.rules.yml")]
    path.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")
    done = subprocess.run([find("promtool"), "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def state(number: int) -> dict[str, dict[str, float]]:
    """The run's state, and the two alerts that are about one: each holds in its own state only."""
    fired = {"TrainingTargetDown": DOWN, "TrainingFailed": FAILED}
    alerts = {f"group({ALERTS[name]})": {"{}": 1.0} if number == own else {} for name, own in fired.items()}
    return {panel("State"): {'{run="a"}': number}, **alerts}


FILE = Process("node:9100", 0, 300, "failed", active=10)
"""What a rank that failed after 10 minutes left to node_exporter."""

BEFORE = [Process(f"train:{rank}", 0, 100, rank=rank, world=2) for rank in (0, 1)]
ALONE = Process("train:2", 103, 300)
"""Rank 0 of a run that goes on with one rank."""


def test_a_rank_that_runs_again_is_not_failed(tmp_path: Path) -> None:
    """Beside the text file of the process that failed before it, a rank that trains is Training, here and on its own dashboard."""
    ranks = {panel("State of each rank", dashboard="Ranks"): {'{as="a 000", run="a", rank="0"}': 2.0}}
    check(tmp_path, [FILE, Process("train:1", 20, 300)], 60, state(TRAINING) | ranks)


def test_a_rank_that_failed_at_once_and_runs_again_is_not_failed(tmp_path: Path) -> None:
    """It is Training also where the last process failed before it did anything: when that was, only its running one can tell."""
    early = Process("node:9100", 0, 300, "failed", active=NEVER)
    check(tmp_path, [early, Process("train:1", 2, 300)], 60, {panel("State"): {'{run="a"}': TRAINING}})


def test_a_rank_that_failed_is_failed(tmp_path: Path) -> None:
    """Alone, or while the other rank waits for it: nothing was started since."""
    ranks = {panel("State of each rank", dashboard="Ranks"): {'{as="a 000", run="a", rank="0"}': 5.0}}
    check(tmp_path, [FILE], 60, state(FAILED) | ranks)
    check(tmp_path, [FILE, Process("train:1", 0, 300, rank=1, world=2, active=10)], 60, state(FAILED))


def test_a_failure_of_an_elastic_restart_that_is_over_is_not_shown(tmp_path: Path) -> None:
    """A rank that failed, and that the run went on without, is no failure of the run, though it has no running process."""
    left = Process("node:9101", 0, 300, "failed", rank=1, active=10)
    check(tmp_path, [left, Process("train:2", 20, 300)], 60, state(TRAINING))


def test_a_rank_that_does_not_answer_is_down(tmp_path: Path) -> None:
    """One of two that were at work, or both of them; and without a target, it is Gone."""
    check(tmp_path, [BEFORE[0], Process("train:1", 0, 300, rank=1, world=2)], 110, state(DOWN))
    check(tmp_path, BEFORE, 110, state(DOWN))
    check(tmp_path, [Process("train:0", 0, 100, answers=False)], 110, state(GONE))


def test_what_an_elastic_restart_left_is_not_down(tmp_path: Path) -> None:
    """The old targets do not answer, and the run has all ranks of its new world size."""
    check(tmp_path, [*BEFORE, ALONE], 110, state(TRAINING))


def test_a_rank_that_has_moved_is_not_down(tmp_path: Path) -> None:
    """Its old target does not answer, and it is at another; the run is not yet complete, so that this alone says it."""
    check(tmp_path, [Process("train:0", 0, 100, world=2), Process("train:2", 103, 300, world=2)], 110, state(TRAINING))


def test_a_target_that_is_down_for_an_hour_is_no_news(tmp_path: Path) -> None:
    """Down up to an hour after the target was last up, as the alert; then the other rank says what the run does."""
    processes = [BEFORE[0], Process("train:1", 0, 300, rank=1, world=2)]
    check(tmp_path, processes, 159, state(DOWN))
    check(tmp_path, processes, 162, state(TRAINING))


def test_an_older_run_of_a_target_is_gone(tmp_path: Path) -> None:
    """Of two runs that a fixed address has served one after the other, the one that is there last is Down."""
    old, new = Process("train:1", 0, 50), Process("train:1", 60, 100, started=60)
    renamed = [{**one, "series": one["series"].replace('run="a"', 'run="b"')} for one in new.series() if "up{" not in one["series"]]
    up = {"series": 'up{job="train", instance="train:1"}', "values": "1x50 0x8 1x40 0x100"}
    series = [*(one for one in old.series() if "up{" not in one["series"]), *renamed, up]
    check_series(tmp_path, series, 102, {panel("State"): {'{run="a"}': GONE, '{run="b"}': DOWN}})


def test_alerts_are_those_of_the_chosen_jobs(tmp_path: Path) -> None:
    """Alerts have no job; the list has those whose run has been seen in a chosen one."""
    firing = 'ALERTS{alertname="TrainingStalled", alertstate="firing", severity="critical"'
    since = 'ALERTS_FOR_STATE{alertname="TrainingStalled", severity="critical"'
    series = [
        one
        for run, job in (("a", "one"), ("b", "two"))
        for one in (
            {"series": f'torch_train_world_size{{job="{job}", instance="h:1", run="{run}", rank="0"}}', "values": "1x10"},
            {"series": f'{firing}, run="{run}"}}', "values": "1x10"},
            {"series": f'{since}, run="{run}"}}', "values": "60x10"},
        )
    ]
    row = '{alertname="TrainingStalled", layer="All", rank="All", run="a"}'
    asked = {panel("Firing alerts", ref, job="one"): {row: value} for ref, value in (("A", 3.0), ("B", 60_000.0))}
    check_series(tmp_path, series, 5, asked)


def test_an_alert_of_a_dead_layer_is_listed_once(tmp_path: Path) -> None:
    """Of both severities of LayerDead the graver, and no GradientVanishing of this layer; that of another layer stays."""
    alerts = [("LayerDead", "warning", "l"), ("LayerDead", "info", "l"), ("GradientVanishing", "warning", "l"),
        ("GradientVanishing", "warning", "m")]  # fmt: skip
    series = [{"series": 'torch_train_world_size{job="t", instance="h:1", run="a", rank="0"}', "values": "1x10"}]
    for name, severity, layer in alerts:
        labels = f'alertname="{name}", severity="{severity}", run="a", layer="{layer}"'
        series += [
            {"series": f'ALERTS{{{labels}, alertstate="firing"}}', "values": "1x10"},
            {"series": f"ALERTS_FOR_STATE{{{labels}}}", "values": "60x10"},
        ]
    listed = {f'{{alertname="{name}", layer="{layer}", rank="All", run="a"}}': 2.0
        for name, layer in (("LayerDead", "l"), ("GradientVanishing", "m"))}  # fmt: skip
    check_series(tmp_path, series, 5, {panel("Firing alerts"): listed})


def test_a_pushed_rank_on_another_host_is_no_error(tmp_path: Path) -> None:
    """It keeps its instance, so that for a while two hosts are known of it: a panel about hosts takes one of them."""
    own = 'job="t", instance="a-0", run="a", rank="0"'
    series = [
        *({"series": f'torch_train_info{{{own}, host="{host}"}}', "values": "1x10"} for host in ("h1", "h2")),
        {"series": f"torch_host_cpu_ratio{{{own}}}", "values": "0.5x10"},
    ]
    asked = {f"count({panel('Processors of the host', dashboard='Resources')})": {"{}": 1.0}}
    check_series(tmp_path, series, 5, asked)


STEPS = 'torch_grad_nonfinite_steps_total{optimizer="x", outcome="stepped"}'
SKIPPED = 'torch_grad_nonfinite_steps_total{optimizer="x", outcome="skipped"}'
LOSSES = "torch_train_loss_nonfinite_total"


@pytest.mark.parametrize(
    ("name", "ref", "alert"),
    [(STEPS, "A", "TrainingNonFiniteGradients"), (SKIPPED, "B", None), (LOSSES, "C", "TrainingNonFiniteLoss")],
    ids=["steps", "skipped", "losses"],
)
def test_nan_before_the_first_scrape_is_shown(tmp_path: Path, name: str, ref: str, alert: str | None) -> None:
    """What was counted at the first scrape shows for 10 minutes, and for as long as the time range holds the process's start."""
    process = Process("train:1", 200, 300, started=199, counted=((name, 3),))
    title = "NaN and Inf"
    for span, minute, seen in (("1h", 204, 1.0), ("5m", 208, 1.0), ("1h", 240, 1.0), ("5m", 240, 0.0)):
        fired = {f"group({ALERTS[alert]})": {"{}": 1.0} if minute < 209 else {}} if alert else {}
        check(tmp_path, [process], minute, {panel(title, ref, span=span): {"{}": seen}} | fired)
    quiet = {panel(title, ref): {"{}": 0.0}} | ({f"group({ALERTS[alert]})": {}} if alert else {})
    check(tmp_path, [Process("train:1", 200, 300, counted=((name, 0),))], 204, quiet)


def test_nan_of_an_old_process_or_another_is_not_shown_as_new(tmp_path: Path) -> None:
    """What was counted before the time range stays out of it, also where the same rank has a new process that counts nothing."""
    old = Process("train:1", 0, 300, counted=((STEPS, 3),))
    new = Process("train:2", 200, 300, counted=((STEPS, 0),))
    for processes in ([old], [old, new]):
        quiet: dict[str, dict[str, float]] = {f"group({ALERTS['TrainingNonFiniteGradients']})": {}}
        check(tmp_path, processes, 204, {panel("NaN and Inf"): {"{}": 0.0}} | quiet)


def stalled(seconds: float | None) -> dict[str, dict[str, float]]:
    """For how long by panel and by alert; the panel shows 0, which it calls No, where the alert is silent."""
    alert = {} if not seconds else {'{run="a"}': seconds}
    return {panel("Stalled for"): {} if seconds is None else {'{run="a"}': seconds}, ALERTS["TrainingStalled"]: alert}


@pytest.mark.parametrize(
    ("state", "slowest", "quiet", "loud"),
    [
        ("training", "1", 5, 6),
        ("training", "100", 8, 9),
        ("training", "1000", 30, 31),
        ("training", "1600", 40, 41),
        ("evaluating", "1", 30, 31),
        ("evaluating", "100", 30, 31),
        ("evaluating", "1600", 40, 41),
    ],
)
def test_a_hang_is_shown_when_the_alert_holds(tmp_path: Path, state: str, slowest: str, quiet: int, loud: int) -> None:
    """A pause, and a minute later a hang: at 5 minutes, 5 slow steps or 30 minutes, 1.5 slow ones, 30 minutes of evaluation."""
    process = Process("train:1", 0, 300, state, active=100, slowest=slowest)
    check(tmp_path, [process], 100 + quiet, stalled(0.0))
    check(tmp_path, [process], 100 + loud, stalled(60.0 * loud))


def test_a_slow_checkpoint_of_the_day_is_remembered(tmp_path: Path) -> None:
    """A step that took 1000 s two hours ago, and has left the recent ones, allows for a pause of 25 minutes."""
    process = Process("train:1", 0, 300, active=150, slowest="1000x10 1")
    check(tmp_path, [process], 175, stalled(0.0))
    check(tmp_path, [process], 176, stalled(60.0 * 26))


def test_a_run_that_has_ended_does_not_stall(tmp_path: Path) -> None:
    """Finished or failed, it is Not training."""
    for state in ("finished", "failed"):
        check(tmp_path, [Process("train:1", 0, 300, state, active=100)], 200, stalled(None))
