"""Every link of the documentation resolves, in the repository and in the built site."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.browser import chromium, visit
from tests.support.tools import REPOSITORY

PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    REPOSITORY / "examples" / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
IDENTIFIER = re.compile(r"<a id=\"([^\"]+)\">")

LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser fetches, each with the attribute that has the address."""

# Links in the repository, as GitHub shows it


def slug(heading: str) -> str:
    """Return the anchor of a heading as GitHub makes it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page; the second of equal headings gets `-1`."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(IDENTIFIER.findall(text))
    for heading in HEADING.findall(text):
        name = slug(heading)
        found.add(next(one for one in (name, *(f"{name}-{number}" for number in range(1, 99))) if one not in found))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_of_pages_resolve(page: Path) -> None:
    """Each relative link of a page names an existing file and heading."""
    prose = CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in LINK.findall(prose):
        address = urlsplit(link)
        if not address.scheme:
            target = (page.parent / address.path).resolve() if address.path else page
            assert target.is_file(), f"{link}: no such file"
            assert not address.fragment or address.fragment in anchors(target), f"{link}: no such heading"


# The site


@dataclass
class Built(HTMLParser):
    """A page of the site: its anchors, links and loaded files."""

    identifiers: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what an element refers to."""
        given = dict(attrs)
        self.identifiers.update(value for key in ("id", "name") if (value := given.get(key)))
        if tag == "a" and (address := given.get("href")):
            self.links.append(address)
        if tag in LOADING and given.get("rel") != "canonical" and (address := given.get(LOADING[tag])):
            self.loaded.append(address)


def build(site: Path) -> None:
    """Build the site into a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site],
        cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def parsed(page: Path) -> Built:
    """Return a parsed page of the site."""
    built = Built()
    built.feed(page.read_text(encoding="utf-8"))
    return built


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder and yield its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.full
@pytest.mark.server
def test_the_site_is_whole_and_self_contained(tmp_path: Path) -> None:
    """The site builds without a warning, all its links resolve, a browser asks no other server, and names stay whole."""
    build(tmp_path)
    pages = {page.relative_to(tmp_path).as_posix(): parsed(page) for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    assert len(pages) == len(PAGES)
    for name, page in pages.items():
        for address in (*page.links, *page.loaded):
            target = urlsplit(address)
            if target.scheme:
                continue
            path = os.path.normpath((Path(name).parent / unquote(target.path)) if target.path else name)
            assert (tmp_path / path).exists(), f"{name}: {address}: no such file"
            if path.endswith(".html") and target.fragment:
                assert unquote(target.fragment) in pages[path].identifiers, f"{name}: {address}: no such anchor"
        assert not [address for address in page.loaded if urlsplit(address).netloc], name
    with served(tmp_path) as url, chromium() as browser, visit(browser) as seen:
        for name in ("index.html", "runbook.html", "api.html"):
            seen.page.goto(f"{url}/{name}", wait_until="networkidle")
        seen.page.set_viewport_size({"width": 390, "height": 844})
        seen.page.goto(f"{url}/metrics.html", wait_until="networkidle")
        names = seen.page.locator("td:first-child code")
        assert set(names.evaluate_all("all => all.map(name => name.getClientRects().length)")) == {1}  # whole, in one line
        assert seen.origins() == {url}
        assert seen.complaints == []
