"""The table and the page of an explanation: content, bounds, and names as text only."""

from __future__ import annotations

import pickle
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.inspection.explain.planted import Two, X, Y
from tests.support.tools import full_disk
from torch_grad_exporter import explain
from torch_grad_exporter.inspection.explain import Explanation


class Reader(HTMLParser):
    """Collects the tags and texts of a page."""

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
    """Return the class and the text of each box of the page."""
    parts = text.split("<g><title>")[1:]
    return [(part.split("<text class='")[1].split("'")[0], part.rpartition("</text>")[0].rpartition(">")[2]) for part in parts]


def notebook(found: Explanation) -> str:
    """Return what a notebook shows."""
    return found._repr_html_()  # private: the name that Jupyter calls


def saved(tmp_path: Path, *arguments: object) -> str:
    """Return the page of an explanation."""
    explain(*arguments).save(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk raises, and leaves the page before."""
    model = nn.Linear(4, 3)
    before = saved(tmp_path, lambda: model(X).sum(), model)
    with full_disk(), pytest.raises(OSError, match=r"large"):
        saved(tmp_path, lambda: model(X).sum(), model)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == before


def test_only_bad_nodes_are_red(tmp_path: Path) -> None:
    """Nodes below a dead ReLU and parameters that were cut off are red, others are not."""
    model = nn.ModuleDict({"a": nn.Linear(4, 6), "head": nn.Linear(6, 3), "cut": nn.Linear(4, 6)})
    nn.init.constant_(model["a"].bias, -100.0)

    def step() -> torch.Tensor:
        h = model["a"](X).relu() + model["cut"](X).detach()
        return nn.functional.cross_entropy(model["head"](h), Y)

    boxes = drawn(saved(tmp_path, step, model))
    assert {label for kind, label in boxes if kind == "bad"} == {
        "Addmm (a) · zero", "T (a) · zero", "a.weight · zero", "a.bias · zero", "cut · missing",
    }  # fmt: skip
    assert {"NllLoss", "Addmm (head)", "Relu", "head.weight", "head.bias"} < {label for kind, label in boxes if kind == "ok"}


@pytest.mark.slow
def test_large_graphs_are_bounded(tmp_path: Path) -> None:
    """Of a large graph the page draws at most 200 boxes and 201 apart."""
    blocks = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))) for _ in range(60)]
    model = nn.ModuleDict({"body": nn.Sequential(*blocks)})
    for parameter in model.parameters():
        nn.init.eye_(parameter) if parameter.dim() == 2 else nn.init.ones_(parameter)
    spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(210))
    text = saved(tmp_path, lambda: model["body"](torch.ones(1, 2)).sum(), {"m": model, "spare": spare})
    graph, _, apart = text.partition("Not in the graph")
    assert 60 <= graph.count("<rect") <= 200
    assert apart.count("<rect") == 200 + 1
    assert len(text) < 500_000
    assert "m.body.7</text>" in text


@pytest.mark.slow
def test_the_table_leaves_out_what_is_ok() -> None:
    """Many parameters without a remark are only counted, and at most 200 rows are printed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
    bad = explain(lambda: model(X).detach().requires_grad_().sum(), model)
    assert str(bad).count("detached_at") == 200 + 1
    assert "... 100 rows more" in str(bad)
    assert notebook(bad).count("<tr>") == 201
    assert pickle.loads(pickle.dumps(bad)).rows == bad.rows  # noqa: S301 - our own
    well = explain(lambda: model(X).sum(), model)
    assert str(well).splitlines()[-1] == "300 parameters: 300 ok"
    assert len(str(well).splitlines()) < 8


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """The page has no script, link, image or address, and names with markup stand in it as text only."""
    evil = "<script>alert('x')</script>\"'&\n"
    model = {evil: nn.ModuleDict({evil: Two(lambda h: h.detach()), "b": nn.Linear(3, 3)})}
    inner = model[evil][evil]
    text = saved(tmp_path, lambda: inner(X).sum(), model)
    page, cell = Reader(text), Reader(notebook(explain(lambda: inner(X).sum(), model)))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "a"}
    assert "script" not in {tag for tag, _ in cell.tags}
    assert not {name for _, attributes in page.tags for name in attributes} & {"src", "href", "onload", "onclick", "style"}
    assert text.count("://") == text.count("xmlns='http://www.w3.org/2000/svg'")
    assert "default-src 'none'" in text
    assert f"{evil}.{evil}.encoder.weight" in page.texts
