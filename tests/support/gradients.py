"""Gradients of any shape, type, memory layout and value, for tests of properties, and what is true of them.

The truth is told in exact sums of float64 numbers, and shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

NAN, INF = math.nan, math.inf
NO_UNITS = np.zeros((0, 0))
REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)
Shape = tuple[int, ...]

BORDERS = (1023, 1024, 1025, 2048, 32767, 32768, 32769, 65535, 65536, 65537)
"""Numbers of elements around which the statistics change their ways: pieces, stacks and blocks."""

FULL: st.SearchStrategy[Shape] = st.lists(st.integers(1, 5), max_size=4).map(tuple)
EMPTY: st.SearchStrategy[Shape] = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
LARGE: st.SearchStrategy[Shape] = st.one_of(
    st.sampled_from(BORDERS).map(lambda n: (n,)),
    st.tuples(st.integers(1, 40), st.sampled_from((1, 512, 1000, 1023, 1024, 1025))),
    st.tuples(st.integers(1, 2), st.sampled_from((32768, 65537))),
    st.tuples(st.sampled_from((1024, 65537)), st.integers(1, 2)),
)
SMALL = st.one_of(FULL, st.tuples(st.integers(1, 5), st.integers(1, 5)), EMPTY)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A parameter, `module.weight`, and its gradient.

    `values`: the gradient in float64, dense, complex elements as two. `units`: the same by output unit, shape (units, elements),
    without a row where there are none.
    """

    module: torch.nn.Module
    gradient: torch.Tensor
    values: np.ndarray
    units: np.ndarray
    layout: str

    def __repr__(self) -> str:
        shape, some = tuple(self.gradient.shape), self.values.reshape(-1)[:40].tolist()
        return f"<{self.layout} {type(self.module).__name__} {self.gradient.dtype} {shape} {some}>"

    @property
    def flat(self) -> list[float]:
        """All values."""
        return self.values.reshape(-1).tolist()  # type: ignore[no-any-return]


# Values


def edges(dtype: torch.dtype, *, finite: bool) -> list[float]:
    """Values at which arithmetic in the type, or in one that sums it up, does something special."""
    info = torch.finfo(dtype)
    root = math.sqrt(info.tiny)
    sizes = [info.tiny * info.eps, info.tiny / 3, info.tiny, root / 1000, root, math.sqrt(info.max), info.max]
    sizes += [size for size in (1e-45, 6e-8, 1e-30, 1e-15, 1e-7, 0.3, 1.0, 300.0, 1e15, 1e19, 1e30) if size <= info.max]
    return [0.0, -0.0, *sizes, *(-size for size in sizes)] + ([] if finite else [NAN, INF, -INF])


@st.composite
def numbers(draw: st.DrawFn, dtype: torch.dtype, size: int) -> torch.Tensor:
    """So many values of a real type: each drawn by itself where they are few, else by a pattern."""
    pool = st.sampled_from(edges(dtype, finite=draw(st.booleans())))
    if size <= 12:
        one_by_one = draw(st.lists(pool | st.floats(-1e3, 1e3), min_size=size, max_size=size))
        return torch.tensor(one_by_one, dtype=torch.float64).to(dtype)
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    few = draw(st.lists(pool, min_size=1, max_size=4))
    pattern = draw(st.sampled_from(["normal", "few", "equal", "some among equals"]))
    if pattern == "normal":
        values = generator.normal(size=size) * 10.0 ** draw(st.integers(-6, 3))
        values[generator.integers(0, size, 3 * len(few))] = few * 3
    elif pattern == "few":
        values = generator.choice(few, size)
    else:
        values = np.full(size, draw(st.floats(1e-4, 1)))
        values[: len(few)] = values[-1] if pattern == "equal" else few
    return torch.from_numpy(values).to(dtype)


