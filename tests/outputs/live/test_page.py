"""The live page in a real Chromium: it shows what the exporter says, works for every visitor and asks no other server."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import bcrypt
import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.outputs.live.support import Made, family
from tests.support.browser import Visit, chromium, visit
from tests.support.certificates import authority
from tests.support.models import Perceptron
from tests.support.tools import PATIENCE, eventually, get
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli import plot
from torch_grad_exporter.collectors.nan_origin import NONFINITE_ORIGIN_STEP
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.collectors.training import TRAIN_LOSS_NONFINITE, TRAIN_STATE, TRAIN_STEPS
from torch_grad_exporter.outputs.live.history import History, Moment
from torch_grad_exporter.outputs.live.live import Live
from torch_grad_exporter.outputs.live.live import Run as Identity
from torch_grad_exporter.rules import Record

pytestmark = pytest.mark.server

HOSTILE = "<img src=x onerror=alert(1)>"
"""The name of a layer: a module may be called anything without a dot."""

Scrape = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests here."""
    expect.set_options(timeout=1000 * PATIENCE)
    with chromium() as started:
        yield started


def check(seen: Visit, url: str, *, ends: bool = False) -> None:
    """Assert that a window has not complained, broken its policy or sent a request to another server."""
    # A browser itself notes on the console that it gets no answer, or a 503 of a server that is closing.
    assert [line for line in seen.complaints if not (ends and ("ERR_" in line or " 503 " in line))] == []
    assert seen.violations() == []
    assert seen.origins() == {re.sub(r"(\w+://)(?:[^/@]*@)?([^/]*).*", r"\1\2", url)}


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Visit]]:
    """Open windows, and check them at the end."""
    opened: list[tuple[Visit, str, bool]] = []
    with contextlib.ExitStack() as stack:

        def show(url: str, *, ends: bool = False, **options: object) -> Visit:
            seen = stack.enter_context(visit(browser, **options))
            opened.append((seen, url, ends))
            seen.show(url)
            return seen

        yield show
        for place, (seen, url, ends) in enumerate(opened):
            seen.picture(re.sub(r"\W+", "-", request.node.name) + (f"-{place}" if place else ""))
            check(seen, url, ends=ends)


class Run:
    """A model in training, with an exporter on it."""

    def __init__(self, model: torch.nn.Module, **options: object) -> None:
        torch.manual_seed(0)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen = {"port": 0, "addr": "127.0.0.1", "every": 1, "run": "trial", **options}
        self.exporter: Exporter = start_exporter(model, **chosen)  # type: ignore[arg-type]
        self.page = self.exporter.page_url or ""
        self.inputs = next(model.parameters()).shape[-1]
        self.losses: list[float] = []

    def train(
        self, steps: int = 1, *, spoiled: torch.Tensor | None = None, value: float = math.nan, heedless: bool = False
    ) -> None:
        """Take clipped steps; the gradient of the parameter `spoiled` is `value`.

        A step that is not finite is skipped, or with `heedless` taken and the weights restored.
        """
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()} if heedless else {}
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, self.inputs)).square().mean()
            handle = None if spoiled is None else spoiled.register_hook(lambda gradient: torch.full_like(gradient, value))
            loss.backward()
            if handle is not None:
                handle.remove()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            if heedless or math.isfinite(norm):
                self.optimizer.step()
            self.exporter.observe(loss=loss.detach(), tokens=64, epoch=3)
            self.losses.append(loss.item())
        if heedless:
            self.model.load_state_dict(kept)

    def scrape(self) -> Scrape:
        """Return all samples of `/metrics` by the reference parser, without the labels that all have."""
        families = list(text_string_to_metric_families(get(f"{self.page}metrics")))
        common = {("run", "trial"), ("rank", str(self.exporter.rank))}
        return {(s.name, frozenset(set(s.labels.items()) - common)): s.value for family in families for s in family.samples}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels."""
        return sum(value for (found, has), value in self.scrape().items() if found == name and set(labels.items()) <= has)

    def columns(self, quantity: str = "norm") -> list[int]:
        """Return the steps of the heatmap's recent columns."""
        found = json.loads(get(f"{self.page}api/v1/layers?quantity={quantity}&view=recent"))
        return [int(step) for step in found["steps"]]

    def saved(self, folder: Path) -> str:
        """Save the run as a page and return its address."""
        self.exporter.save(folder / "saved.json.gz")
        return as_page(plot.loaded(str(folder / "saved.json.gz")), folder)


def as_page(content: Any, folder: Path) -> str:  # noqa: ANN401 - JSON
    """Write a page of a saved run and return its address."""
    (folder / "saved.html").write_text(plot.page(content), encoding="utf-8")
    return (folder / "saved.html").as_uri()


@pytest.fixture(scope="module")
def settled() -> Iterator[Run]:
    """A run of 43 samples and 42 steps, one of them skipped for a NaN, in which half of the units of a layer are dead."""
    run = Run(Perceptron(), dead_window=3, moments=True, activations=True)
    with torch.no_grad():
        run.model.first.bias[:4].fill_(-1e6)
    with run.exporter:
        run.train(40)
        run.train(spoiled=run.model.first.weight)
        run.train(2)
        known = {"torch_train_steps_total": 42, "torch_train_tokens_total": 43 * 64, "torch_grad_captures_total": 86}
        assert eventually(lambda: all(run.total(name) == value for name, value in known.items()))
        for quantity in ("norm", "activation_rms"):
            assert eventually(lambda quantity=quantity: run.columns(quantity)[-1:] == [42])
        yield run


