# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls
"""The programs that run on the device, in Triton: one launch reads all gradients once, a second one adds up what it found.

Importing this module imports Triton, which only CUDA builds of torch bring along. Only `launch.py` does so, and late.

Only what Triton has had since 3.0 is used. No argument is a number that changes, and each address among them is a multiple of 16:
else Triton would compile again for other gradients. Addresses and sizes of gradients are int64. Float64 holds the square of each
float32, so no sum of squares over- or underflows. Zeros, NaNs and Infs are known by their bits, which no compiler rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(base, at, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """The address of an element of so many bytes."""
    return (base + at * WIDTH).to(tl.pointer_type(TYPE))


@triton.jit
def _loaded(base, at, left, lanes, WIDTH: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The next elements from `at` on, zeros after the last of `left`; whole blocks at good addresses in the widest loads."""
    if (left >= BLOCK) & (base % 16 == 0):
        found = tl.load(tl.multiple_of(_pointer(base, at, WIDTH, TYPE), 16) + lanes)
    else:
        found = tl.load(_pointer(base, at, WIDTH, TYPE) + lanes, mask=lanes < left, other=0)
    return found


@triton.jit
def _block(base, at, left, kind, lanes, BLOCK: tl.constexpr):
    """The next elements as float32. `kind`: see `tables.KINDS`. bfloat16 is the upper half of a float32, on any device."""
    if kind == 0:
        found = _loaded(base, at, left, lanes, 4, tl.float32, BLOCK)
    elif kind == 1:
        found = (_loaded(base, at, left, lanes, 2, tl.int16, BLOCK).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = _loaded(base, at, left, lanes, 2, tl.float16, BLOCK).to(tl.float32)
    return found


@triton.jit
def _unit(at, lanes, inner, count, BLOCK: tl.constexpr):
    """The units of the elements at these offsets from `at`; only the first division is one of int64."""
    run = at // inner
    rest = tl.minimum(inner - (at - run * inner), BLOCK).to(tl.int32)
    narrow = tl.minimum(inner, BLOCK).to(tl.int32)
    runs = tl.where(lanes < rest, 0, 1 + (lanes - rest) // narrow)
    return ((run % count).to(tl.int32) + runs) % count.to(tl.int32)


@triton.jit
def _mark(to, bits, zeros, at, left, lanes, inner, count, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Sets the flags of units that have an element that is not zero, with as few stores as their runs allow."""
    filled = tl.minimum(left, BLOCK)
    if at % inner + filled <= inner:  # all of one unit
        if zeros < filled:
            tl.store(to + (at // inner) % count, tl.full((), 1, tl.uint8))
    elif inner % GROUP == 0:  # no group has elements of two units
        groups = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), axis=1)
        first = _unit(at, tl.arange(0, BLOCK // GROUP) * GROUP, inner, count, BLOCK)
        tl.store(to + first, tl.full((BLOCK // GROUP,), 1, tl.uint8), mask=groups != 0)
    else:
        unit = _unit(at, lanes, inner, count, BLOCK)
        tl.store(to + unit, tl.full((BLOCK,), 1, tl.uint8), mask=bits != 0)


@triton.jit
def _mark_nan(to, is_nan, at, lanes, inner, count, flags, BLOCK: tl.constexpr):
    """Sets the flags of units that have a NaN."""
    if flags >= 0:
        tl.store(to + flags + _unit(at, lanes, inner, count, BLOCK), tl.full((BLOCK,), 1, tl.uint8), mask=is_nan)


@triton.jit
def _keep(to, squares, total, zeros, nans, infs, low, high):
    """Stores the partial values of a tile."""
    tl.store(to, squares)
    tl.store(to + 1, total)
    tl.store(to + 2, zeros.to(tl.float64))
    tl.store(to + 3, nans.to(tl.float64))
    tl.store(to + 4, infs.to(tl.float64))
    tl.store(to + 5, low.to(tl.float64))
    tl.store(to + 6, high.to(tl.float64))


@triton.jit
def read(
    owners, gradients, addresses, partials, nonzero, nan,
    COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Reads a tile, some blocks of one gradient: its partial values, shape (tiles, PARTIALS), and the flags of its units.

    `gradients`: an entry of `COLUMNS` numbers for each, see `tables.py`. `MOMENTS`: whether the sum of the elements is wanted.
    Flags are set by plain stores of 1: whoever comes first or last, they say the same.
    """
    tile = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    base = tl.load(addresses + owner)
    entry = gradients + owner * COLUMNS
    kind = tl.load(entry + 1)
    length = tl.load(entry + 2)
    inner = tl.load(entry + 5)
    count = tl.load(entry + 6)
    flags = tl.load(entry + 7)
    lanes = tl.arange(0, BLOCK)
    at = (tile - tl.load(entry + 3)) * length
    end = tl.minimum(at + length, tl.load(entry))
    squares = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    zeros = tl.zeros((), tl.int64)
    nans = tl.zeros((), tl.int64)
    infs = tl.zeros((), tl.int64)
    low = tl.zeros((), tl.float32) + float("inf")
    high = tl.zeros((), tl.float32) - float("inf")
    while at < end:
        left = end - at
        values = _block(base, at, left, kind, lanes, BLOCK)
        there = lanes < left
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        wide = values.to(tl.float64)
        here = tl.sum(wide * wide, axis=0)
        if MOMENTS:
            total += tl.sum(wide, axis=0)
        none = tl.sum(((bits == 0) & there).to(tl.int32), axis=0)
        if not (here < float("inf")):  # a finite float32 has a finite square: there is a NaN or an Inf
            nans += tl.sum((bits > 0x7F800000).to(tl.int32), axis=0)
            infs += tl.sum((bits == 0x7F800000).to(tl.int32), axis=0)
            there = there & (bits <= 0x7F800000)
            _mark_nan(nan, bits > 0x7F800000, at, lanes, inner, count, flags, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(there, values, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(there, values, float("-inf")), axis=0))
        squares += here
        zeros += none
        if flags >= 0:
            _mark(nonzero + flags, bits, none, at, left, lanes, inner, count, BLOCK, GROUP)
        at += BLOCK
    _keep(partials + tile * PARTIALS, squares, total, zeros, nans, infs, low, high)


@triton.jit
def add_up(
    gradients,
    partials,
    rows,
    COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    NORM: tl.constexpr,
    ZEROS: tl.constexpr,
    NANS: tl.constexpr,
    INFS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
):
    """Writes the row of one gradient from the partial values of its tiles, always added up in the same order."""
    owner = tl.program_id(0).to(tl.int64)
    entry = gradients + owner * COLUMNS
    lanes = tl.arange(0, MOST)
    there = lanes < tl.load(entry + 4)
    of = partials + (tl.load(entry + 3) + lanes) * PARTIALS
    nans = tl.sum(tl.load(of + 3, mask=there, other=0.0), axis=0)
    low = tl.min(tl.load(of + 5, mask=there, other=float("inf")), axis=0)
    high = tl.max(tl.load(of + 6, mask=there, other=float("-inf")), axis=0)
    row = rows + owner * WIDTH
    tl.store(row + NORM, tl.sqrt(tl.sum(tl.load(of, mask=there, other=0.0), axis=0)))
    tl.store(row + SUM, tl.sum(tl.load(of + 1, mask=there, other=0.0), axis=0))
    tl.store(row + ZEROS, tl.sum(tl.load(of + 2, mask=there, other=0.0), axis=0))
    tl.store(row + NANS, nans)
    tl.store(row + INFS, tl.sum(tl.load(of + 4, mask=there, other=0.0), axis=0))
    tl.store(row + MIN, tl.where(nans > 0, float("nan"), low))
    tl.store(row + MAX, tl.where(nans > 0, float("nan"), high))
