"""The demo: a small character-level transformer learns Python from the source of the standard library.

Written to be read as an example. The model does not refer to the exporter, and the training loop differs
from any other by one `with start_exporter(...)`, one `observe`, and a look at `should_stop`. `faults.py` injects
faults from outside; `answer_faults` lets actions answer them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, MaxNorm, MaxValue, Measurements, ScaleLearningRate, Stop, Webhook, ZClip
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.cli.assets import JOB
from torch_grad_exporter.cli.faults import KINDS, Injection, Trouble
from torch_grad_exporter.cli.terminal import leave_out, number, option_help, show, whole
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.option import options_of
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus import series

HEADS = 4
LEARNING_RATE = 1e-3
HORIZON_STEPS = 10_000  # half of the cosine's period if the demo has no end
NONFINITE = "torch_grad_nonfinite_steps_total"
OVERHEAD = "torch_grad_exporter_overhead_ratio"
STARTUP = "torch_grad_exporter_startup_overhead_ratio"

# The clipping that `--clip` knows. The others are tried on the same run, without applying them.
POLICIES: dict[str, Policy] = {
    "maxnorm": MaxNorm(1.0), "zclip": ZClip(), "autoclip": AutoClip(), "agc": AGC(), "maxvalue": MaxValue(0.1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run of the demo, called like its arguments. `serving`: further arguments of `start_exporter`."""

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


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    kinds = "\n".join(f"  {name:<8} {kind.effect};\n           see {kind.watch}" for name, kind in KINDS.items())
    parser = commands.add_parser(
        "demo",
        help="train a small model with the exporter on",
        description="Trains a small transformer on the source of Python's standard library and serves its metrics.",
        epilog="A fault is sure to be seen with --every 1. --act answers explode and nan.\n--help-all says what each fault does.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = DemoOptions(device="cuda" if torch.cuda.is_available() else "cpu")
    helps = {option.name: option for option in options_of(Settings)}
    add = parser.add_argument
    add("--steps", type=whole(0), metavar="N", help="steps to train; 0, the default, until Ctrl-C")
    add("--port", type=whole(0, 65535), metavar="PORT", help=option_help(helps["port"], default.port))
    add("--every", type=_every, metavar="N|auto", help=option_help(helps["every"], default.every))
    add("--inject", type=_injection, action="append", default=[], metavar="KIND@STEP",
        help=f"spoil the training from a step on: {', '.join(KINDS)}; may be given several times")  # fmt: skip
    add("--clip", choices=POLICIES, metavar="POLICY",
        help=f"clip by a policy of start_exporter(clip=), and try the others on the same run: {', '.join(POLICIES)}")  # fmt: skip
    add("--act", action="store_true",
        help="let actions answer faults: exploding gradients halve the learning rate, a NaN or Inf in them ends the run",
        )  # fmt: skip
    add("--notify", nargs="?", const="", metavar="URL",
        help="post problems to a webhook, by default to the one in TORCH_GRAD_EXPORTER_WEBHOOK_URL, which other users of this "
        "machine cannot read")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="where to train (default here: %(default)s)")
    rest = [
        add("--seed", type=whole(0, 2**63 - 1), metavar="N", help="random seed (default %(default)s)"),
        add("--batch-size", type=whole(1), metavar="N", help="texts in a step (default %(default)s)"),
        add("--context", type=whole(1, 4096), metavar="N", help="bytes in a text (default %(default)s)"),
        add("--width", type=_width, metavar="N", help=f"width of the model, a multiple of {HEADS} (default %(default)s)"),
        add("--layers", type=whole(1), metavar="N", help="layers of the model (default %(default)s)"),
        add("--addr", metavar="ADDRESS", help=option_help(helps["addr"])),
        add("--web-config-file", metavar="FILE", help=option_help(helps["web_config_file"])),
    ]
    switches = parser.add_argument_group("collectors, all of which are on by default")
    rest += [
        switches.add_argument(f"--no-collector.{name}", dest="off", action="append_const", const=name,
                              help=f"disable the collector {name!r}")
        for name in REGISTRY.names
    ]  # fmt: skip
    leave_out(
        parser,
        rest,
        epilog=f"faults that --inject knows:\n{kinds}\n\nA fault is sure to be seen with --every 1. --act answers explode and nan.",
    )
    parser.set_defaults(**{field.name: getattr(default, field.name) for field in fields(default) if field.name != "inject"})
    parser.set_defaults(run=run, error=parser.error)


