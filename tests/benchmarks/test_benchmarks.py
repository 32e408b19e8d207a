from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from benchmarks import overhead, overhead_tables, record, report
from benchmarks.arms import Arm
from benchmarks.interleave import Comparison, compare, interleave
from benchmarks.monitor import Plain
from benchmarks.monitors import MONITORS, Entry, ThisExporter
from benchmarks.workloads import WORKLOADS

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


def test_known_difference_is_found_despite_drift() -> None:
    """An arm that takes 3 % longer is measured as such while the machine slows down tenfold."""
    machine = Machine()
    arms = {"plain": machine.step(1.0), "slower": machine.step(1.03), "control": machine.step(1.0)}
    found = machine.measured(arms, steps_per_block=20, rounds=2000)
    assert machine.speed > 10
    assert found["slower"].overhead == pytest.approx(0.03, abs=1e-4)
    assert found["slower"].low <= 0.03 <= found["slower"].high
    assert found["control"].overhead == pytest.approx(0.0, abs=1e-4)


def test_a_disturbed_round_is_left_out() -> None:
    """One block in twenty that takes five times as long changes neither the slower arm's overhead nor the control's."""
    machine, blocks = Machine(), iter(range(10**9))

    def disturbed() -> float:
        return 5.0 if next(blocks) % 20 == 7 else 1.0

    arms = {"plain": machine.step(disturbed), "slower": machine.step(1.2), "control": machine.step(disturbed)}
    found = machine.measured(arms, steps_per_block=1, rounds=200)
    assert found["slower"].overhead == pytest.approx(0.2, abs=1e-3)
    assert found["control"].overhead == pytest.approx(0.0, abs=1e-3)


def test_arms_are_needed() -> None:
    """Neither rounds nor seconds, or both, is refused."""
    with pytest.raises(ValueError, match="either rounds or seconds"):
        interleave({"plain": lambda: None}, steps_per_block=1)


def test_measured_blocks_contain_samples(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
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


def test_missing_monitor_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor whose package is missing is a row that says so."""
    monkeypatch.setitem(MONITORS, "exporter", Entry("gone", Plain, "nothing", "no-such-package-anywhere"))
    cells = overhead.measure_all([overhead.Plan("mlp", "exporter", seconds=1.0, settling=1.0)])
    table = overhead_tables.tables(cells)[1]
    assert ["gone", "nothing", "not installed"] in table["rows"]
    assert "gone on MLP 784-256-128-10: not installed: no-such-package-anywhere." in table["notes"]


def test_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    """Results are written between the marks only, and twice is as once."""
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
