"""Which parameters are followed, under which layer names, and how the index follows the model's changes."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import re
import weakref

import pytest
import torch
from torch import nn

from tests.support.models import Conv1D, Experts
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.units import unit_layout


def by_layer(table: ParameterTable) -> dict[str, list[str]]:
    """The attribute names of the tracked parameters under each layer that is shown."""
    found: dict[str, list[str]] = {layer: [] for layer in table.layers}
    for tracked, layer in zip(table.tracked, table.layer_of, strict=True):
        found[table.layers[layer]].append(tracked.attribute)
    return found


def layers(model: nn.Module, *, max_layers: int = 300, **models: nn.Module) -> list[str]:
    """The layers shown for a model, or for several."""
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
    """Labels are the names of modules; a parameter of the root has its own name, never an empty one."""
    assert by_layer(LayerIndex({"": Root()}).table) == {
        "scale": ["scale"],
        "position": ["position"],
        "encoder.0": ["weight", "bias"],
        "encoder.2": ["weight"],
        "norm": ["weight", "bias"],
    }


def test_the_plan_knows_elements_and_units() -> None:
    """Elements count every number, complex ones twice; units are rows of weights and nothing else."""
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


@pytest.mark.parametrize("names", [["module"], ["_orig_mod"], ["_orig_mod", "module"], ["module", "_orig_mod"]], ids=str)
def test_the_names_of_wrappers_are_left_out(names: list[str]) -> None:
    """A wrapped model has the same labels as the model itself, however often it is wrapped."""
    wrapped: nn.Module = Root()
    expected = layers(wrapped)
    for name in names:
        wrapped = Wrapper(name, wrapped)
    assert layers(wrapped) == expected


def test_wrapped_inner_modules_keep_their_names() -> None:
    """The parts that FSDP1 and activation checkpointing put in the middle of a name are left out as well."""
    model = Root()
    model.encoder[0] = Wrapper("_fsdp_wrapped_module", Wrapper("_checkpoint_wrapped_module", model.encoder[0]))
    assert layers(model) == layers(Root())


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_own_wrappers(compiled: bool) -> None:
    """DataParallel and torch.compile leave no trace in the labels."""
    model = Root()
    wrapped = torch.compile(model) if compiled else nn.DataParallel(model)
    assert isinstance(wrapped, nn.Module)
    assert layers(wrapped) == layers(model)


def test_layers_that_would_share_a_name_keep_their_full_ones() -> None:
    """Two modules that differ only by a wrapper's part are told apart."""
    model = nn.Module()
    model.head = nn.Linear(2, 2)
    model.module = Wrapper("head", nn.Linear(2, 2))
    model.tail = nn.Linear(2, 2)
    assert layers(model) == ["head", "module.head", "tail"]


def test_a_parameter_of_the_root_and_a_wrapped_module_of_the_same_name() -> None:
    """A wrapper's own parameter and a module of that name inside of it are two layers."""
    model = Wrapper("module", Wrapper("head", nn.Linear(2, 2)))
    model.head = nn.Parameter(torch.zeros(1))
    assert len(layers(model)) == 2


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "new\nline", "größe 漢字", "a,b={}", " "])
def test_hostile_names_are_kept_as_they_are(name: str) -> None:
    """Quotes, backslashes, newlines and non-ASCII letters are part of the label; escaping is the output's work."""
    model = nn.Module()
    model.add_module(name, Wrapper(name, nn.Linear(2, 2)))
    assert layers(model) == [f"{name}.{name}"]


def test_a_mapping_puts_its_names_first() -> None:
    """With several models each label begins with the model's name, and parameters of a root have both names."""
    index = LayerIndex({"generator": Root(), "critic": nn.Linear(2, 1)})
    assert set(index.table.layers) == {
        *(f"generator.{layer}" for layer in layers(Root())),
        "critic.weight",
        "critic.bias",
    }
    assert {t.model for t in index.table.tracked if t.layer.startswith("critic")} == {1}


def test_a_module_shared_by_two_models_counts_once() -> None:
    """What two models share stands under the first one's name only."""
    shared = nn.Linear(2, 2)
    table = LayerIndex({"a": Wrapper("body", shared), "b": nn.Sequential(shared, nn.Linear(2, 2))}).table
    assert by_layer(table) == {"a.body": ["weight", "bias"], "b.1": ["weight", "bias"]}


def test_tied_parameters_count_once() -> None:
    """A weight that stands in two modules is tracked once, under its first name."""
    model = nn.Module()
    model.words = nn.Embedding(7, 3)
    model.out = nn.Linear(3, 7)
    model.out.weight = model.words.weight
    assert by_layer(LayerIndex({"": model}).table) == {"words": ["weight"], "out": ["bias"]}


# Following the model