def options(values: argparse.Namespace) -> DemoOptions:
    """Return the options that the arguments stand for; wrong ones exit with 2."""
    chosen = {field.name: getattr(values, field.name) for field in fields(DemoOptions)}
    collectors = dict.fromkeys(values.off, False) if values.off else None
    serving = {"addr": values.addr, "web_config_file": values.web_config_file, "collectors": collectors}
    chosen["serving"] = {name: value for name, value in serving.items() if value is not None}
    if values.device == "cuda" and not torch.cuda.is_available():
        values.error("argument --device: no CUDA device is there; use --device cpu")
    for injection in values.inject:
        if 0 < values.steps < injection.step:
            values.error(f"argument --inject: {injection.kind}@{injection.step} is never reached with --steps {values.steps}")
    return DemoOptions(**{**chosen, "inject": tuple(values.inject)})


def _every(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    return number(text, int, 1, float("inf"), f"{text!r} is neither 'auto' nor a whole number of at least 1")


def _width(text: str) -> int:
    width = whole(1)(text)
    if width % HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {HEADS}, the number of attention heads")
    return width


def _injection(text: str) -> Injection:
    kind, _, place = text.partition("@")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no fault {kind!r}; choose from {', '.join(KINDS)}, as in nan@100")
    step, colon, length = place.partition(":")
    wrong = f"{text!r}: the step after @ is a whole number of at least 1, as in {kind}@100"
    begin = number(step, int, 1, float("inf"), wrong)
    if not colon:
        return Injection(kind, begin)
    if kind != "stall":
        raise argparse.ArgumentTypeError(f"{text!r}: only stall takes a length, as in stall@100:30")
    # A day's limit keeps the number within what the system's clock can sleep.
    wrong = f"{text!r}: a stall's length is a number of seconds up to 86400, as in stall@100:30"
    return Injection(kind, begin, number(length, float, 1e-9, 86400.0, wrong))


class ByteTransformer(nn.Module):
    """A model that predicts the next byte of a text at each of its bytes, from those before it."""

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
        """Return logits, shape (batch, time, 256), of bytes, shape (batch, time)."""
        stream = self.bytes(text) + self.positions.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for block in self.blocks:
            stream = block(stream, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def read_corpus(folder: Path) -> Tensor:
    """Return the bytes of the folder's Python modules in the order of their names, as uint8."""
    text = bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))
    if len(text) < 100_000:
        raise UserError(f"the demo learns from the source of Python's standard library, and {folder} holds none of it")
    return torch.frombuffer(text, dtype=torch.uint8)


def draw(corpus: Tensor, batch_size: int, context: int, generator: torch.Generator) -> Tensor:
    """Return random excerpts of the corpus: int64 of shape (batch_size, context + 1)."""
    starts = torch.randint(len(corpus) - context, (batch_size, 1), generator=generator)
    return corpus[starts + torch.arange(context + 1)].long()


def answer_faults(exporter: Exporter) -> None:
    """Let actions answer faults: exploding gradients halve the learning rate, a NaN or Inf in them ends the run."""

    def nonfinite(m: Measurements) -> bool:
        # Of any outcome: this loop skips such a step, so the rule TrainingNonFiniteGradients has nothing to say.
        return any(m.last(NONFINITE, outcome=outcome) > 0 for outcome in ("skipped", "stepped", "unknown"))

    exporter.on("GradientExploding", ScaleLearningRate(0.5))
    exporter.on(nonfinite, Stop(), name="non-finite gradients")


def train(model: ByteTransformer, corpus: Tensor, options: DemoOptions, exporter: Exporter) -> Iterator[Tensor]:
    """Run an ordinary training loop, with one line for the exporter. Yields the loss of each step."""
    trouble = Trouble(model.blocks, options.inject)
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
        yield loss.detach()
        if exporter.should_stop:
            break