def assembled(flat: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a real or complex type from its real numbers."""
    return torch.view_as_complex(flat.reshape(*shape, 2)) if dtype.is_complex else flat.reshape(shape)


def dense_gradients(dtype: torch.dtype, shape: Shape) -> st.SearchStrategy[torch.Tensor]:
    """Ordinary, contiguous gradients."""
    size = math.prod(shape) * (2 if dtype.is_complex else 1)
    return numbers(dtype.to_real(), size).map(lambda flat: assembled(flat, shape, dtype))


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    """The values of a dense tensor; a complex element becomes two."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double().numpy()


# Layouts


def _narrowed(dense: torch.Tensor, step: int) -> torch.Tensor:
    size = dense.shape[-1]
    room = dense.new_full((*dense.shape[:-1], 2 * size), 7)
    laid = room[..., ::2] if step == 2 else room[..., size // 2 : size // 2 + size]
    laid.copy_(dense)
    return laid


def _sparse(dense: torch.Tensor, dims: int) -> torch.Tensor:
    stored = dense.to_sparse(dims)
    indices, values = stored.indices().flip(1), stored.values().flip(0)
    return torch.sparse_coo_tensor(indices, values, dense.shape, check_invariants=True)


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": (lambda t: True, lambda t: t),
    "strided": (lambda t: t.dim() > 0, lambda t: _narrowed(t, 2)),
    "narrowed": (lambda t: t.dim() > 0, lambda t: _narrowed(t, 1)),
    "transposed": (lambda t: t.dim() > 1, lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)),
    "channels last": (lambda t: t.dim() == 4, lambda t: t.contiguous(memory_format=torch.channels_last)),
    "conjugated": (lambda t: t.is_complex(), lambda t: t.conj().resolve_conj().conj()),
    "negated": (
        lambda t: t.dtype in (torch.float32, torch.float64),
        lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    ),
    # Torch itself makes NaN of a complex Inf on the way from sparse to dense.
    "sparse": (lambda t: t.dim() > 0 and not t.is_complex(), lambda t: _sparse(t, t.dim())),
    "sparse rows": (lambda t: t.dim() > 0 and not t.is_complex(), lambda t: _sparse(t, 1)),
    "expanded": (lambda t: t.dim() > 0 and t.shape[0] > 0, lambda t: t[:1].clone().expand(t.shape)),
}
"""Which tensors can have a layout, and how they get it; the expanded one takes the first row for all."""


@st.composite
def repeated(draw: st.DrawFn, dtype: torch.dtype, shape: Shape) -> tuple[torch.Tensor, np.ndarray]:
    """A sparse gradient whose indices stand several times, and its values; they add up exactly in any order and type."""
    dims = draw(st.integers(1, len(shape)))
    count = draw(st.integers(0, 8)) if math.prod(shape) else 0
    indices = np.zeros((dims, count), dtype=np.int64)
    for line, size in zip(indices, shape, strict=False):
        line[:] = draw(st.lists(st.integers(0, max(size - 1, 0)), min_size=count, max_size=count))
    parts = (2,) if dtype.is_complex else ()
    non_finite = [] if dtype.is_complex else [NAN, INF, -INF] * draw(st.booleans())
    few = draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, *non_finite]), min_size=1, max_size=12))
    stored = np.resize(few, (count, *shape[dims:], *parts))
    dense = np.zeros((*shape, *parts))
    with np.errstate(invalid="ignore"):  # Inf - Inf
        np.add.at(dense, tuple(indices), stored)
    content = assembled(torch.from_numpy(stored).to(dtype.to_real()).reshape(-1), (count, *shape[dims:]), dtype)
    return torch.sparse_coo_tensor(torch.from_numpy(indices), content, shape, check_invariants=True), dense


# Parameters


