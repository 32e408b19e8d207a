"""The tables of `overhead.py`, from the cells that it measured."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.monitors import MONITORS
from benchmarks.workloads import WORKLOADS

Cell = dict[str, Any]


def tables(cells: dict[str, dict[str, Cell]]) -> list[record.Table]:
    """The workloads, the overheads, and what the exporter did meanwhile."""
    return [_workload_table(cells), _overhead_table(cells), _exporter_table(cells)]


def _workload_table(cells: dict[str, dict[str, Cell]]) -> record.Table:
    rows = []
    for name, row in cells.items():
        workload, cell = WORKLOADS[name], next((cell for cell in row.values() if "plain" in cell), None)
        if cell is not None:
            size = f"{cell['parameters'] / 1e6:.2f} M"
            step = f"{1e3 * cell['plain']:.3g} ms"
            rows.append([workload.title, cell["tensors"], size, workload.batch_name, workload.optimizer_name, step])
    return record.table("Workloads", ["workload", "parameters", "elements", "batch", "optimizer", "plain step"], rows)


def _overhead_table(cells: dict[str, dict[str, Cell]]) -> record.Table:
    monitors = [name for name in MONITORS if any(name in row for row in cells.values())]
    rows: list[list[str]] = []
    for name in monitors:
        if any("control" in row.get(name, {}) for row in cells.values()):
            title = "no monitor (control)" if name == "exporter" else f"no monitor (control of {MONITORS[name].title})"
            rows.append([title, "", *(_shown(row.get(name, {}), "control") for row in cells.values())])
    rows += [
        [MONITORS[name].title, MONITORS[name].gives, *(_shown(row.get(name, {}), "monitored") for row in cells.values())]
        for name in monitors
    ]
    titles = [WORKLOADS[name].title for name in cells]
    return record.table("Overhead per step", ["monitor", "what it gives", *titles], rows, [*_versions(), *_reasons(cells)])


def _versions() -> list[str]:
    found = {entry.package: record.installed(entry.package) for entry in MONITORS.values() if entry.package}
    known = [f"{package} {version}" for package, version in found.items() if version]
    return [f"With {', '.join(known)}."] if known else []


def _reasons(cells: dict[str, dict[str, Cell]]) -> list[str]:
    return [
        f"{MONITORS[name].title} on {WORKLOADS[workload].title}: {cell['reason']}."
        for workload, row in cells.items()
        for name, cell in row.items()
        if "reason" in cell
    ]


def _exporter_table(cells: dict[str, dict[str, Cell]]) -> record.Table:
    found = [(workload, name, cell) for workload, row in cells.items() for name, cell in row.items() if cell.get("exporter")]
    ours = {name for _, name, cell in found if "control" in cell}
    rows = []
    for workload, name, cell in found:
        if name in ours:
            title = WORKLOADS[workload].title
            rows.append([title if ours == {"exporter"} else f"{title}, {MONITORS[name].title}", *_meanwhile(cell)])
    columns = ["workload", "interval at start, end", "steps per block", "rounds", "samples per block"]
    title = "The exporter at its defaults, meanwhile" if ours <= {"exporter"} else "The exporter, meanwhile"
    return record.table(title, [*columns, "overhead of all rounds, untrimmed", "its own figure"], rows)


def _meanwhile(cell: Cell) -> list[record.Cell]:
    """What an exporter with its own interval did during the measurement."""
    seen, measured = cell["exporter"], cell["monitored"]
    interval = f"{seen['interval_at_start']}, {seen['interval_at_end']}"
    in_block = f"{seen['fewest_in_a_block']} to {seen['most_in_a_block']}"
    said, all_rounds = f"{100 * seen['own_ratio']:.2f} %", f"{100 * measured['untrimmed']:+.2f} %"
    return [interval, cell["steps_per_block"], measured["rounds"], in_block, all_rounds, said]


def _shown(cell: Cell, arm: str) -> str:
    if arm in cell:
        return overhead(cell[arm])
    return str(cell.get("reason", "")).split(":")[0]


def overhead(comparison: Cell) -> str:
    """The overhead with its interval in percent; as many digits as the interval's width lets one believe."""
    low, middle, high = (100 * comparison[key] for key in ("low", "overhead", "high"))
    digits = 2 if high - low < 2 else 1 if high - low < 20 else 0
    return f"{middle:+z.{digits}f} % ({low:+z.{digits}f} to {high:+z.{digits}f})"


def printed(table: record.Table) -> str:
    """A table for a terminal."""
    lines = [table["columns"], *([str(cell) for cell in row] for row in table["rows"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table["columns"]))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["", table["title"], *body, *table["notes"]])
