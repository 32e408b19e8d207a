"""The demo: a small character-level transformer learns Python from the source of the standard library.

Written to be read as an example. The model does not refer to the exporter, and the training loop differs
from any other by one `with start_exporter(...)`, one `observe`, and a look at `should_stop`. `Trouble` injects
faults from outside, so that one can see how each fault shows in the metrics; `answers` lets actions answer them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import (
    AGC,
    AutoClip,
    MaxNorm,
    MaxValue,
    Measurements,
    ScaleLearningRate,
    Stop,
    Webhook,
    ZClip,
)
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus import series

HEADS = 4
LEARNING_RATE = 1e-3
HORIZON_STEPS = 10_000  # Half of the cosine's period where the demo has no end.
EXPLODE_STEPS = 5
CANDIDATES = "torch_grad_clip_candidates_total"
NONFINITE = "torch_grad_nonfinite_steps_total"


POLICIES: dict[str, Policy] = {
    "maxnorm": MaxNorm(1.0),
    "zclip": ZClip(),
    "autoclip": AutoClip(),
    "agc": AGC(),
    "maxvalue": MaxValue(0.1),
}
"""The clipping that `--clip` knows. All others are tried on the same run, without doing it."""

HALF = 0.5
"""What is left of the learning rate where gradients have exploded and `--act` is given."""


class DemoError(Exception):
    """The demo cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class DemoFault:
    """A fault that can be injected: what happens, and which metrics show it."""

    effect: str
    watch: str


KINDS: dict[str, DemoFault] = {
    "nan": DemoFault(
        "the gradient of one layer is NaN for one step while the loss is finite",
        "torch_grad_nonfinite_steps_total, torch_grad_nonfinite_elements_total",
    ),
    "explode": DemoFault(
        f"every gradient is 10,000 times as large for {EXPLODE_STEPS} steps",
        "torch_grad_global_norm, torch_grad_global_norm_spikes_total, torch_grad_clip_coefficient",
    ),
    "vanish": DemoFault(
        "from then on a billionth of the gradient reaches the first half of the model",
        "torch_grad_norm by layer",
    ),
    "dead": DemoFault(
        "from then on all ReLU units of one layer are dead",
        "torch_grad_zero_units_ratio, torch_grad_dead_ratio",
    ),
    "stall": DemoFault(
        "the loop hangs for ten minutes, or SECONDS with stall@STEP:SECONDS",
        "torch_train_last_step_timestamp_seconds",
    ),
}


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault and the step, counted from 1, at which it begins; `seconds` is the length of a stall."""

    kind: str
    step: int
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a run of the demo is made of; `steps` 0 runs until Ctrl-C. `serving`: further arguments of `start_exporter`.

    `clip`: one of `POLICIES`, instead of the loop's own clipping. `act`: whether actions answer faults. `notify`: the address of a
    webhook, empty for the one in the environment; it is a secret.
    """

    steps: int = 0
    port: int = 9100
    every: int | Literal["auto"] = "auto"
    inject: tuple[Injection, ...] = ()
    seed: int = 0
    batch_size: int = 4
    context: int = 64
    width: int = 128
    layers: int = 4
    device: str = "cpu"
    clip: str | None = None
    act: bool = False
    notify: str | None = field(default=None, repr=False)
    serving: Mapping[str, Any] = field(default_factory=dict)


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text at each of its bytes, from those before it."""

    def __init__(self, *, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of shape (batch, time, 256) from bytes of shape (batch, time)."""
        stream = self.bytes(text) + self.positions.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for block in self.blocks:
            stream = block(stream, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def read_corpus(folder: Path) -> Tensor:
    """The bytes of the folder's Python modules in the order of their names, as uint8."""
    text = bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))
    if len(text) < 100_000:
        raise DemoError(f"the demo learns from the source of Python's standard library, and {folder} holds none of it")
    return torch.frombuffer(text, dtype=torch.uint8)


def draw(corpus: Tensor, batch_size: int, context: int, generator: torch.Generator) -> Tensor:
    """Random excerpts of the corpus: int64 of shape (batch_size, context + 1)."""
    starts = torch.randint(len(corpus) - context, (batch_size, 1), generator=generator)
    return corpus[starts + torch.arange(context + 1)].long()


