"""The two judgements of each rule agree: promtool and a process find the same in generated histories.

Prometheus scrapes each minute, and the process remembers at the same moments. The two are not compared where the process would
judge otherwise with all thresholds 15 % higher or lower, as `increase` extrapolates over the ends of a short series, nor where it
would judge otherwise a second later, as a window of Prometheus 2 has both its ends and one of Prometheus 3 only the last.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.rules.test_problems import LONG, NOW, RECORDS, Course, Metrics, Rows, Story, series, shipped, told
from tests.rules.test_rules import promtool
from torch_grad_exporter.collectors.training import STATES
from torch_grad_exporter.rules import THRESHOLDS, Watch
from torch_grad_exporter.rules.catalogue import promql_only

MINUTE = 60
STORIES = 60
"""Histories of one seed."""

BAND = 0.15
"""How far a threshold is moved, as a share of it."""

Problems = list[tuple[str, str, str | None]]


class Chance:
    """Makes histories. All that changes, changes between two moments of the grid, of which the first is when the run began."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def story(self) -> Story:
        """A run with some of the metrics that rules read."""
        age = LONG if self._random.random() < 0.7 else MINUTE * self._random.randint(1, int(LONG) // MINUTE)
        metrics: Metrics = {}
        for kind in (self._losses, self._steps, self._activity, self._data, self._spikes, self._clipping, self._layers,
                     self._actions, self._weights, self._experts, self._attention, self._rewards, self._replicas):  # fmt: skip
            if self._random.random() < 0.6:
                metrics |= kind(age)
        return Story(metrics, self._state(age), age)

    def _state(self, age: float) -> Callable[[float], str | None]:
        state = self._random.choices(STATES, weights=[2 if state in ("training", "evaluating") else 1 for state in STATES])[0]
        if state == "evaluating":  # it trained before
            since = self._moment(age)
            return lambda ago: "training" if ago > since else "evaluating"
        return lambda _: state

    def _moment(self, age: float) -> float:
        """Seconds ago, half a minute away from each moment of the grid."""
        return MINUTE * self._random.randrange(max(1, int(age) // MINUTE)) + MINUTE / 2

    def _counter(self, age: float, most: int, events: int = 4) -> Course:
        """A counter that began with the run and has jumped some times."""
        jumps = [(self._moment(age), self._random.randint(0, most)) for _ in range(self._random.randint(0, events))]
        return lambda ago: float(sum(by for at, by in jumps if ago <= at))

    def _rising(self, age: float, rate: float) -> Course:
        """A counter that rises with the time."""
        return lambda ago: rate * (age - ago)

    def _gauge(self, *around: float) -> Course:
        """A number near one of these, or one before and another one after some moment."""
        first, second = (self._random.choice(around) * 10 ** self._random.uniform(-0.7, 0.7) for _ in range(2))
        since = self._moment(LONG) if self._random.random() < 0.4 else LONG + 1
        return lambda ago: first if ago <= since else second

    def _share(self) -> float:
        return self._random.choice((0.0, 1.0, self._random.random(), self._random.random()))

    def _losses(self, age: float) -> Metrics:
        return {"TRAIN_LOSS_NONFINITE": self._counter(age, 1, 1), "TRAIN_LOSS_SPIKES": self._counter(age, 3)}

    def _steps(self, age: float) -> Metrics:
        nonfinite: Rows = {
            ("a", outcome): self._counter(age, 9, 2) for outcome in ("skipped", "stepped") if self._random.random() < 0.5
        }
        return {
            "TRAIN_SKIPPED_STEPS": self._counter(age, 30),
            "TRAIN_STEPS": {("a",): self._rising(age, self._random.choice((0.0, 0.02, 1.0)))},
            "GRAD_NONFINITE_STEPS": nonfinite,
        }

    def _activity(self, age: float) -> Metrics:
        last = self._random.uniform(0, age)
        return {
            "TRAIN_LAST_ACTIVITY_TIMESTAMP": NOW - last,
            "TRAIN_LAST_STEP_TIMESTAMP": NOW - last,
            "TRAIN_SLOWEST_STEP": self._gauge(1.0, 100.0, 400.0),
        }

    def _data(self, age: float) -> Metrics:
        waiting = self._share()
        phases = {("forward",): self._rising(age, 1 - waiting), ("data",): self._rising(age, waiting)}
        used = {("0", "u"): self._share()} if self._random.random() < 0.3 else {}
        return {"TRAIN_PHASE_SECONDS": phases, "GPU_UTILIZATION": used}

    def _spikes(self, age: float) -> Metrics:
        names = [(str(number),) for number in range(self._random.randint(1, 6))]
        return {
            "GRAD_GLOBAL_NORM_SPIKES": {("a",): self._counter(age, 2), ("b",): self._counter(age, 1)},
            "GRAD_NORM_SPIKES": {name: self._counter(age, 3) for name in names},
            "GRAD_CAPTURES": {name: self._rising(age, self._random.choice((0.01, 0.3))) for name in names},
        }

    def _clipping(self, age: float) -> Metrics:
        return {
            "GRAD_CLIP_COEFFICIENT": {("a",): self._gauge(0.003, 0.03, 0.5)},
            "GRAD_SAMPLE_STEP": {("a",): self._rising(age, self._random.choice((0.0, 0.5)))},
        }

    def _layers(self, age: float) -> Metrics:
        names = [(str(number),) for number in range(self._random.randint(1, 5))]
        return {
            "GRAD_GLOBAL_NORM": {("a",): self._gauge(1000.0)},
            "GRAD_NORM_RECENT_MAX": {name: self._gauge(1e-4, 1.0) for name in names},
            "GRAD_MISSING_PARAMETERS": {name: float(self._random.random() < 0.2) for name in names},
            "GRAD_DEAD_RATIO": {name: self._share() for name in names},
            "GRAD_UNITS": dict.fromkeys(names, 8.0),
        }

    def _weights(self, age: float) -> Metrics:
        names = [(str(number),) for number in range(self._random.randint(1, 5))]
        since = self._moment(LONG)
        ratios: list[float | Course] = [0.0, 1e-3, lambda ago: 0.0 if ago <= since else 1e-3]
        rates: list[float | Course] = [0.0, 1e-3, 1e-3, lambda ago: 1e-3 if ago <= since else 0.0]
        return {
            "WEIGHT_UPDATE_RATIO": {name: self._random.choice(ratios) for name in names},
            "WEIGHT_CAPTURES": {name: self._rising(age, self._random.choice((0.0005, 0.01, 0.1))) for name in names},
            "WEIGHT_UNCHANGED_RATIO": {name: self._share() for name in names},
            "GRAD_ZERO_RATIO": {name: self._share() / 3 for name in names},
            "OPTIMIZER_RMS_RATIO": {name: self._gauge(*self._random.choice(((1.0, 9.0), (0.01, 0.03)))) for name in names},
            "TRAIN_LEARNING_RATE": {("a", str(group)): self._random.choice(rates) for group in range(self._random.randint(1, 2))},
        }

    def _experts(self, age: float) -> Metrics:
        names = [str(number) for number in range(self._random.randint(1, 10))]
        return {
            "MOE_EXPERTS": {(name,): 8.0 for name in names},
            "MOE_EFFECTIVE_EXPERTS": {(name,): 8 * self._share() for name in names},
            "MOE_DEAD_EXPERTS": {(name,): float(self._random.choice((0, 0, 3))) for name in names},
            "MOE_EXPERT_LOAD_RATIO": {(name, str(at)): 5 * self._share() for name in names for at in range(2)},
        }

    def _attention(self, age: float) -> Metrics:
        doubles, now = self._random.choice((1200.0, 3600.0, 1e6)), self._random.choice((60.0, 300.0))
        growing: Course = lambda ago: now * 2 ** (-min(ago, age) / doubles)  # noqa: E731
        return {"ATTENTION_MAX_LOGIT": {("0",): growing, ("1",): self._gauge(40.0, 300.0)}}

    def _rewards(self, age: float) -> Metrics:
        rising = self._rising(age, self._random.choice((-1e-4, 0.0, 1e-4)))
        return {
            "RL_REWARD_MEAN": lambda ago: 0.3 + rising(ago),
            "RL_EVAL_REWARD_MEAN": self._gauge(0.5),
            "RL_ENTROPY": self._gauge(0.02, 0.3),
            "RL_KL_DIVERGENCE": self._gauge(0.1, 3.0, -0.05, -0.3),
            "RL_CLIP_RATIO": self._gauge(0.1, 0.9),
            "RL_ZERO_ADVANTAGE_RATIO": self._share(),
            "RL_EFFECTIVE_SAMPLE_RATIO": self._share(),
            "RL_TRAIN_INFERENCE_KL": self._gauge(0.03, 0.3, -0.3),
        }

    def _replicas(self, age: float) -> Metrics:
        copies = [(str(number), what) for number in range(self._random.randint(1, 4)) for what in ("gradient", "weights")]
        differing: Rows = {copy: self._counter(age, 1, 1) if self._random.random() < 0.3 else 0.0 for copy in copies}
        return {
            "REPLICAS_COMPARED": {("gradient",): self._rising(age, 0.1), ("weights",): self._rising(age, 0.025)},
            "REPLICAS_DIFFER": differing,
        }

    def _actions(self, age: float) -> Metrics:
        at = NOW - age * self._random.random()
        return {
            "EXPORTER_ERRORS": {("clip",): self._counter(age, 20, 1)},
            "EXPORTER_ACTIONS": {("tell", result): self._counter(age, 1, 1) for result in ("done", "failed", "refused")},
            "EXPORTER_NOTIFICATIONS": {("log", result): self._counter(age, 1, 1) for result in ("sent", "failed", "dropped")},
            **({"EXPORTER_LAST_ACTION": {("Stop",): at}} if self._random.random() < 0.3 else {}),
        }


def judged(story: Story, late: float = 0.0) -> Problems:
    """Return the final problems of a process that has seen all moments of the grid, this many seconds late."""
    watch = Watch()
    for ago in range(int(story.age), 0, -MINUTE):
        watch.remember(story.at(ago), NOW - ago + late)
    return [(problem.alert, problem.severity, problem.layer) for problem in watch.problems(story.at(0), NOW)]


def scaled(story: Story, by: float, limits: Mapping[str, float]) -> Problems:
    """What would be wrong with all thresholds scaled."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setitem(THRESHOLDS, name, limit * by)  # type: ignore[arg-type]
        return judged(story)


@pytest.mark.server
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1,))])
def test_promtool_and_the_process_judge_alike(seed: int, tmp_path: Path) -> None:
    """For each random history and alert, promtool and the process find the same layers, outside of the band."""
    chance = Chance(seed)
    stories = {f"story {number}": chance.story() for number in range(STORIES)}
    alerts = [key for key in shipped() if key[0] not in promql_only()]
    found = {name: judged(story) for name, story in stories.items()}
    limits = dict(THRESHOLDS)
    moved = {
        name: [scaled(story, 1 - BAND, limits), scaled(story, 1 + BAND, limits), judged(story, late=1.0)]
        for name, story in stories.items()
    }
    unstable = {
        (name, *key)
        for name in stories
        for key in alerts
        if any(told(found[name], *key) != told(other, *key) for other in moved[name])
    }
    firing = Counter(key for name in stories for key in alerts if told(found[name], *key) and (name, *key) not in unstable)
    assert sum(0 < firing[key] < STORIES for key in alerts) > 0.8 * len(alerts)
    assert len(unstable) < 0.1 * len(stories) * len(alerts)
    checks = [_check(alert, severity, found, unstable) for alert, severity in alerts]
    whole = [one for name, story in stories.items() for one in series(story, name)]
    whole += [
        {"series": f'unstable{{run="{name}", alert="{alert}", severity="{severity}"}}', "values": f"1x{int(LONG) // MINUTE}"}
        for name, alert, severity in sorted(unstable)
    ]
    test = {"interval": "1m", "input_series": whole, "promql_expr_test": checks}
    content = {"rule_files": [str(path) for path in RECORDS], "evaluation_interval": f"{LONG:g}s", "tests": [test]}
    (tmp_path / "judgements.test.yml").write_text(json.dumps(content))
    promtool("test", "rules", tmp_path / "judgements.test.yml")


def _check(alert: str, severity: str, found: Mapping[str, Problems], unstable: set[tuple[str, str, str]]) -> dict[str, object]:
    expected = [
        {"labels": f'{{run="{name}"' + (f', layer="{layer}"}}' if layer else "}"), "value": 1}
        for name, problems in found.items()
        for layer in told(problems, alert, severity)
        if (name, alert, severity) not in unstable
    ]
    left_out = f'unstable{{alert="{alert}", severity="{severity}"}}'
    expression = f"group by (run, layer) ({shipped()[alert, severity]}) unless on (run) {left_out}"
    return {"expr": expression, "eval_time": f"{LONG:g}s", "exp_samples": expected}
