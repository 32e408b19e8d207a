"""A black box has the batch of a step that went wrong, from which it can be seen again."""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.actions.black_box.planted import model, train
from tests.capture.scenes import COUNTED
from tests.capture.scenes import Loop as CountedLoop
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, values
from tests.support.tools import eventually
from torch_grad_exporter import load_black_box, start_exporter
from torch_grad_exporter.actions import MaxNorm, SkipNonFinite
from torch_grad_exporter.rules import RULES, Finding, Rule, RuleContext, rule
from torch_grad_exporter.rules.context import GOING

AUTO: dict[str, object] = {}


@pytest.mark.parametrize(
    ("options", "micro"),
    [({"every": 1}, 1), ({"every": 1}, 3), ({"every": 50}, 1), (AUTO, 1), ({**AUTO, "nan_origin": True}, 2)],
    ids=["each", "each-micro", "fiftieth", "auto", "auto-origin-micro"],
)
def test_the_batch_of_a_nan_replays(options: dict[str, object], micro: int, tmp_path: Path) -> None:
    """The last batch is that of the first NaN, whichever steps are sampled; its replay names the module ten times of ten."""
    given = train(tmp_path, 400, 300, micro=micro, **options)
    box = load_black_box(tmp_path)
    assert box.step == (len(given) - 1) // micro
    assert [kept.step for kept in box.batches] == [place // micro for place in (len(given) - 2, len(given) - 1)]
    for kept, expected in zip(box.batches, given[-2:], strict=True):
        assert torch.equal(kept.args[0], expected)
    for _ in range(10):
        again = model()
        with start_exporter(again, None, every=1, nan_origin="always", collectors=OFF) as exporter:
            with box.batches[-1].random_states():
                again(*box.batches[-1].args, **box.batches[-1].kwargs).square().mean().backward()
            torch.optim.SGD(again.parameters(), 0.1).step()
            assert [labels for (name, labels), _ in values(exporter).items() if name == "torch_nonfinite_origin_step"] == [
                (("kind", "nan"), ("layer", "1"), ("pass", "forward"))
            ]


def test_what_is_in_a_box(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A box has the problem, the samples, the options and the process, and the log names the folder."""
    with caplog.at_level(logging.WARNING):
        given = train(tmp_path, 40, 20, every=1, otlp_endpoint="http://127.0.0.1:9/secret", otlp_headers={"key": "secret"})
    box = load_black_box(tmp_path)
    assert (box.lost, box.found_at_step > box.step) == (0, True)
    assert box.path.parent == tmp_path / "planted-0"
    assert str(box.path) in caplog.text
    assert box.problem.alert == "TrainingNonFiniteGradients"
    assert (box.options["every"], box.process["run"], box.process["rank"]) == (1, "planted", 0)
    assert box.samples["layers"] == ["2", "3"]
    assert box.samples["steps"].tolist() == list(range(1, 41))
    assert box.samples["norm"].isfinite().all(1).tolist() == [step < len(given) - 1 for step in range(40)]
    assert (box.samples["run"]["norm"] > 0).any()
    assert "secret" not in "".join(path.read_text(errors="replace") for path in box.path.iterdir())
    assert json.loads((box.path / "about.json").read_text())["problem"]["text"] == box.problem.text


def test_training_is_the_same(tmp_path: Path) -> None:
    """Batches, and so weights and random numbers, are the same bits with a black box and without."""
    with_box, without = train(tmp_path, 60, 30, every=3), train(None, 60, 30, every=3)
    assert len(with_box) == len(without)
    assert all(map(torch.equal, with_box, without))


@pytest.mark.parametrize("alert", ["LossSpike", "GradientExploding"])
def test_the_batch_of_a_spike(alert: str, tmp_path: Path) -> None:
    """The last batch is that of the last spike, though the rule fires later; one right after another is its consequence."""
    trained = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-12)
    spikes = (60, 70, 80, 81)
    with start_exporter(trained, None, every=1, black_box=tmp_path) as exporter:
        for step in range(120):
            data = torch.full((4, 8), 1e3 + step) if step in spikes else torch.rand(4, 8) + 1
            optimizer.zero_grad()
            loss = trained(data).square().mean()
            loss.backward()
            optimizer.step()
            if alert == "LossSpike":
                exporter.observe(loss=loss)
    boxes = {load_black_box(path).problem.alert: load_black_box(path) for path in tmp_path.glob("*/*") if path.is_dir()}
    assert boxes[alert].step == 80
    assert boxes[alert].batches[-1].args[0][0, 0] == 1080


def test_a_loop_that_raises_at_once(tmp_path: Path) -> None:
    """An exception at the first NaN loss ends the run, and the box has its batch though no sample was due."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)

    def loop() -> None:
        for step in range(50):
            loss = trained(torch.rand(1, 64) if step < 40 else torch.zeros(1, 64)).square().mean()
            loss.backward()
            if not loss.isfinite():
                raise FloatingPointError
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(FloatingPointError), start_exporter(trained, None, every=4096, black_box=tmp_path):
        loop()
    box = load_black_box(tmp_path)
    assert (box.step, box.problem.alert) == (40, "TrainingFailed")
    assert not box.batches[-1].args[0].any()


def test_a_loop_that_ends_at_once(tmp_path: Path) -> None:
    """Leaving the loop at the first NaN ends the run well, and the box has its batch though no sample was due."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    with start_exporter(trained, None, every=4096, black_box=tmp_path):
        for step in range(50):
            loss = trained(torch.rand(1, 64) if step < 40 else torch.zeros(1, 64)).square().mean()
            loss.backward()
            if not loss.isfinite():
                break
            optimizer.step()
            optimizer.zero_grad()
    box = load_black_box(tmp_path)
    assert (box.step, box.found_at_step, box.problem.alert) == (40, 40, "TrainingNonFiniteGradients")
    assert not box.batches[-1].args[0].any()


def test_a_loop_that_skips_at_once(tmp_path: Path) -> None:
    """A loss that is observed and has no backward is that of the last forward before it."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    with start_exporter(trained, None, every=4096, black_box=tmp_path) as exporter:
        for step in range(50):
            loss = trained(torch.zeros(1, 64) if step == 40 else torch.rand(1, 64)).square().mean()
            exporter.observe(loss=loss)
            if step != 40:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    box = load_black_box(tmp_path)
    assert (box.step, box.problem.alert) == (40, "TrainingNonFiniteLoss")
    assert not box.batches[-1].args[0].any()


def test_a_step_that_is_skipped(tmp_path: Path) -> None:
    """With `SkipNonFinite` the run stays well, and the loss that was observed names the batch."""
    trained = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    with start_exporter(trained, None, every=64, black_box=tmp_path, clip=[SkipNonFinite(), MaxNorm(1.0)]) as exporter:
        for step in range(60):
            optimizer.zero_grad()
            loss = trained(torch.full((4, 8), torch.nan if step == 30 else float(step))).square().mean()
            loss.backward()
            optimizer.step()
            exporter.observe(loss=loss)
    box = load_black_box(tmp_path)
    assert (box.step, box.problem.alert, box.options["clip"]) == (30, "TrainingNonFiniteLoss", ["SkipNonFinite()", "MaxNorm(1.0)"])
    assert box.batches[-1].args[0].isnan().all()
    assert trained.weight.isfinite().all()


def test_at_most_three_in_a_run(tmp_path: Path) -> None:
    """A run that is started again and again, and fails each time, writes three boxes."""
    for _ in range(4):
        train(tmp_path, 24, 20, every=1)
    assert len([*tmp_path.glob("*/*/about.json")]) == 3
    with pytest.raises(ValueError, match="there are 3 black boxes; pass one of"):
        load_black_box(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("before", [2, 3])
def test_after_three_nothing_is_kept(before: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once a run has its boxes, rounds are only counted again, no batch is kept, and the log says so once."""
    for _ in range(before):
        train(tmp_path, 24, 20, every=1)
    caplog.clear()
    loop = CountedLoop()
    with start_exporter(loop.model, None, collectors=OFF, run="planted", black_box=tmp_path, **COUNTED) as exporter:
        with torch.no_grad():
            next(loop.model.parameters()).fill_(torch.nan if before == 2 else 1.0)
        assert eventually(lambda: loop.step() or len([*tmp_path.glob("*/*/about.json")]) == 3)
        loop.until_counted(exporter)
        inner = next(each for each in loop.model.modules() if isinstance(each, nn.Linear)).in_features
        data = np.zeros((1 << 19, inner), np.float32)
        alive = weakref.ref(data)
        loop.model(torch.from_numpy(data))
        del data
        assert alive() is None
        assert not errors(exporter)
    assert caplog.text.count("has 3 boxes, no more are written for this run and no batches are kept") == 1


def test_rules_of_others(tmp_path: Path) -> None:
    """Rules that users register write boxes of the newest batches, one each, and three in all."""

    def rule_of(number: int) -> Rule:
        @rule(f"Own{number}", GOING)
        def own(_context: RuleContext) -> Iterator[Finding]:
            yield Finding("warning", f"Number {number} holds.")

        return own

    with contextlib.ExitStack() as registered:
        for number in range(4):
            registered.enter_context(RULES.register(rule_of(number)))
        trained = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(trained.parameters(), 0.0)
        with start_exporter(trained, None, every=1, black_box=tmp_path) as exporter:
            for step in range(30):
                trained(torch.full((4, 8), 100.0 + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            exporter.problems()
    boxes = [load_black_box(path.parent) for path in sorted(tmp_path.glob("*/*/about.json"))]
    assert [box.problem.alert for box in boxes] == ["Own0", "Own1", "Own2"]
    assert all([kept.args[0][0, 0].item() - 100 for kept in box.batches] == [box.step - 1, box.step] for box in boxes)


def test_a_healthy_run_writes_none(tmp_path: Path) -> None:
    """Without a problem the folder stays empty, and says so; a step that a scaler skips is none."""
    trained = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with start_exporter(trained, None, every=1, black_box=tmp_path / "new" / "boxes") as exporter:
        for step in range(30):
            loss = trained(torch.rand(4, 8)).square().mean() * (1e38 if step == 20 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert not errors(exporter)
    assert [*(tmp_path / "new" / "boxes").iterdir()] == []
    with pytest.raises(FileNotFoundError, match="there is none"):
        load_black_box(tmp_path)


def test_written_while_the_training_goes_on(tmp_path: Path) -> None:
    """The box is there before the end of the run."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)

    def steps(data: torch.Tensor) -> None:
        for _ in range(10):
            trained(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def is_there() -> bool:
        steps(torch.rand(1, 64))
        return any(tmp_path.glob("*/*/about.json"))

    with start_exporter(trained, None, black_box=tmp_path):
        steps(torch.rand(1, 64))
        steps(torch.zeros(1, 64))
        assert eventually(is_there)
    box = load_black_box(tmp_path)
    assert box.step == 10
    assert not box.samples["norm"][-1].isfinite().any()


def in_a_job(rank: int, folder: str) -> tuple[int, float]:
    """Train under DDP, with a NaN in a batch of rank 1; return the step, and the sum of the last batch of this rank's box."""
    torch.manual_seed(rank)
    trained = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    with start_exporter(trained, None, every=1, collectors=OFF, black_box=folder, run="job"):
        for step in range(30):
            data = torch.full((4, 8), torch.nan if step == 25 and rank else float(step))
            trained(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    box = load_black_box(Path(folder) / f"job-{rank}")
    assert box.process["rank"] == rank
    return box.step, float(box.batches[-1].args[0].mean())


@pytest.mark.process
def test_ranks(tmp_path: Path) -> None:
    """Each rank has a folder of its own, with what it was given in the step whose reduced gradients were NaN."""
    (innocent_step, innocent), (step, value) = of_ranks(in_a_job, str(tmp_path))
    assert (innocent_step, step) == (25, 25)
    assert innocent == 25
    assert value != value  # noqa: PLR0124 - NaN