def run(values: argparse.Namespace) -> int:
    """Train, serve and sum up. Returns the exit code: 0, or 130 if Ctrl-C came before the last step."""
    chosen = options(values)
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # more would wait for each other on a busy machine, by spinning: seconds a step
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    model = ByteTransformer(width=chosen.width, layers=chosen.layers, context=chosen.context).to(chosen.device)
    clipping: dict[str, Any] = {}
    if chosen.clip is not None:
        others = [policy for name, policy in POLICIES.items() if name != chosen.clip]
        clipping = {"clip": POLICIES[chosen.clip], "dry_run": others}
    try:
        alerts = None if chosen.notify is None else [Webhook(chosen.notify or None)]  # an empty one is in the environment
        exporter = start_exporter(model, port=chosen.port, every=chosen.every, alerts=alerts, **clipping, **chosen.serving)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    log, handler = logging.getLogger("torch_grad_exporter"), logging.StreamHandler(sys.stdout)
    interrupted = False
    with exporter:
        show(_introduction(model, corpus, chosen, exporter.page_url))
        if chosen.act:
            answer_faults(exporter)
        log.addHandler(handler)  # shows faults and actions
        try:
            shown = time.monotonic()
            for step, loss in enumerate(train(model, corpus, chosen, exporter), 1):
                if time.monotonic() - shown >= 1.0:  # not more often: on a GPU, reading a loss means waiting for it
                    shown = time.monotonic()
                    show(f"step {step}{f'/{chosen.steps}' if chosen.steps else ''}, loss {loss.item():.3f}")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            log.removeHandler(handler)
        families = exporter.collect()
        show(summary(families) + comparison(families))
    return 130 if interrupted and chosen.steps else 0


def _introduction(model: nn.Module, corpus: Tensor, options: DemoOptions, url: str | None) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{parameters:,} parameters learn {len(corpus) / 1e6:.1f} MB of Python source on {options.device}"
    end = "Ctrl-C ends it" if options.steps == 0 else f"{options.steps:,} steps, Ctrl-C ends it earlier"
    if url is None:
        return f"{size}; {end}. No port could be opened, so nothing is served."
    scheme, _, target = url.rstrip("/").partition("://")
    secured = ", scheme: https" if scheme == "https" else ""
    secrets = "web_config_file" in options.serving
    more = "\n    # and tls_config and basic_auth, as your web configuration asks for them" if secrets else ""
    return f"""{size}; {end}.

Open {url} in a browser, or have {url}metrics scraped, in prometheus.yml:

scrape_configs:
  - {{job_name: {JOB}, honor_labels: true, scrape_interval: 5s{secured}, static_configs: [{{targets: ["{target}"]}}]}}{more}
"""


SUMMARY = (
    ("optimizer steps", "torch_train_steps_total", "{:,.0f}"),
    ("loss", "torch_train_loss", "{:.3f}"),
    ("gradient norm", "torch_grad_global_norm", "{:.3g}"),
    ("non-finite steps", "torch_grad_nonfinite_steps_total", "{:,.0f}"),
    ("overhead", OVERHEAD, "{:.2%}"),
)


def summary(families: Iterable[Family]) -> str:
    """Return the last values, as a scrape would show them now; several series of a metric are added up."""
    shown = {family.spec.name: series.table(family).sum() for family in families if family.series}
    notes = {}
    if startup := shown.get(STARTUP):
        shown[OVERHEAD] -= startup
        notes[OVERHEAD] = f", without {startup:.2%} for the first samples, which later ones pay back"
    lines = [
        f"  {title:<17} {form.format(shown[name]) if name in shown else 'no value yet':<14} {name}{notes.get(name, '')}"
        for title, name, form in SUMMARY
    ]
    return "\n".join(["The last values:", *lines])


def comparison(families: Iterable[Family]) -> str:
    """Return the number of steps that each other policy would have clipped, in lines; empty if none is tried."""
    lines = [
        f"  {labels['policy']:<17} {count:,.0f}"
        for family in families
        if family.spec.name == "torch_grad_clip_candidates_total"
        for labels, count in zip(series.labels(family, {}), series.table(family)[:, 0].tolist(), strict=True)
    ]
    return "\n".join(["\nSteps that other policies would have clipped:", *lines]) if lines else ""
