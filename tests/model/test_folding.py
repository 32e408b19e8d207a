"""How the layers of large models share rows: by depth, and in ranges of neighbours where depth leaves too few rows."""

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
    """Return whether a label covers a layer: its name, its beginning, or a range with its number in the last part."""
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
    """Return the labels in their order, after a check that each covers its layers."""
    labels = fold(names, most)
    assert len(labels) == len(names)
    assert all(belongs(name, label) for name, label in zip(names, labels, strict=True))
    return list(dict.fromkeys(labels))


@pytest.mark.slow
def test_thousands_of_siblings_are_shown_in_ranges() -> None:
    """3,000 linear layers have 300 rows of ten neighbours each, with every parameter in one of them."""
    with torch.device("meta"):
        model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1, 1) for _ in range(3000))})
    table = LayerIndex({"": model}).table
    assert table.layers == tuple(f"blocks.{first}-{first + 9}" for first in range(0, 3000, 10))
    assert np.bincount(table.layer_of).tolist() == [20] * 300
    assert table.folded == 3000


def test_blocks_that_fold_by_depth_keep_their_names() -> None:
    """96 transformer blocks of 20 modules are shown by block, or by part if those fit."""
    numbered = [f"blocks.{block}.{part}" for block in range(96) for part in range(20)]
    assert rows(["embed", *numbered, "head"]) == ["embed", *(f"blocks.{block}" for block in range(96)), "head"]
    parts = [f"{part}.{number}" for part in ("attention", "mlp") for number in range(10)]
    nested = [f"blocks.{block}.{part}" for block in range(96) for part in parts]
    expected = [f"blocks.{block}.{part}" for block in range(96) for part in ("attention", "mlp")]
    assert rows(["embed", *nested, "head"]) == ["embed", *expected, "head"]


def test_the_number_that_varies_most_makes_the_range() -> None:
    """Ranges are of the number that varies most, and other numbers in a name stay."""
    assert rows([f"h{n}_attn1" for n in range(600)])[:2] == ["h0-1_attn1", "h2-3_attn1"]
    assert rows([f"conv2d_{n}_3x3" for n in range(600)])[:2] == ["conv2d_0-1_3x3", "conv2d_2-3_3x3"]
    assert rows([f"stage1.layer{i}_conv{j}" for i in range(6) for j in range(500)])[:2] == [
        "stage1.layer0_conv0-9",
        "stage1.layer0_conv10-19",
    ]
    assert rows([f"layer_{n:04}" for n in range(600)])[1] == "layer_2-3"


def as_folded_by_depth(names: Sequence[str], most: int) -> list[str]:
    """Return the labels by depth alone: the longest beginnings of which there are few enough."""
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


@pytest.mark.slow
@no_timeout_in_a_soak
@given(names=NAMES, most=st.integers(1, 60))
def test_random_trees_are_bounded_and_complete(names: list[str], most: int) -> None:
    """Any tree has at most the allowed number of labels, each covers its layers, and never fewer than by depth."""
    labels = fold(names, most)
    by_depth = as_folded_by_depth(names, most)
    assert all(belongs(name, label) for name, label in zip(names, labels, strict=True))
    assert len(set(by_depth)) <= len(set(labels)) <= most
    assert labels == fold(names, most)
    if len(set(by_depth)) >= most / 4:
        assert labels == by_depth


def test_the_norm_of_a_range_is_of_all_its_layers() -> None:
    """The norm of a range in a scrape is that of the gradients of all its layers."""
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
    """The log and the metrics say how many layers share rows."""
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
