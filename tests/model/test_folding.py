"""How the layers of large models share rows: by depth, and where that leaves too few rows in ranges of neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.properties import no_timeout_in_a_soak
from tests.support.scrape import key, values
from torch_grad_exporter import start_exporter
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.layers import LayerIndex

NUMBERS = re.compile(r"([0-9]+)-([0-9]+)")


def belongs(name: str, label: str) -> bool:
    """Whether a label covers a layer: it is the name or its beginning, with at most one number within a range in its last part."""
    parts, shown = name.split("."), label.split(".")
    if label == "model" or parts[: len(shown)] == shown:
        return True
    here, last = parts[len(shown) - 1], shown[-1]
    for found in NUMBERS.finditer(last):
        before, after = re.escape(last[: found.start()]), re.escape(last[found.end() :])
        number = re.fullmatch(f"{before}([0-9]+){after}", here)
        if parts[: len(shown) - 1] == shown[:-1] and number is not None:
            return int(found[1]) <= int(number[1]) <= int(found[2])
    return False


def rows(names: Sequence[str], most: int = 300) -> list[str]:
    """The labels that are shown, in their order; each covers the layers that have it."""
    labels = fold(names, most)
    assert len(labels) == len(names)
    assert all(belongs(name, label) for name, label in zip(names, labels, strict=True))
    return list(dict.fromkeys(labels))


def test_thousands_of_siblings_are_shown_in_ranges() -> None:
    """A ModuleList of 3,000 linear layers has 300 rows of ten neighbours each, in order, and every parameter is in one of them."""
    with torch.device("meta"):
        model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1, 1) for _ in range(3000))})
    table = LayerIndex({"": model}).table
    assert table.layers == tuple(f"blocks.{first}-{first + 9}" for first in range(0, 3000, 10))
    assert np.bincount(table.layer_of).tolist() == [20] * 300
    assert table.folded == 3000


def test_ranges_are_the_same_at_each_sample_and_after_freezing() -> None:
    """A model that does not change keeps its labels, and one layer that is frozen renames no other."""
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(1000)])
    index = LayerIndex({"": model})
    before = index.table
    assert before.layers[:2] == ("0-4", "5-9")
    assert len(before.layers) == 200
    assert index.refresh() is before
    model[999].requires_grad_(requires_grad=False)
    model[5].requires_grad_(requires_grad=False)
    after = index.refresh()
    assert after.layers == before.layers
    assert len(after.tracked) == len(before.tracked) - 4


def test_blocks_that_fold_by_depth_keep_their_names() -> None:
    """96 transformer blocks of 20 modules are shown as folding by depth alone does: by block, or by part if those fit."""
    numbered = [f"blocks.{block}.{part}" for block in range(96) for part in range(20)]
    assert rows(["embed", *numbered, "head"]) == ["embed", *(f"blocks.{block}" for block in range(96)), "head"]
    parts = [f"{part}.{number}" for part in ("attention", "mlp") for number in range(10)]
    nested = [f"blocks.{block}.{part}" for block in range(96) for part in parts]
    expected = [f"blocks.{block}.{part}" for block in range(96) for part in ("attention", "mlp")]
    assert rows(["embed", *nested, "head"]) == ["embed", *expected, "head"]


@pytest.mark.parametrize("blocks", [10, 32, 60, 80, 96, 290])
def test_modules_with_names_are_never_in_ranges(blocks: int) -> None:
    """Blocks whose modules have words for names are folded by depth, however few they are: there are no neighbours in them."""
    names = [f"blocks.{block}.{part}{part}" for block in range(blocks) for part in "abcdefghijklmnopqrstuvwxyzABCDEF"]
    assert rows(names) == (names if len(names) <= 300 else [f"blocks.{block}" for block in range(blocks)])


def test_few_towers_of_many_blocks_are_split() -> None:
    """Three towers of 1,000 blocks are shown in ranges of each tower's blocks, not as three rows."""
    names = [f"towers.{tower}.{block}.{part}" for tower in "abc" for block in range(1000) for part in ("up", "down")]
    expected = [f"towers.{tower}.{first}-{first + 9}" for tower in "abc" for first in range(0, 1000, 10)]
    assert rows(names) == expected


def test_mixed_nesting_spends_rows_where_they_are_needed() -> None:
    """Beside 1,000 experts in ranges, the modules of a small encoder keep their own names."""
    encoder = [f"encoder.layers.{block}.{part}" for block in range(12) for part in ("q", "k", "v", "o")]
    names = ["embed", *(f"experts.{number}" for number in range(1000)), *encoder, "head.norm", "head.out"]
    expected = ["embed", *(f"experts.{first}-{first + 4}" for first in range(0, 1000, 5)), *encoder, "head.norm", "head.out"]
    assert rows(names) == expected


def test_one_deep_branch_does_not_fold_the_others() -> None:
    """A block with 400 children of its own is in ranges, the parts of 49 other blocks are shown one by one."""
    others = [
        f"blocks.{block}.{part}.{kind}" for block in range(1, 50) for part in ("q", "k", "v", "o") for kind in ("lora", "base")
    ]
    found = rows([f"blocks.0.{number}" for number in range(400)] + others)
    assert found[80:] == [f"blocks.{block}.{part}" for block in range(1, 50) for part in "qkvo"]
    assert found[:80] == [f"blocks.0.{first}-{first + 4}" for first in range(0, 400, 5)]


