"""Writes docs/metrics.md from what the collectors declare; `make golden` runs it, and a test compares."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import fields

from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.metrics.families import Kind, Spec

TARGET = pathlib.Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

<!-- `make golden` writes this page from what the files in `torch_grad_exporter/collectors/` declare. Edit those. -->

Every series also carries `run`, `rank` and the labels that the user added. A metric without a value has no series: no made-up
zero stands for "unknown". Counters start at 0 as soon as their labels are known. *Sampled* steps are those whose gradients the
exporter read; `torch_grad_captures_total` counts them per layer.

Counters and histograms of a layer stay while its module exists. Those of removed modules are added up in one remainder,
`layer="(removed)"`, which rates leave out; see [What the numbers mean](numbers.md).

Metrics of gradients without a `layer` carry `optimizer` where several optimizers own different parameters, and no such label
where there is only one.

The column *ranks* says which ranks of a job export a metric. *All*: every rank. *Part, copy*: where gradients are sharded, as
under FSDP2 and tensor parallelism, every rank that has a part shows its part; where they are equal, as under DDP, the first rank
shows them (`ranks="all"` changes that). See [Many ranks](distributed.md).
"""

# Of options that are not on or off, and of what several switch on.
VALUES = {
    "alerts": "alerts=[...]",
    "clip": "clip=... or dry_run=[...]",
    "dry_run": "dry_run=[...]",
    "flops_per_step": "flops_per_step=...",
    "routers": "routers=True or exporter.router(...)",
    "state_dir": "state_dir=...",
}


def ranks(spec: Spec) -> str:
    """Which ranks of a job export it."""
    if spec.opt_in == "replicas":
        return "rank 0"
    own = spec.opt_in in ("activations", "attention", "layer_times", "nan_origin", "routers")  # of its own data and its own time
    return "part, copy" if "layer" in spec.labels and not own else "all"


def switch(spec: Spec) -> str:
    """What switches a metric on that is off by default: a collector or an option."""
    if spec.opt_in in VALUES:
        return VALUES[spec.opt_in]
    if spec.opt_in in ("log", "on", "watch"):
        return f"exporter.{spec.opt_in}(...)"
    if spec.opt_in in ("freeze", "rollback"):
        return f"exporter.on({spec.opt_in.capitalize()}(...))"
    option = spec.opt_in in {one.name for one in fields(Settings)}
    return f'collectors={{"{spec.opt_in}": True}}' if spec.opt_in in REGISTRY.names and not option else f"{spec.opt_in}=True"


def rows(specs: list[Spec]) -> Iterator[str]:
    """The table of one section."""
    yield "| metric | kind | labels | ranks | meaning |"
    yield "|---|---|---|---|---|"
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        meaning = spec.help
        if spec.opt_in:
            meaning += f" Only with `{switch(spec)}`."
        if spec.kind is Kind.HISTOGRAM:
            meaning += f" Buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)}."
        cell = meaning.replace("|", "\\|")
        yield f"| `{spec.name}` | {spec.kind.value} | {labels} | {ranks(spec)} | {cell} |"


def page() -> str:
    """The whole page."""
    members: dict[str, list[Spec]] = {}
    for section in REGISTRY.catalogue.sections:
        members.setdefault(section.title, []).extend(section.specs)
    parts = [HEAD, *(f"## {title}\n\n" + "\n".join(rows(specs)) + "\n" for title, specs in members.items())]
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