@st.composite
def parameters(draw: st.DrawFn, kinds: Sequence[tuple[torch.dtype, Shape]]) -> Drawn:
    """A parameter of one of the given types and shapes with a gradient."""
    dtype, shape = draw(st.sampled_from(kinds))
    dense = draw(dense_gradients(dtype, shape))
    layouts = [name for name, (fits, _) in LAYOUTS.items() if fits(dense)]
    layout = draw(st.sampled_from([*layouts, *["repeated"] * (len(shape) > 0)]))
    if layout == "repeated":
        gradient, values = draw(repeated(dtype, shape))
    else:
        gradient = LAYOUTS[layout][1](dense)
        values = as_float64(gradient if layout == "expanded" else dense)
    module: torch.nn.Module = torch.nn.Module()
    units = values.reshape(shape[0], -1) if len(shape) > 1 and values.size else NO_UNITS
    usual = draw(st.booleans())
    if len(shape) == 2 and not usual:
        module, units = torch.nn.Embedding(1, 1), NO_UNITS
    elif len(shape) > 2 and values.size and not usual:
        groups = draw(st.sampled_from([n for n in (1, 2, 3) if shape[0] % n == 0]))
        module = torch.nn.ConvTranspose1d(shape[0], groups, 1, groups=groups, bias=False)
        inputs = shape[0] // groups
        blocks = [values[g * inputs : (g + 1) * inputs, o] for g in range(groups) for o in range(shape[1])]
        units = np.stack([block.reshape(-1) for block in blocks])
    module.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    return Drawn(module, gradient, values, units, layout)


def given_gradient(gradient: torch.Tensor, module: torch.nn.Module | None = None) -> Drawn:
    """A weight that has this gradient, in an embedding or in a module whose rows are its output units."""
    owner = torch.nn.Module() if module is None else module
    owner.weight = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    values = as_float64(gradient.to_dense())
    units = values.reshape(len(values), -1) if module is None and gradient.dim() > 1 else NO_UNITS
    return Drawn(owner, gradient, values, units, "given")


def models(shapes: st.SearchStrategy[Shape]) -> st.SearchStrategy[list[Drawn]]:
    """A few parameters with gradients, several of which are likely to be of one shape and type."""
    kinds = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=2)
    return kinds.flatmap(lambda some: st.lists(parameters(some), min_size=1, max_size=3))


# The truth


def exponent(values: Sequence[float]) -> int:
    """The power of two by which finite values are to be divided so that none is above 1."""
    return math.frexp(max(map(abs, values), default=0.0))[1]


def times_two_to(value: float, power: int) -> float:
    """`value * 2**power`, infinite where float64 cannot hold it."""
    try:
        return math.ldexp(value, power)
    except OverflowError:
        return math.copysign(INF, value)


def true_norm(values: Sequence[float]) -> float:
    """The L2 norm, scaled by a power of two so that no square over- or underflows, and summed up exactly."""
    if any(map(math.isnan, values)):
        return NAN
    if any(map(math.isinf, values)):
        return INF
    power = exponent(values)
    return times_two_to(math.sqrt(math.fsum(math.ldexp(v, -power) ** 2 for v in values)), power)


def true_sum(values: Sequence[float]) -> tuple[float, float]:
    """The sum, and how far float64 additions in any order may miss it: infinitely far where one of them may overflow."""
    infinite = {v for v in values if math.isinf(v)}
    if any(map(math.isnan, values)) or len(infinite) == 2:
        return NAN, 0.0
    finite = [v for v in values if math.isfinite(v)]
    power = exponent(finite)
    scaled = [math.ldexp(v, -power) for v in finite]
    magnitude = math.fsum(map(abs, scaled))
    if times_two_to(magnitude, power) > 1e308:
        return 0.0, INF
    if infinite:
        return infinite.pop(), 0.0
    return times_two_to(math.fsum(scaled), power), times_two_to(magnitude * len(values) * 2**-52, power)


def close(found: float, expected: float, rel: float, absolute: float = 0.0) -> bool:
    """Return whether both are NaN, or the same infinity, or close. The last digits of a subnormal number do not count."""
    if not math.isfinite(expected):
        return repr(float(found)) == repr(float(expected))
    return math.isclose(found, expected, rel_tol=rel, abs_tol=max(absolute, 1e-323))


def bits(tensor: torch.Tensor) -> list[np.ndarray]:
    """All that a tensor holds, to the last bit."""
    if tensor.is_sparse:
        indices, values = tensor._indices(), tensor._values()  # private: torch offers them coalesced only
        return [*bits(indices), *bits(values)]
    plain = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).resolve_neg()
    packed = plain.new_empty(plain.numel()).copy_(plain.reshape(-1))
    return [packed.view(torch.uint8).numpy()]
