"""Compares clipping policies on one run: a small recurrent network, whose gradients have spikes, learns Python.

python scripts/compare_clipping.py --out clipping.png     # needs matplotlib; 20 s

`MaxNorm(1.0)` clips. The others only say what they would have done with the same gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from matplotlib.figure import Figure
from torch import Tensor, nn

from torch_grad_exporter.actions import AGC, AutoClip, Clipper, MaxNorm, MaxValue, ZClip

CONTEXT, WIDTH, BATCH = 64, 128, 16
LIMIT = 1.0
CLIPS = f"MaxNorm({LIMIT})"
TRIED: dict[str, AGC | AutoClip | MaxNorm | MaxValue | ZClip] = {
    "MaxNorm(0.5)": MaxNorm(0.5),
    "AutoClip()": AutoClip(),
    "AutoClip(percentile=90)": AutoClip(percentile=90),
    "ZClip()": ZClip(),
    "AGC(0.1)": AGC(0.1),
    "MaxValue(0.1)": MaxValue(0.1),
}
DRAWN = ("MaxNorm(0.5)", "AutoClip()", "AutoClip(percentile=90)", "ZClip()")
"""Those that have one threshold for the norm of the whole model."""


class Network(nn.Module):
    """Predicts the next byte of a text at each of its bytes: from int64 (batch, time) to logits (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.recurrent = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(self.recurrent(self.bytes(text))[0])
        return logits


@dataclass
class Comparison:
    """What one run has shown: the norm of each step, the threshold of each policy in each, and whom it would have clipped."""

    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    thresholds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in DRAWN})
    clipped: dict[str, int] = field(default_factory=dict)


def read_corpus() -> Tensor:
    """The bytes of the standard library's modules, as uint8."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def train(steps: int) -> Comparison:
    """One run. It reads each value at once, which a loop on a GPU would not do."""
    torch.manual_seed(0)
    corpus, generator = read_corpus(), torch.Generator().manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipper = Clipper(model, MaxNorm(LIMIT), dry_run=[*TRIED.values()])
    seen = Comparison()
    for _ in range(steps):
        text = corpus[torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=generator) + torch.arange(CONTEXT + 1)].long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        seen.norms.append(float(clipper()))
        seen.losses.append(loss.item())
        optimizer.step()
        for name, candidate in zip(TRIED, clipper.candidates, strict=True):
            if name in DRAWN and candidate.threshold is not None:
                seen.thresholds[name].append(float(candidate.threshold))
    tried = {name: int(candidate.clipped_steps) for name, candidate in zip(TRIED, clipper.candidates, strict=True)}
    seen.clipped = {CLIPS: sum(norm > LIMIT for norm in seen.norms)} | tried
    return seen


def draw(seen: Comparison, out: Path) -> None:
    """The picture, with the numbers that it shows in its metadata."""
    figure = Figure(figsize=(10.5, 4.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
    left.semilogy(seen.norms, ".", color="#8b949e", markersize=3, label="norm before clipping")
    left.axhline(LIMIT, color="#24292e", linewidth=1.2, linestyle="--", label=CLIPS)
    colours = dict(zip(DRAWN, ("#6a737d", "#0b7285", "#2f9e44", "#e8590c"), strict=True))
    for name, thresholds in seen.thresholds.items():
        left.semilogy([t if math.isfinite(t) else math.nan for t in thresholds], color=colours[name], linewidth=1.2, label=name)
    left.set(xlabel="step", ylabel="gradient norm", xlim=(0, len(seen.norms)))
    left.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    left.minorticks_off()
    left.set_title("Thresholds of policies", fontsize=10)
    left.legend(fontsize=8, loc="upper right", ncols=2)
    bars = right.barh([*seen.clipped], [*seen.clipped.values()], color=[colours.get(name, "#ced4da") for name in seen.clipped])
    right.bar_label(bars, padding=3, fontsize=8)
    right.invert_yaxis()
    right.set(xlim=(0, len(seen.norms) * 1.15), xlabel=f"of {len(seen.norms)} steps")
    right.set_title("Steps that each clips", fontsize=10)
    right.tick_params(labelsize=8)
    figure.savefig(out, metadata={"Software": None, "Description": json.dumps({"steps": len(seen.norms), **summary(seen)})})


def summary(seen: Comparison) -> dict[str, object]:
    """What is to be said of the run in numbers."""
    return {"clipped": seen.clipped, "largest": round(max(seen.norms), 2), "median": round(statistics.median(seen.norms), 2)}


def main() -> None:
    """Trains, prints a table and draws the picture."""
    parser = argparse.ArgumentParser(description="Compare clipping policies on one run.")
    parser.add_argument("--steps", type=int, default=600, help="(default: 600)")
    parser.add_argument("--out", type=Path, default=Path("clipping.png"), help="the picture (default: clipping.png)")
    chosen = parser.parse_args()
    seen = train(chosen.steps)
    print(f"norm: median {summary(seen)['median']}, largest {summary(seen)['largest']}; last loss {seen.losses[-1]:.2f}")
    print("| policy | steps clipped |\n|---|---:|")
    for name, count in seen.clipped.items():
        print(f"| `{name}` | {count} |")
    draw(seen, chosen.out)


if __name__ == "__main__":
    main()
