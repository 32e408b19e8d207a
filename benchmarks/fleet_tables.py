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
    found = []
    for one in outcomes:
        name = f"{one.case.name}, {one.case.ranks} ranks"
        if one.least_up != one.case.ranks or one.failed:
            found.append(f"{name}: at times only {one.least_up} were up")
        if one.series != one.expected:
            found.append(f"{name}: {one.series} series were scraped, {one.expected} were served")
    return found


def by_group(recording: Recording) -> dict[str, int]:
    """The series of a scrape, by group."""
    found = dict.fromkeys(GROUPS, 0)
    for name, series in recording.series.items():
        found[_group(name)] += series
    return found


def _group(name: str) -> str:
    if "layer" in REGISTRY.catalogue[name].labels and name != "torch_grad_norm_distribution":
        return "what else there is per layer"
    beginnings = {beginning: group for group, some in GROUPS.items() for beginning in some if name.startswith(beginning)}
    return beginnings[max(beginnings, key=len)]


def _shown(outcomes: Sequence[Outcome]) -> record.Table:
    ddp, fsdp = outcomes[0], outcomes[-1]
    columns = ["series", f"{ddp.case.name}, rank 0", f"{ddp.case.name}, any other rank", f"{fsdp.case.name}, each rank"]
    shown: list[Mapping[str, int]] = [by_group(one) for one in (*ddp.recorded, fsdp.recorded[0])]
    rows: list[list[record.Cell]] = [
        [group, *(one[group] for one in shown)] for group in GROUPS if any(one[group] for one in shown)
    ]
    rows.append(["all", *(sum(one.values()) for one in shown)])
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
    for one in outcomes:
        taken = round(one.end.samples_since(one.settled))
        times = [round(1e3 * value, 2) for value in (*one.durations, one.of_rank_0[0])]
        place: list[record.Cell] = [one.case.name, one.case.ranks, one.case.layers, one.least_up]
        rows.append([*place, one.series, round(one.series / one.case.ranks), taken, *times, f"{100 * one.served:.0f} %"])
    processors = ", ".join(f"{one.serving:.2f}" for one in outcomes)
    rates = ", ".join(f"{one.sent_per_second / MIB:.2f}" for one in outcomes)
    seconds = outcomes[0].end.at - outcomes[0].settled.at
    notes = [
        f"Each rank is scraped each {interval:g} s, for {seconds:.0f} s after all were up; up: the fewest at any time of it.",
        "Times of scrapes: as Prometheus says, compressed bodies, loopback.",
        "Load of the machine at the end of each: " + ", ".join(f"{one.load:.1f}" for one in outcomes) + ".",
        f"The fleet: the thread that stands for all ranks. It took {processors} processors and sent {rates} MiB/s.",
    ]
    return record.table("Scrapes of many ranks by one Prometheus", columns, rows, notes)


def _needs(outcomes: Sequence[Outcome]) -> record.Table:
    columns = [
        "gradients", "ranks", "layers", "series", "processors", "resident MiB", "at most MiB", "without ranks MiB",
        "KiB per rank", "bytes per series", "bytes per sample in a block",
    ]  # fmt: skip
    rows: list[list[record.Cell]] = []
    for one in outcomes:
        grown = one.end.resident - one.empty.resident
        memory = [round(value / MIB) for value in (one.end.resident, one.peak, one.empty.resident)]
        shares = [round(grown / one.case.ranks / KIB), round(grown / one.end.series), round(one.bytes_per_sample, 2)]
        processors = round(one.end.cpu_since(one.settled), 3)
        rows.append([one.case.name, one.case.ranks, one.case.layers, round(one.end.series), processors, *memory, *shares])
    grown_by = [one.end.resident - one.empty.resident for one in outcomes]
    per_rank, per_series = fitted([(one.case.ranks, one.end.series) for one in outcomes], grown_by)
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
    found = [(one.case.ranks, one.found) for one in outcomes] + [(outcomes[0].case.ranks, way) for way in ways]
    rows: list[list[record.Cell]] = []
    for ranks, way in found:
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
        [one.case.name, one.case.ranks, one.case.layers, *(round(1e3 * one.queries[name], 1) for name in names)] for one in outcomes
    ]
    return record.table("Queries over all ranks", columns, rows, ["Over one minute, the best of three, over HTTP."])
