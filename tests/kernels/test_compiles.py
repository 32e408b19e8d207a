"""The programs compile for GPUs that are not here: Triton brings the compilers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from torch_grad_exporter.statistics.kernels import launch, tables

SCRIPT = """
import json, pathlib, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_grad_exporter.statistics.kernels import programs

backend, architecture, threads, moments, options, either, read, add_up = json.loads(sys.argv[1])
architecture = int(architecture) if architecture.isdigit() else architecture
found = []
for program, pointers, constants, wanted in (
    (programs.read, ("*i32", "*i64", "*i64", "*fp64", "*u8", "*u8"), read | {"MOMENTS": moments}, options),
    (programs.add_up, ("*i64", "*fp64", "*fp64"), add_up, either),
):
    signature = dict(zip(program.arg_names, pointers)) | dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(program.arg_names), signature
    source = ASTSource(program, signature, constants)
    compiled = triton.compile(source, target=GPUTarget(backend, architecture, threads), options=wanted)
    found.append({kind: code for kind, code in compiled.asm.items() if kind in ("ptx", "amdgcn")})
    if "cubin" in compiled.asm:
        binary = pathlib.Path(sys.argv[2]) / "program"
        binary.write_bytes(compiled.asm["cubin"])
        listing = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        found[-1]["machine code"] = subprocess.run([listing, "-c", binary], capture_output=True, text=True, check=True).stdout
print(json.dumps(found))
"""

WIDE_LOADS = {"cuda": ("ld.global.v4", 8), "hip": ("buffer_load_dwordx4", 4)}
"""Loads of 16 bytes and how many there are at least: for a thread's part of a block of each type, for AMD's GPUs of float32."""


INSTRUCTIONS = {"one unit": 12, "several units": 17}
"""For each element, at most, in the loop over whole blocks: where a block is of one unit or of none, and with all else in it."""

MACHINE_CODE = "3.9."
"""The version of Triton whose compiler it is, that of the Makefile. That of 3.6 spills registers in these loops."""

PER_THREAD = 16
"""Elements of a block that a thread reads."""


def compiled(backend: str, architecture: str, threads: int, moments: bool, folder: Path) -> list[dict[str, str]]:
    """Both programs, by the name of each kind of code."""
    shared = {"COLUMNS": tables.COLUMNS, "PARTIALS": tables.PARTIALS}
    read = {"BLOCK": tables.BLOCK, "GROUP": tables.GROUP, **shared}
    add_up = {"MOST": tables.MOST_TILES, "WIDTH": 9, **{column.name: int(column) for column in launch.WRITTEN}, **shared}
    given = (backend, architecture, threads, moments, launch.options(hip=backend == "hip"), dict(launch.ANY), read, add_up)
    # Not the interpreter, and nothing in the cache of whoever runs this.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps(given), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def loops(listing: str) -> Iterator[list[str]]:
    """The instructions between each branch that goes back and where it goes to."""
    places: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            places[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    for place, instruction in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", instruction)
        if target and places[target[1]] < place:
            yield instructions[places[target[1]] : place + 1]


def has(instructions: Sequence[str], *names: str) -> int:
    """How many of these instructions there are."""
    return sum(bool(re.search(rf"\b({'|'.join(names)})\b", one)) for one in instructions)


@pytest.mark.parametrize(
    ("backend", "architecture", "threads", "moments"),
    [("cuda", "75", 32, False), ("cuda", "80", 32, True), ("cuda", "90", 32, True), ("hip", "gfx942", 64, True)],
)
def test_it_compiles(backend: str, architecture: str, threads: int, moments: bool, tmp_path: Path) -> None:
    """For GPUs of several generations and of two makers, without a warning; whole blocks are read by the widest loads there are."""
    code = compiled(backend, architecture, threads, moments, tmp_path)[0]["ptx" if backend == "cuda" else "amdgcn"]
    wide, loads = WIDE_LOADS[backend]
    assert code.count(wide) >= loads


def test_the_loop_over_whole_blocks_is_short(tmp_path: Path) -> None:
    """In the machine code for sm_90: of each type nothing is spilled, no thread waits for another, and few instructions."""
    if not version("triton").startswith(MACHINE_CODE):
        pytest.skip(f"the machine code is that of Triton {MACHINE_CODE}")
    wide = [loop for loop in loops(compiled("cuda", "90", 32, False, tmp_path)[0]["machine code"]) if has(loop, "LDG.E.128")]
    lengths = sorted(len(loop) / PER_THREAD for loop in wide)
    assert len(wide) == 2 * len(tables.KINDS)
    assert [has(loop, "LDL", "STL", "BAR", "SHFL", "CALL") for loop in wide] == [0] * len(wide)
    assert lengths[len(wide) // 2 - 1] <= INSTRUCTIONS["one unit"]
    assert lengths[-1] <= INSTRUCTIONS["several units"]