@pytest.fixture(scope="module")
def window(browser: Browser, settled: Run) -> Iterator[Visit]:
    """The page of that run."""
    with visit(browser, reduced_motion="reduce") as seen:
        seen.show(settled.page)
        yield seen
        seen.picture("settled")
        check(seen, settled.page)


def number(page: Page, name: str) -> float:
    """Return the number behind a tile of the banner or a fact of a layer, NaN if there is none."""
    text = page.locator(f"dd[data-testid={name}]").get_attribute("data-value")
    return float(text.replace("Infinity", "inf")) if text else math.nan


def soon(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for the page, which asks every 2 seconds."""
    assert eventually(lambda: condition() or bool(page.wait_for_timeout(50))), page.inner_text("main")


def nonfinite_pixels(page: Page) -> int:
    """Return how many pixels of the heatmap have the colour of values that are not finite."""
    count: int = page.evaluate(
        """() => {
          const bad = getComputedStyle(document.documentElement).getPropertyValue("--nonfinite").trim().toLowerCase();
          const from = document.querySelector("#heatmap");
          const copy = new OffscreenCanvas(from.width, from.height).getContext("2d");
          copy.drawImage(from, 0, 0);
          const { data } = copy.getImageData(0, 0, from.width, from.height);
          const wanted = parseInt(bad.slice(1), 16);
          let count = 0;
          for (let at = 0; at < data.length; at += 4) count += ((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]) === wanted;
          return count;
        }"""
    )
    return count


def wide(page: Page) -> int:
    """Return by how many pixels the page is wider than the window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width


def at_row(page: Page, row: int, rows: int) -> dict[str, float]:
    """Return the place of a row in the heatmap near its last column; the axis below takes 24 pixels, the strip above 6."""
    box = page.get_by_test_id("heatmap-overlay").bounding_box()
    assert box is not None
    return {"x": box["width"] - 17, "y": 6 + (box["height"] - 30) * (row + 0.5) / rows}


def show_layer(page: Page, name: str, row: int, rows: int) -> None:
    """Click a row of the heatmap and wait for its layer."""
    page.get_by_test_id("heatmap-overlay").click(position=at_row(page, row, rows))
    expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", name)
    expect(page.get_by_test_id("layer-name")).to_have_text(name)


# What it shows of a run


def test_the_banner_agrees_with_metrics(settled: Run, window: Visit) -> None:
    """The banner has the values of `/metrics`, and the page's policy refuses an inline script."""
    run, page = settled, window.page
    expect(page.get_by_test_id("state")).to_have_text("Training")
    expect(page.get_by_test_id("run")).to_have_text("trial")
    for name, metric in {
        "step": "torch_train_steps_total",
        "loss": "torch_train_loss",
        "learning-rate": "torch_train_learning_rate",
        "nonfinite": "torch_grad_nonfinite_steps_total",
        "spikes": "torch_grad_global_norm_spikes_total",
        "overhead": "torch_grad_exporter_overhead_ratio",
        "interval": "torch_grad_exporter_sampling_interval_steps",
    }.items():
        assert number(page, name) == run.total(metric), name
    assert (number(page, "nonfinite"), number(page, "dead-layers")) == (1, 0)
    assert page.get_by_test_id("nonfinite-note").inner_text() == "48 elements · 1 step skipped"
    assert number(page, "global-norm") == pytest.approx(run.total("torch_grad_global_norm"))
    after, step = run.total("torch_grad_global_norm_after_clip"), run.total("torch_grad_sample_step")
    assert page.get_by_test_id("global-norm-note").inner_text() == f"{after:#.3g} after clipping · step\u00a0{step:g}"
    soon(page, lambda: charts_are_as_answered(page, run))
    # A NaN whose step was skipped is no problem, so its tile has no colour either.
    expect(page.get_by_test_id("problem-list")).to_have_text("Nothing is wrong by the thresholds of the alert rules.")
    assert page.locator(".tile:not([data-level=''])").count() == 0
    explained = {page.locator(f"#tile-{name} dt").get_attribute("title") for name in ("nonfinite", "spikes", "interval")}
    assert len(explained - {None}) == 3

    assert "script-src 'self';" in page.request.get(run.page).headers["content-security-policy"]
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert page.evaluate("[window.ran === undefined, seen.violations.length]") == [True, 1]
    page.evaluate("seen.violations = []")
    window.complaints.clear()


def charts_are_as_answered(page: Page, run: Run) -> bool:
    """Return whether the charts show the numbers of the JSON interface."""
    known = page.request.get(f"{run.page}api/v1/run?view=whole").json()
    norms = [[value if isinstance(value, float) else None for value in known[key]] for key in ("norm", "norm_after_clip")]
    logs = [pytest.approx([value and math.log10(value) for value in norm]) for norm in norms]
    drawn = page.evaluate("Object.values(TorchGrad.app.charts).map((chart) => chart.uplot.data)")
    right: bool = drawn[:2] == [[known["steps"], *logs], [known["steps"], known["loss"]]]
    return right and known["loss"][-1:] == pytest.approx(run.losses[-1:], rel=1e-5)


def test_norms_of_different_steps_name_them(open_page: Callable[..., Visit]) -> None:
    """Norms before and after clipping of different steps have each its own; a missing loss says how to give it."""
    run = Run(Perceptron(), every=3)
    norms: list[float] = []
    with run.exporter:
        for _ in range(9):
            run.optimizer.zero_grad()
            run.model(torch.randn(8, run.inputs)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
            run.exporter.observe(grad_norm=norm)
            run.optimizer.step()
            norms.append(float(norm))
        sampled = run.total("torch_grad_sample_step")
        assert eventually(lambda: run.columns()[-1:] == [sampled] and run.total("torch_grad_global_norm") == norms[-1])
        page = open_page(run.page).page
        expected = f"before {norms[-1]:#.3g} (step 9)after clipping 1.00e-3 of {norms[int(sampled) - 1]:#.3g} (step {sampled:g})"
        soon(page, lambda: (page.locator("#chart-norm .legend").text_content() or "").strip() == expected)
        assert page.get_by_test_id("loss-note").inner_text() == "exporter.observe(loss=…)"


def test_a_layer(settled: Run, window: Visit) -> None:
    """A click on a row opens its layer, with the numbers, the distribution and the moments of `/metrics`."""
    run, page = settled, window.page
    for row, name in enumerate(("first", "second")):
        show_layer(page, name, row, 2)
        for fact, metric in {
            "norm": "norm",
            "max_magnitude": "max_magnitude",
            "zero_ratio": "zero_ratio",
            "units": "units",
            "captures": "captures_total",
        }.items():
            assert number(page, f"layer-{fact}") == run.total(f"torch_grad_{metric}", layer=name), fact
        assert counts(page) == buckets(run, name)
        assert sum(counts(page)) > 40
        for moment in ("mean", "stddev"):
            shown = page.locator(f"#layer-{moment} .value").inner_text()
            assert float(shown) == pytest.approx(run.total(f"torch_grad_{moment}", layer=name), rel=6e-3)
    assert buckets(run, "first") != buckets(run, "second")
    page.keyboard.press("Escape")


def counts(page: Page) -> list[int]:
    """Return the counts of the distribution shown."""
    return [int(text.rpartition(": ")[2]) for text in page.locator("#layer-distribution li .unseen").all_text_contents()]


def buckets(run: Run, layer: str) -> list[int]:
    """Return the counts of a layer's norms in each bucket."""
    name = "torch_grad_norm_distribution_bucket"
    below = {
        float(dict(has)["le"]): value for (found, has), value in run.scrape().items() if found == name and ("layer", layer) in has
    }
    counts = [below[bound] for bound in sorted(below)]
    return [int(after - before) for before, after in zip([0, *counts], counts, strict=False)]


def test_quantities(settled: Run, window: Visit) -> None:
    """Each quantity has a button and stands in the address, and its last cell agrees with `/metrics`."""
    run, page = settled, window.page
    for quantity, (metric, text) in {
        "zero_ratio": ("torch_grad_zero_ratio", lambda value: f"zeros {100 * value:.3g} %"),
        "dead_ratio": ("torch_grad_dead_ratio", lambda value: f"dead units {100 * value:.3g} %"),
        "zscore": ("torch_grad_norm_zscore", lambda value: f"z-score {value:+.1f} \N{GREEK SMALL LETTER SIGMA}"),
        "norm": ("torch_grad_norm", lambda value: f"norm {value:#.3g}"),
    }.items():
        button = page.get_by_test_id(f"quantity-{quantity}")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator("[data-choice=quantity][aria-pressed=true]").count() == 1
        assert (f"quantity={quantity}" in page.url) == (quantity != "norm")
        wanted = f"first, step 42, {text(run.total(metric, layer='first'))}"
        assert eventually(lambda wanted=wanted: last_cell(page) == wanted)  # once the quantity is there
    assert run.total("torch_grad_dead_ratio", layer="first") == 0.5
    page.get_by_test_id("quantity-activation_rms").click()
    expect(page.locator("#heatmap-title")).to_contain_text("Activation")
    page.get_by_test_id("quantity-norm").click()


def last_cell(page: Page) -> str:
    """Return the description of the first layer's last cell, reached by the keys."""
    page.get_by_test_id("heatmap-overlay").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    page.wait_for_timeout(150)
    return page.get_by_test_id("announcer").inner_text().replace("\u00a0", " ")


def test_a_saved_page(settled: Run, open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A saved page is one file that shows the same as the live one and sends no request."""
    url = settled.saved(tmp_path)
    seen = open_page(url)
    page = seen.page
    assert page.locator("html").get_attribute("data-connection") == "saved"
    expect(page.get_by_test_id("connection")).to_have_text(re.compile("^Saved at 20"))
    expect(page.get_by_test_id("state")).to_have_text("Training")
    assert number(page, "step") == 42
    page.get_by_test_id("quantity-zero_ratio").click()
    show_layer(page, "second", 1, 2)
    assert counts(page) == buckets(settled, "second")
    shown = page.locator("#layer-mean .value").inner_text()
    assert float(shown) == pytest.approx(settled.total("torch_grad_mean", layer="second"), rel=6e-3)
    assert [request.url for request in seen.requests] == [url]


def test_an_open_page_shows_what_happens(open_page: Callable[..., Visit]) -> None:
    """An open page comes to show a NaN as a critical problem and in the heatmap, then a layer with dead units, then the end.

    It keeps what it knew when the exporter is gone.
    """
    run = Run(Perceptron(), dead_window=3, linger=PATIENCE)
    run.train(3)
    assert eventually(lambda: run.columns() != [])
    page = open_page(f"{run.page}#quantity=activation_rms", ends=True).page
    expect(page.get_by_test_id("activations")).to_be_hidden()
    expect(page.get_by_test_id("quantity-norm")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    expect(page.get_by_test_id("problem-list")).to_have_text("Nothing is wrong by the thresholds of the alert rules.")
    assert nonfinite_pixels(page) == 0
    run.train(spoiled=run.model.second.weight, heedless=True)
    run.train(3)
    problem = page.locator("[data-testid=problem-list] li[data-alert=TrainingNonFiniteGradients]")
    problem.wait_for()
    assert problem.get_attribute("data-severity") == "critical"
    assert page.locator("#tile-nonfinite").get_attribute("data-level") == "critical"
    assert number(page, "nonfinite") == 1
    assert page.get_by_test_id("nonfinite-note").inner_text() == f"{run.model.second.weight.numel()} elements"
    assert problem.locator(".text").inner_text().endswith("in 1 unskipped step, since the start, in second.")
    assert problem.get_by_role("button", name="Show layer").get_attribute("data-layer") == "second"
    assert problem.locator(".steps").inner_text().startswith("Stop the run and go back to a checkpoint")
    assert problem.get_by_role("link", name="More").get_attribute("href") == "runbook#TrainingNonFiniteGradients"
    soon(page, lambda: nonfinite_pixels(page) > 0)

    with torch.no_grad():
        run.model.first.bias.fill_(-1e6)
    run.train(6)
    dead = page.locator("[data-testid=problem-list] li[data-alert=LayerDead][data-severity=warning] button[data-layer=first]")
    dead.wait_for()
    soon(page, lambda: last_cell(page) == "first, step 13, norm 0")
    dead.click()
    page.locator("dd[data-testid=layer-dead_ratio]").wait_for()
    assert page.get_by_test_id("layer-name").inner_text() == "first"
    assert number(page, "layer-dead_ratio") == run.total("torch_grad_dead_ratio", layer="first") == 1
    for moment in ("mean", "stddev"):
        assert page.locator(f"#layer-{moment} .nothing").inner_text() == "Needs start_exporter(moments=True)"

    last = time.localtime(run.total("torch_train_last_step_timestamp_seconds"))
    closing = threading.Thread(target=run.exporter.close)
    closing.start()
    page.locator("#state[data-state=finished]").wait_for()
    expect(page.get_by_test_id("state")).to_have_text("Finished")
    expect(page.locator("#since")).to_have_text(re.compile(r"^ran for \d+\s(min|s)"))
    assert run.total("torch_train_state", state="finished") == 1  # it waited for this scrape
    closing.join()
    page.wait_for_selector("html[data-connection=lost]")
    notice = page.get_by_test_id("notice").inner_text()
    assert re.match(r"The exporter does not answer, since \d\d:\d\d:\d\d\. The training may", notice)
    assert number(page, "step") == 13
    expect(page.get_by_test_id("last-step")).to_have_text(time.strftime("%H:%M:%S", last))
    assert page.get_by_test_id("last-step-note").inner_text() == time.strftime("%Y-%m-%d", last)


class Overflowing(torch.nn.Module):
    """Gives NaN on demand."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * math.nan if self.broken else x


def test_nan_losses_bring_samples(open_page: Callable[..., Visit]) -> None:
    """NaN losses count in their tile, beside the steps that were sampled then, and the problem names the module of the NaN."""
    run = Run(torch.nn.Sequential(torch.nn.Linear(4, 4), Overflowing(), torch.nn.Linear(4, 2)), every=4096, nan_origin=True)
    with run.exporter:
        run.train(10)
        cast("Overflowing", run.model[1]).broken = True
        assert eventually(lambda: run.train(heedless=True) or run.total("torch_nonfinite_origin_step", layer="1") > 0)
        cast("Overflowing", run.model[1]).broken = False
        run.train(10)
        losses = sum(map(math.isnan, run.losses))
        page = open_page(run.page, ends=True).page
        soon(page, lambda: f"{losses} losses" in page.locator("#tile-nonfinite").inner_text())
        steps = run.total("torch_grad_nonfinite_steps_total")
        assert steps > 0
        assert number(page, "nonfinite") == steps
        assert page.locator("#tile-nonfinite").get_attribute("data-level") == "critical"
        problem = page.locator("#problem-list li[data-alert=TrainingNonFiniteLoss] .text").inner_text()
        assert re.match(
            rf"1 gave NaN in the forward, at step \d+\. The loss was NaN or Inf {losses} times since the start\.", problem
        )


def test_an_origin_of_nan_stays_named(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Minutes after the last NaN loss, its tile has no colour any more, and the earlier problem still names its origin."""
    origin = family(NONFINITE_ORIGIN_STEP, {("head", "forward", "nan"): 40.0})
    made = Made(families=[family(TRAIN_STATE, {("training",): 1.0}), family(TRAIN_STEPS, {("a",): 40.0}), origin])
    made.families.append(family(TRAIN_LOSS_NONFINITE, 6.0))
    made.record().live.remember()
    for _ in range(30):
        made.now += 15
        made.live.remember()
    page = open_page(as_page(made.json("saved"), tmp_path)).page
    assert page.get_by_test_id("nonfinite").inner_text() == "6 losses"
    assert page.locator("#tile-nonfinite").get_attribute("data-level") == ""
    lines = page.get_by_test_id("problem-list").locator("li")
    assert lines.first.inner_text().startswith("Nothing is wrong now")
    expect(lines.last.locator(".text")).to_contain_text("At step 40: head gave NaN in the forward, at step 40. The loss was NaN")


# What it draws


N = 1200
"""Records of the run below: a bin of the whole run has two of them, one of the layers four; of layers the last 600 are kept."""
SECONDS = 1.8e9 + np.arange(N)
AT = 10 * np.arange(1, N + 1)
"""Times and steps."""
NORMS = {"a": 1e-3, "b": 10**-1.5, "c": 1.0}
LOSS = np.linspace(3, 1, N)
ACTS = [
    {"time": SECONDS[99] + 0.5, "step": int(AT[99]), "name": HOSTILE, "action": "ScaleLearningRate(factor=0.5)", "result": "done"},
    {"time": SECONDS[-2], "step": int(AT[-2]), "name": "LossSpike", "action": "Stop()", "result": "refused"},
]
"""What actions did, the first of them on a rule with a hostile name."""


def drawn_run(*, in_turns: bool = False, exploding: int = -1) -> dict[str, Any]:
    """Return what is saved of a run made by the test, with some records that were not finite.

    `in_turns`: samples alternate between two models, the second of which has layer b. `exploding`: a record with large norms.
    """
    at = itertools.count()
    looks = iter(SECONDS.tolist())

    def moment() -> Moment:
        k = next(at)
        values = np.array([[norm, 0.25, 0.5, 1] for norm in NORMS.values()], dtype=np.float32)
        if k in (200, 803):
            values[1, 0] = math.inf
        if in_turns:
            values[k % 2 :: 2] = math.nan
        values[:, 0] *= 2000 if k == exploding else 1
        norm = 2000 if k == exploding else 2
        return Moment(k + 1, int(AT[k]), list(NORMS), values, np.array([LOSS[k], norm, 0.5, 0.1, 1e-3], dtype=np.float32))

    history = History(moment, now=lambda: next(looks))
    for _ in range(N):
        history.record_if_due()
    live = Live(
        Identity("drawn", 0, 1, "host", "1"), history, list, targets=lambda: b"[]", marks=ActionMarks(), record=Record(),
        now=lambda: SECONDS[-1],
    )  # fmt: skip
    result = json.loads(json.dumps(live.everything()))
    result["layers"]["norm"]["whole"]["sharded"] = ["b"]
    result["layer"]["b"].update(sharded=True, shard_norm=0.25)
    over = {"state": "failed", "ended": SECONDS[0] + 7 * 60, "ended_by": "<i>OutOfMemoryError"}
    result["status"].update(step=None, started=SECONDS[0], now=SECONDS[-1] + 86400, actions=ACTS, **over)
    return cast("dict[str, Any]", result)


@pytest.fixture(scope="module")
def drawn(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of that run."""
    url = as_page(drawn_run(), tmp_path_factory.mktemp("drawn"))
    with visit(browser) as seen:
        yield seen.show(url)
        check(seen, url)


def test_a_nonfinite_record_has_marks(drawn: Page) -> None:
    """A bin with a record that is not finite keeps its value and has a mark, and its tooltip says so."""
    assert nonfinite_pixels(drawn) > 0
    overlay, y = drawn.get_by_test_id("heatmap-overlay"), int(at_row(drawn, 1, len(NORMS))["y"])
    for column, marks in ((50, ["also not finite"]), (60, [])):
        x = int(drawn.evaluate("(x) => TorchGrad.app.heatmap._left(x)", int(AT[4 * column + 3])))
        overlay.hover(position={"x": x, "y": y})
        assert "norm of this rank's part 0.0316" in drawn.locator("#tooltip .reading").inner_text()
        assert drawn.locator("#tooltip .bad").all_inner_texts() == marks


def test_parts_of_ranks(drawn: Page) -> None:
    """The page says which norms are those of this rank's part, and by what exception the run failed."""
    expect(drawn.locator("#heatmap-title")).to_have_text("Gradient norm by layer (1 of 3: this rank's part)")
    expect(drawn.get_by_test_id("state")).to_have_text("Failed")
    assert math.isnan(number(drawn, "step"))
    expect(drawn.locator("#since")).to_have_text("ran for 7 min, ended by <i>OutOfMemoryError")
    overlay = drawn.get_by_test_id("heatmap-overlay")
    overlay.click(position=at_row(drawn, 1, 3))
    assert drawn.locator("#layer-norm h3").inner_text() == "Norm of this rank's part"
    assert number(drawn, "layer-shard_norm") == 0.25
    assert drawn.get_by_test_id("layer-note").inner_text().startswith("Sharded over ranks")
    overlay.click(position=at_row(drawn, 0, 3))
    assert drawn.locator("#layer-norm h3").inner_text() == "Gradient norm"
    assert drawn.get_by_test_id("layer-note").inner_text() == ""
    drawn.keyboard.press("Escape")


def test_the_first_samples_are_apart(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Until they are paid back, the first samples stand beside the overhead."""
    for startup, shown, note in ((0.019, 0.5, "of 1 % budget · 1.9 % at start"), (0.0, 2.4, "of 1 % budget")):
        saved = drawn_run()
        saved["status"].update(overhead_ratio=0.024, startup_overhead_ratio=startup, overhead_budget_ratio=0.01)
        page = open_page(as_page(saved, tmp_path)).page
        assert 100 * number(page, "overhead") == pytest.approx(shown)
        assert page.get_by_test_id("overhead-note").inner_text().replace("\u00a0", " ") == note


def test_what_was_last_known(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A saved run without activity is stalled; the other ranks are linked."""
    saved = drawn_run()
    counts = {"nonfinite_elements": 0, "nonfinite_steps": 1, "skipped_steps": 1, "loss_spikes": 1}
    saved["status"].update(state="training", step=100, ended=None, ended_by=None, actions=[], last_step=SECONDS[-1] - 400, **counts)
    stalled = {"alert": "TrainingStalled", "severity": "critical", "text": "Nothing.", "layer": None, "others": []}
    dead = {"alert": "LayerDead", "severity": "warning", "text": "Layer a", "layer": "a", "others": []}
    saved["status"]["problems"] = [
        {**stalled, "first_steps": "Find the rank."},
        {**dead, "first_steps": "Look."},
        {**dead, "layer": "b", "first_steps": "Look."},
    ]
    others = {1: (HOSTILE, "http://node1:9100/"), 2: ("c", "https://[fd00::2]:9100/")}
    saved["status"].update(world_size=3, ranks=[{"rank": rank, "host": name, "url": url} for rank, (name, url) in others.items()])
    page = open_page(as_page(saved, tmp_path)).page
    expect(page.get_by_test_id("rank")).to_have_text("rank 0 of 3")
    links = page.get_by_test_id("ranks").locator("a")
    assert [link.get_attribute("href") for link in links.all()] == [url for _, url in others.values()]
    assert links.all_inner_texts() == [f"Rank 1 {HOSTILE}", "Rank 2 c"]
    expect(page.get_by_test_id("state")).to_have_text("Stalled")
    assert page.title() == "Stalled · step 100 · drawn"
    last = time.localtime(SECONDS[-1] - 400)
    said = {
        "nonfinite": ("1 step", "1 step skipped"),
        "loss": ("–", "1 spike"),  # noqa: RUF001 - as the page has it
        "last-step": (time.strftime("%H:%M:%S", last), time.strftime("%Y-%m-%d", last)),
    }
    for name, words in said.items():
        assert (page.get_by_test_id(name).inner_text(), page.get_by_test_id(f"{name}-note").inner_text()) == words
    expect(page.locator("#since")).to_have_text(re.compile(r"^was running for 1\sd"))
    # One entry for each rule: the other layer has a button in it.
    assert page.locator(".steps").all_inner_texts() == ["Find the rank.", "Look."]
    assert page.get_by_test_id("problem-count").inner_text() == "2"


def test_a_rule_on_many_layers_is_one_entry(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A rule that found 30 layers has one entry with a hint; its other layers are buttons, the first of them."""
    saved, names = drawn_run(), ["b", "c", HOSTILE, *(f"layer.{number}" for number in range(27))]
    found = {
        "alert": "LayerDead",
        "severity": "warning",
        "text": "Layer a: dead.",
        "layer": "a",
        "others": [],
        "first_steps": "Look.",
    }
    rest = {**found, "text": "22 more layers: dead.", "layer": None, "others": names[7:]}
    loss = {**found, "alert": "LossSpike", "text": "The loss.", "layer": None}
    saved["status"]["problems"] = [found, *({**found, "layer": name} for name in names[:7]), rest, loss]
    page = open_page(as_page(saved, tmp_path), width=390, height=844).page
    entries = page.locator("#problem-list li")
    assert entries.evaluate_all("(all) => all.map((item) => item.dataset.alert)") == ["LayerDead", "LossSpike"]
    assert page.locator("#problem-list .steps").all_inner_texts() == ["Look.", "Look."]
    also = entries.first.locator(".also")
    assert also.locator("button").all_inner_texts() == names[:8]
    assert (also.inner_text().splitlines()[0], also.inner_text().splitlines()[-1]) == ("30 more layers:", "and 22 more")
    assert wide(page) <= 0
    also.get_by_role("button", name="b", exact=True).click()
    expect(page.get_by_test_id("layer-name")).to_have_text("b")


def test_what_was_wrong_earlier(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """NaN losses between samples count as not finite, and stay below the line that nothing is wrong now on this rank."""
    saved = drawn_run()
    earlier = {"alert": "TrainingNonFiniteLoss", "severity": "critical", "layer": None, "text": HOSTILE, "first": 7, "last": 1200}
    saved["status"].update(nonfinite_elements=0, nonfinite_steps=0, nonfinite_losses=6, skipped_steps=0, world_size=2)
    saved["status"].update(problems=[], earlier=[earlier], optimizers=2, steps_per_second=4.0)
    page = open_page(as_page(saved, tmp_path)).page
    assert page.get_by_test_id("nonfinite").inner_text() == "6 losses"
    lines = page.get_by_test_id("problem-list").locator("li")
    assert lines.first.inner_text() == "Nothing is wrong now on this rank by the thresholds of the alert rules."
    expect(lines.last.locator(".text")).to_have_text(f"At steps 7 to 1,200: {HOSTILE}")
    expect(page.get_by_test_id("steps-per-second-note")).to_have_text("250\u00a0ms a round")


def test_two_models_in_turns(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A layer without a value keeps its last one, paler; both learning rates and the size of the largest spike are shown."""
    saved = drawn_run(in_turns=True)
    saved["run"]["whole"]["norm"][5] = 24.0
    saved["status"].update(spikes=3, optimizers=2, learning_rates={"generator": 1e-3, "critic": 4e-4})
    page = open_page(as_page(saved, tmp_path)).page
    assert page.get_by_test_id("spikes-note").inner_text() == "largest: at least 12 × the median"  # noqa: RUF001 - as the page has it
    assert page.get_by_test_id("learning-rate-note").inner_text() == "critic 4e-4"
    page.locator("[data-choice='view'][data-value='recent']").click()
    colours = page.evaluate("""() => {
        const { context, gutter, plotWidth, rowHeight, ratio, colour } = TorchGrad.app.heatmap;
        const row = context.getImageData((gutter + 100) * ratio, (6 + rowHeight / 2) * ratio, plotWidth * ratio - 200, 1);
        return [[...new Set(new Uint32Array(row.data.buffer))], colour.ground];
    }""")
    assert len(colours[0]) == 2
    assert colours[1] not in colours[0]
    assert last_cell(page).endswith("norm 0.00100")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("announcer")).to_contain_text("0.0316 at step 11,990")


def test_a_round_of_two_optimizers(open_page: Callable[..., Visit]) -> None:
    """With two optimizers, the times of steps in the chart make up the time of the run, whether recorded by step or by look."""
    run = Run(Perceptron(), every=4)
    second = torch.optim.Adam(run.model.parameters(), lr=4e-4)
    with run.exporter:
        for _ in range(500):
            run.train()
            second.zero_grad()
            run.model(torch.randn(8, run.inputs)).square().mean().backward()
            second.step()
        page = open_page(run.page, ends=True).page
        expect(page.get_by_test_id("steps-per-second-note")).to_contain_text("a round")
        expect(page.locator("#chart-step-time h3")).to_have_text("Time of a round of optimizers")
        soon(page, lambda: page.evaluate("TorchGrad.app.charts.time.uplot.data[0].at(-1)") == 500)
        steps, (times,) = page.evaluate("[TorchGrad.app.charts.time.xs, TorchGrad.app.charts.time.raw]")
        known = [(step, value) for step, value in zip(steps, times, strict=True) if value is not None]
        total = sum(value * (step - before) for (before, _), (step, value) in itertools.pairwise([(1, 0.0), *known]))
        assert total == pytest.approx(run.total("torch_train_step_duration_seconds_sum"), rel=0.1)


@pytest.mark.parametrize("every", [1, 25])
def test_norms_of_samples_have_no_line(open_page: Callable[..., Visit], tmp_path: Path, every: int) -> None:
    """Norms after clipping are points where few steps have one, and a line where all do."""
    saved = drawn_run()
    for view in ("whole", "recent"):
        saved["run"][view]["norm_after_clip"] = [0.5 if k % every == 0 else None for k in range(len(saved["run"][view]["steps"]))]
    page = open_page(as_page(saved, tmp_path)).page
    share = page.evaluate(COLUMNS_OF_LINE, ["norm", "line-1"])
    assert share > 0.9 if every == 1 else 0.05 < share < 0.5
    after = "0.500" if every == 1 else "0.500 of 2.00 (step 11,520)"
    assert page.locator("#chart-norm .value").all_inner_texts()[1] == after
    assert page.locator("#chart-norm .of").inner_text() == "mean of 2 records"


COLUMNS_OF_LINE = """([chart, name]) => {
  const { ctx, bbox } = TorchGrad.app.charts[chart].uplot;
  const colour = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const { data, width, height } = ctx.getImageData(bbox.left, bbox.top, bbox.width, bbox.height);
  const found = new Set();
  for (let at = 0; at < width * height; at += 1) {
    if (data[4 * at + 3] > 64 && wanted.every((value, k) => Math.abs(data[4 * at + k] - value) < 24)) found.add(at % width);
  }
  return found.size / width;
}"""
"""The share of a chart's columns of pixels that have the colour of a line."""


def test_spikes_between_samples_are_marked(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """An explosion that no sample has is marked above the heatmap; one that a sample shows is not."""
    saved, sampled, between = drawn_run(exploding=700), 700, 900
    saved["layers"]["norm"]["whole"]["sharded"] = []
    page = open_page(as_page(saved, tmp_path)).page
    page.get_by_test_id("view-recent").click()
    expect(page.locator("#heatmap-between")).to_be_hidden()
    saved["run"]["recent"]["norm"][between : between + 5] = [2000.0] * 5
    page = open_page(as_page(saved, tmp_path)).page
    page.get_by_test_id("view-recent").click()
    expect(page.locator("#heatmap-between")).to_have_text("spike between samples")
    marked = page.evaluate(
        """(steps) => {
          const { context, canvas, ratio } = TorchGrad.app.heatmap;
          const { data } = context.getImageData(0, 1, canvas.width, 1);
          const wanted = parseInt(TorchGrad.theme.colour("warning").slice(1), 16);
          return steps.map((step) => {
            const at = 4 * Math.round(TorchGrad.app.heatmap._left(step) * ratio);
            return ((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]) === wanted;
          });
        }""",
        [int(AT[k]) for k in (sampled, between - 20, between, between + 4, between + 25)],
    )
    assert marked == [False, False, True, True, False]
    page.get_by_test_id("quantity-zscore").click()
    expect(page.locator("#heatmap-between")).to_be_hidden()


@pytest.mark.parametrize(("first", "shown"), [(4e4, "1e4"), (40.0, "40"), (-4e4, "-40,000")])
def test_a_wide_loss_is_logarithmic(open_page: Callable[..., Visit], tmp_path: Path, first: float, shown: str) -> None:
    """A loss that spans three decades has a logarithmic axis, unless it is 0 or less at times."""
    saved = drawn_run()
    for view in ("whole", "recent"):
        losses = saved["run"][view]["loss"]
        saved["run"][view]["loss"] = [first, *[1.0] * (len(losses) - 1)]
    page = open_page(as_page(saved, tmp_path)).page
    texts = page.evaluate("(() => { const { loss } = TorchGrad.app.charts; const { min, max } = loss.uplot.scales.y;"
        " return loss._yTicks(min, max).map((y) => loss._yText(y)); })()")  # fmt: skip
    assert shown in texts


def test_logged_values_have_charts(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Each logged value has a chart, grouped by the part before the first slash, live and in a saved page."""
    run = Run(Perceptron())

    def records() -> int:
        return len(json.loads(get(f"{run.page}api/v1/values?view=whole"))["times"])

    with run.exporter:
        for number in range(4):
            run.train(1)
            run.exporter.log(dict.fromkeys(("train/reward", "eval/loss", HOSTILE), number))
            run.exporter.log({"train/kl": math.nan if number == 2 else number})
        assert eventually(lambda: records() == 4)
        for url in (run.page, run.saved(tmp_path)):
            page = open_page(url, ends=True).page
            expect(page.locator("#values-groups figure h3")).to_have_text(["reward", "kl", "loss", HOSTILE])
            expect(page.locator("#values-groups .group > h3:visible")).to_have_text(["train", "eval"])
            drawn = page.evaluate("[...TorchGrad.app.values.charts].map(([name, chart]) => [name, chart.uplot.data[1]])")
            assert dict(drawn).pop("train/kl") == [0, 1, None, 3]
            assert [data for name, data in drawn if name != "train/kl"] == [[0, 1, 2, 3]] * 3


def test_what_actions_did(drawn: Page) -> None:
    """Actions are a list in words, whose buttons move the cursor to their step."""
    rows = drawn.locator("#action-list li[data-result]")
    assert rows.evaluate_all("(all) => all.map((item) => item.dataset.result)") == ["refused", "done"]
    last = rows.last.locator("button")
    when = time.strftime("%H:%M:%S", time.localtime(SECONDS[99] + 0.5))
    step = drawn.evaluate("(step) => TorchGrad.numbers.count(step)", int(AT[99]))
    words = ["Done", HOSTILE, f"ScaleLearningRate(factor=0.5) at step {step}, {when}", "Show in charts"]
    assert last.locator("span").all_inner_texts() == words
    last.press("Enter")
    expect(drawn.locator("#chart-loss .acted")).to_have_text(f"{HOSTILE}: ScaleLearningRate(factor=0.5) done")


def test_parts_and_axes(drawn: Page) -> None:
    """The buttons choose records or bins and steps or times for all pictures, and the address keeps the choice."""

    def shown() -> tuple[list[float], list[float]]:
        result = drawn.evaluate("[TorchGrad.app.heatmap.xs, TorchGrad.app.charts.loss.uplot.data[0]]")
        return result[0], result[1]

    assert shown() == (AT[3::4].tolist(), AT[1::2].tolist())
    drawn.get_by_test_id("axis-time").click()
    assert shown() == (SECONDS[3::4].tolist(), SECONDS[1::2].tolist())
    drawn.get_by_test_id("view-recent").click()
    assert shown() == (SECONDS[-600:].tolist(), SECONDS.tolist())
    drawn.get_by_test_id("axis-step").click()
    assert shown() == (AT[-600:].tolist(), AT.tolist())
    assert drawn.evaluate("TorchGrad.app.charts.loss.uplot.data[1]") == pytest.approx(LOSS, rel=1e-5)
    pressed = drawn.locator(".controls [aria-pressed=true]").evaluate_all("(all) => all.map((item) => item.dataset.testid)")
    assert pressed == ["view-recent", "axis-step"]
    assert drawn.url.endswith("#view=recent")
    assert drawn.locator("#chart-norm .value").all_inner_texts() == ["2.00", "0.500"]
    drawn.get_by_test_id("view-whole").click()


# Models of all kinds


class Chain(torch.nn.Module):
    """Linear layers of these names, one after the other, and others that are never used."""

    def __init__(self, names: list[str], unused: tuple[str, ...] = (), width: int = 2) -> None:
        super().__init__()
        for name in (*names, *unused):
            self.add_module(name, torch.nn.Linear(width, width))
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = x + self.get_submodule(name)(x) / len(self.names)
        return x


NAMES = [HOSTILE, "__proto__", "a&b=c#d?e/f%20", "</script><script>alert(2)</script>"]


def test_hostile_names_on_a_phone(open_page: Callable[..., Visit]) -> None:
    """Names that would be markup, script or address are text, and on a phone nothing is wider than the window."""
    run = Run(Chain([*NAMES, "decoder"], unused=(f"{HOSTILE} unused",)), run="a-run-of-a-long-name-" * 4)
    run.train(6)
    assert eventually(lambda: run.total("torch_grad_captures_total") == 6 * (len(NAMES) + 1))
    assert eventually(lambda: run.columns()[-1:] == [6])
    layers = json.loads(get(f"{run.page}api/v1/layers"))["layers"]
    assert {*NAMES, "decoder"} <= {*layers}
    page = open_page(run.page, ends=True, width=360, height=780, dark=False, has_touch=True, device_scale_factor=2).page
    button = page.locator("#problem-list [data-alert=LayerWithoutGradient] button").first
    assert button.get_attribute("data-layer") == f"{HOSTILE} unused"
    assert f"Layer {HOSTILE} unused: parameters got no gradient." in button.inner_text()
    for name in NAMES:
        page.get_by_test_id("heatmap-overlay").tap(position=at_row(page, layers.index(name), len(layers)))
        expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", name)
        expect(page.get_by_test_id("layer-name")).to_have_text(name)
        assert number(page, "layer-captures") == 6
    assert page.evaluate("[document.querySelectorAll('body img, body iframe').length, window.x]") == [0, None]
    assert wide(page) <= 0
    chosen = []
    for _ in range(3):
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        chosen.append((page.locator("html").get_attribute("data-theme"), max(ground) < 64))
        page.get_by_test_id("theme").tap()
    assert chosen == [("light", False), ("light", False), ("dark", True)]
    run.exporter.close()


def test_tls_and_a_password(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Behind TLS and basic authentication the page works, and without the password its data are refused."""
    authority().issue("ip:127.0.0.1").write(tmp_path, "server")
    tls = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(f"{tls}basic_auth_users:\n  alice: {hashed}\n")
    run = Run(Perceptron(), web_config_file=tmp_path / "web.yml")
    run.train(3)
    assert run.page.startswith("https://127.0.0.1:")
    page = open_page(run.page.replace("//", "//alice:secret@"), ends=True, ignore_https_errors=True).page
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    soon(page, lambda: number(page, "step") == 3)
    other = page.context.browser.new_context(ignore_https_errors=True)
    statuses = [other.request.get(run.page + path).status for path in ("", "static/page.js", "api/v1/status", "api/v1/layers")]
    assert statuses == [401] * 4
    other.close()
    run.exporter.close()
