"""The pictures of `plot`: their source, their content and their errors."""

from __future__ import annotations

import base64
import contextlib
import gzip
import html.parser
import itertools
import json
import math
import re
import socketserver
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import bcrypt
import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import torch_grad_exporter
from tests.support.certificates import authority
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import OFF
from tests.support.tools import eventually, full_disk
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.cli import plot
from torch_grad_exporter.collectors.gradients import GRAD_DEAD_RATIO
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.collectors.training import TRAIN_STATE, TRAIN_STEPS
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.metrics.families import Family, LabelRows
from torch_grad_exporter.outputs.live import saved as reading
from torch_grad_exporter.outputs.live.history import MEAN_AND_STDDEV, QUANTITIES, History, Moment
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.rules import Record

HOSTILE = ["</script><script>alert(1)</script>", "<!--", "]]>", "a$b$c^_{", "lone \ud800", "schicht.ä", "\u2028 \\n", "x" * 200]
PASSWORD = "p@ss: w/rd%"  # noqa: S105 - of these tests alone


def saved(values: np.ndarray, names: list[str] | None = None, *, run: str = "run", steps: int = 0, **scalars: float) -> plot.Saved:
    """What is saved of a run with these values, shape (n, layers, quantities); `steps`: those before its first."""
    names = names or [f"layers.{number}" for number in range(values.shape[1])]
    at = [0]
    row = [scalars.get(name, 1.0) for name in ("loss", "norm", "norm_after_clip", "step_seconds", "learning_rate")]

    def moment() -> Moment:
        number = at[0] + 1
        shown = values[at[0]] if len(values) else np.zeros((0, 4))
        return Moment(number, steps + number, names, shown.astype(np.float32), np.array(row, dtype=np.float32))

    quantities = QUANTITIES + MEAN_AND_STDDEV * (values.shape[2] == len(QUANTITIES + MEAN_AND_STDDEV))
    history = History(moment, now=lambda: 1.8e9 + at[0], quantities=quantities)
    for number in range(len(values)):
        at[0] = number
        history.record_if_due()
    families = [
        Family(TRAIN_STATE, np.ones(1), LabelRows((("training",),))),
        Family(TRAIN_STEPS, np.array([steps + len(values)], dtype=np.float64), LabelRows((("sgd",),))),
        Family(GRAD_DEAD_RATIO, np.full(len(names), 0.95), LabelRows(tuple((name,) for name in names))),
    ]
    live = Live(
        Run(run, 0, 1, "host", "0"), history, lambda: families, targets=lambda: b"[]", marks=ActionMarks(), record=Record(),
        now=lambda: 1.8e9 + at[0],
    )  # fmt: skip
    found: plot.Saved = live.everything()
    return found


def made(records: int = 12, layers: int = 5) -> np.ndarray:
    """Random values of all quantities, norms over six decades."""
    values = np.random.default_rng(0).random((records, layers, len(QUANTITIES)))
    values[:, :, 0] = 10 ** (6 * values[:, :, 0] - 5)
    values[:, :, 3] = 12 * values[:, :, 3] - 6
    return values


def written(tmp_path: Path, content: plot.Saved | bytes | str, name: str = "saved.json") -> str:
    """A file of it."""
    path = tmp_path / name
    path.write_bytes(
        content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    return str(path)


# Where it comes from


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, its key and its authority, and two web configurations."""
    found = tmp_path_factory.mktemp("web")
    authority().issue("dns:localhost", "ip:127.0.0.1").write(found, "server")
    (found / "ca.crt").write_text(authority().pem)
    users = f"basic_auth_users:\n  alice: {bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()}\n"
    (found / "users.yml").write_text(users)
    (found / "both.yml").write_text(f"tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n{users}")
    return found


@contextlib.contextmanager
def training(web_config: Path | None = None) -> Iterator[Exporter]:
    """A training that has a record and is served."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(
        model, 0, addr="127.0.0.1", every=1, collectors=OFF, **({"web_config_file": web_config} if web_config else {})
    ) as exporter:
        for _ in range(3):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield exporter


def strips(found: plot.Saved) -> plot.Saved:
    """All but what the moment of the question decides."""
    return {key: value for key, value in found.items() if key not in ("status", "judged", "metrics")}


