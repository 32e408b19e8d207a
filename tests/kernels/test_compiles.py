"""The programs compile for GPUs that are not here: Triton brings the compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_grad_exporter.statistics.kernels import launch, tables

SCRIPT = """
import json, sys
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
print(json.dumps(found))
"""

WIDE_LOADS = {"cuda": ("ld.global.v4", 8), "hip": ("buffer_load_dwordx4", 4)}
"""Loads of 16 bytes and how many there are at least: for a thread's part of a block of each type, for AMD's GPUs of float32."""


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(
    ("backend", "architecture", "threads"),
    [("cuda", "75", 32), ("cuda", "80", 32), ("cuda", "90", 32), ("hip", "gfx942", 64)],
)
def test_it_compiles(backend: str, architecture: str, threads: int, moments: bool, tmp_path: Path) -> None:
    """For GPUs of several generations and of two makers, without a warning; whole blocks are read by the widest loads there are."""
    shared = {"COLUMNS": tables.COLUMNS, "PARTIALS": tables.PARTIALS}
    read = {"BLOCK": tables.BLOCK, "GROUP": tables.GROUP, **shared}
    add_up = {"MOST": tables.MOST_TILES, "WIDTH": 9, **{column.name: int(column) for column in launch.WRITTEN}, **shared}
    given = (backend, architecture, threads, moments, launch.options(hip=backend == "hip"), dict(launch.ANY), read, add_up)
    # Not the interpreter, and nothing in the cache of whoever runs this.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (code,) = json.loads(done.stdout)[0].values()
    wide, loads = WIDE_LOADS[backend]
    assert code.count(wide) >= loads