class Trouble:
    """Injects the chosen faults into the training, and prints when each begins."""

    def __init__(self, model: ByteTransformer, injections: tuple[Injection, ...], say: Callable[[str], None]) -> None:
        middle = model.blocks[(len(model.blocks) - 1) // 2]
        assert isinstance(middle, nn.TransformerEncoderLayer)  # noqa: S101 - tells the type checker
        self._middle = middle
        self._injections = injections
        self._say = say

    def begin(self, step: int) -> None:
        """Switches on what begins at this step; a stall happens in here."""
        for injection in self._injections:
            if injection.step != step:
                continue
            kind = KINDS[injection.kind]
            self._say(f"step {step}: {injection.kind}: {kind.effect}; watch {kind.watch}")
            if injection.kind == "vanish":
                self._middle.register_forward_hook(_vanish)
            elif injection.kind == "dead":
                with torch.no_grad():
                    self._middle.linear1.bias.fill_(-1e4)
            elif injection.kind == "stall":
                time.sleep(injection.seconds)

    def spoil(self, loss: Tensor, step: int) -> Tensor:
        """The loss whose gradient is taken instead of the true one's."""
        for injection in self._injections:
            if injection.kind == "nan" and injection.step == step:
                # A classic: a penalty on the distance to a copy of the weight. It is 0, and so harmless in
                # the loss, but the square root's slope at 0 is infinite, and infinity times 0 is NaN.
                weight = self._middle.linear2.weight
                loss = loss + (weight - weight.detach()).square().sum().sqrt()
            if injection.kind == "explode" and injection.step <= step < injection.step + EXPLODE_STEPS:
                loss = loss * 1e4
        return loss


def _vanish(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 1e-9)  # type: ignore[no-untyped-call] # torch leaves it untyped


class Progress:
    """Shows how far the training is: a bar of tqdm, or where that is not installed a line every second."""

    def __init__(self, steps: int) -> None:
        self._end = f"/{steps}" if steps else ""
        self._step = 0
        self._shown = time.monotonic()
        try:
            from tqdm import tqdm  # noqa: PLC0415 - optional
        except ImportError:
            self._bar = None
        else:
            self._bar = tqdm(total=steps or None, unit=" steps", dynamic_ncols=True)

    def advance(self, loss: Tensor) -> None:
        """One more step, with its loss, which is read once a second: on a GPU, reading it means waiting for it."""
        self._step += 1
        if self._bar is not None:
            self._bar.update()
        now = time.monotonic()
        if now - self._shown >= 1.0:
            self._shown = now
            if self._bar is not None:
                self._bar.set_postfix(loss=f"{loss.item():.3f}")
            else:
                self.say(f"step {self._step}{self._end}, loss {loss.item():.3f}")

    def say(self, text: str) -> None:
        """One line on standard output, without spoiling the bar."""
        with contextlib.nullcontext() if self._bar is None else self._bar.external_write_mode():
            print(text, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def answers(exporter: Exporter) -> None:
    """Lets actions answer faults: exploding gradients halve the learning rate, a NaN or Inf in them ends the run."""

    def spoilt(m: Measurements) -> bool:
        # Of any outcome: this loop skips such a step, so the rule TrainingNonFiniteGradients has nothing to say.
        return any(m.last(NONFINITE, outcome=outcome) > 0 for outcome in ("skipped", "stepped", "unknown"))

    exporter.on("GradientExploding", ScaleLearningRate(HALF))
    exporter.on(spoilt, Stop(), name="non-finite gradients")


class Said(logging.Handler):
    """Shows what the exporter logs, such as what an action did, without spoiling the bar."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self._say(record.getMessage())


@contextlib.contextmanager
def said(say: Callable[[str], None]) -> Iterator[None]:
    """Shows what the exporter logs meanwhile."""
    handler = Said(say)
    log = logging.getLogger("torch_grad_exporter")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def train(model: ByteTransformer, corpus: Tensor, options: Options, exporter: Exporter, progress: Progress) -> None:
    """An ordinary training loop, with one line for the exporter."""
    trouble = Trouble(model, options.inject, progress.say)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    limit = 1.0 if options.clip is None else math.inf  # which clips nothing: the exporter does
    horizon = options.steps or HORIZON_STEPS
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon, eta_min=LEARNING_RATE / 10)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(1, options.steps + 1) if options.steps else itertools.count(1):
        trouble.begin(step)
        text = draw(corpus, options.batch_size, options.context, generator).to(options.device)
        inputs, targets = text[:, :-1], text[:, 1:]

        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        trouble.spoil(loss, step).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)

        exporter.observe(loss=loss, tokens=inputs.numel(), grad_norm=norm)

        # A step with a NaN in it would destroy the weights.
        if norm.isfinite():
            optimizer.step()
            if schedule.last_epoch < horizon:  # the cosine would rise again
                schedule.step()
        optimizer.zero_grad()
        progress.advance(loss)
        if exporter.should_stop:
            break


def run(options: Options) -> int:
    """Trains, serves and sums up. Returns the exit code: 0, or 130 where Ctrl-C came before the last step."""
    torch.manual_seed(options.seed)
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    model = ByteTransformer(width=options.width, layers=options.layers, context=options.context).to(options.device)
    try:
        alerts = None if options.notify is None else [Webhook(options.notify or None)]
        exporter = start_exporter(
            model, port=options.port, every=options.every, alerts=alerts, **_clipping(options), **options.serving
        )
    except (TypeError, ValueError) as error:
        raise DemoError(str(error)) from error
    interrupted = False
    with exporter:
        print(_introduction(model, corpus, options, exporter.url), flush=True)
        if options.act:
            answers(exporter)
        with contextlib.closing(Progress(options.steps)) as progress, said(progress.say):
            try:
                train(model, corpus, options, exporter, progress)
            except KeyboardInterrupt:
                interrupted = True
        families = exporter.collect()
        print(summary(families) + comparison(families), flush=True)
    return 130 if interrupted and options.steps else 0


def _clipping(options: Options) -> dict[str, Any]:
    """The chosen policy, and what the others would do."""
    if options.clip is None:
        return {}
    others = [policy for name, policy in POLICIES.items() if name != options.clip]
    return {"clip": POLICIES[options.clip], "dry_run": others}


def _introduction(model: nn.Module, corpus: Tensor, options: Options, url: str | None) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{parameters:,} parameters learn {len(corpus) / 1e6:.1f} MB of Python source on {options.device}"
    end = "Ctrl-C ends it" if options.steps == 0 else f"{options.steps:,} steps, Ctrl-C ends it earlier"
    if url is None:
        return f"{size}; {end}. No port could be opened, so nothing is served."
    scheme, _, address = url.partition("://")
    target = address.removesuffix("/metrics")
    secured = ", scheme: https" if scheme == "https" else ""
    more = (
        "\n    # and tls_config and basic_auth, as your web configuration asks for them"
        if options.serving.get("web_config_file")
        else ""
    )
    return f"""{size}; {end}.

Open     {url}
or have it scraped, in prometheus.yml:

scrape_configs:
  - {{job_name: torch, honor_labels: true, scrape_interval: 5s{secured}, static_configs: [{{targets: ["{target}"]}}]}}{more}
"""


SUMMARY = (
    ("optimizer steps", "torch_train_steps_total", "{:,.0f}"),
    ("loss", "torch_train_loss", "{:.3f}"),
    ("gradient norm", "torch_grad_global_norm", "{:.3g}"),
    ("non-finite steps", "torch_grad_nonfinite_steps_total", "{:,.0f}"),
    ("overhead", "torch_grad_exporter_overhead_ratio", "{:.2%}"),
)


def summary(families: Iterable[Family]) -> str:
    """The last values, as a scrape would show them now; several series of a metric are added up."""
    shown = {family.spec.name: series.table(family) for family in families if family.series}
    lines = [
        f"  {title:<17} {form.format(shown[name].sum()) if name in shown else 'no value yet':<14} {name}"
        for title, name, form in SUMMARY
    ]
    return "\n".join(["The last values:", *lines])


def comparison(families: Iterable[Family]) -> str:
    """Which steps other policies would have clipped, in lines; empty where none is tried."""
    found = next((one for one in families if one.spec.name == CANDIDATES), None)
    counts = [] if found is None else zip(series.present_rows(found), series.table(found)[:, 0].tolist(), strict=True)
    lines = [f"  {policy:<17} {count:,.0f}" for (policy,), count in counts]
    return "\n".join(["\nSteps that other policies would have clipped:", *lines]) if lines else ""
