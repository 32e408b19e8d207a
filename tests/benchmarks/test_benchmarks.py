from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from benchmarks import overhead, overhead_tables
from benchmarks.arms import Arm
from benchmarks.interleave import Comparison, compare, interleave
from benchmarks.monitor import Plain
from benchmarks.monitors import MONITORS
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
