import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from benchmarks import overhead, overhead_tables, record, report
from benchmarks.arms import Arm
from benchmarks.interleave import Comparison, compare, interleave, trimmed_mean
from benchmarks.monitor import Plain
from benchmarks.monitors import MONITORS, Entry, ThisExporter
from benchmarks.workloads import WORKLOADS, Training
from tests.support.tools import eventually

pytestmark = pytest.mark.full  # what measures the package, not the package


class Machine:
    """A clock that only steps move; `speed` changes between readings, as that of a shared machine does."""

    def __init__(self) -> None:
        self.now, self.speed = 0.0, 1.0

    def measured(self, arms: Mapping[str, Callable[[], None]], **options: int) -> dict[str, Comparison]:
        return compare(interleave(arms, clock=self.clock, collect=lambda: None, **options), resamples=200)

    def clock(self) -> float:
        return self.now

    def step(self, cost: float | Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.now += self.speed * (cost if isinstance(cost, float) else cost())
            self.speed *= 1.00002

        return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch, as the benchmarks have, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_known_difference_is_found_on_a_machine_that_drifts() -> None:
    """An arm that takes 3 % longer is measured as such while the machine becomes ten times slower, and a control as the same."""
    machine = Machine()
    arms = {"plain": machine.step(1.0), "slower": machine.step(1.03), "control": machine.step(1.0)}
    found = machine.measured(arms, steps_per_block=20, rounds=2000)
    assert machine.speed > 10
    assert found["slower"].overhead == pytest.approx(0.03, abs=1e-4)
    assert found["slower"].low <= 0.03 <= found["slower"].high
    assert found["control"].overhead == pytest.approx(0.0, abs=1e-4)


def test_trimming_hides_no_samples() -> None:
    """A monitor that makes each 50th step ten times as long costs 18 %; a median of steps would say nothing at all."""
    machine, count, durations = Machine(), iter(range(10**9)), []

    def sampled() -> float:
        durations.append(10.0 if next(count) % 50 == 0 else 1.0)
        return durations[-1]

    arms = {"plain": machine.step(1.0), "sampled": machine.step(sampled)}
    found = machine.measured(arms, steps_per_block=50, rounds=40)
    assert found["sampled"].overhead == pytest.approx(0.18, abs=2e-3)
    assert found["sampled"].untrimmed == pytest.approx(0.18, abs=2e-3)
    assert statistics.median(durations) == 1.0


def test_a_disturbed_round_is_left_out() -> None:
    """One block in twenty that takes five times as long changes neither the slower arm's overhead nor the control's."""
    machine, blocks = Machine(), iter(range(10**9))

    def disturbed() -> float:
        return 5.0 if next(blocks) % 20 == 7 else 1.0

    arms = {"plain": machine.step(disturbed), "slower": machine.step(1.2), "control": machine.step(disturbed)}
    found = machine.measured(arms, steps_per_block=1, rounds=200)
    assert found["slower"].overhead == pytest.approx(0.2, abs=1e-3)
    assert found["control"].overhead == pytest.approx(0.0, abs=1e-3)


def test_half_as_much_work_again_takes_half_as_long_again() -> None:
    """Half as much again of the same additions is measured as 50 %, in this thread's own time, and as much as nothing."""

    def added(times: int) -> Callable[[], None]:
        return lambda: [sum(range(200)) for _ in range(times)] and None

    arms = {"plain": added(100), "slower": added(150), "control": added(100)}

    def is_right() -> bool:
        found = compare(interleave(arms, steps_per_block=10, rounds=30, clock=time.thread_time, collect=lambda: None))
        slower, control = found["slower"], found["control"]
        return slower.low - 0.05 <= 0.5 <= slower.high + 0.05 and control.low - 0.05 <= 0.0 <= control.high + 0.05

    assert eventually(is_right)


def test_each_arm_is_as_often_first_as_last() -> None:
    """Over whole turns every arm has had every place the same number of times."""
    ran: list[str] = []
    arms = {name: lambda name=name: ran.append(name) for name in "abc"}
    interleave(arms, steps_per_block=1, rounds=12, collect=lambda: None)
    for place in range(3):
        assert sorted(ran[place::3]) == sorted("abc" * 4)


def test_arms_are_needed() -> None:
    """Neither rounds nor seconds, or both, is refused."""
    with pytest.raises(ValueError, match="either rounds or seconds"):
        interleave({"plain": lambda: None}, steps_per_block=1)


def test_few_values_are_not_trimmed_away() -> None:
    """Three rounds keep all three."""
    assert trimmed_mean([1.0, 2.0, 6.0]) == 3.0


def test_the_exporter_is_sampled_in_the_blocks_that_are_measured(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Measured blocks are whole intervals of the exporter's, which took samples in them by its own count."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_OVERHEAD_BUDGET", "0.5")  # samples often, so that a block can be short
    monkeypatch.setattr(overhead, "BLOCK_SECONDS", 0.05)
    cell = overhead.measure(overhead.Plan("mlp", "exporter", seconds=0.5, settling=0.5))
    seen = cell["exporter"]
    assert cell["steps_per_block"] % seen["interval_at_start"] == 0
    assert seen["samples"] >= cell["monitored"]["rounds"] / 2
    assert {"plain", "monitored", "control"} == set(cell["blocks"])
    table = overhead_tables.tables({"mlp": {"exporter": cell}})[1]
    assert [row[0] for row in table["rows"]] == ["no monitor (control)", "this exporter, defaults"]


def test_two_exporters_have_a_control_each(one_thread: None) -> None:
    """Both controls are rows, and the table of intervals says of each row which exporter it is about."""
    compared = {"overhead": 0.01, "low": 0.0, "high": 0.02, "untrimmed": 0.01, "rounds": 3}
    seen = {"interval_at_start": 8, "interval_at_end": 16, "fewest_in_a_block": 1, "most_in_a_block": 2, "own_ratio": 0.005}
    cell = {"monitored": compared, "control": compared, "exporter": seen, "steps_per_block": 16}
    of_each_step = {"monitored": compared, "exporter": seen, "steps_per_block": 16}  # an interval of 1, and so no control
    found = {"exporter": cell, "exporter_activations": cell, "exporter_every_1": of_each_step}
    _, overheads, meanwhile = overhead_tables.tables({"mlp": found})
    assert [row[0] for row in overheads["rows"]] == [
        "no monitor (control)",
        "no monitor (control of this exporter, `activations=True`)",
        "this exporter, defaults",
        "this exporter, `activations=True`",
        "this exporter, `every=1`",
    ]
    assert [row[0] for row in meanwhile["rows"]] == [
        "MLP 784-256-128-10, this exporter, defaults",
        "MLP 784-256-128-10, this exporter, `activations=True`",
    ]


def test_a_plain_arm_runs_without_the_exporters_hooks(one_thread: None) -> None:
    """PyTorch's global optimizer hooks hold the exporter's while its own arm runs, and nothing while a plain one does."""
    before = len(_global_optimizer_pre_hooks)
    plain, watched = Arm(WORKLOADS["mlp"], Plain()), Arm(WORKLOADS["mlp"], ThisExporter(1))
    with plain.running():
        assert not _global_optimizer_pre_hooks
    with watched.running():
        watched.step()
        assert len(_global_optimizer_pre_hooks) == 1
    watched.close()
    plain.close()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the module hooks: the first layer's input is data
@pytest.mark.parametrize("name", [name for name, entry in MONITORS.items() if entry.package is None])
def test_monitors_leave_the_training_trained(name: str, one_thread: None) -> None:
    """Three watched steps are taken and the loss is the one of plain training; only clipping may change it."""
    arms = [Arm(WORKLOADS["mlp"], monitor) for monitor in (Plain(), MONITORS[name].make())]
    losses = []
    for arm in arms:
        with arm.running():
            for _ in range(3):
                arm.step()
            losses.append(arm.training.backward().item())
        arm.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if name == "clip_grad_norm" else 0.0)


def test_a_monitor_whose_package_is_missing_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither dropped nor measured."""
    monkeypatch.setitem(MONITORS, "exporter", Entry("gone", Plain, "nothing", "no-such-package-anywhere"))
    cells = overhead.measure_all([overhead.Plan("mlp", "exporter", seconds=1.0, settling=1.0)])
    table = overhead_tables.tables(cells)[1]
    assert ["gone", "nothing", "not installed"] in table["rows"]
    assert "gone on MLP 784-256-128-10: not installed: no-such-package-anywhere." in table["notes"]


@pytest.mark.parametrize(("name", "tensors", "millions"), [("resnet18", 62, 11.2), ("decoder", 148, 91.4)])
def test_the_large_workloads_have_the_sizes_that_the_page_says(name: str, tensors: int, millions: float) -> None:
    """As many parameters and elements as written; counted without memory for them."""
    with torch.device("meta"):
        parameters = list(WORKLOADS[name].model().parameters())
    assert len(parameters) == tensors
    assert sum(p.numel() for p in parameters) / 1e6 == pytest.approx(millions, rel=0.002)


@pytest.mark.parametrize("name", ["mlp", "small_layers"])
def test_every_parameter_of_the_small_workloads_gets_a_gradient(name: str, one_thread: None) -> None:
    """One that is neither zero nor not finite: nothing is cheap to watch because there is nothing to see."""
    training = Training(WORKLOADS[name])
    assert training.backward().isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in training.model.parameters())


def test_the_page_is_filled_from_results_and_only_there(tmp_path: Path) -> None:
    """Between the marks stand where and when, tables and notes; what was not measured says so; twice is as once."""
    found = record.table("Costs", ["what", "µs"], [["a | b", 1234.5], ["c", None]], ["A note."])
    record.save("costs", {"tables": [found]}, directory=tmp_path)
    text = "By hand.\n<!-- results: costs -->\nold\n<!-- end -->\nMore.\n<!-- results: other -->\n<!-- end -->\n"
    page = report.page(text, tmp_path)
    assert page.startswith("By hand.\n<!-- results: costs -->\n\nMeasured on ")
    assert "| what | µs |\n| --- | ---: |\n| a \\| b | 1,234 |\n| c |  |\n" in page
    assert "- A note.\n" in page
    assert "old" not in page
    assert "<!-- results: other -->\n\nNot measured yet.\n\n<!-- end -->" in page
    assert report.page(page, tmp_path) == page