@pytest.mark.slow
def test_address_and_saved_files_plot_the_same(tmp_path: Path) -> None:
    """Every address of a running exporter, its plain file and its compressed file give the same content."""
    with training() as exporter:
        base = f"http://127.0.0.1:{exporter.port}"
        assert eventually(lambda: bool((found := plot.loaded(base))["layer"] and found["run"]["whole"]["times"]))
        expected = plot.loaded(base)
        assert expected["layers"]["norm"]["whole"]["layers"] == ["first", "second"]
        for address in ("/metrics/", "?x=1", "/#quantity=zscore&view=recent"):
            assert strips(plot.loaded(base + address)) == strips(expected), address
        for name in ("a.json", "a.json.gz", "any"):
            exporter.save(tmp_path / name)
            assert strips(plot.loaded(str(tmp_path / name))) == strips(expected)
        (tmp_path / "later").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
        assert strips(plot.loaded(str(tmp_path / "later"))) == strips(expected)


def test_plot_from_exporter_with_tls_and_password(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """User and password are read from the address, encoded, and the certificate's authority from a file."""
    with training(folder / "both.yml") as exporter:
        address = f"https://alice:{quote(PASSWORD, safe='')}@localhost:{exporter.port}"
        assert plot.loaded(address, str(folder / "ca.crt"))["status"]["run"] == exporter.run
        out = tmp_path / "a.html"
        assert cli.main(["plot", address, "--out", str(out), "--cacert", str(folder / "ca.crt")]) == 0
        assert exporter.run in out.read_text()
        assert capsys.readouterr().out == f"{out}\n"
        with pytest.raises(UserError, match="--cacert"):
            plot.loaded(address)
        with pytest.raises(UserError, match=r"401|password") as raised:
            plot.loaded(f"https://alice:secret@localhost:{exporter.port}", str(folder / "ca.crt"))
        assert "secret" not in str(raised.value)
        with pytest.raises(UserError, match=r"missing\.crt") as raised:
            plot.loaded(address, str(folder / "missing.crt"))
        assert "does not answer" not in str(raised.value)


@contextlib.contextmanager
def answering(body: bytes, *, status: int = 200, asked: list[str | None] | None = None, **headers: str) -> Iterator[str]:
    """The address of a server that is something else, and answers everything alike. `asked`: takes who asks for authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


NOT_ONE = {
    "nothing": b"",
    "page": b"<!doctype html>",
    "list": b"[]",
    "another": b'{"format": "something else", "version": 1}',
    "half": json.dumps({"format": "torch_grad_exporter history", "version": 1}).encode()[:-3],
    "no text": b"\xff\xfe\x00",
    "bad gzip": gzip.compress(b"{}" * 1000)[:12] + b"xxxxxxxxxxxx",
    "half of a gzip": gzip.compress(b'{"format": "torch_grad_exporter history"}' * 9)[:-9],
    "deep": b"[" * 200_000,
}


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not a history ends the command with status 2 and a line that says how to write one."""
    out = tmp_path / "out.html"
    for name, content in NOT_ONE.items():
        assert cli.main(["plot", written(tmp_path, content), "--out", str(out)]) == 2, name
        told = capsys.readouterr()
        assert told.err.startswith("torch-grad-exporter plot: error: "), name
        assert "is not a history of torch_grad_exporter; exporter.save(path) writes one" in told.err, name
        assert (told.err.count("\n"), told.out, out.exists()) == (1, "", False), name


def test_other_servers_are_refused() -> None:
    """A server that is not an exporter, or breaks its answer off, is named by its address."""
    with answering(b"<html>") as address, pytest.raises(UserError, match="not a history"):
        plot.loaded(address)
    with answering(b"{}", Content_Length="1000") as address, pytest.raises(UserError, match=re.escape(address)):
        plot.loaded(address)


def test_password_is_not_sent_after_a_redirect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A redirect is not followed, so the other server never sees the password."""
    first, other = list[str | None](), list[str | None]()
    content = json.dumps(saved(made(2))).encode()
    with (
        answering(content, asked=other) as elsewhere,
        answering(b"", status=307, asked=first, Location=f"{elsewhere}/api/v1/saved", Content_Length="0") as address,
    ):
        source = address.replace("http://", "http://user:secret@")
        assert cli.main(["plot", source, "--out", str(tmp_path / "a.html")]) == 2
        told = capsys.readouterr().err
        assert plot.loaded(elsewhere)["layer"]
    assert (first, other) == (["Basic dXNlcjpzZWNyZXQ="], [None])
    assert "answers 307" in told
    assert f"is not followed; it points to '{elsewhere}/api/v1/saved'" in told
    assert "secret" not in told


def changed(place: str, value: object) -> plot.Saved:
    """A saved history of 4 records and 3 layers, with one of its values another one, or none for `...`; `place`: keys and dots."""
    content: plot.Saved = json.loads(json.dumps(saved(made(4, 3))))
    *above, last = place.split(".")
    inner = content
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return content


ACTS = [
    {"time": 1.8e9 + 1, "step": 2, "name": "GradientExploding", "action": "ScaleLearningRate(factor=0.5)", "result": "done"},
    {"time": 1.8e9 + 9, "step": 10, "name": "a$b", "action": "tell", "result": "failed"},
    {"time": 1.8e9 + 99, "step": 100, "name": "later", "action": "tell", "result": "done"},
]
"""What actions did, the last one beyond the end."""

DAMAGED = {
    "actions that are none": changed("status.actions", {}),
    "an action without a step": changed("status.actions", [{**ACTS[0], "step": None}]),
    "an action at no time": changed("status.actions", [{**ACTS[0], "time": "Infinity"}]),
    "an endless step": changed("status.step", "Infinity"),
    **{f"no {key}": changed(key, ...) for key in ("status", "layer", "run.whole.loss", "layers.norm.whole.codes")},
    "a text for a list": changed("run.recent.loss", "1234"),
    "times of another length": changed("layers.norm.whole.times", [1.0, 2.0, 3.0]),
    "endless steps": changed("layers.norm.recent.steps", [1.0, 2.0, 3.0, "Infinity"]),
    "a large number": changed("run.whole.norm", [10**400, 1.0, 1.0, 1.0]),
    "more codes": changed("layers.norm.recent.codes", base64.b64encode(bytes(26)).decode()),
    "a scale too high": changed("layers.norm.whole.high", 1e6),
    "unknown layers": changed("layer", {}),
    "a place beyond": changed("run.whole.nonfinite", {"loss": [4]}),
    "fewer flags": changed("layers.norm.whole.nonfinite", "AA=="),
}


def test_damaged_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged history gives one line of error for both kinds of pictures, and no picture."""
    for (name, content), kind in itertools.product(DAMAGED.items(), ("png", "html")):
        source, out = written(tmp_path, content), tmp_path / f"out.{kind}"
        assert cli.main(["plot", source, "--out", str(out)]) == 2, name
        told = capsys.readouterr().err
        assert told.startswith(f"torch-grad-exporter plot: error: {source} is damaged: "), name
        assert (told.count("\n"), out.exists()) == (1, False), name


def test_other_version_is_refused(tmp_path: Path) -> None:
    """The error names the version of the file and the version that is supported."""
    for version, named in ((2, "version 2"), ("1", "version '1'"), (None, "version None")):
        content = {**saved(made(2)), "version": version}
        with pytest.raises(UserError, match=f"{named} of the format; this program reads version 1"):
            plot.loaded(written(tmp_path, content))


def test_invalid_source_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid source, target or type of file gives status 2 and one line that names it, without a traceback."""
    for source, says in (
        ("missing.json", "cannot read missing.json"),
        (".", "cannot read"),
        ("http://127.0.0.1:1", "127.0.0.1:1 does not answer"),
        ("http://[::1", "::1"),
        ("http://127.0.0.1:port", "port"),
        ("http://a b/", "a b"),
    ):
        assert cli.main(["plot", source, "--out", str(tmp_path / "out.html")]) == 2
        told = capsys.readouterr().err
        assert told.startswith("torch-grad-exporter plot: error: ")
        assert says in told
        assert told.count("\n") == 1
    source = written(tmp_path, saved(made(2)))
    for kind in ("png", "html"):
        assert cli.main(["plot", source, "--out", str(tmp_path / "missing" / f"a.{kind}")]) == 2
        assert f"missing/a.{kind}" in capsys.readouterr().err
        out = tmp_path / f"a.{kind}"
        out.write_text("before")
        with full_disk():
            assert cli.main(["plot", source, "--out", str(out)]) == 2
        assert f"cannot write {out}" in capsys.readouterr().err
        assert out.read_text() == "before"
    with pytest.raises(SystemExit) as ended:
        cli.main(["plot", source, "--out", "a.pdf"])
    assert ended.value.code == 2
    assert "ends neither in .png nor in .html" in capsys.readouterr().err


# Values


def test_grid_has_the_recorded_values() -> None:
    """A grid holds the recorded values with layers first, and NaN with a mark where a value was not finite."""
    values = made(9, 4)
    values[3, 1], values[4, 2, 0], values[5, 0, 0] = np.nan, np.inf, 0.0
    content = saved(values)
    for place, quantity in enumerate(QUANTITIES):
        for view in ("whole", "recent"):
            found, expected = reading.grid(content, quantity, view), values[:, :, place].T.astype(np.float64)
            finite = np.where(np.isinf(expected), np.nan, expected)
            np.testing.assert_allclose(found.values, finite, rtol=2e-4 if quantity == "norm" else 0, atol=2e-4 if place else 0)
            assert found.nonfinite[2, 4] == (quantity == "norm")
            assert found.steps.tolist() == list(range(1, 10))
    assert reading.grid(saved(np.zeros((0, 0, 4))), "norm", "whole").values.size == 0


def with_moments(records: int = 12, layers: int = 5) -> np.ndarray:
    """As `made`, with means and deviations, those of one layer far below those of another."""
    spread = np.random.default_rng(1).random((records, layers, 2)) * 10.0 ** -np.arange(0, 3 * layers, 3)[None, :, None]
    spread[:, :, 0] *= 0.2
    return np.concatenate([made(records, layers), spread], axis=2)


def flagged(content: plot.Saved, cells: list[tuple[int, int]], *, quantity: str = "norm", view: str = "whole") -> plot.Saved:
    """The same with records that are not finite in the bins of these cells (column, layer), beside what there is."""
    found: plot.Saved = json.loads(json.dumps(content))
    answer = found["layers"][quantity][view]
    flags = np.zeros((len(answer["times"]), len(answer["layers"])), dtype=bool)
    flags[tuple(np.array(cells).T)] = True
    answer["nonfinite"] = base64.b64encode(np.packbits(flags.ravel()).tobytes()).decode()
    return found


# A PNG


def drawn(tmp_path: Path, content: plot.Saved, *arguments: str) -> np.ndarray:
    """The picture of the command, read by matplotlib's own reader: shape (height, width, 4)."""
    out = tmp_path / "out.png"
    assert cli.main(["plot", written(tmp_path, content), "--out", str(out), *arguments]) == 0
    return matplotlib.image.imread(out)


def lines(found: np.ndarray) -> list[int]:
    """Where lines begin, of which each may be some pixels wide."""
    return np.flatnonzero(np.diff(found.astype(int), prepend=0) == 1).tolist()


def heatmap_cells(picture: np.ndarray, wide: int, high: int) -> np.ndarray:
    """The colour in the middle of each cell of the heatmap, found by its frame of black lines: shape (high, wide, 3)."""
    dark = (picture[:, :, :3] < 0.25).all(axis=2)
    top, bottom, *_ = lines(dark.mean(axis=1) > 0.6)
    left, right, *_ = lines(dark[top : bottom + 1].mean(axis=0) > 0.8)  # the others are those of the scale
    y = np.linspace(top, bottom, 2 * high + 1)[1::2].round().astype(int)
    x = np.linspace(left, right, 2 * wide + 1)[1::2].round().astype(int)
    return picture[np.ix_(y, x)][:, :, :3]


def half_decades(norms: np.ndarray) -> tuple[float, float]:
    """The logarithms of the first and the last colour of some norms: the half decades around them."""
    logs = np.log10(norms)
    return math.floor(2 * logs.min()) / 2, math.ceil(2 * logs.max()) / 2


@pytest.mark.slow
def test_heatmap_colours_show_the_norms(tmp_path: Path) -> None:
    """Each cell has viridis' colour for the logarithm of its norm; magenta is non-finite and grey is absent."""
    values = made(10, 6)
    values[4, 2, 0], values[:, 3, 0], values[7, 1, 0] = np.inf, 0, np.nan
    cells = heatmap_cells(drawn(tmp_path, saved(values)), 10, 6)
    norms = values[:, :, 0].T
    known = np.isfinite(norms) & (norms > 0)
    low, high = half_decades(norms[known])
    wanted = mpl.colormaps["viridis"]((np.log10(np.where(known, norms, 10**low)) - low) / (high - low))[:, :, :3]
    wanted[2, 4], wanted[1, 7] = (1.0, 0.0, 1.0), (0.8, 0.8, 0.8)
    np.testing.assert_allclose(cells, wanted, atol=0.03)


def figure_of(tmp_path: Path, content: plot.Saved, *arguments: str) -> Figure:
    """What the command would write."""
    with mock.patch.object(Figure, "savefig", autospec=True) as savefig:
        assert cli.main(["plot", written(tmp_path, content), "--out", str(tmp_path / "a.png"), *arguments]) == 0
    found: Figure = savefig.call_args.args[0]
    return found


def test_layer_panel_shows_mean_and_deviation(tmp_path: Path) -> None:
    """Each named layer has a panel with a line at its mean and a band of one deviation."""
    values = with_moments()
    plain = figure_of(tmp_path, saved(values))
    figure = figure_of(tmp_path, saved(values), "--moments", "layers.1", "--moments", "layers.4")
    assert len(figure.axes) == len(plain.axes) + 2
    for name, layer in (("layers.1", 1), ("layers.4", 4)):
        (axes,) = [axes for axes in figure.axes if axes.get_ylabel() == f"Elements of\n{name}"]
        mean, stddev = values[:, layer, 4:].astype(np.float32).astype(np.float64).T
        np.testing.assert_allclose(axes.lines[0].get_ydata(), mean)
        (band,) = axes.collections
        corners = band.get_paths()[0].vertices
        assert corners[:, 1].min() == pytest.approx((mean - stddev).min())
        assert corners[:, 1].max() == pytest.approx((mean + stddev).max())


def test_missing_moments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A history without moments, or without the layer, is refused with the reason."""
    out = tmp_path / "out.png"
    for content, layer, said in (
        (saved(made()), "layers.1", "start_exporter(moments=True)"),
        (saved(with_moments()), "nothing", "no such layer; there is layers.0"),
    ):
        assert cli.main(["plot", written(tmp_path, content), "--out", str(out), "--moments", layer]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()


def at_steps(content: plot.Saved, steps: list[float]) -> plot.Saved:
    """The same with its records at these steps."""
    found: plot.Saved = json.loads(json.dumps(content))
    for view in ("whole", "recent"):
        found["run"][view]["steps"] = steps
        for quantity in QUANTITIES:
            found["layers"][quantity][view]["steps"] = steps
    return found


def magenta(picture: np.ndarray) -> np.ndarray:
    """Return which pixels of a picture are magenta."""
    found: np.ndarray = (np.abs(picture[:, :, :3] - (1.0, 0.0, 1.0)) < 0.1).all(axis=2)
    return found


@pytest.mark.slow
def test_nonfinite_records_are_marked(tmp_path: Path) -> None:
    """A bin with a non-finite record keeps its colour and is marked, and so is a point of a line; nothing else is magenta."""
    plain = saved(made(10, 6))
    before = drawn(tmp_path, plain)
    plain["run"]["whole"]["nonfinite"] = {"loss": [4]}
    found = drawn(tmp_path, flagged(plain, [(3, 1)]))
    np.testing.assert_array_equal(heatmap_cells(found, 10, 6), heatmap_cells(before, 10, 6))
    assert magenta(before).sum() == 0
    heatmap, charts = np.array_split(magenta(found), [len(found) // 2])
    assert heatmap.any()
    assert charts.any()


def test_actions_are_marked(tmp_path: Path) -> None:
    """Each visible action is a dashed line in every panel, magenta if it failed, and has its text below."""
    content = saved(made(12, 3))
    assert lines_of_actions(figure_of(tmp_path, content)) == []
    content["status"]["actions"] = ACTS
    figure = figure_of(tmp_path, content)
    assert lines_of_actions(figure) == [(2.0, "0.25"), (10.0, "magenta")] * 3
    said = " ".join(figure.get_supxlabel().split())
    assert "Dashed: GradientExploding: ScaleLearningRate(factor=0.5) done at step 2, a\\$b: tell failed at step 10." in said
    content["status"]["actions"] = [{**ACTS[0], "step": number} for number in range(1, 8)]
    assert "Dashed: 3 earlier ones, GradientExploding" in " ".join(figure_of(tmp_path, content).get_supxlabel().split())


def lines_of_actions(figure: Figure) -> list[tuple[float, object]]:
    """Where they are, and their colours, panel by panel."""
    return [
        (float(np.asarray(line.get_xdata())[0]), line.get_color())
        for axes in figure.axes
        for line in axes.get_lines()
        if line.get_gid() == "action"
    ]


ODD = {
    "no sample yet": saved(np.zeros((0, 0, 4))),
    "nothing known": saved(np.full((3, 2, 4), np.nan), loss=math.nan, norm=math.nan, norm_after_clip=math.nan),
    "zeros and odd names": saved(np.zeros((3, 3, 4)), ["層.一", "слой\n2", "a$b$c^_{"], run="a$b$ ^\\frac{1 $x$", norm=0.0),
    "one step, not finite": at_steps(saved(np.full((3, 2, 4), np.inf), loss=math.inf, norm=math.inf), [5, 5, 5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_histories_are_drawn(name: str, tmp_path: Path) -> None:
    """Empty, single, absent and infinite values and odd names are drawn without a warning."""
    assert drawn(tmp_path, ODD[name]).shape[1:] == (1650, 4)


def test_missing_matplotlib_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib a PNG is refused with the command that installs it; an HTML file still works."""
    source = written(tmp_path, saved(made(2)))
    monkeypatch.delattr(torch_grad_exporter.cli, "picture")
    monkeypatch.delitem(sys.modules, "torch_grad_exporter.cli.picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", source, "--out", str(tmp_path / "a.png")]) == 2
    told = capsys.readouterr().err
    assert "pip install matplotlib" in told
    assert ".html" in told
    assert cli.main(["plot", source, "--out", str(tmp_path / "a.html")]) == 0


