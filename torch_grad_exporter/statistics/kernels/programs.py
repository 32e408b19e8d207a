# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls
"""The programs that run on the device, in Triton: one launch reads all gradients once, a second one adds up what it found.

Importing this module imports Triton, which only CUDA builds of torch bring along. Only `launch.py` does so, and late.

Only what Triton has had since 3.0 is used; it compiles by 3.0, 3.2 and 3.9. No argument is a number that changes, and each address
among them is a multiple of 16: else Triton would compile again for other gradients. Addresses and sizes of gradients are int64.
Float64 holds the square of each float32, so no sum of squares over- or underflows. Zeros, NaNs and Infs are known by their bits,
which no compiler rounds.

What bounds the speed where memory is fast is the number of instructions for an element. So the loop over whole blocks has none that
is for something rare: no masks, no meeting of threads, no division; `tests/kernels/test_compiles.py` counts what is in it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(begin, at, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A whole block as it lies in memory, by the widest loads; two elements of bfloat16 at a time. `KIND`: see `tables.KINDS`."""
    if KIND == 0:
        found = tl.load(tl.multiple_of((begin + at * 4).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK))
    elif KIND == 1:
        found = tl.load(tl.multiple_of((begin + at * 2).to(tl.pointer_type(tl.int32)), 16) + tl.arange(0, BLOCK // 2))
    else:
        found = tl.load(tl.multiple_of((begin + at * 2).to(tl.pointer_type(tl.float16)), 16) + tl.arange(0, BLOCK))
    return found


@triton.jit
def _elements(raw, KIND: tl.constexpr):
    """The elements of such a block as float32, in their order. bfloat16 is the upper half of a float32, on any device."""
    if KIND == 1:
        found = tl.interleave(raw << 16, raw & -65536).to(tl.float32, bitcast=True)
    else:
        found = raw.to(tl.float32)
    return found


@triton.jit
def _part(base, at, left, lanes, KIND: tl.constexpr):
    """The next elements from `at` on, at any address, as float32; zeros after the last of `left`."""
    if KIND == 0:
        found = tl.load((base + at * 4).to(tl.pointer_type(tl.float32)) + lanes, mask=lanes < left, other=0)
    elif KIND == 1:
        raw = tl.load((base + at * 2).to(tl.pointer_type(tl.int16)) + lanes, mask=lanes < left, other=0)
        found = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = tl.load((base + at * 2).to(tl.pointer_type(tl.float16)) + lanes, mask=lanes < left, other=0).to(tl.float32)
    return found


@triton.jit
def _magnitude(values):
    """The bits of float32 values without their sign: 0 for a zero, more than 0x7F800000 for a NaN."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _ends(after, per_run):
    """How many runs of units have ended before an offset that is so many elements behind the end of the first one.

    `per_run`: 1 over the length of a run. The quotients are of numbers below 2**14, from the middle between two integers on, so
    that float32 rounds none of them to another integer.
    """
    return tl.where(after < 0, 0, 1 + ((after.to(tl.float32) + 0.5) * per_run).to(tl.int32))


@triton.jit
def _round(number, count, per_count, BLOCK: tl.constexpr):
    """The unit among `count` of a number that may be larger, by no more than the runs in a block. In the same way."""
    few = ((number.to(tl.float32) + 0.5) * per_count).to(tl.int32)
    return number - tl.where(count > BLOCK, (number >= count).to(tl.int32), few) * count


@triton.jit
def _units(unit, left, offsets, count, per_run, per_count, BLOCK: tl.constexpr):
    """The units of elements at these offsets from one in `unit` whose run goes on for `left` elements."""
    return _round(unit + _ends(offsets - tl.minimum(left, BLOCK).to(tl.int32), per_run), count, per_count, BLOCK)


@triton.jit
def _begin(at, inner, count):
    """The unit of the element at this offset, and how many elements its run has from there on."""
    run = at // inner
    return (run % count).to(tl.int32), inner - (at - run * inner)


@triton.jit
def _blocks(
    base, at, blocks, to, has_units, inner, count, per_run, per_count,
    KIND: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Read whole blocks from offset `at` on, an address for the widest loads; return sum of squares, sum, zeros and extremes.

    While a block is looked at the next one is on its way. Each thread keeps to itself what it finds in groups of neighbours, all of
    one unit: the threads meet once, at the end.
    """
    squares = tl.zeros((BLOCK // GROUP,), tl.float64)
    total = tl.zeros((BLOCK // GROUP,), tl.float64)
    filled = tl.zeros((BLOCK // GROUP,), tl.int32)
    low = tl.full((BLOCK // GROUP,), float("inf"), tl.float32)
    high = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    unit, left = _begin(at, inner, count)
    begin = base + at * (4 if KIND == 0 else 2)
    raw = _block(begin, 0, KIND, BLOCK)
    block = tl.zeros((), tl.int32)
    while block < blocks:
        following = tl.minimum(block + 1, blocks - 1).to(tl.int64) * BLOCK
        ahead = _block(begin, following, KIND, BLOCK)
        values = tl.reshape(_elements(raw, KIND), (BLOCK // GROUP, GROUP))
        wide = values.to(tl.float64)
        squares += tl.sum(wide * wide, axis=1)
        if MOMENTS:
            total += tl.sum(wide, axis=1)
        low = tl.minimum(low, tl.min(values, axis=1))
        high = tl.maximum(high, tl.max(values, axis=1))
        nonzero = tl.sum(tl.minimum(_magnitude(values), 1), axis=1)
        filled += nonzero
        if has_units:
            units = unit + tl.zeros((BLOCK // GROUP,), tl.int32)
            if left < BLOCK:
                units = _units(unit, left, tl.arange(0, BLOCK // GROUP) * GROUP, count, per_run, per_count, BLOCK)
            tl.store(to + units, tl.full((BLOCK // GROUP,), 1, tl.uint8), mask=nonzero > 0)
            left -= BLOCK
            if left <= 0:
                ends = _ends((-left).to(tl.int32), per_run)
                unit = _round(unit + ends, count, per_count, BLOCK)
                left += ends * inner
        raw = ahead
        block += 1
    zeros = blocks.to(tl.int64) * BLOCK - tl.sum(filled.to(tl.int64), axis=0)
    return tl.sum(squares, axis=0), tl.sum(total, axis=0), zeros, tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _rest(
    base, at, left, to, has_units, inner, count, per_run, per_count,
    KIND: tl.constexpr, BLOCK: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """The same for one block, at any address, of which `left` elements are there or more."""
    lanes = tl.arange(0, BLOCK)
    there = lanes < left
    values = _part(base, at, left, lanes, KIND)
    bits = _magnitude(values)
    wide = values.to(tl.float64)
    if has_units:
        unit, run = _begin(at, inner, count)
        tl.store(to + _units(unit, run, lanes, count, per_run, per_count, BLOCK), tl.full((BLOCK,), 1, tl.uint8), mask=bits != 0)
    total = tl.zeros((), tl.float64)
    if MOMENTS:
        total = tl.sum(wide, axis=0)
    zeros = tl.sum(((bits == 0) & there).to(tl.int32), axis=0).to(tl.int64)
    low = tl.min(tl.where(there, values, float("inf")), axis=0)
    return tl.sum(wide * wide, axis=0), total, zeros, low, tl.max(tl.where(there, values, float("-inf")), axis=0)


@triton.jit
def _not_finite(
    base, at, end, nan, has_units, inner, count, per_run, per_count,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count NaNs and Infs, and set the flags of units that have a NaN: a second read of the few tiles that have any."""
    lanes = tl.arange(0, BLOCK)
    nans = tl.zeros((), tl.int64)
    infs = tl.zeros((), tl.int64)
    while at < end:
        bits = _magnitude(_part(base, at, end - at, lanes, KIND))
        nans += tl.sum((bits > 0x7F800000).to(tl.int32), axis=0)
        infs += tl.sum((bits == 0x7F800000).to(tl.int32), axis=0)
        if has_units:
            unit, run = _begin(at, inner, count)
            units = _units(unit, run, lanes, count, per_run, per_count, BLOCK)
            tl.store(nan + units, tl.full((BLOCK,), 1, tl.uint8), mask=bits > 0x7F800000)
        at += BLOCK
    return nans, infs


@triton.jit
def _keep(to, squares, total, zeros, nans, infs, low, high):
    """Store the partial values of a tile."""
    tl.store(to, squares)
    tl.store(to + 1, total)
    tl.store(to + 2, zeros.to(tl.float64))
    tl.store(to + 3, nans.to(tl.float64))
    tl.store(to + 4, infs.to(tl.float64))
    tl.store(to + 5, low.to(tl.float64))
    tl.store(to + 6, high.to(tl.float64))


@triton.jit
def _tile(
    base, at, end, to, nan, has_units, inner, count, partials,
    KIND: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Read the elements from `at` to `end` of a gradient of one type and store their partial values."""
    begin = at
    per_run = 1.0 / tl.minimum(inner, BLOCK).to(tl.float32)
    per_count = 1.0 / count.to(tl.float32)
    squares = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    zeros = tl.zeros((), tl.int64)
    nans = tl.zeros((), tl.int64)
    infs = tl.zeros((), tl.int64)
    low = tl.zeros((), tl.float32) + float("inf")
    high = tl.zeros((), tl.float32) - float("inf")
    in_groups = (inner % GROUP == 0) | (not has_units)
    aligned = (base + at * (4 if KIND == 0 else 2)) % 16 == 0
    if in_groups & aligned & (end - at >= BLOCK):
        blocks = ((end - at) // BLOCK).to(tl.int32)
        squares, total, zeros, low, high = _blocks(
            base, at, blocks, to, has_units, inner, count, per_run, per_count, KIND, BLOCK, GROUP, MOMENTS
        )
        at += blocks.to(tl.int64) * BLOCK
    while at < end:
        more, sums, none, least, most = _rest(
            base, at, end - at, to, has_units, inner, count, per_run, per_count, KIND, BLOCK, MOMENTS
        )
        squares += more
        total += sums
        zeros += none
        low = tl.minimum(low, least)
        high = tl.maximum(high, most)
        at += BLOCK
    if not (squares < float("inf")):  # a finite float32 has a finite square: there is a NaN or an Inf
        nans, infs = _not_finite(base, begin, end, nan, has_units, inner, count, per_run, per_count, KIND, BLOCK)
    _keep(partials, squares, total, zeros, nans, infs, low, high)


@triton.jit
def read(
    owners, gradients, addresses, partials, nonzero, nan,
    COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Read a tile, some blocks of one gradient: its partial values, shape (tiles, PARTIALS), and the flags of its units.

    `gradients`: an entry of `COLUMNS` numbers for each, see `tables.py`. `MOMENTS`: whether the sum of the elements is wanted.
    Flags are set by plain stores of 1: whoever comes first or last, they say the same.
    """
    tile = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    base = tl.load(addresses + owner)
    entry = gradients + owner * COLUMNS
    kind = tl.load(entry + 1)
    length = tl.load(entry + 2)
    at = (tile - tl.load(entry + 3)) * length
    end = tl.minimum(at + length, tl.load(entry))
    inner = tl.load(entry + 5)
    count = tl.load(entry + 6).to(tl.int32)
    flags = tl.load(entry + 7)
    has = flags >= 0
    to = nonzero + flags
    of = nan + flags
    partials += tile * PARTIALS
    if kind == 0:
        _tile(base, at, end, to, of, has, inner, count, partials, 0, BLOCK, GROUP, MOMENTS)
    elif kind == 1:
        _tile(base, at, end, to, of, has, inner, count, partials, 1, BLOCK, GROUP, MOMENTS)
    else:
        _tile(base, at, end, to, of, has, inner, count, partials, 2, BLOCK, GROUP, MOMENTS)


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
    """Write the row of one gradient from the partial values of its tiles, always added up in the same order."""
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
