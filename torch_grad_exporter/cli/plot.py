"""Pictures of a run, from a running exporter or a saved history: a PNG for a paper, or the live page as one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_grad_exporter.outputs.live.pages import INDEX, SCRIPT, STYLE, source
from torch_grad_exporter.outputs.live.saved import PlotError, Saved, has_moments, loaded

__all__ = ["Options", "PlotError", "Saved", "loaded", "page", "run"]

CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Of a file that has everything in it."""

NAMED = 8
"""Layers that an error names, at most."""


@dataclass(frozen=True, slots=True)
class Options:
    """`source`: the address of an exporter, or a file that `exporter.save` has written. `out`: ends in .png or .html.

    `quantity`: of the heatmap in a PNG. `moments`: layers whose mean and standard deviation a PNG shows. `recent`: instead of
    the whole run. `cacert`: to trust in addition to the system's.
    """

    source: str
    out: Path
    quantity: str = "norm"
    moments: Sequence[str] = ()
    recent: bool = False
    cacert: str | None = None


def run(options: Options) -> Path:
    """Draws and returns where. Raises `PlotError`."""
    saved = loaded(options.source, options.cacert)
    try:
        if options.out.suffix == ".html":
            options.out.write_text(page(saved), encoding="utf-8")
        else:
            _draw(saved, options)
    except OSError as error:
        raise PlotError(f"cannot write {options.out}: {error}") from None
    return options.out


def _draw(saved: Saved, options: Options) -> None:
    try:
        from torch_grad_exporter.cli import picture  # noqa: PLC0415 - matplotlib is optional
    except ImportError:
        raise PlotError("a PNG needs matplotlib; pip install 'torch-grad-exporter[plot]', or write a .html") from None
    _check_moments(saved, options.moments)
    picture.draw(saved, options.quantity, "recent" if options.recent else "whole", options.out, options.moments)


def _check_moments(saved: Saved, layers: Sequence[str]) -> None:
    if not layers:
        return
    if not has_moments(saved):
        raise PlotError(f"--moments {layers[0]}: this run has no means and deviations; it takes start_exporter(moments=True)")
    known = saved["layer"]
    for name in layers:
        if name not in known:
            raise PlotError(f"--moments {name}: no such layer; there is {', '.join(list(known)[:NAMED]) or 'none yet'}")


def page(saved: Saved) -> str:
    """The page with all of its files, and what it shows, in one text."""
    text = STYLE.sub(lambda m: f"<style>{_file(m[1])}</style>", _file(INDEX))
    # In JSON a character may be written by its number: so no layer's name can end the element.
    data = json.dumps(saved, separators=(",", ":")).replace("<", "\\u003c")
    first = f'<script type="application/json" id="saved">{data}</script>\n'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(CSP)}">\n'
    text = SCRIPT.sub(lambda m: f"<script>{_script(m[1])}</script>", text)
    return text.replace("<title>", f"{policy}<title>", 1).replace("<script>", f"{first}<script>", 1)


def _file(name: str) -> str:
    found = source(name)
    if found is None:
        raise PlotError(f"the package has lost its file {name}")
    return found.decode()


def _script(name: str) -> str:
    return _file(name).replace("</script", "<\\/script")
