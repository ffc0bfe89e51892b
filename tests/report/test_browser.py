"""A page in a real browser: no complaint on its console, no request to anywhere, and something to
be seen; 4 seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from pages import titles
from served_pages import serving
from surefoot.tools.report import live_server
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.write import page_of, write_page
from surefoot.tracking.jsonl import line
from waiting import HANG_S
from written_runs import falling, layers, train, written


def find_browser() -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


BROWSER = find_browser()
ASKED_BY_THE_BROWSER_ITSELF = {
    "clients2.google.com",
    "update.googleapis.com",
    "accounts.google.com",
    "www.google.com",
    "android.clients.google.com",
    "content-autofill.googleapis.com",
    "optimizationguide-pa.googleapis.com",
}
OPTIONS = [
    "--headless",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--v=0",
    "--window-size=900,1500",
    "--dump-dom",
]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


class PageInBrowser:
    """What a browser made of a page: its document, its console, the hosts it asked, and a
    picture.
    """

    def __init__(self, page: str, place: Path, *more: str) -> None:
        assert BROWSER is not None
        options = [
            *OPTIONS,
            f"--user-data-dir={place / 'profile'}",
            f"--log-net-log={place / 'net.json'}",
            f"--screenshot={place / 'seen.png'}",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        process = subprocess.run(
            [BROWSER, *options, *more, page],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        self.document = process.stdout
        self.console = re.findall(r":CONSOLE.*?\] (.*)", process.stderr)
        texts = re.findall(r'"url":("(?:[^"\\]|\\.)*")', (place / "net.json").read_text())
        addresses = [urlsplit(json.loads(text)) for text in texts]
        remote = [address for address in addresses if address.scheme not in ("file", "data")]
        self.hosts = {address.hostname for address in remote} - ASKED_BY_THE_BROWSER_ITSELF
        with Image.open(place / "seen.png") as picture:
            self.picture = np.asarray(picture.convert("RGB"))


def test_a_page_is_seen_without_complaint_and_asks_nobody(tmp_path: Path) -> None:
    records = falling(2000, temperature=0.5)
    records += [layers(step) for step in range(2000, 2100)]
    records += [{"kind": "sample", "step": 2000, "text": "<script>console.error('ran')</script>"}]
    page = write_page(written(tmp_path / "run", records))

    seen = PageInBrowser(page.as_uri(), tmp_path)
    assert seen.console == []
    assert seen.hosts == set()
    assert titles(seen.document)[1:4] == ["Loss", "Metrics", "Learning rate and gradient"]
    plot = '<svg class="plot"'
    assert seen.document.count(plot) == page.read_text().count(plot) == 10
    assert seen.picture.shape == (1500, 900, 3)
    is_blue = (np.abs(seen.picture.astype(int) - (0, 0x72, 0xB2)) < 8).all(axis=2)
    blue_columns = np.flatnonzero(is_blue[300:].any(axis=0))
    assert blue_columns[-1] - blue_columns[0] > 600  # the training loss goes across


@pytest.mark.slow
def test_what_a_browser_complains_of_and_asks_for_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<script>console.error("bad"); fetch("https://one.example/x")</script><img src="http://two.example/a.png">'
    )
    seen = PageInBrowser(page.as_uri(), tmp_path)
    assert any("bad" in line for line in seen.console)
    assert seen.hosts == {"one.example", "two.example"}


@pytest.mark.slow
def test_a_page_that_is_watched_exchanges_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", falling(100))

    pages: list[str] = []

    def append_record_and_write(places: Sequence[Path], **settings: str) -> str:
        """Each page has one more record."""
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(train(1000 + 10 * len(pages))) + "\n")
        pages.append(page_of(places, **settings))
        return pages[-1]

    monkeypatch.setattr(live_server, "page_of", append_record_and_write)
    with live_server.create_server([run], token="token") as server, serving(server) as client:
        address = f"{client.origin}/token/"
        seen = PageInBrowser(address, tmp_path, "--virtual-time-budget=12000")
    assert seen.console == []
    assert seen.hosts == {"127.0.0.1"}
    assert len(pages) >= 4  # the first, that of the browser, and two polls
    step, *_ = re.findall(r"ended at step ([\d,]+)", seen.document)
    assert step in [f"{1000 + 10 * place:,}" for place in range(2, len(pages))]


@pytest.mark.slow
def test_the_page_of_a_directory_draws_what_its_address_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "<script>console.error(1)<"):
        written(tmp_path / "runs" / name, falling(100))
    watch = DirectoryWatch(tmp_path / "runs")
    watch.start()
    server = live_server.create_directory_server(watch, token="token")
    try:
        with server, serving(server) as client:
            address = f"{client.origin}/token/?run={next(iter(watch.runs))}"
            seen = PageInBrowser(address, tmp_path, "--virtual-time-budget=12000")
    finally:
        watch.close()
    assert seen.console == []
    assert seen.hosts == {"127.0.0.1"}
    assert seen.document.count("data-run=") == 2
    assert titles(seen.document) == ["Curves"]
