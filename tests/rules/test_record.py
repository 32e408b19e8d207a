"""Problems of a whole run: by the clock as in Prometheus, and by samples, of which one stands for a scrape."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from tests.rules.test_problems import Metrics, c, family, layer, optimizer
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.rules import Finding, Record, Rule, RuleContext, Values, Watch
from torch_grad_exporter.rules.record import EVERY, JudgedAt, Wrong
from torch_grad_exporter.store.journal import Journal

Rows = float | Mapping[tuple[str, ...], float]

START = 1_800_000_000.0


def families(state: str = "training", **metrics: Rows) -> list[Family]:
    """Return a scrape of a run that began at `START`."""
    given: dict[str, Rows] = {"TRAIN_START_TIMESTAMP": START, **metrics}
    shown = [family(getattr(c, name), rows if isinstance(rows, Mapping) else {(): rows}) for name, rows in given.items()]
    states = ("initialising", "training", "evaluating", "finished", "failed")
    return [*shown, family(c.TRAIN_STATE, {(name,): float(name == state) for name in states})]


def values(state: str = "training", **metrics: Rows) -> Values:
    """Return the values of such a scrape."""
    return Values(families(state, **metrics))


def by_samples(record: Record, first: int, last: int, **metrics: Rows) -> list[Wrong]:
    """Judge samples `first` to `last`, in no time."""
    for sample in range(first, last + 1):
        record.of_sample(sample, sample, lambda: families(**metrics))
    return record.wrong


def small(norm: float) -> Metrics:
    """The layer `x` under a global norm of 1000."""
    return {**optimizer(GRAD_GLOBAL_NORM=1000.0), **layer(GRAD_NORM_RECENT_MAX=norm)}


def at_clock(record: Record, watch: Watch, seconds: float, state: str = "training", samples: int = 0, **metrics: Rows) -> None:
    """Judge by the clock, this many seconds after the start."""
    now, found = START + seconds, values(state, **metrics)
    watch.remember(found, now)
    over = watch.problems(found, now) if state in ("finished", "failed") else ()
    record.of_scrape(found, JudgedAt(now, samples, samples), watch.problems(found, now, going=True), over)


# By samples


def test_a_wait_of_ten_minutes_is_forty_samples() -> None:
    """A vanishing gradient is a problem after as many samples as there are scrapes in ten minutes."""
    record = Record()
    assert by_samples(record, 1, 40, **small(1e-5)) == []
    [wrong] = by_samples(record, 41, 44, **small(1e-5))
    assert (wrong.alert, wrong.severity, wrong.layer, wrong.by_samples) == ("GradientVanishing", "warning", "x", True)
    assert (wrong.first, wrong.last) == (EVERY, 44)
    by_samples(record, 45, 60, **small(1e-5))
    by_samples(record, 61, 80, **small(1.0))
    assert (record.wrong[0].last, len(record.wrong)) == (60, 1)


def test_a_shorter_time_is_no_problem() -> None:
    """A sample with a gradient restarts the wait."""
    record = Record()
    by_samples(record, 1, 30, **small(1e-5))
    by_samples(record, 31, 35, **small(1.0))
    by_samples(record, 36, 70, **small(1e-5))
    assert record.wrong == []


def test_a_window_of_ten_minutes_is_forty_samples() -> None:
    """Three spikes within forty samples are an explosion, and farther apart they are not."""
    record = Record()
    for sample in range(1, 121):
        spikes = float(sum(sample >= at for at in (10, 60, 110)))
        record.of_sample(sample, sample, lambda spikes=spikes: families(**optimizer(GRAD_GLOBAL_NORM_SPIKES=spikes)))
    assert record.wrong == []
    for sample in range(121, 161):
        spikes = 3.0 + sum(sample >= at for at in (125, 130, 135))
        record.of_sample(sample, sample, lambda spikes=spikes: families(**optimizer(GRAD_GLOBAL_NORM_SPIKES=spikes)))
    [wrong] = record.wrong
    assert (wrong.alert, wrong.first) == ("GradientExploding", 132)
    assert "in the last 40 samples" in wrong.text


# By the clock


def test_a_wait_by_the_clock_takes_its_minutes() -> None:
    """A gradient that vanishes for ten minutes, with few samples, is a problem, and not before."""
    record, watch = Record(), Watch()
    for seconds in range(0, 600, 15):
        at_clock(record, watch, seconds, samples=1, **small(1e-5))
    assert record.wrong == []
    at_clock(record, watch, 600, samples=1, **small(1e-5))
    assert [(wrong.alert, wrong.by_samples) for wrong in record.wrong] == [("GradientVanishing", False)]
    assert record.seconds == 600


def test_a_stall_takes_its_minutes() -> None:
    """A stall is judged by the clock, whatever samples came before."""
    record, watch = Record(), Watch()
    by_samples(record, 1, 400, TRAIN_LAST_ACTIVITY_TIMESTAMP=START)
    active = {"TRAIN_LAST_ACTIVITY_TIMESTAMP": START, "TRAIN_SLOWEST_STEP": 1.0}
    at_clock(record, watch, 299, samples=400, **active)
    assert record.wrong == []
    at_clock(record, watch, 301, samples=400, **active)
    assert [one.alert for one in record.wrong] == ["TrainingStalled"]


def test_a_short_run_is_judged_at_its_end() -> None:
    """A run shorter than the pause between judgements is judged at its end as if it went on."""
    record, watch = Record(), Watch()
    at_clock(record, watch, 0, TRAIN_LOSS_SPIKES=0.0)
    at_clock(record, watch, 9, "finished", samples=3, TRAIN_LOSS_SPIKES=3.0)
    assert [wrong.alert for wrong in record.wrong] == ["LossSpike"]


def test_a_failed_run_has_failed_at_once() -> None:
    """A failed run is a problem at once, a finished one is not."""
    record, watch = Record(), Watch()
    at_clock(record, watch, 0)
    at_clock(record, watch, 9, "finished")
    assert record.wrong == []
    at_clock(record, watch, 9, "failed")
    assert [(one.alert, one.severity) for one in record.wrong] == [("TrainingFailed", "critical")]


def test_nothing_is_written_down_after_the_last() -> None:
    """A judgement that another thread began before the last one, and that comes after it, writes down no beginning."""
    journal = Journal()
    record, watch = Record(journal=journal), Watch()
    scrape = values(TRAIN_LOSS_NONFINITE=1.0)
    problems = watch.problems(scrape, START)
    for last in (False, True, False):
        record.of_scrape(scrape, JudgedAt(START, 1, 1), problems, last=last)
    assert [event.name for event in journal.take()] == ["torch.problem.start", "torch.problem.end"]


# What is kept


def test_rules_without_metrics_are_left_out() -> None:
    """A rule whose metrics or rows the run never had is not among those judged."""
    record = Record()
    record.of_scrape(values(TRAIN_PHASE_SECONDS={("forward",): 1.0}), JudgedAt(START, 1, 1), ())
    assert "DataLoaderStarvation" not in record.there
    assert "TrainingFailed" in record.there
    record.of_scrape(values(TRAIN_PHASE_SECONDS={("data",): 1.0}), JudgedAt(START, 1, 1), ())
    assert "DataLoaderStarvation" in record.there


@pytest.mark.slow
def test_a_failed_judgement_leaves_the_next_ones() -> None:
    """A rule that raises, or a judgement that another thread holds up, leaves the next judgement unharmed."""

    def judge(context: RuleContext) -> Iterator[Finding]:
        if context.values.one(c.TRAIN_LOSS):
            raise ZeroDivisionError
        yield Finding("critical", "It is.")

    record = Record([Rule(name="Broken", judge=judge, states=frozenset({"training"}), by_samples=True)])
    with pytest.raises(ZeroDivisionError):
        record.of_sample(EVERY, 1, lambda: families(TRAIN_LOSS=1.0))
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> list[Family]:
        inside.set()
        go_on.wait()
        return families()

    thread = threading.Thread(target=record.of_sample, args=(2 * EVERY, 2, slow))
    thread.start()
    inside.wait()
    with pytest.raises(TimeoutError):
        record.of_scrape(values(), JudgedAt(START, 1, 1), ())
    go_on.set()
    thread.join()
    assert [one.alert for one in record.wrong] == ["Broken"]