def test_nothing_changes_while_the_model_stays() -> None:
    """A refresh and a rescan of an unchanged model give the very same table, also after a step of training."""
    model = Root()
    index = LayerIndex({"": model})
    table = index.table
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.norm(model.encoder(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    assert index.refresh() is table
    assert index.refresh() is table


def test_frozen_parameters_come_and_go() -> None:
    """A refresh drops a parameter that was frozen and brings it back, as the same object, when it is unfrozen."""
    model = Root()
    model.norm.requires_grad_(False)
    index = LayerIndex({"": model})
    assert "norm" not in index.table.layers
    model.norm.requires_grad_(True)
    assert by_layer(index.refresh())["norm"] == ["weight", "bias"]
    before = {t.attribute: t for t in index.table.tracked if t.layer == "encoder.0"}
    model.encoder[2].weight.requires_grad_(False)
    assert "encoder.2" not in index.refresh().layers
    model.encoder[2].weight.requires_grad_(True)
    assert by_layer(index.refresh())["encoder.2"] == ["weight"]
    assert {t.attribute: t for t in index.table.tracked if t.layer == "encoder.0"} == before


def test_a_frozen_layer_is_not_forgotten_by_a_filter() -> None:
    """A layer that is excluded stays out when it is unfrozen."""
    model = Root()
    model.norm.requires_grad_(False)
    index = LayerIndex({"": model}, LayerFilter(exclude=(re.compile("norm"),)))
    model.norm.requires_grad_(True)
    assert "norm" not in index.refresh().layers
    assert "norm" not in index.refresh().layers


def test_a_replaced_parameter_is_followed() -> None:
    """A refresh finds the new parameter where the old one stood."""
    model = Root()
    index = LayerIndex({"": model})
    model.encoder[0].weight = nn.Parameter(torch.zeros(6, 3))
    table = index.refresh()
    parameters = table.parameters()
    assert parameters is not None
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
    assert by_layer(table)["encoder.0"] == ["weight", "bias"]
    assert table.units[[t.attribute == "weight" and t.layer == "encoder.0" for t in table.tracked]].tolist() == [6]


def test_added_and_removed_modules_are_found_by_a_rescan() -> None:
    """A rescan finds modules that were added and drops those that are gone."""
    model = Root()
    index = LayerIndex({"": model})
    model.head = nn.Linear(2, 2)
    assert by_layer(index.refresh())["head"] == ["weight", "bias"]
    del model.norm
    assert "norm" not in index.refresh().layers
    assert index.refresh() is index.table


def test_a_parameter_that_moves_is_shown_where_it_stands() -> None:
    """Two layers that change places change their labels, once the index has looked at all modules again."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    index = LayerIndex({"": model})
    model[0], model[1] = model[1], model[0]
    index.refresh()
    assert {id(t.parameter()): t.layer for t in index.table.tracked} == {
        id(parameter): name.partition(".")[0] for name, parameter in model.named_parameters()
    }


def test_a_parameter_that_moves_does_not_unsettle_the_index() -> None:
    """After a weight was handed on to another module and replaced in the first, the table comes to rest again."""
    model = nn.Module()
    model.old, model.new = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    index = LayerIndex({"": model})
    model.new.weight, model.old.weight = model.old.weight, nn.Parameter(torch.zeros(2, 2))
    table = index.refresh()
    assert by_layer(table) == {"old": ["weight"], "new": ["weight"]}
    assert index.refresh() is table


def test_lazy_modules_appear_when_they_are_made() -> None:
    """A lazy layer is tracked from the refresh after its first forward on, with its real size."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    index = LayerIndex({"": model})
    assert index.table.layers == ("1",)
    model(torch.ones(1, 3))
    table = index.refresh()
    assert set(table.layers) == {"0", "1"}
    assert sorted(table.elements.tolist()) == [2, 4, 8, 12]


def test_all_layers_lists_frozen_ones_too() -> None:
    """The names that patterns are checked against include frozen and filtered layers, before folding."""
    model = Root()
    model.norm.requires_grad_(False)
    index = LayerIndex({"": model}, LayerFilter(exclude=(re.compile("encoder"),)), max_layers=1)
    assert set(index.all_layers()) == {"scale", "position", "encoder.0", "encoder.2", "norm"}


# Filters


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {"scale", "position", "encoder.0", "encoder.2", "norm"}),
        (("encoder",), (), {"encoder.0", "encoder.2"}),
        (("2", "norm"), (), {"encoder.2", "norm"}),
        ((), ("encoder", "^s"), {"position", "norm"}),
        (("encoder",), (r"\.0$",), {"encoder.2"}),
    ],
)
def test_patterns_choose_layers(include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]) -> None:
    """A layer is tracked where an include pattern is found in its name and no exclude pattern is."""
    chosen = LayerFilter(tuple(map(re.compile, include)), tuple(map(re.compile, exclude)))
    assert set(LayerIndex({"": Root()}, chosen).table.layers) == expected


# Folding