# One HTML file


class Page(html.parser.HTMLParser):
    """What a browser finds in a page: tags with attributes, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.texts.append((*self.tags[-1], data))


def test_html_loads_nothing(tmp_path: Path) -> None:
    """The HTML file refers only to `data:` and to anchors, and its policy forbids anything else."""
    found = Page(page_of(tmp_path, saved(made())))
    for tag, attributes in found.tags:
        for name in ("src", "href", "srcset", "data", "action", "xlink:href"):
            address = attributes.get(name) or "#"
            if tag == "a":  # is followed by a click alone
                assert address.startswith("#") or address in ("metrics", "runbook")
            else:
                assert address.startswith(("#", "data:")), (tag, address)
    styles = "".join(text for tag, _, text in found.texts if tag == "style")
    assert "@import" not in styles
    assert re.findall(r"url\((?!['\"]?data:)[^)]*\)", styles) == []
    [policy] = [attributes["content"] for _, attributes in found.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in (policy or "")
    assert "http" not in (policy or "")


def page_of(tmp_path: Path, content: plot.Saved) -> str:
    """The file that the command writes."""
    out = tmp_path / "out.html"
    assert cli.main(["plot", written(tmp_path, content), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    """Layers and runs with markup in their names add no script and are read back unchanged."""
    content = saved(made(3, len(HOSTILE)), HOSTILE, run=HOSTILE[0])
    text = page_of(tmp_path, content)
    plain, found = Page(page_of(tmp_path, saved(made(3)))), Page(text)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    [data] = [data for _, attributes, data in found.texts if attributes.get("id") == "saved"]
    assert "<" not in data
    assert json.loads(data) == content
    assert list(json.loads(data)["layer"]) == HOSTILE
