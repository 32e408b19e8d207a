"""Writes docs/metrics.md from the catalogue; `make golden` runs it, and a test compares."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from torch_grad_exporter.metrics.catalogue import CATALOGUE
from torch_grad_exporter.metrics.families import Kind, Spec

TARGET = pathlib.Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

SECTIONS = {
    "Gradients": ("torch_grad_",),
    "Weights": ("torch_weight_",),
    "Training": ("torch_train_",),
    "The whole run": ("torch_run_",),
    "Memory of CUDA devices": ("torch_cuda_",),
    "GPUs": ("torch_gpu_",),
    "Process": ("process_", "python_", "torch_process_"),
    "Host and container": ("torch_host_", "torch_container_"),
    "The exporter itself": ("torch_grad_exporter_",),
}
"""Title and name prefixes of each section; the longest prefix that fits decides."""

HEAD = """# Metrics

Written from `torch_grad_exporter/metrics/catalogue.py` by `make golden`; edit the catalogue, not this page.

Every series also carries `run` and `rank`, and the labels that the user added. A metric without a value yields no
sample: no made-up zero stands for "unknown". Counters that can count are there from the start. What is *sampled* is
about the steps that the exporter read the gradients of; `torch_grad_captures_total` says how many those were, per layer.

Counters and histograms of a layer stay while its module exists. Those of removed modules are added up in one remainder,
`layer="(removed)"`, which rates leave out; see [numbers.md](numbers.md).

Metrics of the gradients that have no `layer` carry `optimizer` where several optimizers own different parameters, and
no such label where there is one.

The column *ranks* says who exports a metric in a job of several. *All*: every rank. *Part, copy*: a rank that has a part of
the layer's gradient, as under FSDP2 and tensor parallelism, shows that; of ranks whose gradients are equal, as under DDP, the
first one does (`ranks="all"` changes that); see [distributed.md](distributed.md). *0*: rank 0.
"""


def section_of(spec: Spec) -> str:
    """The section of the page that a metric belongs to."""
    fitting = [(len(prefix), title) for title, own in SECTIONS.items() for prefix in own if spec.name.startswith(prefix)]
    return max(fitting)[1]


def ranks(spec: Spec) -> str:
    """Which ranks of a job export it."""
    if spec.name.startswith("torch_run_"):
        return "0"
    return "part, copy" if "layer" in spec.labels else "all"


_SWITCH = {"whole_run": 'collectors={"whole_run": True}'}


def rows(specs: list[Spec]) -> Iterator[str]:
    """The table of one section."""
    yield "| metric | kind | labels | ranks | meaning |"
    yield "|---|---|---|---|---|"
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        meaning = spec.help
        if spec.opt_in:
            meaning += f" Only with `{_SWITCH.get(spec.opt_in, f'{spec.opt_in}=True')}`."
        if spec.kind is Kind.HISTOGRAM:
            meaning += f" Buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)}."
        yield f"| `{spec.name}` | {spec.kind.value} | {labels} | {ranks(spec)} | {meaning} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title in SECTIONS:
        members = [spec for spec in CATALOGUE.values() if section_of(spec) == title]
        parts.append(f"## {title}\n\n" + "\n".join(rows(members)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