def test_the_number_that_varies_most_makes_the_range() -> None:
    """Of names with digits in several places the ranges are of the number that differs most, and the others stay as they are."""
    assert rows([f"h{n}_attn1" for n in range(600)])[:2] == ["h0-1_attn1", "h2-3_attn1"]
    assert rows([f"conv2d_{n}_3x3" for n in range(600)])[:2] == ["conv2d_0-1_3x3", "conv2d_2-3_3x3"]
    assert rows([f"stage1.layer{i}_conv{j}" for i in range(6) for j in range(500)])[:2] == [
        "stage1.layer0_conv0-9",
        "stage1.layer0_conv10-19",
    ]
    assert rows([f"layer_{n:04}" for n in range(600)])[1] == "layer_2-3"


def test_numbers_need_not_be_in_a_row() -> None:
    """Linear layers between activations have every second number, and a family may begin anywhere."""
    assert rows([str(2 * n) for n in range(3000)])[:2] == ["0-19", "20-39"]
    assert rows([f"x{n}" for n in range(1_000_000, 1_003_000)])[:2] == ["x1000000-1000009", "x1000010-1000019"]
    assert rows([f"hash{n * 10**14}" for n in range(3000)])[0] == f"hash0-{10**15 - 1}"


def test_too_many_words_become_one_row() -> None:
    """Thousands of siblings without numbers cannot be in ranges: they share the row of their parent, beside ranges of others."""
    words = ["w" + "".join("abcdefghij"[number // 10**place % 10] for place in range(4)) for number in range(3000)]
    assert rows(words) == ["model"]
    found = rows([f"tasks.{word}" for word in words] + [f"experts.{number}" for number in range(3000)])
    assert found == ["tasks", *(f"experts.{first}-{first + 19}" for first in range(0, 3000, 20))]


@pytest.mark.parametrize("siblings", [301, 302, 599, 600, 601, 750, 1000, 1499, 1501, 2999, 3001, 7000, 20_000])
def test_a_flat_model_keeps_at_least_a_third_of_the_rows(siblings: int) -> None:
    """However many siblings there are, numbered from 0 or from 1, there are from 100 to 300 rows."""
    for first in (0, 1):
        assert 100 <= len(rows([f"blocks.{first + number}" for number in range(siblings)])) <= 300


def as_folded_by_depth(names: Sequence[str], most: int) -> list[str]:
    """What folding by depth alone gives: the longest beginnings of which there are few enough."""
    for depth in range(max(name.count(".") for name in names) + 1, 0, -1):
        labels = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(labels)) <= most:
            return labels
    return ["model"] * len(names)


PARTS = st.one_of(
    st.integers(0, 400).map(str),
    st.sampled_from(["norm", "attn", "mlp", "0-9", "model", "-", "a b", "é٣"]),
    st.builds("{}{}".format, st.sampled_from(["conv", "l1_", "h"]), st.integers(0, 30)),
    st.builds("b{}x{}".format, st.integers(0, 9), st.integers(0, 9)),
)
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=5).map(".".join), min_size=1, max_size=200, unique=True)


@no_timeout_in_a_soak
@given(names=NAMES, most=st.integers(1, 60))
def test_random_trees_are_bounded_and_complete(names: list[str], most: int) -> None:
    """Any tree of names has at most as many labels as allowed, each covers its layers, and fewer than folding by depth never."""
    labels = fold(names, most)
    by_depth = as_folded_by_depth(names, most)
    assert all(belongs(name, label) for name, label in zip(names, labels, strict=True))
    assert len(set(by_depth)) <= len(set(labels)) <= most
    assert labels == fold(names, most)
    if len(set(by_depth)) >= most / 4:
        assert labels == by_depth


@no_timeout_in_a_soak
@given(siblings=st.lists(st.integers(0, 5000), min_size=61, max_size=400, unique=True), most=st.integers(4, 60))
def test_random_numbers_keep_a_good_part_of_the_rows(siblings: list[int], most: int) -> None:
    """Siblings with any numbers fill at least a fifth of the rows, and neighbours share a row only with neighbours."""
    names = [f"blocks.{number}" for number in sorted(siblings)]
    labels = fold(names, most)
    assert most / 5 <= len(set(labels)) <= most
    assert labels == sorted(labels, key=labels.index)


def test_metrics_of_ranges_are_those_of_all_their_layers() -> None:
    """The norm of a range, in a scrape, is that of the gradients of all layers in it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start_exporter(model, port=None, every=1, max_layers=10, collectors={"host": False, "process": False}) as exporter:
        model(torch.randn(3, 2)).square().sum().backward()
        optimizer.step()
        found = values(exporter)
    for first in range(0, 40, 5):
        squares = sum(float(p.grad.double().square().sum()) for layer in model[first : first + 5] for p in layer.parameters())
        assert found[key("torch_grad_norm", layer=f"{first}-{first + 4}")] == pytest.approx(squares**0.5, rel=1e-5)
    assert found[key("torch_grad_exporter_layers_folded")] == 40


def test_the_log_says_how_many_layers_share_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Of 363 layers 240 share 120 rows, and 123 have their own: 243 rows."""
    model = nn.ModuleDict(
        {
            "pairs": nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(120)),
            "single": nn.ModuleList(nn.Linear(1, 1) for _ in range(123)),
        }
    )
    with start_exporter(model, port=None, max_layers=300, collectors={"host": False, "process": False}) as exporter:
        shown = values(exporter)
    assert (shown[key("torch_grad_exporter_layers")], shown[key("torch_grad_exporter_layers_folded")]) == (243, 240)
    (line,) = [record.getMessage() for record in caplog.records if "max_layers" in record.getMessage()]
    assert "363 layers are shown in 243 rows, 240 of them together with others; raise max_layers=300," in line
