"""The live page in a real Chromium, served by real exporters: what it shows, whom it asks, who can use it and how fast it is."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.outputs.http.test_basic_auth import hashed
from tests.support.browser import Visit, chromium, visit
from tests.support.certificates import authority
from tests.support.models import Perceptron
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli import plot
from torch_grad_exporter.collectors.training import TRAIN_LAST_STEP_TIMESTAMP
from torch_grad_exporter.outputs.live.history import QUANTITIES, History, Moment, Window
from torch_grad_exporter.outputs.live.live import Live
from torch_grad_exporter.outputs.live.live import Run as Identity
from torch_grad_exporter.outputs.live.pages import CSP
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.outputs.live.track import WHOLE
from torch_grad_exporter.rules import THRESHOLDS

HOSTILE = "<img src=x onerror=alert(1)>"
"""The name of a layer: a module may be called anything in which there is no dot."""

Scrape = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests here."""
    expect.set_options(timeout=1000 * PATIENCE)
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Visit]]:
    """Opens windows. At the end none of them may have complained, broken its policy or sent a request to another server."""
    opened: list[tuple[Visit, str, bool]] = []
    with contextlib.ExitStack() as stack:

        def show(url: str, *, ends: bool = False, **options: object) -> Visit:
            one = stack.enter_context(visit(browser, **options))
            opened.append((one, url, ends))
            one.show(url)
            return one

        yield show
        for number, (one, url, ends) in enumerate(opened):
            one.picture(re.sub(r"\W+", "-", request.node.name) + (f"-{number}" if number else ""))
            # A browser says of itself, to the console, that it gets no answer.
            assert [said for said in one.complaints if not (ends and "ERR_" in said)] == []
            assert one.violations() == []
            assert one.origins() == {origin(url)}


def origin(url: str) -> str:
    """Scheme and host of an address."""
    return re.sub(r"(\w+://)(?:[^/@]*@)?([^/]*).*", r"\1\2", url)


class Run:
    """A model in training, with an exporter on it."""

    def __init__(self, model: torch.nn.Module, **options: object) -> None:
        torch.manual_seed(0)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen = {"port": 0, "addr": "127.0.0.1", "every": 1, "run": "trial", **options}
        self.exporter: Exporter = start_exporter(model, **chosen)  # type: ignore[arg-type]
        self.page = (self.exporter.url or "").removesuffix("metrics")
        self.inputs = next(model.parameters()).shape[-1]
        self.losses: list[float] = []

    def train(
        self, steps: int = 1, *, spoiled: torch.Tensor | None = None, value: float = math.nan, heedless: bool = False
    ) -> None:
        """Takes steps, clipped; the gradient of the parameter `spoiled` is `value`.

        One that is not finite is skipped, or `heedless` taken; the weights are then as they were.
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
        """All samples of `/metrics` as the reference parser reads them, without the labels that all have."""
        with urllib.request.urlopen(f"{self.page}metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        common = {("run", "trial"), ("rank", str(self.exporter.rank))}
        return {(s.name, frozenset(set(s.labels.items()) - common)): s.value for family in families for s in family.samples}

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels."""
        return sum(value for (found, has), value in self.scrape().items() if found == name and set(labels.items()) <= has)


@pytest.fixture
def training() -> Iterator[Callable[..., Run]]:
    """Starts runs, and closes them."""
    with contextlib.ExitStack() as stack:

        def start(model: torch.nn.Module, **options: object) -> Run:
            run = Run(model, **options)
            stack.callback(run.exporter.close)
            return run

        yield start


def number(page: Page, name: str) -> float:
    """The number behind a tile of the banner or a fact of a layer, as it came; NaN where there is none."""
    text = page.locator(f"dd[data-testid={name}]").get_attribute("data-value")
    return float(text.replace("Infinity", "inf")) if text else math.nan


def soon(page: Page, condition: Callable[[], bool]) -> None:
    """Waits for the page to come to it, of which it is not told; it asks every 2 seconds."""
    assert eventually(lambda: condition() or bool(page.wait_for_timeout(50))), page.inner_text("main")


def recorded(run: Run) -> int:
    """The columns of the heatmap so far."""
    return len(run.exporter._view.history.grid("norm", Window(whole=False))[1].times)


def pixels(page: Page, canvas: str = "#heatmap") -> np.ndarray:
    """The colours of a canvas as numbers 0xrrggbb, of shape (height, width)."""
    width, height, data = page.evaluate(
        """(canvas) => {
          const from = document.querySelector(canvas);
          const copy = new OffscreenCanvas(from.width, from.height).getContext("2d");
          copy.drawImage(from, 0, 0);
          const { data } = copy.getImageData(0, 0, from.width, from.height);
          let text = "";
          for (let at = 0; at < data.length; at += 4) text += String.fromCharCode(data[at], data[at + 1], data[at + 2]);
          return [from.width, from.height, btoa(text)];
        }""",
        canvas,
    )
    channels = np.frombuffer(base64.b64decode(data), dtype=np.uint8).reshape(height, width, 3).astype(int)
    return channels @ (65536, 256, 1)


def colour(page: Page, name: str) -> int:
    """A colour of the style as a number 0xrrggbb."""
    found: str = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    return int(found.removeprefix("#"), 16)


def nonfinite_pixels(page: Page, canvas: str = "#heatmap") -> int:
    """How many pixels of a picture have the colour of what is not finite."""
    return int((pixels(page, canvas) == colour(page, "nonfinite")).sum())


