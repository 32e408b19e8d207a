"""The table and the page: what they show, that they are bounded, and that names are only text in them."""

from __future__ import annotations

import pickle
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.inspection.explain.planted import Two, X, Y, classified
from torch_grad_exporter import explain
from torch_grad_exporter.inspection.explain.drawing import BOXES


class Reader(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def drawn(text: str) -> list[tuple[str, str]]:
    """The class and the text of each box of the page."""
    parts = text.split("<g><title>")[1:]
    return [(part.split("<text class='")[1].split("'")[0], part.rpartition("</text>")[0].rpartition(">")[2]) for part in parts]


def saved(tmp_path: Path, *arguments: object) -> str:
    """The page of an explanation."""
    explain(*arguments).save(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_bad_nodes_are_red_and_others_are_not(tmp_path: Path) -> None:
    """Below a dead ReLU all nodes are red and zero, above it none is; parameters that were cut off stand apart, red."""
    model = nn.ModuleDict({"a": nn.Linear(4, 6), "head": nn.Linear(6, 3), "cut": nn.Linear(4, 6)})
    nn.init.constant_(model["a"].bias, -100.0)

    def step() -> torch.Tensor:
        h = model["a"](X).relu() + model["cut"](X).detach()
        return nn.functional.cross_entropy(model["head"](h), Y)

    boxes = drawn(saved(tmp_path, step, model))
    assert {label for kind, label in boxes if kind == "bad"} == {
        "Addmm (a) · zero", "T (a) · zero", "a.weight · zero", "a.bias · zero", "cut · missing",
    }  # fmt: skip
    assert {label for kind, label in boxes if kind == "ok"} == {
        "NllLoss", "LogSoftmax", "Addmm (head)", "Add", "Relu", "T (head)", "head.weight", "head.bias",
    }  # fmt: skip


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """It has no script, no link, no image and no address but the name of SVG, and forbids them itself."""
    text = saved(tmp_path, classified(model := Two(lambda h: h.detach())), model)
    tags = Reader(text).tags
    assert {tag for tag, _ in tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td", "br", "code",
        "div", "svg", "path", "g", "rect", "text",
    }  # fmt: skip
    assert not {name for _, attributes in tags for name in attributes} & {"src", "href", "onload", "onclick", "style"}
    assert text.count("://") == text.count("xmlns='http://www.w3.org/2000/svg'")
    assert "default-src 'none'" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Names with markup, quotes and line ends of modules, models and lines of code stand in the page as text only."""
    evil = "<script>alert('x')</script>\"'&\n"
    model = {evil: nn.ModuleDict({evil: Two(lambda h: h.detach()), "b": nn.Linear(3, 3)})}
    inner = model[evil][evil]
    text = saved(tmp_path, lambda: inner(X).sum() + 0 * len("<script>"), model)
    assert "script" not in {tag for tag, _ in Reader(text).tags}
    assert f"{evil}.{evil}.encoder.weight" in Reader(text).texts
    assert "script" not in {tag for tag, _ in Reader(explain(lambda: inner(X).sum(), model)._repr_html_()).tags}


@pytest.mark.parametrize("grouped", [True, False])
def test_large_graphs_are_bounded(tmp_path: Path, grouped: bool) -> None:
    """Of 12,000 nodes in 3,000 layers the page draws at most 200 boxes and 201 apart, within seconds, in less than a megabyte."""
    layers = [nn.Linear(2, 2) for _ in range(3000)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    blocks = [nn.Sequential(*layers[n : n + 50]) for n in range(0, 3000, 50)] if grouped else layers
    model = nn.ModuleDict({"body": nn.Sequential(*blocks)}) if grouped else nn.Sequential(*layers)
    spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(300))
    step = (lambda: model["body"](torch.ones(1, 2)).sum()) if grouped else (lambda: model(torch.ones(1, 2)).sum())
    began = time.perf_counter()
    text = saved(tmp_path, step, {"m": model, "spare": spare})
    assert time.perf_counter() - began < 60
    graph, _, apart = text.partition("Not in the graph")
    assert 60 <= graph.count("<rect") <= BOXES
    assert apart.count("<rect") == BOXES + 1
    assert len(text) < 2_000_000
    if grouped:
        assert "m.body.7</text>" in text
    else:
        assert "m.2999 … 2984</text>" in text


def test_a_deep_graph_needs_no_deep_stack() -> None:
    """A chain of 20,000 operations is explained; a recursion would overflow."""
    model = nn.Linear(2, 1)

    def step() -> torch.Tensor:
        h = model(torch.ones(1, 2))
        for _ in range(20_000):
            h = h + 1
        return h.sum()

    assert {str(row.verdict) for row in explain(step, model).rows} == {"ok"}


def test_the_table_leaves_out_what_is_well() -> None:
    """Of more than 40 parameters those without a remark are counted only, and at most 200 are printed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
    bad = explain(lambda: model(X).detach().requires_grad_().sum(), model)
    assert str(bad).count("detached_at") == 200 + 1
    assert "... 100 rows more" in str(bad)
    assert bad._repr_html_().count("<tr>") == 201
    well = explain(lambda: model(X).sum(), model)
    assert str(well).splitlines()[-1] == "300 parameters: 300 ok"
    assert len(str(well).splitlines()) < 8


def test_the_explanation_keeps_no_graph() -> None:
    """Neither parameters nor nodes are reachable from it: it may be kept and pickled."""
    model = Two()
    found = explain(classified(model), model)
    assert pickle.loads(pickle.dumps(found)).rows == found.rows  # noqa: S301 - written a line before
    assert found["head.weight"].layer == "head"
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]