def test_layers_are_folded_into_the_finest_grouping_that_fits() -> None:
    """Beyond the cap the labels are the longest common depth that fits, and the table says how many are folded."""
    pair = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(12)]
    blocks = {f"block{b}": nn.ModuleDict({f"part{p}": pair[3 * b + p] for p in range(3)}) for b in range(4)}
    model = nn.ModuleDict(blocks)
    index = {most: LayerIndex({"": model}, max_layers=most).table for most in (24, 23, 12, 11, 4, 3, 1)}
    assert {most: len(table.layers) for most, table in index.items()} == {24: 24, 23: 12, 12: 12, 11: 4, 4: 4, 3: 1, 1: 1}
    assert {most: table.folded for most, table in index.items()} == {24: 0, 23: 24, 12: 24, 11: 24, 4: 24, 3: 24, 1: 24}
    assert index[23].layers[:2] == ("block0.part0", "block0.part1")
    assert index[4].layers == ("block0", "block1", "block2", "block3")
    assert index[1].layers == ("model",)
    assert all(len(table.tracked) == 48 for table in index.values())


def test_only_layers_that_share_a_label_count_as_folded() -> None:
    """A layer that keeps its own name, or is alone in its group, is not folded."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    table = LayerIndex({"": model}, max_layers=3).table
    assert by_layer(table) == {"0": ["weight", "bias"], "1": ["weight", "bias"] * 3}
    assert table.folded == 3


def test_folding_loses_no_name() -> None:
    """Whatever the cap, there is a label for each name, and at most as many different ones as allowed."""
    generator = torch.Generator().manual_seed(0)
    names = [".".join(f"m{part}" for part in torch.randint(3, (1 + n % 5,), generator=generator).tolist()) for n in range(200)]
    for most in range(1, 120):
        labels = fold(names, most)
        assert len(labels) == len(names)
        assert len(set(labels)) <= most
        assert all(label == "model" or f"{name}.".startswith(f"{label}.") for name, label in zip(names, labels, strict=True))


# Memory


def test_the_index_keeps_no_model_alive() -> None:
    """A model that its user drops is freed while the index lives, and the table says that it is gone."""
    model: nn.Module | None = Root()
    assert model is not None
    index = LayerIndex({"": model})
    gone = weakref.ref(model.norm.weight)
    del model
    gc.collect()
    assert gone() is None
    assert index.table.parameters() is None
    assert index.refresh().tracked == ()


def test_a_copy_of_the_model_is_another_model() -> None:
    """A deep copy shares no parameter with what the index follows."""
    model = Root()
    parameters = LayerIndex({"": model}).table.parameters()
    assert parameters is not None
    assert not {id(p) for p in copy.deepcopy(model).parameters()} & {id(p) for p in parameters}


# Units


def test_unit_rows_of_a_grouped_transposed_convolution() -> None:
    """The rows are the output channels, in their order, each with all weights that lead to it."""
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
    """A module with a weight of this shape that says these things of itself."""

    def __init__(self, *shape: int, **said: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0 * math.prod(shape)).reshape(shape))
        vars(self).update(said)


class GptOssExperts(Sized):
    """As in Transformers 4, which does not say how its weights lie."""


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (Conv1D(5, 5), (1,)),
        (Sized(3, 5, in_features=3, out_features=5), (1,)),
        (Sized(5, 3, in_features=3, out_features=5), (0,)),
        (Sized(4, 4, in_features=4, out_features=4), (0,)),
        (Sized(3, 5, _in_feats=3, _out_feats=5), (1,)),
        (Sized(3, 5, in_features=None, out_features="5"), (0,)),
        (Sized(3, 5, in_features=torch.zeros(3), out_features=torch.zeros(5)), (0,)),
        (Sized(2, 3, 5, input_size=3, output_size=5), (0, 2)),
        (Sized(2, 5, 3, input_size=3, output_size=5), (0, 1)),
        (Sized(2, 3, 5), (0,)),
        (Sized(2, 3, 3, is_transposed=True), (0, 2)),
        (Sized(2, 3, 3, is_transposed=False), (0, 1)),
        (GptOssExperts(2, 3, 3), (0, 2)),
        (nn.Linear(3, 5), (0,)),
        (nn.Conv1d(4, 4, 4), (0,)),
        (nn.Bilinear(3, 4, 5), (0,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "".join(map(str, value)),
)
def test_units_are_those_of_the_outputs(module: nn.Module, dims: tuple[int, ...]) -> None:
    """The rows are the slices along the dimensions of the outputs, whatever lies first."""
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


def test_biases_of_experts_have_no_units() -> None:
    """A matrix beside the weights of experts is their biases."""
    experts = Experts(3, 4, is_transposed=True)
    assert unit_layout(experts, experts.down_proj_bias) is None


def test_what_has_no_units() -> None:
    """Biases, scalars, embeddings and empty weights have no output units."""
    linear = nn.Linear(2, 2)
    assert unit_layout(linear, linear.bias) is None
    assert unit_layout(linear, torch.zeros(())) is None
    assert unit_layout(linear, torch.zeros(0, 3)) is None
    assert unit_layout(nn.Embedding(2, 2), torch.zeros(2, 2)) is None
