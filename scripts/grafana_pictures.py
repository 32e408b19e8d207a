"""`python -m scripts.grafana_pictures http://localhost:3000 training=my-run`: take pictures of dashboards in a running Grafana.

For each dashboard a picture of its first screen goes to docs/dashboards/, in the light theme, with the chosen run; a name in front
(`first-screen:training=my-run`) is that of the file, and a height behind (`layers=my-run@1700`) shows more of it. The Grafana of
dashboards/compose.yaml will do. Which runs there are, and what is wrong with them, is up to who takes the pictures.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser

from dashboards.generate.reading import dashboards
from tests.support.browser import chromium

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "dashboards"
WIDTH, HEIGHT = 1440, 900
QUIET = "document.querySelectorAll('[aria-label=\"Panel loading bar\"]').length === 0"
REQUEST = re.compile(r"(?:(?P<name>[\w-]+):)?(?P<board>\w+)(?:=(?P<run>[^@]+))?(?:@(?P<height>\d+))?")


def taken(browser: Browser, address: str, height: int, at: float | None) -> bytes:
    """Return the picture of a page whose panels are loaded. `at`: the Unix time that the browser believes it is."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
    if at is not None:
        page.clock.install(time=at)
    page.goto(address, wait_until="networkidle")
    page.wait_for_function(QUIET)
    page.wait_for_load_state("networkidle")
    picture = page.screenshot()
    page.close()
    return picture


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.grafana_pictures", description=__doc__)
    parser.add_argument("grafana", help="the address of Grafana")
    parser.add_argument("picture", nargs="+", type=REQUEST.fullmatch, help="[name:]dashboard[=run][@height]")
    parser.add_argument("--at", type=float, help="the Unix time of the pictures (default: now)")
    given = parser.parse_args()
    with chromium() as browser:
        for picture in given.picture:
            board = picture["board"]
            query = {"theme": "light", "kiosk": "1"} | ({"var-run": picture["run"]} if picture["run"] else {})
            address = f"{given.grafana}/d/{dashboards()[f'{board}.json']['uid']}?{urlencode(query)}"
            image = Image.open(io.BytesIO(taken(browser, address, int(picture["height"] or HEIGHT), given.at)))
            path = FOLDER / f"{picture['name'] or board}.png"
            image.convert("RGB").save(path, optimize=True)
            print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
