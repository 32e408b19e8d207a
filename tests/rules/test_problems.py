"""The rules in the process: each fires beyond its limits and is silent at them, as promtool does with the alerts."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rules.test_rules import ALERTS, promtool, rules
from tests.rules.test_rules import RULES as RECORDS
from tests.support.catalogue import by_constant
from tests.support.scrape import OFF
from torch_grad_exporter import start_exporter
from torch_grad_exporter.collectors.training import STATES
from torch_grad_exporter.metrics.families import Family, LabelRows, Spec
from torch_grad_exporter.rules import RULES, THRESHOLDS, Finding, Problem, Rule, RuleContext, Values, Watch
from torch_grad_exporter.rules.catalogue import promql_only
from torch_grad_exporter.rules.context import LAYERS
from torch_grad_exporter.rules.declaration import SEVERITIES
from torch_grad_exporter.rules.watch import OFTEN, SlowestStep

c = SimpleNamespace(**by_constant())
"""The metrics by the names of their constants."""

NOW = 1_800_000_000.0

LONG = 4200.0
"""Seconds that a run goes on, unless it is young."""

Course = Callable[[float], float]
"""A number by how many seconds ago it was."""

Rows = Mapping[tuple[str, ...], float | Course]


def jump(now: float, before: float = 0.0, ago: float = 240.0) -> Course:
    """Return a number that changed this many seconds ago."""
    return lambda seconds: now if seconds <= ago else before


def grows(by: float) -> Course:
    """Return a counter that grows by this much a second."""
    return lambda seconds: by * (LONG - seconds)


@dataclass(frozen=True)
class Story:
    """A run over time. A metric is a number or has rows, by its constant's name; the state is by seconds ago."""

    metrics: Mapping[str, float | Course | Rows]
    state: Callable[[float], str | None]
    age: float

    def at(self, ago: float) -> Values:
        """Return the values of that moment."""
        return Values([family(spec, rows) for spec, rows in self.numbers(ago)])

    def numbers(self, ago: float) -> Iterator[tuple[Spec, dict[tuple[str, ...], float]]]:
        """Yield the metrics and their rows."""
        yield c.TRAIN_INFO, {("2.4", "1.0", "3.11", "node", "0", "cpu"): 1.0}
        if self.state(ago) is not None:
            yield c.TRAIN_STATE, {(state,): float(state == self.state(ago)) for state in STATES}
        for name, rows in {"TRAIN_START_TIMESTAMP": NOW - self.age, **self.metrics}.items():
            by_labels: Rows = rows if isinstance(rows, Mapping) else {(): rows}
            yield getattr(c, name), {row: number(ago) if callable(number) else number for row, number in by_labels.items()}

    @cached_property
    def found(self) -> list[tuple[str, str, str | None]]:
        """Alert, severity and layer of each problem in the end."""
        return [(problem.alert, problem.severity, problem.layer) for problem in self.problems]

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems in the end, where the run was looked at each minute or five."""
        watch = Watch()
        for ago in (*range(int(LONG), 900, -300), *range(900, 0, -60)):
            if ago <= self.age:
                watch.remember(self.at(ago), NOW - ago)
        return watch.problems(self.at(0), NOW)


def run(
    state: str | Callable[[float], str | None] | None = "training", *, age: float = LONG, **metrics: float | Course | Rows
) -> Story:
    """Return a run, which trains unless another state is given."""
    return Story(metrics, state if callable(state) else lambda _: state, age)


def starting(**metrics: float | Course | Rows) -> Story:
    """A run that has been initialising for some minutes."""
    return run("initialising", TRAIN_START_TIMESTAMP=NOW - 1000, **metrics)


def family(spec: Spec, rows: float | Mapping[tuple[str, ...], float], present: Sequence[bool] | None = None) -> Family:
    """Return a family with these rows; a number is that of the only row."""
    rows = rows if isinstance(rows, Mapping) else {(): rows}
    there = None if present is None else np.array(present)
    return Family(spec, np.array(list(rows.values()), dtype=np.float64), LabelRows(tuple(rows)), there)


def made(state: str | None = "training", **metrics: float | Rows) -> Values:
    """Return a single moment of a run."""
    return run(state, **metrics).at(0)


Metrics = dict[str, Any]


def layer(**metrics: float | Course) -> Metrics:
    """Metrics of the layer `x`."""
    return {name: {("x",): value} for name, value in metrics.items()}


def layers(number: int, others: float | Course, rest: int) -> Rows:
    """Return rows of this many layers: the first `rest` are 0, the others have one number."""
    return {(str(place),): 0.0 if place < rest else others for place in range(number)}


def gpu(used: float | Course) -> Metrics:
    """A GPU that is in use for this share of the time."""
    return {"GPU_UTILIZATION": {("0", "u"): used}}


def optimizer(**metrics: float | Course) -> Metrics:
    """Metrics of the optimizer `a`."""
    return {name: {("a",): value} for name, value in metrics.items()}


def phases(data: float) -> Metrics:
    """A run that waits for data this share of the time."""
    return {"TRAIN_PHASE_SECONDS": {("forward",): grows(1 - data), ("data",): grows(data)}}


def vanishing(recent: float | Course, missing: float = 0.0) -> Metrics:
    """The layer `x` under a global norm of 1000, beside an optimizer whose norm is infinite."""
    norms = {("adam",): 1000.0, ("sgd",): np.inf}
    return {"GRAD_GLOBAL_NORM": norms, **layer(GRAD_NORM_RECENT_MAX=recent, GRAD_MISSING_PARAMETERS=missing)}


RATES: Rows = MappingProxyType({("a", "0"): 1e-3})


def updating(ratio: float | Course, captures: Course | None = None, rates: Rows = RATES, **others: float | Course) -> Metrics:
    """The layer `x`, whose weights are measured each minute, and learning rates by optimizer and group."""
    of_layer = layer(WEIGHT_UPDATE_RATIO=ratio, WEIGHT_CAPTURES=captures or grows(1 / 60), **others)
    return {**of_layer, "TRAIN_LEARNING_RATE": rates}


LOST: Metrics = {"WEIGHT_UNCHANGED_RATIO": 0.751, "GRAD_ZERO_RATIO": 0.25}
"""A layer of whose elements half have a gradient and stay as they are."""


def remembering(x: float, y: float | None = None, steps: float = 1001) -> Metrics:
    """An optimizer whose second moment stands in this ratio to the gradients of the layers `x` and `y`."""
    ratios = {("x",): x} if y is None else {("x",): x, ("y",): y}
    return {"OPTIMIZER_RMS_RATIO": ratios, "TRAIN_STEPS": {("a",): steps}}


def active(seconds: float, slowest: float | Course) -> Metrics:
    """A training that was last active this many seconds ago."""
    return {"TRAIN_LAST_ACTIVITY_TIMESTAMP": NOW - seconds, "TRAIN_SLOWEST_STEP": slowest}


def first_step(seconds: float, after: float, start: float) -> Metrics:
    """A training whose only activity since was its first step, some seconds after its start."""
    times = {"TRAIN_LAST_ACTIVITY_TIMESTAMP": NOW - seconds, "TRAIN_LAST_STEP_TIMESTAMP": NOW - start + after}
    return {**times, "TRAIN_START_TIMESTAMP": NOW - start}


def outcomes(**counts: float | Course) -> Metrics:
    """Steps on gradients that were not finite, by their outcome."""
    return {"GRAD_NONFINITE_STEPS": {("a", outcome): count for outcome, count in counts.items()}}


def replicas(differing: float | Course) -> Metrics:
    """Comparisons in which one layer's weights differed, and another's did not."""
    return {
        "REPLICAS_COMPARED": {("weights",): grows(0.1)},
        "REPLICAS_DIFFER": {("w", "weights"): 0.0, ("x", "weights"): differing},
    }


def skipping(skipped: float, steps: float, nonfinite: float) -> Metrics:
    """Steps skipped, taken, and skipped for gradients that were not finite, within some minutes."""
    return {"TRAIN_SKIPPED_STEPS": jump(skipped), **optimizer(TRAIN_STEPS=jump(steps)), **outcomes(skipped=jump(nonfinite))}


def clipped(coefficient: float | Course, steps: Course | None = None) -> Metrics:
    """A training clipped by this coefficient, with a sample each minute."""
    return optimizer(GRAD_CLIP_COEFFICIENT=coefficient, GRAD_SAMPLE_STEP=steps or grows(1.0))


@dataclass(frozen=True)
class Case:
    """Runs in which something is wrong, and runs in which it is almost wrong."""

    problem: tuple[str, str, str | None]
    wrong: Sequence[Story]
    right: Sequence[Story]
    beside: tuple[tuple[str, str, str | None], ...] = ()


def case(
    alert: str,
    severity: str,
    wrong: Sequence[Story],
    right: Sequence[Story],
    *,
    layer: str | None = None,
    beside: tuple[str, str] | None = None,
) -> Case:
    """Return a case; `beside` is another problem that goes with it."""
    return Case((alert, severity, layer), wrong, right, () if beside is None else ((*beside, None),))


CASES = {
    "failed": case("TrainingFailed", "critical", [run("failed")], [run("finished")]),
    "step on nonfinite": case(
        "TrainingNonFiniteGradients",
        "critical",
        [
            run(**outcomes(stepped=jump(1))),
            run(**outcomes(unknown=jump(1))),
            starting(**outcomes(stepped=jump(1))),
            run(age=599, **outcomes(stepped=1)),
        ],
        [
            run(**outcomes(skipped=jump(9), stepped=5)),
            run(**outcomes(stepped=jump(1, ago=360))),
            run("finished", **outcomes(stepped=jump(1))),
            run(age=600, **outcomes(stepped=1)),
        ],
    ),
    "steps skipped": case(
        "TrainingNonFiniteGradients",
        "critical",
        [
            run(**skipping(20, 19, 1)),
            run(**skipping(500, 0, 500)),
            run(TRAIN_SKIPPED_STEPS=jump(20), **outcomes(skipped=jump(1, ago=3000))),
        ],
        [
            run(**skipping(19, 0, 19)),
            run(**skipping(20, 20, 20)),
            run(**skipping(20, 19, 0)),
            run(TRAIN_SKIPPED_STEPS=jump(20, ago=900), **outcomes(skipped=jump(1))),
        ],
    ),
    "replicas differ": case(
        "ReplicasDiffer",
        "critical",
        [
            run(**replicas(jump(1))),
            run(**replicas(jump(3, before=2, ago=1500))),
            starting(**replicas(jump(1))),
            run(age=599, **replicas(1)),
        ],
        [
            run(**replicas(0)),
            run(**replicas(jump(1, ago=2100))),
            run("finished", **replicas(jump(1))),
            run(age=2400, **replicas(1)),
        ],
    ),
    "nonfinite loss": case(
        "TrainingNonFiniteLoss",
        "critical",
        [run(TRAIN_LOSS_NONFINITE=jump(1)), run(age=599, TRAIN_LOSS_NONFINITE=1.0)],
        [run(TRAIN_LOSS_NONFINITE=1.0), run(age=600, TRAIN_LOSS_NONFINITE=1.0), run("finished", TRAIN_LOSS_NONFINITE=jump(1))],
    ),
    "stalled": case(
        "TrainingStalled",
        "critical",
        [
            run(**active(300.5, 1.0)),
            run(**active(500.5, 100)),
            run(**active(6001, 4000)),
            run(**active(6001, jump(1, before=4000))),
            run("evaluating", **active(1801, 1.0)),
            run(**first_step(seconds=501, after=100, start=1000)),
            run(TRAIN_LAST_ACTIVITY_TIMESTAMP=NOW - 301),
        ],
        [
            run(**active(300, 1.0)),
            run(**active(500, 100)),
            run(**active(6000, 4000)),
            run(**active(5999, jump(1, before=4000))),
            run("evaluating", **active(1800, 1.0)),
            run(**first_step(seconds=500, after=100, start=1000)),
            run(**first_step(seconds=3000, after=2000, start=6000)),
            run("initialising", TRAIN_START_TIMESTAMP=NOW, **active(9000, 1.0)),
            run("finished", **active(9000, 1.0)),
        ],
    ),
    "never started": case(
        "TrainingNeverStarted",
        "warning",
        [run("initialising", TRAIN_START_TIMESTAMP=NOW - 1200.5)],
        [run("initialising", TRAIN_START_TIMESTAMP=NOW - 1200), run(), run("evaluating")],
    ),
    "loss spikes": case(
        "LossSpike",
        "warning",
        [run(TRAIN_LOSS_SPIKES=jump(3))],
        [run(TRAIN_LOSS_SPIKES=jump(2)), run(TRAIN_LOSS_SPIKES=3.0), run("finished", TRAIN_LOSS_SPIKES=jump(3))],
    ),
    "starving": case(
        "DataLoaderStarvation",
        "warning",
        [
            run(**phases(0.499)),
            run(**phases(0.201)),
            run("evaluating", **phases(0.3), **gpu(jump(0.9, before=0.1, ago=60))),
        ],
        [
            run(**phases(0.199)),
            starting(**phases(0.4)),
            run(**phases(0.4), **gpu(0.5)),
        ],
    ),
    "starved": case(
        "DataLoaderStarvation",
        "critical",
        [run(**phases(0.501)), run("evaluating", **phases(0.9), **gpu(0.49))],
        [run(**phases(0.199)), run(**phases(0.9), **gpu(0.51))],
    ),
    "exploding": case(
        "GradientExploding",
        "warning",
        [run(GRAD_GLOBAL_NORM_SPIKES={("a",): jump(2), ("b",): jump(3)})],
        [
            run(GRAD_GLOBAL_NORM_SPIKES={("a",): jump(2), ("b",): jump(2)}),
            run("finished", GRAD_GLOBAL_NORM_SPIKES={("a",): jump(3)}),
        ],
    ),
    "layers exploding": case(
        "GradientExploding",
        "warning",
        [
            run(GRAD_NORM_SPIKES=layers(4, jump(3), 3), GRAD_CAPTURES=layers(4, jump(299), 0)),
            run(GRAD_NORM_SPIKES=layers(10, jump(50), 0), GRAD_CAPTURES=layers(10, jump(600), 0)),
        ],
        [
            run(GRAD_NORM_SPIKES=layers(4, jump(3), 3), GRAD_CAPTURES=layers(4, jump(301), 0)),
            run(GRAD_NORM_SPIKES=layers(4, jump(2), 0), GRAD_CAPTURES=layers(4, jump(9), 0)),
            run(GRAD_NORM_SPIKES=layers(5, jump(3), 4), GRAD_CAPTURES=layers(5, jump(9), 0)),
            run(GRAD_NORM_SPIKES=layers(3, jump(3), 0), GRAD_CAPTURES=layers(3, jump(9), 0)),
        ],
    ),
    "clipped": case(
        "GradientExploding",
        "warning",
        [run(**clipped(0.0099)), run(**clipped(jump(1e-4, before=1.0, ago=610)))],
        [
            run(**clipped(0.01)),
            run(**clipped(jump(1e-4, before=1.0, ago=530))),
            run(age=590, **clipped(1e-4)),
            run(**clipped(1e-4, steps=jump(2, before=1))),
        ],
    ),
    "vanishing": case(
        "GradientVanishing",
        "warning",
        [
            run(**vanishing(0.99e-4)),
            run("evaluating", **vanishing(0.0)),
            run(**vanishing(jump(0.0, before=1.0, ago=330))),
            run(GRAD_NORM={("x",): 1e-8, ("y",): 0.2, ("z",): np.inf}),
            run(GRAD_SHARD_NORM={("x",): 1e-12, ("y",): 100.0}),
        ],
        [
            run(**vanishing(1e-4)),
            run(**vanishing(1.0)),
            starting(**vanishing(0.0)),
            run(LAYER_FROZEN={("x",): 1.0, ("y",): 0.0}, **vanishing(0.0)),
            run(**vanishing(jump(0.0, before=1.0, ago=170))),
            run(GRAD_NORM={("x",): 1e-7, ("y",): 0.2}),
            run(GRAD_NORM_RECENT_MAX={("x",): 1.0}, GRAD_NORM={("x",): 0.0, ("y",): 0.2}),
        ],
        layer="x",
    ),
    "dead": case(
        "LayerDead",
        "warning",
        [
            run(**layer(GRAD_DEAD_RATIO=0.91, GRAD_UNITS=8)),
            run("evaluating", **layer(GRAD_DEAD_RATIO=1, GRAD_UNITS=8)),
            run(**layer(GRAD_DEAD_RATIO=0.91, GRAD_UNITS=8, LAYER_FROZEN=0)),
        ],
        [
            run(**layer(GRAD_DEAD_RATIO=0.5, GRAD_UNITS=8)),
            starting(**layer(GRAD_DEAD_RATIO=1, GRAD_UNITS=8)),
            run(**layer(GRAD_DEAD_RATIO=1, GRAD_UNITS=8, LAYER_FROZEN=1)),
        ],
        layer="x",
    ),
    "half dead": case(
        "LayerDead",
        "info",
        [run(**layer(GRAD_DEAD_RATIO=0.9, GRAD_UNITS=8)), run(**layer(GRAD_DEAD_RATIO=0.51, GRAD_UNITS=8))],
        [run(**layer(GRAD_DEAD_RATIO=0.5, GRAD_UNITS=8)), run(**layer(GRAD_DEAD_RATIO=0.6, GRAD_UNITS=8, LAYER_FROZEN=1))],
        layer="x",
    ),
    "without gradient": case(
        "LayerWithoutGradient",
        "warning",
        [run(**layer(GRAD_MISSING_PARAMETERS=1)), run(**vanishing(0.0, missing=1))],
        [
            run(**layer(GRAD_MISSING_PARAMETERS=0)),
            starting(**layer(GRAD_MISSING_PARAMETERS=1)),
            run(**layer(GRAD_MISSING_PARAMETERS=1, LAYER_FROZEN=1)),
        ],
        layer="x",
    ),
    "not updating": case(
        "LayerNotUpdating",
        "warning",
        [
            run(**updating(0.0)),
            run(**updating(jump(0.0, before=1e-3, ago=1860))),
            run(**updating(0.0, GRAD_CAPTURES=grows(1.0))),
            run(**updating(0.0, rates={("a", "0"): 0.0, ("a", "1"): 1e-9})),
            run("evaluating", **updating(0.0)),
        ],
        [
            run(**updating(1e-12)),
            run(**updating(jump(0.0, before=1e-3, ago=1440))),
            run(**updating(0.0, captures=jump(2))),
            run(**updating(0.0, LAYER_FROZEN=1.0)),
            run(**updating(0.0, rates={("a", "0"): 0.0})),
            run(**updating(0.0, rates={("a", "0"): jump(1e-3, ago=1440)})),
            run(**updating(0.0, rates={})),
            run("finished", **updating(0.0)),
        ],
        layer="x",
    ),
    "updates lost": case(
        "UpdatesLost",
        "warning",
        [
            run(**updating(1e-5, **LOST)),
            run("evaluating", **updating(1e-5, **LOST)),
        ],
        [
            run(**updating(1e-5, **LOST | {"WEIGHT_UNCHANGED_RATIO": 0.749})),
            run(**updating(1e-12, **LOST | {"WEIGHT_UNCHANGED_RATIO": jump(0.1, before=0.9)})),
            run(**updating(1e-5, **LOST | {"GRAD_ZERO_RATIO": 0.6})),
            run(**updating(1e-5, LAYER_FROZEN=1.0, **LOST)),
            run(**updating(1e-5, rates={("a", "0"): 0.0}, **LOST)),
            run("finished", **updating(1e-5, **LOST)),
        ],
        layer="x",
    ),
    "spike ahead": case(
        "SpikeAhead",
        "warning",
        [
            run(**remembering(8.01)),
            run("evaluating", **remembering(9.0, y=0.001)),
            run(**remembering(0.019, y=0.001)),
        ],
        [
            run(**remembering(7.99)),
            run(**remembering(0.021, y=0.001)),
            run(**remembering(9.0, steps=1000)),
            run("finished", **remembering(9.0)),
        ],
    ),
    "few experts": case(
        "ExpertCollapse",
        "warning",
        [
            run(**layer(MOE_EFFECTIVE_EXPERTS=2.39, MOE_EXPERTS=8.0)),
            run("evaluating", **layer(MOE_EFFECTIVE_EXPERTS=2.39, MOE_EXPERTS=8.0, MOE_DEAD_EXPERTS=6.0)),
        ],
        [
            run(**layer(MOE_EFFECTIVE_EXPERTS=2.41, MOE_EXPERTS=8.0, MOE_DEAD_EXPERTS=0.0)),
            run("finished", **layer(MOE_EFFECTIVE_EXPERTS=1.0, MOE_EXPERTS=8.0)),
        ],
        layer="x",
    ),
    "dead experts": case(
        "ExpertCollapse",
        "info",
        [run(**layer(MOE_EFFECTIVE_EXPERTS=6.0, MOE_EXPERTS=8.0, MOE_DEAD_EXPERTS=1.0))],
        [
            run(**layer(MOE_EFFECTIVE_EXPERTS=6.0, MOE_EXPERTS=8.0, MOE_DEAD_EXPERTS=0.0)),
            run("finished", **layer(MOE_EFFECTIVE_EXPERTS=6.0, MOE_EXPERTS=8.0, MOE_DEAD_EXPERTS=1.0)),
        ],
        layer="x",
    ),
    "an overloaded expert": case(
        "RouterImbalance",
        "info",
        [run(MOE_EXPERT_LOAD_RATIO={("x", "3"): 3.1, ("x", "0"): 0.2}), run("evaluating", MOE_EXPERT_LOAD_RATIO={("x", "1"): 4.0})],
        [
            run(MOE_EXPERT_LOAD_RATIO={("x", "3"): 2.9, ("x", "0"): 0.2}),
            run("finished", MOE_EXPERT_LOAD_RATIO={("x", "3"): 5.0}),
        ],
        layer="x",
    ),
    "attention logits": case(
        "AttentionLogitsGrowing",
        "warning",
        [
            run(ATTENTION_MAX_LOGIT={("x",): jump(101.0, before=67.0, ago=330)}),
            run("evaluating", ATTENTION_MAX_LOGIT={("x",): jump(500.0, before=300.0, ago=1400)}),
            run(ATTENTION_MAX_LOGIT={("x",): lambda ago: 400.0 * 2 ** (-ago / 1200)}),
        ],
        [
            run(ATTENTION_MAX_LOGIT={("x",): jump(99.0, before=10.0, ago=330)}),
            run(ATTENTION_MAX_LOGIT={("x",): jump(500.0, before=10.0, ago=200)}),
            run(ATTENTION_MAX_LOGIT={("x",): jump(500.0, before=10.0, ago=2200)}),
            run(ATTENTION_MAX_LOGIT={("x",): jump(140.0, before=101.0, ago=900)}),
            run(ATTENTION_MAX_LOGIT={("x",): 1e4}),
            run(ATTENTION_MAX_LOGIT={("x",): lambda ago: 400.0 * 2 ** (ago / 1200)}),
            run("finished", ATTENTION_MAX_LOGIT={("x",): jump(500.0, before=10.0, ago=330)}),
        ],
        layer="x",
    ),
    "entropy": case(
        "EntropyCollapse",
        "warning",
        [run(RL_ENTROPY=0.049), run("evaluating", RL_ENTROPY=jump(0.01, before=1.0, ago=610))],
        [
            run(RL_ENTROPY=0.05),
            run(RL_ENTROPY=-0.01),
            run(RL_ENTROPY=jump(0.01, before=1.0, ago=530)),
            run("finished", RL_ENTROPY=0.0),
        ],
    ),
    "divergence": case(
        "KlOutOfRange",
        "warning",
        [run(RL_KL_DIVERGENCE=1.01), run(RL_KL_DIVERGENCE=-0.11), run(RL_KL_DIVERGENCE=jump(3.0, ago=240))],
        [run(RL_KL_DIVERGENCE=1.0), run(RL_KL_DIVERGENCE=-0.1), run(RL_KL_DIVERGENCE=jump(1.9)), starting(RL_KL_DIVERGENCE=2.0)],
    ),
    "no advantage": case(
        "ZeroAdvantage",
        "warning",
        [run(RL_ZERO_ADVANTAGE_RATIO=0.81), run(RL_ZERO_ADVANTAGE_RATIO=jump(1.0, before=0.75, ago=240))],
        [run(RL_ZERO_ADVANTAGE_RATIO=0.8), run(RL_ZERO_ADVANTAGE_RATIO=jump(1.0)), run("finished", RL_ZERO_ADVANTAGE_RATIO=1.0)],
    ),
    "hacked": case(
        "RewardWithoutEval",
        "warning",
        [
            run(RL_REWARD_MEAN=grows(1e-4), RL_EVAL_REWARD_MEAN=jump(0.44, before=0.5, ago=3000)),
            run(RL_REWARD_MEAN=jump(-1.0, before=-2.0, ago=610), RL_EVAL_REWARD_MEAN=jump(-0.56, before=-0.5)),
        ],
        [
            run(RL_REWARD_MEAN=grows(1e-4), RL_EVAL_REWARD_MEAN=jump(0.451, before=0.5)),
            run(RL_REWARD_MEAN=grows(1e-4), RL_EVAL_REWARD_MEAN=jump(0.44, before=0.5, ago=3700)),
            run(RL_REWARD_MEAN=0.5, RL_EVAL_REWARD_MEAN=jump(0.1, before=0.5)),
            run(RL_REWARD_MEAN=grows(1e-4)),
            run(RL_EVAL_REWARD_MEAN=jump(0.1, before=0.5)),
            run("finished", RL_REWARD_MEAN=grows(1e-4), RL_EVAL_REWARD_MEAN=jump(0.1, before=0.5)),
        ],
    ),
    "policy clipped": case(
        "PolicyClipped",
        "warning",
        [run(RL_CLIP_RATIO=0.31), run("evaluating", RL_CLIP_RATIO=jump(1.0))],
        [run(RL_CLIP_RATIO=0.3), run(RL_CLIP_RATIO=jump(0.5)), starting(RL_CLIP_RATIO=1.0)],
    ),
    "mismatch": case(
        "TrainInferenceMismatch",
        "warning",
        [run(RL_TRAIN_INFERENCE_KL=0.11), run(RL_TRAIN_INFERENCE_KL=-0.11), run(RL_EFFECTIVE_SAMPLE_RATIO=0.29)],
        [
            run(RL_TRAIN_INFERENCE_KL=0.099, RL_EFFECTIVE_SAMPLE_RATIO=0.301),
            run(RL_TRAIN_INFERENCE_KL=-0.099),
            run(RL_TRAIN_INFERENCE_KL=jump(0.2)),
            run("finished", RL_TRAIN_INFERENCE_KL=1.0),
        ],
    ),
    "not clipped": case(
        "GradientClippingFailing",
        "critical",
        [
            run(EXPORTER_ERRORS={("clip",): jump(9, before=8)}),
            run(EXPORTER_ERRORS={("clip",): 10.0}),
            run(age=599, EXPORTER_ERRORS={("clip",): 1.0}),
            starting(EXPORTER_ERRORS={("clip",): jump(1)}),
        ],
        [
            run(EXPORTER_ERRORS={("clip",): 9.0, ("history",): jump(20)}),
            run(age=600, EXPORTER_ERRORS={("clip",): 1.0}),
            run("finished", EXPORTER_ERRORS={("clip",): jump(10)}),
        ],
    ),
    "stopped": case(
        "TrainingStoppedItself",
        "warning",
        [
            *[run(state, EXPORTER_LAST_ACTION={("Stop",): NOW - 3599}) for state in ("training", "finished", None)],
            starting(EXPORTER_LAST_ACTION={("Stop",): NOW - 1}),
        ],
        [
            run(EXPORTER_LAST_ACTION={("Stop",): NOW - 3600}),
            run("finished", EXPORTER_LAST_ACTION={("ScaleLearningRate",): NOW - 1}),
        ],
    ),
    "action failing": case(
        "ActionFailing",
        "warning",
        [run(EXPORTER_ACTIONS={("tell", "failed"): jump(1), ("tell", "done"): jump(5)})],
        [run(EXPORTER_ACTIONS={("tell", "done"): jump(1), ("tell", "dropped"): jump(1), ("tell", "failed"): 3.0})],
    ),
    "notifications failing": case(
        "NotificationsFailing",
        "warning",
        [run(EXPORTER_NOTIFICATIONS={("webhook", result): jump(3)}) for result in ("failed", "dropped")],
        [run(EXPORTER_NOTIFICATIONS={("webhook", "sent"): jump(1), ("webhook", "failed"): 3.0})],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rule_fires_beyond_its_limits_only(case: Case) -> None:
    """A rule finds its problem just beyond its limits, and none just at them."""
    for story in case.wrong:
        assert sorted(story.found) == sorted([case.problem, *case.beside])
    for story in case.right:
        assert story.found == []


# The alert rules


@cache
def shipped() -> dict[tuple[str, str], str]:
    """The expression of each alert and severity."""
    return {(rule["alert"], rule["labels"]["severity"]): rule["expr"] for path in ALERTS for rule in rules(path)}  # type: ignore[index]


def test_each_alert_is_judged_here_or_by_promql_only() -> None:
    """Each shipped alert has a rule that judges in the process, or is PromQL only; each judged severity has a case."""
    here = {rule.name for rule in RULES}
    assert {alert for alert, _ in shipped()} == here | promql_only()
    assert not here & promql_only()
    assert set(THRESHOLDS) <= here
    assert {case.problem[:2] for case in CASES.values()} == {key for key in shipped() if key[0] in here}


@pytest.mark.parametrize("name", ["CudaOutOfMemory", "ExporterBlind", "StragglerRank"])
def test_no_action_on_a_rule_of_prometheus(name: str) -> None:
    """An action on a rule that only Prometheus judges is refused, with conditions and other rules as alternatives."""
    with (
        start_exporter(torch.nn.Linear(2, 1), None, collectors=OFF) as exporter,
        pytest.raises(ValueError, match=f"{name}.*only Prometheus judges.*condition.*GradientExploding"),
    ):
        exporter.on(name, lambda _: None)


def series(story: Story, name: str) -> Iterator[dict[str, str]]:
    """Return a story for promtool: a value each minute, times in seconds from the beginning."""
    found: dict[str, list[str]] = {}
    minutes = range(int(LONG) // 60 + 1)
    for minute in minutes:
        ago = LONG - 60 * minute
        for spec, rows in story.numbers(ago) if ago <= story.age else ():
            back = NOW - LONG if spec.name.endswith("_timestamp_seconds") else 0.0
            for row, number in rows.items():
                labels = {"run": name, "rank": "0", "job": "t", "instance": name, **dict(zip(spec.labels, row, strict=True))}
                key = spec.name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
                found.setdefault(key, ["_"] * len(minutes))[minute] = format(number - back, "g" if not back else "f").replace(
                    "inf", "Inf"
                )
    return ({"series": key, "values": " ".join(values)} for key, values in found.items())


def told(found: Iterable[tuple[str, str, str | None]], alert: str, severity: str) -> set[str | None]:
    """Return the layers, or None, of an alert found with at least this severity."""
    return {layer for name, bad, layer in found if name == alert and SEVERITIES.index(bad) <= SEVERITIES.index(severity)}


@pytest.mark.server
def test_promtool_says_the_same(tmp_path: Path) -> None:
    """In each of these runs promtool finds each alert for the same layers as the process."""
    stories = {
        f"{name}, {kind} {number}": story
        for name, case in CASES.items()
        for kind, some in (("wrong", case.wrong), ("right", case.right))
        for number, story in enumerate(some)
    }
    found = {name: story.found for name, story in stories.items()}
    checks = []
    for (alert, severity), expression in shipped().items():
        if alert not in promql_only():
            expected = [
                {"labels": f'{{run="{name}"' + (f', layer="{layer}"}}' if layer else "}"), "value": 1}
                for name, problems in found.items()
                for layer in told(problems, alert, severity)
            ]
            assert expected
            checks.append({"expr": f"group by (run, layer) ({expression})", "eval_time": f"{LONG:g}s", "exp_samples": expected})
    whole = [one for name, story in stories.items() for one in series(story, name)]
    files = {"rule_files": [str(path) for path in RECORDS], "evaluation_interval": f"{LONG:g}s"}
    test = {**files, "tests": [{"interval": "1m", "input_series": whole, "promql_expr_test": checks}]}
    (tmp_path / "problems.test.yml").write_text(json.dumps(test))
    promtool("test", "rules", tmp_path / "problems.test.yml")


# Reported problems


def test_nothing_known_is_nothing_wrong() -> None:
    """Without families, or with absent rows only, there is no problem and no rate."""
    watch = Watch()
    absent = Values([family(c.GRAD_DEAD_RATIO, {("x",): 1.0}, [False]), family(c.TRAIN_LOSS_SPIKES, 9.0, [False])])
    for values in (Values([]), absent):
        watch.remember(values, NOW)
        assert watch.problems(values, NOW) == []
        assert watch.rates(values, NOW + 60) == {}


def test_an_absent_state_is_unknown() -> None:
    """Without the collector `training` only problems that need no state are found."""
    unknown = made(
        None, GRAD_NONFINITE_STEPS={("a", "stepped"): 1.0}, TRAIN_LAST_ACTIVITY_TIMESTAMP=NOW, **layer(GRAD_DEAD_RATIO=1.0)
    )
    assert unknown.state() is None
    assert made("initialising").state() == "initialising"
    told = [(problem.alert, problem.layer) for problem in Watch().problems(unknown, NOW)]
    assert told == [("TrainingNonFiniteGradients", None), ("LayerDead", "x")]
    assert Watch().problems(made(None), NOW) == []


def test_the_worst_stands_first() -> None:
    """Critical problems come before warnings, and these before information."""
    metrics = {"TRAIN_LOSS_NONFINITE": 1.0, "TRAIN_LOSS_SPIKES": 3.0, **layer(GRAD_DEAD_RATIO=0.6)}
    severities = [problem.severity for problem in Watch().problems(made(**metrics), NOW)]
    assert severities == ["critical", "warning", "info"]


def test_many_layers_are_summarized() -> None:
    """Of 50 dead layers eight are named and the others counted."""
    names = ["<img src=x>", *(f"layers.{number}" for number in range(49))]
    told = Watch().problems(made(GRAD_DEAD_RATIO={(name,): 1.0 for name in names}), NOW)
    assert [problem.layer for problem in told] == [*names[:LAYERS], None]
    assert [problem.value for problem in told] == [1.0] * LAYERS + [None]
    text = "Layer <img src=x>: more than 90 % of its units are dead."
    assert replace(told[0], first_steps="") == Problem("LayerDead", "warning", text, "<img src=x>")
    assert told[-1].text.startswith("42 more layers: ")
    assert (told[0].others, told[-1].others) == ((), tuple(names[LAYERS:]))


def test_nonfinite_layers_are_named() -> None:
    """A problem names the layers whose elements were not finite within the window, in the order of the model."""
    before = {(name, kind): 3e8 + 1 for kind in ("nan", "inf") for name in "abcdef"}
    counts = {("e", "inf"): 4.0, ("b", "nan"): 1.0, ("a", "inf"): 2.0}
    after = {row: count + 1000 * counts.get(row, 0.0) for row, count in before.items()}
    watch = Watch()
    watch.remember(made(GRAD_NONFINITE_ELEMENTS=before), NOW - 1000)
    (told,) = watch.problems(made(GRAD_NONFINITE_ELEMENTS=after, **outcomes(stepped=2.0)), NOW)
    assert told.text == "Gradients were NaN or Inf in 2 unskipped steps, in the last 5 minutes, in a, b, e."
    assert (told.layer, told.others) == ("a", ("b", "e"))


def test_a_window_is_no_longer_than_the_run() -> None:
    """A window reaches back to the start of a young run, and its text says so."""
    metrics = {"TRAIN_LOSS_SPIKES": 48.0, **optimizer(GRAD_GLOBAL_NORM_SPIKES=3.0), **phases(0.4)}
    for age, words in ((60.0, "since the start"), (900.0, "in the last 10 minutes")):
        texts = [one.text for one in Watch().problems(made(TRAIN_START_TIMESTAMP=NOW - age, **metrics), NOW)]
        assert texts[0] == f"The loss jumped 48 times {words}."
        assert texts[1].startswith("40% of the time since the start" if age == 60 else "40% of the time in the last 5 minutes")
        assert texts[2] == f"The global gradient norm spiked 3 times {words}."


# What is remembered


def test_a_new_counter_has_grown_from_zero() -> None:
    """A counter that is new has grown from zero."""
    watch = Watch()
    watch.remember(made(GRAD_GLOBAL_NORM_SPIKES={("a",): 9.0}), NOW - 601)
    now = made(GRAD_GLOBAL_NORM_SPIKES={("a",): 9.0, ("b",): 3.0})
    assert [problem.alert for problem in watch.problems(now, NOW)] == ["GradientExploding"]


def test_hardware_counters_grow_from_the_first_look() -> None:
    """Memory errors count from the first look at a GPU, as they may be of last month."""

    def judge(context: RuleContext) -> Iterator[Finding]:
        for (name, *_), errors in context.increase(c.GPU_ECC_ERRORS, 3600.0).items():
            if errors:
                yield Finding("critical", f"GPU {name}: {errors:g} errors.")

    ecc = Rule(name="Ecc", judge=judge, states=frozenset({"training"}), remembers={c.GPU_ECC_ERRORS: 3600.0})
    watch, old = Watch([ecc]), {("0", "u", "uncorrected"): 5.0}
    watch.remember(made(GPU_ECC_ERRORS=old), NOW - 120)
    watch.remember(made(GPU_ECC_ERRORS=old | {("1", "v", "uncorrected"): 7.0}), NOW - 60)
    now = old | {("1", "v", "uncorrected"): 9.0, ("2", "w", "uncorrected"): 4.0}
    texts = [problem.text for problem in watch.problems(made(GPU_ECC_ERRORS=now), NOW)]
    assert texts == ["GPU 1: 2 errors."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metrics", "minutes", "alert"),
    [
        ({"TRAIN_LOSS_NONFINITE": 1.0}, 5, "TrainingNonFiniteLoss"),
        (optimizer(GRAD_GLOBAL_NORM_SPIKES=3.0), 10, "GradientExploding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_counter_is_forgotten_after_its_window(metrics: dict[str, Any], minutes: int, alert: str) -> None:
    """The growth of a counter is a problem for as long as the window of its alert."""
    watch, values = Watch(), made(TRAIN_START_TIMESTAMP=NOW - LONG, **metrics)
    nothing = {name: dict.fromkeys(rows, 0.0) if isinstance(rows, dict) else 0.0 for name, rows in metrics.items()}
    watch.remember(made(TRAIN_START_TIMESTAMP=NOW - LONG, **nothing), NOW - 1)
    told = []
    looks = (*range(0, 60 * minutes - 60, 15), *range(60 * minutes - 60, 60 * minutes + 120, 5))
    for second in looks:
        watch.remember(values, NOW + second)
        if [problem.alert for problem in watch.problems(values, NOW + second)] == [alert]:
            told.append(second)
    assert told == [second for second in looks if second <= told[-1]]
    assert 60 * minutes - 5 <= told[-1] <= 60 * minutes + OFTEN


@pytest.mark.slow
def test_memory_does_not_grow_with_time() -> None:
    """Two hours of a thousand layers take 1.2 kB a layer, and four hours no more."""
    watch, count = Watch(), 1000
    names = LabelRows(tuple((f"layer{place}",) for place in range(count)))
    kinds = LabelRows(tuple((name, kind) for kind in ("nan", "inf") for (name,) in names.rows))
    remembered = {spec for rule in RULES for spec in rule.remembers if "layer" in spec.labels}
    of_layers = {spec: kinds if "kind" in spec.labels else names for spec in remembered}
    taken = []
    tracemalloc.start()
    for second in range(0, 4 * 3600, 30):
        families = [Family(spec, np.ones(len(labels)), labels) for spec, labels in of_layers.items()]
        watch.remember(Values([*families, family(c.TRAIN_LOSS_SPIKES, 1.0)]), NOW + second)
        taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert taken[len(taken) // 2] <= 1200 * count
    assert taken[-1] <= 1.1 * taken[len(taken) // 2]


def test_the_slowest_step_is_remembered_for_a_day() -> None:
    """A pause of an hour is remembered for 24 hours and less than one more."""
    longest = SlowestStep()
    for hour in range(30):
        longest.remember(made(TRAIN_SLOWEST_STEP=3600.0 if hour == 0 else 1.0), NOW + 3600 * hour)
        assert longest.seconds() == (3600.0 if hour <= 24 else 1.0)


def test_a_clock_set_back_makes_nothing_wrong() -> None:
    """After a clock was set back by an hour, old failures are not found again and new ones are."""
    watch, old = Watch(), made(TRAIN_START_TIMESTAMP=NOW - 9e4, TRAIN_LOSS_NONFINITE=4.0)
    for second in range(0, 1200, 15):
        watch.remember(old, NOW + second)
    back = NOW + 1200 - 3600
    watch.remember(old, back)
    assert watch.problems(old, back) == []
    new = watch.problems(made(TRAIN_START_TIMESTAMP=NOW - 9e4, TRAIN_LOSS_NONFINITE=5.0), back + 120)
    assert [problem.text for problem in new] == ["The loss was NaN or Inf 1 time in the last 5 minutes."]


def test_rates_are_those_of_the_last_minute() -> None:
    """Steps of the fastest optimizer and samples per second are those of the last minute."""
    watch = Watch()

    def counted(second: float) -> Values:
        steps = 2.0 * second if second <= 300 else 600 + 10 * (second - 300)
        return made(TRAIN_STEPS={("a",): steps, ("b",): steps / 2}, TRAIN_SAMPLES=8 * steps)

    rates = {}
    for second in range(361):
        watch.remember(counted(second), NOW + second)
        rates[second] = watch.rates(counted(second), NOW + second)
    assert rates[2] == {}
    assert rates[3] == pytest.approx({"steps": 2.0, "samples": 16.0})
    assert rates[100] == pytest.approx({"steps": 2.0, "samples": 16.0})
    assert rates[360] == pytest.approx({"steps": 10.0, "samples": 80.0})


def test_rules_do_not_see_removed_layers() -> None:
    """Rules see the present layers only; sums include removed ones."""
    rows = LabelRows((("a", "nan"), ("(removed)", "nan"), ("a", "inf"), ("(removed)", "inf")))
    values = Values([Family(c.GRAD_NONFINITE_ELEMENTS, np.array([1.0, 500.0, 0.0, 20.0]), rows)])
    assert dict(values.table(c.GRAD_NONFINITE_ELEMENTS).items()) == {("a", "nan"): 1.0, ("a", "inf"): 0.0}
    assert sum(value for _, value in values.rows(c.GRAD_NONFINITE_ELEMENTS)) == 521.0
    only = Values([Family(c.GRAD_CAPTURES, np.array([7.0]), LabelRows((("(removed)",),)))])
    assert only.table(c.GRAD_CAPTURES).rows == ()
