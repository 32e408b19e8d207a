"""What came of the fleets as tables, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import record
from benchmarks.fleet_job import Recording
from benchmarks.fleet_run import Found, Outcome
from torch_grad_exporter.collectors import REGISTRY

MIB, KIB = 2**20, 2**10

GROUPS = {
    "histogram of each layer's norm": ("torch_grad_norm_distribution",),
    "what else there is per layer": (),
    "gradients as a whole": ("torch_grad_",),
    "training": ("torch_train_",),
    "memory of CUDA devices": ("torch_cuda_",),
    "GPUs": ("torch_gpu_",),
    "process": ("process_", "python_", "torch_process_"),
    "host and container": ("torch_host_", "torch_container_"),
    "the exporter itself": ("torch_grad_exporter_",),
}
"""Beginnings of the names of the metrics in each group; the longest that fits counts."""


def tables(outcomes: Sequence[Outcome], ways: Sequence[Found], interval: float) -> list[record.Table]:
    """All of them, in the order of the page."""
    return [_shown(outcomes), _scrapes(outcomes, interval), _needs(outcomes), _discovery(outcomes, ways), _queries(outcomes)]


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it must be; empty if all is well."""
    wrong = []
    for outcome in outcomes:
        name = f"{outcome.case.name}, {outcome.case.ranks} ranks"
        if outcome.least_up != outcome.case.ranks or outcome.failed:
            wrong.append(f"{name}: at times only {outcome.least_up} were up")
        if outcome.series != outcome.expected:
            wrong.append(f"{name}: {outcome.series} series were scraped, {outcome.expected} were served")
    return wrong


def by_group(recording: Recording) -> dict[str, int]:
    """The series of a scrape, by group."""
    counts = dict.fromkeys(GROUPS, 0)
    for name, series in recording.series.items():
        counts[_group(name)] += series
    return counts


def _group(name: str) -> str:
    if "layer" in REGISTRY.catalogue[name].labels and name != "torch_grad_norm_distribution":
        return "what else there is per layer"
    beginnings = {beginning: group for group, some in GROUPS.items() for beginning in some if name.startswith(beginning)}
    return beginnings[max(beginnings, key=len)]


def _shown(outcomes: Sequence[Outcome]) -> record.Table:
    ddp, fsdp = outcomes[0], outcomes[-1]
    columns = ["series", f"{ddp.case.name}, rank 0", f"{ddp.case.name}, any other rank", f"{fsdp.case.name}, each rank"]
    shown: list[Mapping[str, int]] = [by_group(recording) for recording in (*ddp.recorded, fsdp.recorded[0])]
    rows: list[list[record.Cell]] = [
        [group, *(recording[group] for recording in shown)] for group in GROUPS if any(recording[group] for recording in shown)
    ]
    rows.append(["all", *(sum(recording.values()) for recording in shown)])
    notes = [
        f"With {ddp.case.layers} layers. No GPU: its metrics, and those of its memory, come on top where there is one.",
        "From a real job of two ranks; under FSDP2 one rank alone cannot know a layer's norm, so there is no histogram of it.",
    ]
    return record.table("What a rank shows", columns, rows, notes)


def _scrapes(outcomes: Sequence[Outcome], interval: float) -> record.Table:
    columns = [
        "gradients", "ranks", "layers", "up", "series", "series per rank", "samples/s",
        "scrape, median ms", "99 % ms", "rank 0, median ms", "share spent in the fleet",
    ]  # fmt: skip
    rows: list[list[record.Cell]] = []
    for outcome in outcomes:
        taken = round(outcome.end.samples_since(outcome.settled))
        times = [round(1e3 * value, 2) for value in (*outcome.durations, outcome.of_rank_0[0])]
        place: list[record.Cell] = [outcome.case.name, outcome.case.ranks, outcome.case.layers, outcome.least_up]
        per_rank = round(outcome.series / outcome.case.ranks)
        rows.append([*place, outcome.series, per_rank, taken, *times, f"{100 * outcome.served:.0f} %"])
    processors = ", ".join(f"{outcome.serving:.2f}" for outcome in outcomes)
    rates = ", ".join(f"{outcome.sent_per_second / MIB:.2f}" for outcome in outcomes)
    seconds = outcomes[0].end.at - outcomes[0].settled.at
    notes = [
        f"Each rank is scraped each {interval:g} s, for {seconds:.0f} s after all were up; up: the fewest at any time of it.",
        "Times of scrapes: as Prometheus says, compressed bodies, loopback.",
        "Load of the machine at the end of each: " + ", ".join(f"{outcome.load:.1f}" for outcome in outcomes) + ".",
        f"The fleet: the thread that stands for all ranks. It took {processors} processors and sent {rates} MiB/s.",
    ]
    return record.table("Scrapes of many ranks by one Prometheus", columns, rows, notes)