def wide(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


def at_row(page: Page, row: int, rows: int) -> dict[str, float]:
    """The place in the heatmap of a row among so many, near its last column; the axis below takes 24 pixels, the strip above 6."""
    box = page.get_by_test_id("heatmap-overlay").bounding_box()
    assert box is not None
    return {"x": box["width"] - 17, "y": 6 + (box["height"] - 30) * (row + 0.5) / rows}


# What it shows


def test_values_of_metrics(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """The banner has the values of `/metrics` of the same moment, and the policy that it was sent with refuses an inline script."""
    run = training(Perceptron())
    run.train(40)
    run.train(spoiled=run.model.first.weight)
    run.train(2)
    soon_known = {"torch_train_steps_total": 42, "torch_train_tokens_total": 43 * 64, "torch_grad_captures_total": 86}
    assert eventually(lambda: all(run.total(name) == value for name, value in soon_known.items()))
    opened = time.time()
    visited = open_page(run.page)
    page = visited.page
    expect(page.get_by_test_id("state")).to_have_text("Training")
    expect(page.get_by_test_id("run")).to_have_text("trial")
    same = {
        "step": "torch_train_steps_total",
        "loss": "torch_train_loss",
        "learning-rate": "torch_train_learning_rate",
        "nonfinite": "torch_grad_nonfinite_steps_total",
        "spikes": "torch_grad_global_norm_spikes_total",
        "overhead": "torch_grad_exporter_overhead_ratio",
        "interval": "torch_grad_exporter_sampling_interval_steps",
    }
    for name, metric in same.items():
        assert number(page, name) == run.total(metric), name
    assert number(page, "nonfinite") == 1
    assert run.model.first.weight.numel() == 48
    assert page.get_by_test_id("nonfinite-note").inner_text() == "48 elements · 1 step skipped"
    assert number(page, "dead-layers") == 0
    assert number(page, "global-norm") == pytest.approx(run.total("torch_grad_global_norm"))
    after, step = run.total("torch_grad_global_norm_after_clip"), run.total("torch_grad_sample_step")
    assert page.get_by_test_id("global-norm-note").inner_text() == f"{after:#.3g} after clipping · step\u00a0{step:g}"
    stepped = run.total("torch_train_last_step_timestamp_seconds")
    assert opened - stepped - 1 <= number(page, "last-step") <= time.time() - stepped + 1
    soon(page, lambda: charts_are_as_answered(page, run))

    expect(page.get_by_test_id("resources")).to_be_visible()
    memory = page.get_by_test_id("resources").locator("li", has_text="Process memory").locator(".value").inner_text()
    shown = re.fullmatch(r"([\d.]+)\s([KMG]iB) of ([\d.]+)\s([KMG]iB)", memory)
    assert shown is not None, memory
    sizes = [float(shown[k]) * 1024 ** " KMG".index(shown[k + 1][0]) for k in (1, 3)]
    assert sizes[0] == pytest.approx(run.total("process_resident_memory_bytes"), rel=0.1)
    assert sizes[1] == pytest.approx(run.total("torch_host_memory_total_bytes"), rel=0.01)

    response = page.request.get(run.page)
    assert response.headers["content-security-policy"] == CSP
    assert "script-src 'self';" in CSP
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert page.evaluate("[window.ran === undefined, seen.violations.length]") == [True, 1]
    page.evaluate("seen.violations = []")
    visited.complaints.clear()


def charts_are_as_answered(page: Page, run: Run) -> bool:
    """Whether the lines, and what is said of their last values, are of the numbers that the interface answers."""
    known = page.request.get(f"{run.page}api/v1/run?view=whole").json()
    norms = [[value if isinstance(value, float) else None for value in known[key]] for key in ("norm", "norm_after_clip")]
    logs = [pytest.approx([value and math.log10(value) for value in one]) for one in norms]
    drawn = page.evaluate("Object.values(TorchGrad.app.charts).map((chart) => chart.uplot.data)")
    last = [f"{value:#.3g}" for one in norms for value in [value for value in one if value][-1:]]
    return (
        drawn[:2] == [[known["steps"], *logs], [known["steps"], known["loss"]]]
        and known["loss"][-1:] == pytest.approx(run.losses[-1:], rel=1e-5)
        and len(last) == 2
        and page.locator("#chart-norm .value").all_inner_texts() == last
    )


def test_rates(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """Steps and tokens per second are those of a loop that is timed from outside, and new steps come without a reload."""
    run = training(Perceptron())
    run.train()
    page = open_page(run.page).page
    moments = [time.monotonic()]
    while number(page, "step") < 40 or not number(page, "steps-per-second") > 0:
        run.train()
        page.wait_for_timeout(40)
        moments.append(time.monotonic())
        assert moments[-1] - moments[0] < PATIENCE
    # It looks every two seconds; on a machine with other work the steps of these are not as many as of the two before.
    rates = [10 / (after - before) for before, after in zip(moments, moments[10:], strict=False)]
    assert min(rates) / 1.5 <= number(page, "steps-per-second") <= 1.5 * max(rates)
    assert number(page, "tokens-per-second") == pytest.approx(64 * number(page, "steps-per-second"), rel=0.1)


def test_a_nan_and_a_dead_layer(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """An open page comes to show a NaN as a critical problem and in the heatmap, and then a layer whose ReLU units have died."""
    run = training(Perceptron(), dead_window=3)
    run.train(3)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page).page
    expect(page.get_by_test_id("problem-list")).to_have_text("Nothing is wrong by the thresholds of the alert rules.")
    assert nonfinite_pixels(page) == 0
    assert triangles(page, "warning") == 0
    before = recorded(run)
    run.train(spoiled=run.model.second.weight, heedless=True)
    run.train(3)
    assert eventually(lambda: recorded(run) > before)
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
    assert page.get_by_test_id("problems").get_attribute("data-count") == str(page.locator("#problem-list li[data-alert]").count())
    assert number(page, "dead-layers") == sum(run.total("torch_grad_dead_ratio", layer=name) > 0.9 for name in ("first", "second"))
    assert page.locator("#tile-dead-layers").get_attribute("data-level") == "warning"
    soon(page, lambda: last_cell(page) == "first, step 13, norm 0")
    marked = {one.get_attribute("data-layer") for one in page.locator("#problem-list button").all()}
    assert sum(triangles(page, severity) for severity in ("critical", "warning")) == len(marked) > 0
    assert {"first", "second"} <= set(labels(page))
    dead.click()
    page.locator("dd[data-testid=layer-dead_ratio]").wait_for()
    assert page.get_by_test_id("layer-name").inner_text() == "first"
    assert number(page, "layer-dead_ratio") == run.total("torch_grad_dead_ratio", layer="first") == 1


def triangles(page: Page, severity: str) -> int:
    """How many rows of the heatmap have a triangle of this colour before their name: its base is wider than a line of a letter."""
    left = page.evaluate("TorchGrad.app.heatmap.gutter")
    found = (pixels(page)[:, :left] == colour(page, severity)).astype(int)
    base = np.lib.stride_tricks.sliding_window_view(found, 7, axis=1).all(axis=2).any(axis=1).astype(int)
    return int((np.diff(base, prepend=0) > 0).sum())


def labels(page: Page) -> list[str]:
    """What is written in the picture of the heatmap."""
    found: list[str] = page.evaluate(
        """() => {
          const { heatmap } = TorchGrad.app;
          const said = [];
          heatmap.context.fillText = (text) => said.push(text);
          heatmap.draw();
          delete heatmap.context.fillText;
          heatmap.draw();
          return said;
        }"""
    )
    return found


def test_the_end(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """A run that lingers is finished, and one that is gone leaves the page with what it knew, and it says since when."""
    run = training(Perceptron(), linger=FOREVER)
    run.train(3)
    page = open_page(run.page, ends=True).page
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    closing = threading.Thread(target=run.exporter.close)
    closing.start()
    page.locator("#state[data-state=finished]").wait_for()
    expect(page.get_by_test_id("state")).to_have_text("Finished")
    expect(page.locator("#since")).to_have_text(re.compile(r"^ran for \d+\s(min|s)"))
    assert run.total("torch_train_state", state="finished") == 1  # it waited for this scrape
    closing.join(PATIENCE)
    page.wait_for_selector("html[data-connection=lost]")
    assert re.match(
        r"The exporter does not answer, since \d\d:\d\d:\d\d\. The training may", page.get_by_test_id("notice").inner_text()
    )
    assert number(page, "step") == 3
    last = time.localtime(run.exporter._view.live._latest.values().one(TRAIN_LAST_STEP_TIMESTAMP))
    expect(page.get_by_test_id("last-step")).to_have_text(time.strftime("%H:%M:%S", last))
    assert page.get_by_test_id("last-step-note").inner_text() == time.strftime("%Y-%m-%d", last)


def test_without_a_step(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """Where nothing counts steps the page claims neither state nor step, and goes on to ask for samples after a long rest."""
    run = training(Perceptron(), collectors={"training": False})
    run.train(3)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page).page
    expect(page.get_by_test_id("state")).to_have_text("Unknown")
    expect(page.get_by_test_id("step")).to_have_text("\N{EN DASH}")
    assert page.title() == "Unknown · trial"
    soon(page, functools.partial(page.evaluate, "TorchGrad.app.live.now(), TorchGrad.app.quiet > 3"))
    before = recorded(run)
    run.train(3)
    assert eventually(lambda: recorded(run) > before)
    soon(page, lambda: page.evaluate("TorchGrad.app.live.now(), TorchGrad.app.heatmap.xs.length") == recorded(run))


def test_a_layer(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """A click on a row opens its layer, whose distribution has the counts of the histogram's buckets."""
    run = training(Perceptron())
    run.train(5)
    with torch.no_grad():
        run.model.second.weight.mul_(100)
    run.train(20)
    assert eventually(lambda: recorded(run) > 0 and run.total("torch_grad_captures_total") == 50)
    page = open_page(run.page).page
    for row, name in enumerate(("first", "second")):
        page.get_by_test_id("heatmap-overlay").click(position=at_row(page, row, 2))
        expect(page.get_by_test_id("layer-name")).to_have_text(name)
        expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", name)
        facts = {
            "norm": "norm",
            "max_magnitude": "max_magnitude",
            "zero_ratio": "zero_ratio",
            "units": "units",
            "captures": "captures_total",
        }
        for fact, metric in facts.items():
            assert number(page, f"layer-{fact}") == run.total(f"torch_grad_{metric}", layer=name), fact
        shown = [int(text.rpartition(": ")[2]) for text in page.locator("#layer-distribution li .unseen").all_text_contents()]
        assert shown == buckets(run, name)
        assert sum(shown) == 25
    assert len({tuple(buckets(run, name)) for name in ("first", "second")}) == 2


def test_means_and_deviations_of_a_layer(training: Callable[..., Run], open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """With moments on the layer has a chart of each, whose last values are those of `/metrics`, as has the page in a file.

    Without, it says what they need.
    """
    run = training(Perceptron(), moments=True)
    run.train(3)
    assert eventually(lambda: recorded(run) > 0 and run.total("torch_grad_captures_total") == 6)
    file = tmp_path / "moments.html"
    file.write_text(plot.page(json.loads(json.dumps(run.exporter._view.live.everything()))), encoding="utf-8")
    for address in (run.page, file.as_uri()):
        page = open_page(f"{address}#layer=first&view=recent").page
        page.locator("#layer:not(.waiting)[data-layer=first]").wait_for()
        for moment in ("mean", "stddev"):
            shown = page.locator(f"#layer-{moment} .value").inner_text()
            assert float(shown) == pytest.approx(run.total(f"torch_grad_{moment}", layer="first"), rel=6e-3)
    plain = training(Perceptron())
    plain.train(3)
    assert eventually(lambda: recorded(plain) > 0 and plain.total("torch_grad_captures_total") == 6)
    page = open_page(f"{plain.page}#layer=first&view=recent").page
    page.locator("#layer:not(.waiting)[data-layer=first]").wait_for()
    for moment in ("mean", "stddev"):
        assert page.locator(f"#layer-{moment} .nothing").inner_text() == "Needs start_exporter(moments=True)"


def buckets(run: Run, layer: str) -> list[int]:
    """The counts of a layer's norms by bucket, by their upper bounds."""
    name = "torch_grad_norm_distribution_bucket"
    below = {
        float(dict(has)["le"]): value for (found, has), value in run.scrape().items() if found == name and ("layer", layer) in has
    }
    counts = [below[bound] for bound in sorted(below)]
    return [int(after - before) for before, after in zip([0, *counts], counts, strict=False)]


def test_quantities(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """Each quantity is switched to, kept in the address, and its last cell says what `/metrics` says."""
    run = training(Perceptron(), dead_window=3)
    with torch.no_grad():
        run.model.first.bias[:4].fill_(-1e6)
    # The last record is of the last step alone, as a norm is the largest since the record before.
    for steps, reached in ((59, 59), (1, 60)):
        run.train(steps)
        assert eventually(
            lambda at=reached: list(run.exporter._view.history.grid("norm", Window(whole=False))[1].steps[-1:]) == [at]
        )
    page = open_page(run.page).page
    said = {
        "norm": ("torch_grad_norm", lambda value: f"norm {value:#.3g}"),
        "zero_ratio": ("torch_grad_zero_ratio", lambda value: f"zeros {100 * value:.3g} %"),
        "dead_ratio": ("torch_grad_dead_ratio", lambda value: f"dead units {100 * value:.3g} %"),
        "zscore": ("torch_grad_norm_zscore", lambda value: f"z-score {value:+.1f} \N{GREEK SMALL LETTER SIGMA}"),
    }
    for quantity, (metric, text) in said.items():
        button = page.get_by_test_id(f"quantity-{quantity}")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator("[data-choice=quantity][aria-pressed=true]").count() == 1
        assert (f"quantity={quantity}" in page.url) == (quantity != "norm")
        wanted = f"first, step 60, {text(run.total(metric, layer='first'))}"
        assert eventually(lambda wanted=wanted: last_cell(page) == wanted)  # once the quantity is there
    assert run.total("torch_grad_dead_ratio", layer="first") == 0.5
    page.reload()
    expect(page.get_by_test_id("quantity-zscore")).to_have_attribute("aria-pressed", "true")


def test_activations_have_a_history_and_buttons_of_their_own(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """With `activations=` there are three more quantities, whose last records are what `/metrics` says, and a button for each."""
    run = training(Perceptron(), activations=True)
    inner = run.exporter._view.live._activations
    assert inner is not None
    run.train(20)
    quantities = ("activation_rms", "activation_zero_ratio", "activation_dead_ratio")

    def last(quantity: str) -> float:
        names, part = inner.grid(quantity, Window(whole=False))
        return float(part.values[-1][names.index("first")]) if len(part.values) else float("nan")

    for quantity in quantities:
        wanted = run.total(f"torch_{quantity}", layer="first")
        assert eventually(lambda quantity=quantity, wanted=wanted: abs(last(quantity) - wanted) <= 1e-6 * max(wanted, 1.0))
    page = open_page(run.page).page
    for quantity in quantities:
        page.get_by_test_id(f"quantity-{quantity}").click()
        assert f"quantity={quantity}" in page.url
        expect(page.locator("#heatmap-title")).to_contain_text("Activation")
        expect(page.get_by_test_id("layer-count")).to_have_text("2 layers")


def test_without_activations_there_is_no_button_for_them(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """Nor does an address that names one of their quantities harm the page: it shows norms."""
    run = training(Perceptron())
    run.train(20)
    page = open_page(f"{run.page}#quantity=activation_rms").page
    expect(page.get_by_test_id("heatmap")).to_be_visible()
    expect(page.get_by_test_id("activations")).to_be_hidden()
    expect(page.get_by_test_id("quantity-norm")).to_have_attribute("aria-pressed", "true")


def last_cell(page: Page) -> str:
    """The description of the first layer's last cell, reached by the keys."""
    page.get_by_test_id("heatmap-overlay").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    page.wait_for_timeout(150)
    return page.get_by_test_id("announcer").inner_text().replace("\u00a0", " ")


def test_ranks(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """The page of a rank links the others by what they said of themselves, whatever they are called."""
    run = training(Perceptron())
    run.train()
    assert open_page(run.page).page.get_by_test_id("ranks").is_hidden()
    groups = [
        {"targets": [f"{host}:9100"], "labels": {"rank": str(rank), "host": name, **scheme}}
        for rank, (host, name, scheme) in enumerate(
            (("127.0.0.1", "me", {}), ("node1", HOSTILE, {}), ("[fd00::2]", "c", {"__scheme__": "https"}))
        )
    ]
    live = run.exporter._view.live
    live._run = dataclasses.replace(live._run, world_size=3)
    live._targets = lambda: json.dumps(groups).encode()
    page = open_page(run.page).page
    expect(page.get_by_test_id("rank")).to_have_text("rank 0 of 3")
    links = page.get_by_test_id("ranks").locator("a")
    expect(links).to_have_count(2)
    assert [one.get_attribute("href") for one in links.all()] == ["http://node1:9100/", "https://[fd00::2]:9100/"]
    assert links.all_inner_texts() == [f"Rank 1 {HOSTILE}", "Rank 2 c"]


# What it draws


N = 1200
"""Records of the run below: whole, two of them are one bin, and four one of the layers, of which the last 600 are kept, too."""
RATE = np.where(np.arange(N) < 300, 100, 10)
AT = np.cumsum(RATE)
"""Steps: slower from a quarter of them on."""
PAUSE = 800
SECONDS = 1.8e9 + np.arange(N) + np.where(np.arange(N) < PAUSE, 0, 600)
"""Times: with ten minutes without a step after some of them."""
NORMS = {"a": 1e-3, "b": 10**-1.5, "c": 1.0}
LOSS = np.linspace(3, 1, N)


def drawn_run() -> dict[str, Any]:
    """What is saved of a run in which all is known, and in whose bins some records were not finite."""
    at = itertools.count()
    looks = iter(SECONDS.tolist())

    def moment() -> Moment:
        k = next(at)
        values = np.array([[norm, 0.25, 0.5, 1] for norm in NORMS.values()], dtype=np.float32)
        norm = 2 if k % 8 == 0 else math.nan
        return Moment(k + 1, int(AT[k]), list(NORMS), values, np.array([LOSS[k], norm, norm / 4, 0.1, 1e-3], dtype=np.float32))

    history = History(moment, now=lambda: next(looks))
    for _ in range(N):
        history.record_if_due()
    found = json.loads(json.dumps(Live(Identity("drawn", 0, 1, "host", "1"), history, list, now=lambda: SECONDS[-1]).everything()))
    grid, run = found["layers"]["norm"]["whole"], found["run"]["whole"]
    assert (len(grid["times"]), len(run["times"])) == (N // 4, N // 2)
    codes = np.frombuffer(base64.b64decode(grid["codes"]), dtype="<u2").reshape(-1, len(NORMS)).copy()
    codes[200, 2] = 65535
    flags = np.zeros(codes.shape, dtype=bool)
    flags[[50, 200], [1, 2]] = True
    grid["codes"], grid["nonfinite"] = (base64.b64encode(one.tobytes()).decode() for one in (codes, np.packbits(flags.ravel())))
    grid["sharded"], found["layer"]["b"]["sharded"], found["layer"]["b"]["shard_norm"] = ["b"], True, 0.25
    run["loss"][441], run["nonfinite"] = "Infinity", {"loss": [101, 441]}
    found["status"].update(state=None, step=None, started=SECONDS[0], ended=SECONDS[0] + 7 * 60, now=SECONDS[-1] + 86400)
    return cast("dict[str, Any]", found)


@pytest.fixture
def drawn(open_page: Callable[..., Visit], tmp_path: Path) -> Page:
    """The page of that run, in a window in which one pixel of a picture is one of the page."""
    html = tmp_path / "drawn.html"
    html.write_text(plot.page(drawn_run()), encoding="utf-8")
    return open_page(html.as_uri()).page


def cell(page: Page, column: int, row: int) -> tuple[int, int]:
    """Where the middle of a cell of the norm is in the picture of the whole run: x, y."""
    x = page.evaluate("(x) => TorchGrad.app.heatmap._left(x)", int(AT[4 * column + 3]))
    return int(x), int(at_row(page, row, len(NORMS))["y"])


def test_colours(drawn: Page) -> None:
    """Colours are as far apart in the legend as the logarithms of the norms that they stand for."""
    seen = pixels(drawn)
    x, _ = cell(drawn, 250, 0)
    shown = [seen[cell(drawn, 250, row)[::-1]] for row in range(3)]
    bar = pixels(drawn, "#legend")[6, 18:-18]
    places = [np.flatnonzero(bar == one).mean() / (len(bar) - 1) for one in shown]
    low, high = (
        float(end) for end in re.findall(r"[\d.]+(?:e-?\d+)?", drawn.get_by_test_id("legend").get_attribute("aria-label") or "")
    )
    decades = [math.log10(low) + place * math.log10(high / low) for place in places]
    assert decades == pytest.approx([-3, -1.5, 0], abs=0.03)
    drawn.get_by_test_id("quantity-dead_ratio").click()
    cividis = {pixels(drawn)[cell(drawn, 250, row)[::-1]] for row in range(3)}
    assert len(cividis) == 1
    assert cividis.isdisjoint(shown)
    assert x > 0


def test_parts_and_axes(drawn: Page) -> None:
    """The buttons choose records or bins and steps or times, for all pictures, and the address keeps it.

    By step a run that has become slower has no gap; by time one without a step is one.
    """

    def pressed() -> list[str]:
        return [str(one.get_attribute("data-testid")) for one in drawn.locator(".controls [aria-pressed=true]").all()]

    def shown() -> tuple[list[float], list[float], list[float]]:
        found = drawn.evaluate("[TorchGrad.app.heatmap.xs, ...TorchGrad.app.charts.loss.uplot.data]")
        return found[0], found[1], found[2]

    def gaps() -> float:
        box = drawn.evaluate("[TorchGrad.app.heatmap.gutter, TorchGrad.app.heatmap.plotWidth]")
        row = pixels(drawn)[int(at_row(drawn, 0, 3)["y"]), box[0] : box[0] + box[1]]
        row = row[np.argmax(row != colour(drawn, "ground")) :]
        return float((row == colour(drawn, "ground")).mean())

    assert pressed() == ["view-whole", "axis-step"]
    assert gaps() == 0
    columns, xs, losses = shown()
    assert (columns, xs) == (AT[3::4].tolist(), AT[1::2].tolist())
    assert losses[:441] == pytest.approx(LOSS.reshape(-1, 2).mean(axis=1)[:441], rel=1e-5)
    assert losses[441] is None
    drawn.get_by_test_id("axis-time").click()
    assert shown()[:2] == (SECONDS[3::4].tolist(), SECONDS[1::2].tolist())
    assert gaps() == pytest.approx(600 / (SECONDS[-1] - SECONDS[0]), abs=0.01)
    drawn.get_by_test_id("view-recent").click()
    assert shown()[:2] == (SECONDS[-600:].tolist(), SECONDS.tolist())
    drawn.get_by_test_id("axis-step").click()
    assert shown()[:2] == (AT[-600:].tolist(), AT.tolist())
    assert shown()[2] == pytest.approx(LOSS, rel=1e-5)
    assert gaps() == 0
    assert pressed() == ["view-recent", "axis-step"]
    assert drawn.url.endswith("#view=recent")
    lines = {name: pixels(drawn, f"#chart-{name} canvas") == colour(drawn, "line-1") for name in ("loss", "norm")}
    assert lines["loss"].any(axis=1).sum() > 60  # from the top of the chart to its bottom
    # One line from the first sample to the last, though not each record has one.
    across = np.flatnonzero(lines["norm"].any(axis=0))
    assert len(across) == across[-1] - across[0] + 1 > 200
    assert drawn.locator("#chart-norm .value").all_inner_texts() == ["2.00", "0.500"]


def test_closer(drawn: Page) -> None:
    """Dragging across a chart shows that part in all pictures, until a button or a double click shows all."""
    before = drawn.evaluate("TorchGrad.app.heatmap.range")
    over = drawn.locator("#chart-norm .u-over")
    box = over.bounding_box()
    assert box is not None
    for back in (drawn.locator("#zoom-reset").click, over.dblclick):
        assert drawn.locator("#zoom-reset").is_hidden()
        drawn.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
        drawn.mouse.down()
        drawn.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=3)
        drawn.mouse.up()
        expect(drawn.get_by_role("button", name="Show all")).to_be_visible()
        ranges = drawn.evaluate(
            "[TorchGrad.app.heatmap.range, ...Object.values(TorchGrad.app.charts).map((chart) => chart.uplot.scales.x)]"
        )
        wanted = [AT[-1] / 4, AT[-1] / 2]
        assert ranges[0] == pytest.approx(wanted, rel=0.02)
        assert [[one["min"], one["max"]] for one in ranges[1:]] == [ranges[0]] * 3
        back()
        assert drawn.evaluate("TorchGrad.app.heatmap.range") == before


def test_not_finite_beside_a_value(drawn: Page) -> None:
    """A bin with a record that is not finite keeps its value and has a mark; strips above and beside lead to it, and words."""
    seen, bad = pixels(drawn), colour(drawn, "nonfinite")
    (x, y), right = cell(drawn, 50, 1), drawn.evaluate("TorchGrad.app.heatmap.gutter + TorchGrad.app.heatmap.plotWidth")
    assert seen[y, x] == seen[y, cell(drawn, 60, 1)[0]] != bad
    assert bad in seen[y : y + 18, x]
    assert bad not in seen[y : y + 18, cell(drawn, 60, 1)[0]]
    whole = cell(drawn, 200, 2)
    assert (seen[whole[1] - 15 : whole[1] + 15, whole[0]] == bad).all()
    assert [bool((seen[:4, cell(drawn, k, 0)[0]] == bad).all()) for k in (40, 50, 60, 190, 200, 210)] == [False, True, False] * 2
    beside = [bool((seen[cell(drawn, 0, row)[1], right + 2 : right + 6] == bad).all()) for row in range(3)]
    assert beside == [False, True, True]

    chart, ratio = pixels(drawn, "#chart-loss canvas"), drawn.evaluate("TorchGrad.app.charts.loss.uplot.bbox")
    ticks = np.flatnonzero((chart == bad).any(axis=0)) - ratio["left"]
    wanted = [round(ratio["width"] * AT[2 * k + 1] / AT[-1]) for k in (101, 441)]
    assert ticks.tolist() == pytest.approx([one + k for one in wanted for k in (-1, 0)], abs=1)
    assert nonfinite_pixels(drawn, "#chart-norm canvas") == 0

    overlay = drawn.get_by_test_id("heatmap-overlay")
    overlay.hover(position={"x": x, "y": y})
    assert drawn.locator("#tooltip .bad").inner_text() == "also not finite"
    assert "norm of this rank's part 0.0316" in drawn.locator("#tooltip .reading").inner_text()
    assert drawn.locator("#chart-loss .also").inner_text() == "also not finite"
    overlay.hover(position={"x": whole[0], "y": 2})
    assert drawn.locator("#tooltip .reading.bad").inner_text() == "norm not finite (NaN or Inf)"
    overlay.hover(position={"x": cell(drawn, 220, 0)[0], "y": y})
    assert drawn.locator("#chart-loss .value").inner_text() == "not finite"
    assert drawn.locator("#tooltip .bad").count() == 0


def test_parts_of_ranks(drawn: Page) -> None:
    """Of a sharded layer the page says that its norm is of this rank's part; of a run without a state, that it knows none."""
    expect(drawn.locator("#heatmap-title")).to_have_text("Gradient norm by layer (1 of 3: this rank's part)")
    expect(drawn.get_by_test_id("state")).to_have_text("Unknown")
    assert math.isnan(number(drawn, "step"))
    assert drawn.title() == "Unknown · drawn"
    expect(drawn.locator("#since")).to_have_text("ran for 7 min")
    overlay = drawn.get_by_test_id("heatmap-overlay")
    overlay.click(position=at_row(drawn, 1, 3))
    assert drawn.locator("#layer-norm h3").inner_text() == "Norm of this rank's part"
    assert number(drawn, "layer-shard_norm") == 0.25
    assert drawn.get_by_test_id("layer-note").inner_text().startswith("Sharded over ranks")
    assert nonfinite_pixels(drawn, "#layer-norm canvas") > 0
    assert drawn.locator("#layer-norm .of").inner_text() == "largest of 4 records"
    drawn.get_by_test_id("view-recent").click()
    assert drawn.locator("#layer-norm .of").is_hidden()
    overlay.click(position=at_row(drawn, 0, 3))
    assert drawn.locator("#layer-norm h3").inner_text() == "Gradient norm"
    assert drawn.get_by_test_id("layer-note").inner_text() == ""
    drawn.get_by_test_id("quantity-zero_ratio").click()
    expect(drawn.locator("#heatmap-title")).to_have_text("Zero ratio by layer")


def test_what_was_last_known(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A stalled run is no training one; norms are of one sample; words fit their numbers, and none says how long ago it is."""
    saved = drawn_run()
    norms = {"global_norm": 0.281, "global_norm_after_clip": 1.0, "clip_coefficient": 0.25, "last_sample_step": 96}
    counts = {"nonfinite_elements": 0, "nonfinite_steps": 1, "skipped_steps": 1, "loss_spikes": 1}
    saved["status"].update(state="training", step=100, ended=None, last_step=SECONDS[-1] - 400, **norms, **counts)
    saved["status"]["problems"] = [
        {
            "alert": "TrainingStalled", "severity": "critical", "text": "Nothing has happened.", "layer": None, "others": [],
            "first_steps": "Find the rank.",
        },
        {"alert": "LayerDead", "severity": "warning", "text": "Layer a", "layer": "a", "others": []},
        {"alert": "LayerDead", "severity": "warning", "text": "2 more layers", "layer": None, "others": ["b", "c"]},
    ]  # fmt: skip
    html = tmp_path / "saved.html"
    html.write_text(plot.page(saved), encoding="utf-8")
    page = open_page(html.as_uri()).page
    expect(page.get_by_test_id("state")).to_have_text("Stalled")
    assert colour_of(page, "#state") == colour(page, "critical")
    assert page.title() == "Stalled · step 100 · drawn"
    last = time.localtime(SECONDS[-1] - 400)
    said = {
        "global-norm": ("4.00", "1.00 after clipping · step\u00a096"),
        "nonfinite": ("1 step", "1 step skipped"),
        "loss": ("–", "1 spike"),  # noqa: RUF001 - as the page has it
        "last-step": (time.strftime("%H:%M:%S", last), time.strftime("%Y-%m-%d", last)),
    }
    for name, words in said.items():
        assert (page.get_by_test_id(name).inner_text(), page.get_by_test_id(f"{name}-note").inner_text()) == words
    expect(page.locator("#since")).to_have_text(re.compile(r"^was running for 1\sd"))
    assert triangles(page, "warning") == 3
    assert page.locator(".steps").all_inner_texts() == ["Find the rank.", "", ""]  # in what was saved before there were any
    assert page.get_by_role("link", name="More").count() == 0  # nothing serves the runbook of a file
    for ratio, level in ((0.0119, ""), (0.0121, "warning")):
        page.evaluate(f"TorchGrad.app.overview.show({{ overhead_ratio: {ratio}, overhead_budget_ratio: 0.01 }})")
        assert page.locator("#tile-overhead").get_attribute("data-level") == level
    assert THRESHOLDS["ExporterOverBudget"] == 1.2


ACTS = [
    {"time": SECONDS[99] + 0.5, "step": int(AT[99]), "name": HOSTILE, "action": "ScaleLearningRate(factor=0.5)", "result": "done"},
    *[{"time": SECONDS[700], "step": int(AT[700]), "name": f"cause {k}", "action": "tell", "result": "failed"} for k in range(4)],
    {"time": SECONDS[-2], "step": int(AT[-2]), "name": "LossSpike", "action": "Stop()", "result": "refused"},
]
"""What actions did in that run, the first of them on a rule with a wild name."""


def lines_at(page: Page, chart: str, colour: str) -> list[float]:
    """Where on a chart, in its values of x, dashed lines of a colour stand from its upper to its lower edge."""
    return cast(
        "list[float]",
        page.evaluate(
            """([name, colour]) => {
              const { uplot } = TorchGrad.app.charts[name];
              const { left, top, width, height } = uplot.bbox;
              const { canvas } = uplot.ctx;
              const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
              const read = copy.getContext("2d", { willReadFrequently: true });
              read.drawImage(canvas, 0, 0);
              const area = read.getImageData(left, top, width, height).data;
              const probe = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
              probe.fillStyle = TorchGrad.theme.colour(colour);
              probe.fillRect(0, 0, 1, 1);
              const wanted = probe.getImageData(0, 0, 1, 1).data;
              const found = [];
              for (let x = 0; x < width; x += 1) {
                let count = 0;
                for (let y = 0; y < height; y += 1) {
                  const at = 4 * (y * width + x);
                  if ([0, 1, 2].every((k) => Math.abs(area[at + k] - wanted[k]) < 40)) count += 1;
                }
                if (count > height * 0.4) found.push(uplot.posToVal(x / devicePixelRatio, "x"));
              }
              return found;
            }""",
            [chart, colour],
        ),
    )


def test_what_actions_did(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """A line in each chart where something was done, by step and by time; a list in words, whose buttons move the cursor there."""
    saved = drawn_run()
    saved["status"]["actions"] = ACTS
    html = tmp_path / "saved.html"
    html.write_text(plot.page(json.loads(json.dumps(saved))), encoding="utf-8")
    page = open_page(html.as_uri()).page
    for chart in ("norm", "loss", "time"):
        done = lines_at(page, chart, "text")
        assert done[0] == pytest.approx(AT[99], abs=0.01 * AT[-1])
        assert done[-1] - done[0] < 0.01 * AT[-1]
        assert lines_at(page, chart, "critical")[0] == pytest.approx(AT[700], abs=0.01 * AT[-1])
    expect(page.get_by_test_id("action-count")).to_have_text("6")
    rows = page.locator("#action-list li[data-result]")
    assert rows.evaluate_all("(all) => all.map((one) => one.dataset.result)") == ["refused", "failed", "failed", "failed"]
    page.get_by_role("button", name="Show 2 more").press("Enter")
    assert rows.count() == 6
    last = rows.last.locator("button")
    when = time.strftime("%H:%M:%S", time.localtime(SECONDS[99] + 0.5))
    step = page.evaluate("(step) => TorchGrad.numbers.count(step)", int(AT[99]))
    words = ["Done", HOSTILE, f"ScaleLearningRate(factor=0.5) at step {step}, {when}", "Show in charts"]
    assert last.locator("span").all_inner_texts() == words
    last.press("Enter")
    expect(page.locator("#chart-loss .acted")).to_have_text(f"{HOSTILE}: ScaleLearningRate(factor=0.5) done")
    page.get_by_test_id("axis-time").click()
    assert lines_at(page, "loss", "text")[0] == pytest.approx(SECONDS[99], abs=20)


def test_without_actions_nothing_is_said_of_them(drawn: Page) -> None:
    """There is no list and no line."""
    assert drawn.get_by_test_id("actions").is_hidden()
    assert lines_at(drawn, "loss", "text") == lines_at(drawn, "loss", "critical") == []


def test_a_run_that_failed(open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """The banner says by what kind of exception, however it is spelled."""
    saved = drawn_run()
    saved["status"].update(state="failed", ended=SECONDS[0] + 7 * 60, ended_by="<i>OutOfMemoryError")
    html = tmp_path / "saved.html"
    html.write_text(plot.page(saved), encoding="utf-8")
    page = open_page(html.as_uri()).page
    expect(page.get_by_test_id("state")).to_have_text("Failed")
    expect(page.locator("#since")).to_have_text("ran for 7 min, ended by <i>OutOfMemoryError")


def colour_of(page: Page, element: str) -> int:
    """The colour of an element's text as a number 0xrrggbb."""
    red, green, blue = page.evaluate(f"getComputedStyle(document.querySelector('{element}')).color.match(/\\d+/g).map(Number)")
    return int(red) << 16 | int(green) << 8 | int(blue)


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


NAMES = [
    HOSTILE,
    "\"'><script>alert(1)</script>",
    "__proto__",
    "$&$1",
    "a&b=c#d?e/f%20",
    "\u202eevil",
    "</script><script>alert(2)</script>",
]


def test_hostile_names(training: Callable[..., Run], open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Names that would be markup, script or address are text wherever they are shown, live and saved."""
    run = training(Chain(NAMES, unused=(f"{HOSTILE} unused",)))
    run.train(5)
    assert eventually(lambda: recorded(run) > 0 and run.total("torch_grad_captures_total") == 5 * len(NAMES))
    saved = tmp_path / "saved.json"
    run.exporter.save(saved)
    (tmp_path / "saved.html").write_text(plot.page(plot.loaded(str(saved))), encoding="utf-8")
    for url in (run.page, (tmp_path / "saved.html").as_uri()):
        page = open_page(url).page
        button = page.locator("#problem-list button").first
        assert button.get_attribute("data-layer") == f"{HOSTILE} unused"
        assert f"Layer {HOSTILE} unused: parameters got no gradient." in button.inner_text()
        shown = list(run.exporter._view.history.layers)
        assert set(NAMES) <= set(shown)
        for name in NAMES:
            page.mouse.move(0, 0)
            page.get_by_test_id("heatmap-overlay").hover(position=at_row(page, shown.index(name), len(shown)))
            assert page.locator("#tooltip .name").inner_text() == name
            page.get_by_test_id("heatmap-overlay").click(position=at_row(page, shown.index(name), len(shown)))
            expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", name)
            assert page.get_by_test_id("layer-name").inner_text() == name
            assert number(page, "layer-captures") == 5
        assert page.evaluate("[document.querySelectorAll('body img, body iframe').length, window.x]") == [0, None]


def test_one_layer(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """A model of one layer has a heatmap of one row, which opens it."""
    run = training(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    run.train(5)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page).page
    expect(page.get_by_test_id("layer-count")).to_have_text("1 layer")
    page.get_by_test_id("heatmap-overlay").click(position=at_row(page, 0, 1))
    expect(page.get_by_test_id("layer-name")).to_have_text("0")


def test_two_thousand_layers(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """A model of 2,000 layers is one picture, from which a filter picks one layer; the keys go beyond what is in sight."""
    names = [f"layer_{number}" for number in range(2000)]
    run = training(Chain(names, width=1), max_layers=2000)
    run.train(2)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page).page
    expect(page.get_by_test_id("layer-count")).to_have_text("2,000 layers")
    page.get_by_test_id("rows-mode").click()
    page.get_by_test_id("heatmap-overlay").focus()
    for _ in range(6):
        page.keyboard.press("PageDown")
    expect(page.get_by_test_id("announcer")).to_have_text(re.compile("^layer_100, step"))
    page.get_by_test_id("filter").fill("_1234")
    expect(page.get_by_test_id("layer-count")).to_have_text("1 of 2,000 layers")
    page.keyboard.press("Enter")
    expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", "layer_1234")
    soon(page, lambda: number(page, "layer-norm") == run.total("torch_grad_norm", layer="layer_1234") > 0)
    assert wide(page) <= 0


# All visitors


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_phone(theme: str, training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """On a phone nothing is wider than the window, in the colours that the system prefers, or else chosen by a button."""
    run = training(Chain(["a" * 80, HOSTILE, "decoder"]), run="a-run-of-a-long-name-" * 4)
    run.train(5, spoiled=run.model.decoder.weight, value=math.inf)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page, width=360, height=780, dark=theme == "dark", has_touch=True, device_scale_factor=2).page
    assert page.locator("html").get_attribute("data-theme") == theme
    page.get_by_test_id("heatmap-overlay").tap(position=at_row(page, 2, 3))
    expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", "decoder")
    assert wide(page) <= 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 64) == (theme == "dark")
    chosen = []
    for _ in range(3):
        page.get_by_test_id("theme").tap()
        chosen.append(page.locator("html").get_attribute("data-theme"))
    assert chosen == ["light", "dark", theme]


def test_keys_alone(training: Callable[..., Run], open_page: Callable[..., Visit]) -> None:
    """By keys alone one gets to the heatmap, to a cell, into its layer, and back to where one was."""
    run = training(Perceptron())
    run.train(5)
    assert eventually(lambda: recorded(run) > 0)
    page = open_page(run.page, reduced_motion="reduce").page

    def focus() -> str:
        found: str = page.evaluate("document.activeElement.id")
        return found

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(40):
        if focus() == "heatmap-overlay":
            break
        page.keyboard.press("Tab")
    assert focus() == "heatmap-overlay"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("announcer")).to_have_text(re.compile(r"^second, step \d, norm [\d.e-]+$"))
    assert page.get_by_test_id("tooltip").is_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", "second")
    assert focus() == "layer-close"
    page.keyboard.press("Escape")
    assert page.get_by_test_id("layer").is_hidden()
    assert focus() == "heatmap-overlay"


# Where it comes from


def test_tls_and_password(training: Callable[..., Run], open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """Behind TLS and basic authentication the page works as it does without, and its data are refused to who has no password."""
    authority().issue("ip:127.0.0.1").write(tmp_path, "server")
    config = tmp_path / "web.yml"
    tls = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
    config.write_text(f"{tls}basic_auth_users:\n  alice: {hashed('secret')}\n")
    run = training(Perceptron(), web_config_file=config)
    run.train(3)
    alice = {"username": "alice", "password": "secret"}
    assert run.page.startswith("https://127.0.0.1:")
    in_address = open_page(run.page.replace("//", "//alice:secret@"), ignore_https_errors=True).page
    page = open_page(run.page, ignore_https_errors=True, http_credentials=alice).page
    for shown in (in_address, page):
        expect(shown.get_by_test_id("connection")).to_have_text("Live")
        assert number(shown, "step") == 3
    other = page.context.browser.new_context(ignore_https_errors=True)
    statuses = [other.request.get(run.page + path).status for path in ("", "static/page.js", "api/v1/status", "api/v1/layers")]
    assert statuses == [401] * 4
    other.close()


def test_saved(training: Callable[..., Run], open_page: Callable[..., Visit], tmp_path: Path) -> None:
    """One HTML file, opened from disk, shows what the page showed, and sends no request."""
    run = training(Perceptron())
    run.train(30)
    assert eventually(lambda: recorded(run) > 0 and run.total("torch_grad_captures_total") == 60)
    run.exporter.close()
    saved = tmp_path / "saved.json.gz"
    run.exporter.save(saved)
    html = tmp_path / "saved.html"
    html.write_text(plot.page(plot.loaded(str(saved))), encoding="utf-8")
    visited = open_page(html.as_uri())
    page = visited.page
    assert page.locator("html").get_attribute("data-connection") == "saved"
    expect(page.get_by_test_id("connection")).to_have_text(re.compile("^Saved at 20"))
    expect(page.get_by_test_id("state")).to_have_text("Finished")
    assert number(page, "step") == 30
    page.get_by_test_id("quantity-zero_ratio").click()
    page.get_by_test_id("heatmap-overlay").click(position=at_row(page, 1, 2))
    expect(page.locator("#layer:not(.waiting)")).to_have_attribute("data-layer", "second")
    assert sum(int(text.rpartition(": ")[2]) for text in page.locator("#layer-distribution li .unseen").all_text_contents()) == 30
    assert [request.url for request in visited.requests] == [html.as_uri()]


# Numbers to reach


MOST_BYTES = 150_000
MOST_SECONDS = 1.0
LAYERS, STEPS = 300, 100_000


def filled() -> History:
    """The history of a run of 100,000 steps and 300 layers, whose bins are all in use."""
    generator = np.random.default_rng(0)
    times = iter(np.linspace(time.time() - STEPS, time.time(), 4 * WHOLE))
    steps = iter(np.linspace(1, STEPS, 4 * WHOLE).astype(int).tolist())
    names = [f"blocks.{number // 6}.part_{number % 6}" for number in range(LAYERS)]
    counted = iter(range(4 * WHOLE))

    def moment() -> Moment:
        values = np.exp(generator.normal(-3, 2, (LAYERS, len(QUANTITIES)))).astype(np.float32)
        scalars = np.exp(generator.normal(0, 1, len(SCALARS))).astype(np.float32)
        return Moment(next(counted) + 1, next(steps), names, values, scalars)

    history = History(moment, now=lambda: float(next(times)))
    for _ in range(4 * WHOLE):
        history.record_if_due()
    return history


def test_weight_and_speed(training: Callable[..., Run], browser: Browser, record_property: Callable[[str, object], None]) -> None:
    """The first load is at most 150 kB, and 300 layers of a run of 100,000 steps are drawn, once, within a second of it.

    The best of twelve loads counts, as other processes may have the processors.
    """
    run = training(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(LAYERS))))
    run.train(3)
    run.exporter._view.close()
    history = run.exporter._view.live._history = filled()
    assert history.grid("norm", Window(whole=True))[1].values.shape == (WHOLE, LAYERS)
    seconds = [math.inf]
    while seconds[-1] > MOST_SECONDS and len(seconds) <= 12:
        with visit(browser) as visited:
            page = visited.show(run.page)
            soon(page, functools.partial(page.evaluate, "seen.pictures !== null"))
            drawn = page.evaluate("performance.getEntriesByName('heatmap drawn')[0].startTime")
            seconds.append(max(drawn, page.evaluate("seen.pictures")) / 1000)
            assert page.evaluate("document.documentElement.dataset.drawn") == "1"
            assert page.get_by_test_id("layer-count").inner_text() == "300 layers"
            files = [one for one in visited.requests if "/api/" not in one.url and not one.url.startswith("data:")]
            weight = sum(one.sizes()["responseBodySize"] for one in files)
            assert {one.resource_type for one in files} >= {"document", "script", "stylesheet"}
            assert visited.complaints == []
            visited.picture("test_weight_and_speed")
    record_property("bytes", weight)
    record_property("seconds", seconds[1:])
    print(f"first load: {weight} bytes; pictures after {seconds[1:]} s")  # noqa: T201 - for docs/live.md
    assert weight <= MOST_BYTES
    assert min(seconds) <= MOST_SECONDS
