"""A real Chromium for tests: pages in it, what they complain of and what they ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.support.tools import PATIENCE, find

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
    # A request to anywhere else fails, and so is seen, on machines with a network, too.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip

MOMENTS = """
window.seen = { violations: [], pictures: null };
document.addEventListener("securitypolicyviolation", (event) => seen.violations.push(event.violatedDirective));
(function look() {
  const drawn = document.documentElement?.dataset.drawn;
  const lines = ["norm", "loss", "step-time"].every((name) => document.querySelector(`#chart-${name} .plot:not(.empty) canvas`));
  if (drawn && lines) seen.pictures = performance.now();
  else requestAnimationFrame(look);
})();
"""
"""Put into each page before its own scripts: notes what breaks its policy, and the millisecond at which all pictures are there."""

PICTURES = os.environ.get("SCREENSHOTS")
"""A directory for pictures of what the tests see."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of the system, or what `make tools` has brought, with a profile of its own. None is ever downloaded here."""
    os.environ.setdefault("PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find("chromium"), args=[*FLAGS], headless=True)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page, and all its lines on the console and its requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request))  # noqa: PLW0108 - it takes no built-in

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def show(self, url: str) -> Page:
        """Opens an address, and waits until the heatmap is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-drawn]")
        return self.page

    def origins(self) -> set[str]:
        """The servers of its requests. Pictures within the page itself, as `data:`, need none."""
        asked = [urlsplit(request.url) for request in self.requests if not request.url.startswith("data:")]
        return {f"{one.scheme}://{one.netloc.rpartition('@')[2]}" for one in asked}

    def violations(self) -> list[str]:
        """What broke the page's Content-Security-Policy."""
        found: list[str] = self.page.evaluate("seen.violations")
        return found

    def picture(self, name: str) -> None:
        """Leaves a picture of the whole page, if one is wanted."""
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


@contextmanager
def visit(browser: Browser, *, width: int = 1400, height: int = 1000, dark: bool = True, **options: Any) -> Iterator[Visit]:  # noqa: ANN401
    """A window of its own, without cookies or cache; `options`: further ones of Playwright's `new_context`."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    context.set_default_timeout(1000 * PATIENCE)
    context.add_init_script(MOMENTS)
    try:
        yield Visit(context.new_page())
    finally:
        context.close()