def _needs(outcomes: Sequence[Outcome]) -> record.Table:
    columns = [
        "gradients", "ranks", "layers", "series", "processors", "resident MiB", "at most MiB", "without ranks MiB",
        "KiB per rank", "bytes per series", "bytes per sample in a block",
    ]  # fmt: skip
    rows: list[list[record.Cell]] = []
    for outcome in outcomes:
        grown = outcome.end.resident - outcome.empty.resident
        memory = [round(value / MIB) for value in (outcome.end.resident, outcome.peak, outcome.empty.resident)]
        shares = [round(grown / outcome.case.ranks / KIB), round(grown / outcome.end.series), round(outcome.bytes_per_sample, 2)]
        processors = round(outcome.end.cpu_since(outcome.settled), 3)
        case, series = outcome.case, round(outcome.end.series)
        rows.append([case.name, case.ranks, case.layers, series, processors, *memory, *shares])
    grown_by = [outcome.end.resident - outcome.empty.resident for outcome in outcomes]
    per_rank, per_series = fitted([(outcome.case.ranks, outcome.end.series) for outcome in outcomes], grown_by)
    notes = [
        "Series: all that its head holds, with the five that it adds to each target.",
        "Per rank and per series: the memory that it holds more than without ranks, at the end.",
        f"Fitted to all fleets: {per_rank / KIB:.0f} KiB for each rank and {per_series:.0f} bytes for each series.",
        "Minutes old: a head holds two to three hours of samples, most of them in files that are mapped into memory.",
        "In a block: its chunks, of as few samples per series as these are; of 120 they are smaller.",
    ]
    return record.table("What Prometheus needs for them", columns, rows, notes)


def fitted(causes: Sequence[tuple[float, float]], effects: Sequence[float]) -> tuple[float, float]:
    """What one of each of two causes does, by least squares."""
    first, second = np.linalg.lstsq(np.array(causes, dtype=np.float64), np.array(effects), rcond=None)[0].tolist()
    return first, second


def _discovery(outcomes: Sequence[Outcome], ways: Sequence[Found]) -> record.Table:
    columns = ["ranks", "change", "up after s", "reads of all files", "still read for s", "s in reads", "processor s"]
    changes = [(outcome.case.ranks, outcome.found) for outcome in outcomes] + [(outcomes[0].case.ranks, way) for way in ways]
    rows: list[list[record.Cell]] = []
    for ranks, way in changes:
        times = [round(value, 1) for value in (way.read_on, way.reading, way.cpu)]
        rows.append([ranks, way.way, round(way.up_after, 1), way.reads, *times])
    notes = [
        "Up: as many ranks as there should be. Still read: after that. Processor s: all that Prometheus took until it was at rest.",
        "Prometheus reads all files again at each change in the folder.",
        "A file that is written in it and renamed is several changes, one that is moved there from elsewhere is one.",
    ]
    return record.table("Discovery", columns, rows, notes)


def _queries(outcomes: Sequence[Outcome]) -> record.Table:
    names = list(outcomes[0].queries)
    columns = ["gradients", "ranks", "layers", *(f"{name}, ms" for name in names)]
    rows: list[list[record.Cell]] = [
        [outcome.case.name, outcome.case.ranks, outcome.case.layers, *(round(1e3 * outcome.queries[name], 1) for name in names)]
        for outcome in outcomes
    ]
    return record.table("Queries over all ranks", columns, rows, ["Over one minute, the best of three, over HTTP."])
