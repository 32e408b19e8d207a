"""Which parameters are followed, under which layer names, and how the index follows the model's changes."""

from __future__ import annotations

import gc
import itertools
import math
import re
import weakref

import pytest
import torch
from torch import nn

from tests.support.models import Conv1D
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.units import unit_layout


def by_layer(table: ParameterTable) -> dict[str, list[str]]:
    """Return the attribute names of the tracked parameters of each layer."""
    found: dict[str, list[str]] = {layer: [] for layer in table.layers}
    for tracked, layer in zip(table.tracked, table.layer_of, strict=True):
        found[table.layers[layer]].append(tracked.attribute)
    return found


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


def test_a_layer_is_the_module_that_owns_the_parameter() -> None:
    """Labels are the names of modules; a parameter of the root has its own name."""
    assert by_layer(LayerIndex({"": Root()}).table) == {
        "scale": ["scale"],
        "position": ["position"],
        "encoder.0": ["weight", "bias"],
        "encoder.2": ["weight"],
        "norm": ["weight", "bias"],
    }


def test_the_plan_knows_elements_and_units() -> None:
    """Elements count every number, complex ones twice; only rows of weights are units."""
    model = Root()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    model.words = nn.Embedding(11, 2)
    table = LayerIndex({"": model}).table
    found = {
        (t.layer, t.attribute): (e, u) for t, e, u in zip(table.tracked, table.elements.tolist(), table.units.tolist(), strict=True)
    }
    assert found == {
        ("scale", "scale"): (1, 0),
        ("position", "position"): (10, 5),
        ("phase", "phase"): (6, 0),
        ("encoder.0", "weight"): (12, 4),
        ("encoder.0", "bias"): (4, 0),
        ("encoder.2", "weight"): (8, 2),
        ("norm", "weight"): (2, 0),
        ("norm", "bias"): (2, 0),
        ("words", "weight"): (22, 0),
    }


@pytest.mark.parametrize("names", [["module"], ["_orig_mod", "module"]], ids=str)
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


def test_a_mapping_puts_its_names_first() -> None:
    """With several models each label begins with the name of the model, and a shared module has the first one's."""
    generator = Root()
    critic = nn.Linear(2, 1)
    critic.shared = generator.norm
    index = LayerIndex({"generator": generator, "critic": critic})
    assert set(index.table.layers) == {
        *(f"generator.{layer}" for layer in layers(Root())),
        "critic.weight",
        "critic.bias",
    }
    assert {t.model for t in index.table.tracked if t.layer.startswith("critic")} == {1}


def test_tied_parameters_count_once() -> None:
    """A weight of two modules is tracked once, under its first name."""
    model = nn.Module()
    model.words = nn.Embedding(7, 3)
    model.out = nn.Linear(3, 7)
    model.out.weight = model.words.weight
    assert by_layer(LayerIndex({"": model}).table) == {"words": ["weight"], "out": ["bias"]}


# Following the model


def test_frozen_parameters_come_and_go() -> None:
    """A refresh drops a frozen parameter and brings the same object back when it is unfrozen, unless it is excluded."""
    model = Root()
    model.norm.requires_grad_(False)
    index, without = LayerIndex({"": model}), LayerIndex({"": model}, LayerFilter(exclude=(re.compile("norm"),)))
    assert "norm" not in index.table.layers
    model.norm.requires_grad_(True)
    assert by_layer(index.refresh())["norm"] == ["weight", "bias"]
    assert "norm" not in without.refresh().layers
    before = {t.attribute: t for t in index.table.tracked if t.layer == "encoder.0"}
    model.encoder[2].weight.requires_grad_(False)
    assert "encoder.2" not in index.refresh().layers
    model.encoder[2].weight.requires_grad_(True)
    assert by_layer(index.refresh())["encoder.2"] == ["weight"]
    assert {t.attribute: t for t in index.table.tracked if t.layer == "encoder.0"} == before


def test_a_replaced_parameter_is_followed() -> None:
    """A refresh finds the new parameter in the place of the old one."""
    model = Root()
    index = LayerIndex({"": model})
    model.encoder[0].weight = nn.Parameter(torch.zeros(6, 3))
    table = index.refresh()
    parameters = table.parameters()
    assert parameters is not None
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
    assert by_layer(table)["encoder.0"] == ["weight", "bias"]
    assert table.units[[t.attribute == "weight" and t.layer == "encoder.0" for t in table.tracked]].tolist() == [6]


def test_added_and_removed_modules_are_found() -> None:
    """A refresh finds added modules, drops removed ones, and otherwise returns the same table."""
    model = Root()
    index = LayerIndex({"": model})
    model.head = nn.Linear(2, 2)
    assert by_layer(index.refresh())["head"] == ["weight", "bias"]
    del model.norm
    assert "norm" not in index.refresh().layers
    assert index.refresh() is index.table


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
    """A layer is tracked if an include pattern matches its name and no exclude pattern does."""
    chosen = LayerFilter(tuple(map(re.compile, include)), tuple(map(re.compile, exclude)))
    assert set(LayerIndex({"": Root()}, chosen).table.layers) == expected


# Memory


def test_the_index_keeps_no_model_alive() -> None:
    """A model that its user drops is freed while the index lives, and the table says so."""
    model: nn.Module | None = Root()
    assert model is not None
    index = LayerIndex({"": model})
    gone = weakref.ref(model.norm.weight)
    del model
    gc.collect()
    assert gone() is None
    assert index.table.parameters() is None
    assert index.refresh().tracked == ()


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
