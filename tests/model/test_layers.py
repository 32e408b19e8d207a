"""Which parameters are followed, under which layer names, and how the index follows the model's changes."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import nn

from tests.support.models import Conv1D
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.model.units import unit_layout


def layers(model: nn.Module, *, max_layers: int = 300, **models: nn.Module) -> list[str]:
    """Return the layers shown for one model, or for several."""
    return list(LayerIndex(models or {"": model}, max_layers=max_layers).table.layers)


class Root(nn.Module):
    """A model with parameters of its own beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
        self.norm = nn.LayerNorm(2)
        self.position = nn.Parameter(torch.zeros(5, 2))


class Wrapper(nn.Module):
    """A module that puts a name before those of the model."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


# Names


@pytest.mark.parametrize("names", [["module"], ["_orig_mod", "module"], ["_module"]], ids=str)
def test_the_names_of_wrappers_are_left_out(names: list[str]) -> None:
    """A wrapped model has the labels of the model itself, however often and wherever it is wrapped."""
    wrapped: nn.Module = Root()
    expected = layers(wrapped)
    wrapped.encoder[0] = Wrapper("_fsdp_wrapped_module", Wrapper("_checkpoint_wrapped_module", wrapped.encoder[0]))
    for name in names:
        wrapped = Wrapper(name, wrapped)
    assert layers(wrapped) == expected


def test_layers_of_one_name_keep_their_full_names() -> None:
    """Two modules that differ only by the name of a wrapper keep their full names."""
    model = nn.Module()
    model.head = nn.Linear(2, 2)
    model.module = Wrapper("head", nn.Linear(2, 2))
    model.tail = nn.Linear(2, 2)
    assert layers(model) == ["head", "module.head", "tail"]


# Filters


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (("2", "norm"), (), {"encoder.2", "norm"}),
        ((), ("encoder", "^s"), {"position", "norm"}),
        (("encoder",), (r"\.0$",), {"encoder.2"}),
    ],
)
def test_patterns_choose_layers(include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]) -> None:
    """A layer is tracked if an include pattern matches its name and no exclude pattern does, also once it is unfrozen."""
    chosen = LayerFilter(tuple(map(re.compile, include)), tuple(map(re.compile, exclude)))
    model = Root().requires_grad_(False)
    index = LayerIndex({"": model}, chosen)
    assert index.table.layers == ()
    model.requires_grad_(True)
    assert set(index.refresh().layers) == expected


# Units


def test_units_of_a_grouped_transposed_convolution() -> None:
    """The rows are the output channels in their order, each with all its weights."""
    layer = nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False)
    with torch.no_grad():
        for i in range(6):
            for j in range(2):
                layer.weight[i, j] = 2 * (i // 3) + j
    layout = unit_layout(layer, layer.weight)
    assert layout is not None
    rows = layout.rows(layer.weight.detach())
    assert layout.count == 4
    assert rows.tolist() == [[float(channel)] * 9 for channel in range(4)]


class Sized(nn.Module):
    """A module with a weight of this shape and these attributes."""

    def __init__(self, *shape: int, **said: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0 * math.prod(shape)).reshape(shape))
        vars(self).update(said)


class GptOssExperts(Sized):
    """Like that of Transformers 4, which does not say how its weights lie."""


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (Conv1D(5, 5), (1,)),
        (Sized(3, 5, in_features=3, out_features=5), (1,)),
        (Sized(3, 5, _in_feats=3, _out_feats=5), (1,)),
        (Sized(3, 5, in_features=None, out_features="5"), (0,)),
        (Sized(2, 3, 5, input_size=3, output_size=5), (0, 2)),
        (Sized(2, 3, 5), (0,)),
        (GptOssExperts(2, 3, 3), (0, 2)),
        (nn.Linear(3, 5), (0,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "".join(map(str, value)),
)
def test_units_are_those_of_the_outputs(module: nn.Module, dims: tuple[int, ...]) -> None:
    """The rows are the slices along the dimensions of the outputs, whichever dimension is first."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    layout = unit_layout(module, weight)
    assert layout is not None
    slices = [
        [weight[tuple(chosen.get(dim, slice(None)) for dim in range(weight.dim()))].detach().flatten()]
        for index in itertools.product(*(range(weight.shape[dim]) for dim in dims))
        for chosen in [dict(zip(dims, index, strict=True))]
    ]
    assert layout.count == len(slices)
    assert torch.equal(layout.rows(weight.detach()), torch.cat([torch.stack(one) for one in slices]))


def test_what_has_no_units() -> None:
    """Biases, scalars, embeddings and empty weights have no units."""
    linear = nn.Linear(2, 2)
    assert unit_layout(linear, linear.bias) is None
    assert unit_layout(linear, torch.zeros(())) is None
    assert unit_layout(linear, torch.zeros(0, 3)) is None
    assert unit_layout(nn.Embedding(2, 2), torch.zeros(2, 2)) is None
