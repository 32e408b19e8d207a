"""One rendering for all scrapers: how long it is handed out."""

from __future__ import annotations

from torch_grad_exporter.metrics.families import Family, Kind, Spec, scalar
from torch_grad_exporter.outputs.http.shared import SharedScrape
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

SCRAPES = Spec("scrapes", Kind.GAUGE, "Scrapes so far.")


def test_the_age_of_a_scrape_counts_from_its_end() -> None:
    """One that takes three seconds is handed out for a second afterwards, and not for longer."""
    now, scrapes = [100.0], [0]

    def scrape() -> list[Family]:
        now[0] += 3.0
        scrapes[0] += 1
        return [scalar(SCRAPES, scrapes[0])]

    shared = SharedScrape(scrape, Renderer({}), max_age=1.0, clock=lambda: now[0])
    bodies: list[bytes | BaseException] = []
    for later in (0.0, 0.0, 0.75, 0.25, 0.0):
        now[0] += later
        shared.ask(Format.TEXT, compressed=False, take=bodies.append)
    assert [bytes(body).split()[-1] for body in bodies if isinstance(body, bytes)] == [b"1.0", b"1.0", b"1.0", b"2.0", b"2.0"]
    assert scrapes == [2]
