"""The command `plot`: a run, from a running exporter or a saved history, as a PNG or as the live page in one HTML file."""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path

from torch_grad_exporter.cli.terminal import show
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.files import write_output
from torch_grad_exporter.outputs.live.fetch import loaded
from torch_grad_exporter.outputs.live.history import QUANTITIES
from torch_grad_exporter.outputs.live.pages import INDEX, SCRIPT, STYLE, source
from torch_grad_exporter.outputs.live.saved import Saved, has_moments, logged

# Of a file that has everything in it.
CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"

# Layers that an error names, at most.
NAMED = 8


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "plot",
        help="draw a run: a PNG, or the live page as one HTML file",
        description="Draws what a running exporter shows on its live page, or what exporter.save(path) has kept of one.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="address of a running exporter, such as http://localhost:9100, or a saved history")
    add("--out", type=_picture, required=True, metavar="FILE", help="a .png, which needs matplotlib, or a .html")
    add("--quantity", choices=QUANTITIES, default="norm", help="what the heatmap of a PNG shows (default norm)")
    add("--moments", action="append", default=[], metavar="LAYER",
        help="a panel with mean and standard deviation of a layer's gradient, in a PNG of a run with moments=True; may be given "
        "several times")  # fmt: skip
    add("--value", action="append", default=[], metavar="NAME",
        help="a panel with a value that exporter.log() was given, in a PNG; may be given several times")  # fmt: skip
    add("--recent", action="store_true", help="the last records instead of the whole run, in a PNG")
    add("--cacert", metavar="FILE", help="certificate authority of the exporter's certificate")
    parser.set_defaults(run=run)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .html")
    return path


def run(values: argparse.Namespace) -> int:
    """Draw the run, and print where. Raises `UserError` for a source that cannot be read, or a file that cannot be written."""
    saved = loaded(values.source, values.cacert)
    try:
        write_output(values.out, page(saved).encode() if values.out.suffix == ".html" else _drawn(saved, values))
    except OSError as error:
        raise UserError(f"cannot write {values.out}: {error}") from None
    except RecursionError:
        raise UserError(f"{values.source} is damaged: it is nested too deeply") from None
    show(str(values.out))
    return 0


def _drawn(saved: Saved, values: argparse.Namespace) -> bytes:
    try:
        from torch_grad_exporter.cli import picture  # noqa: PLC0415 - matplotlib is optional
    except ImportError:
        raise UserError("a PNG needs matplotlib; pip install matplotlib, or write a .html") from None
    if values.moments and not has_moments(saved):
        raise UserError(
            f"--moments {values.moments[0]}: this run has no means and deviations; it takes start_exporter(moments=True)"
        )
    for option, noun, names, known, otherwise in (
        ("--moments", "layer", values.moments, list(saved["layer"]), "none yet"),
        ("--value", "value", values.value, list(logged(saved, "whole").values), "none: exporter.log() was given none"),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"{option} {name}: no such {noun}; there is {', '.join(known[:NAMED]) or otherwise}")
    view = "recent" if values.recent else "whole"
    return picture.drawn(saved, values.quantity, view, values.moments, values.value)


def page(saved: Saved) -> str:
    """Return the live page with all of its files, and what it shows, in one text."""
    text = STYLE.sub(lambda m: f"<style>{_file(m[1])}</style>", _file(INDEX))
    # In JSON a character may be written by its number, so that no layer's name can end the element.
    data = json.dumps(saved, separators=(",", ":")).replace("<", "\\u003c")
    first = f'<script type="application/json" id="saved">{data}</script>\n'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(CSP)}">\n'
    text = SCRIPT.sub(lambda m: "<script>" + _file(m[1]).replace("</script", "<\\/script") + "</script>", text)
    return text.replace("<title>", f"{policy}<title>", 1).replace("<script>", f"{first}<script>", 1)


def _file(name: str) -> str:
    content = source(name)
    if content is None:
        raise UserError(f"the package has lost its file {name}")
    return content.decode()
