"""Which GPUs CUDA will show this process, and in which order, as far as that is certain before CUDA is initialised.

The rules of CUDA_VISIBLE_DEVICES: unset, all are visible. Else a list of indices, of UUIDs of GPUs or beginnings of them, or
of MIG devices; it ends at the first entry that is none, and one that names a GPU twice is empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class Installed:
    """A GPU of the machine. `partitioned`: it is cut into MIG devices, of which CUDA shows one in its place."""

    uuid: str
    model: str
    partitioned: bool = False


SILENT = Installed("", "", partitioned=True)
"""Stands for a GPU that does not answer: whether CUDA shows it, which shifts the numbers of the next ones, is not certain."""


def visible(environment: Mapping[str, str], installed: Sequence[Installed]) -> tuple[str, ...]:
    """UUIDs of CUDA's devices 0, 1 and so on, of GPUs or MIG devices; none where that is not certain.

    `installed` in the driver's order, by place on the bus.
    """
    listed = environment.get(VISIBLE)
    if listed is None:
        return _by_index(range(len(installed)), environment, installed)
    entries = listed.split(",")
    if entries[0].startswith("MIG-"):
        # CUDA gives a process no more than one.
        return (entries[0],)
    if entries[0].startswith("GPU-"):
        return _by_uuid(entries, installed)
    return _by_index(_indices(entries), environment, installed)


def _by_index(indices: Sequence[int], environment: Mapping[str, str], installed: Sequence[Installed]) -> tuple[str, ...]:
    # By default CUDA counts the fastest GPU first, which leaves the driver's order alone only where all are equally fast.
    ordered = environment.get(ORDER) == "PCI_BUS_ID" or len({gpu.model for gpu in installed}) == 1
    if not ordered or any(gpu.partitioned for gpu in installed):
        return ()
    end = next((place for place, index in enumerate(indices) if index >= len(installed)), len(indices))
    return tuple(installed[index].uuid for index in indices[:end])


def _indices(entries: Sequence[str]) -> list[int]:
    """The indices up to the first entry that is none. Like C, CUDA reads the number that an entry begins with."""
    found: list[int] = []
    for entry in entries:
        number = re.match(r"\s*([+-]?\d+)", entry)
        if number is None or int(number[1]) < 0:
            break
        if int(number[1]) in found:
            return []
        found.append(int(number[1]))
    return found


def _by_uuid(entries: Sequence[str], installed: Sequence[Installed]) -> tuple[str, ...]:
    listed = list(takewhile(lambda entry: entry.startswith("GPU-"), entries))
    found: list[Installed] = []
    for entry in listed:
        matching = [gpu for gpu in installed if gpu.uuid.startswith(entry)]
        # A GPU that does not answer may begin with it as well.
        if len(matching) != 1 or (SILENT in installed and matching[0].uuid != entry):
            break
        found += matching
    twice = len(set(listed)) < len(listed) or len(set(found)) < len(found)
    return () if twice or any(gpu.partitioned for gpu in found) else tuple(gpu.uuid for gpu in found)
