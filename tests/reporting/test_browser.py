"""A page in a real browser: no complaint on its console, no request to anywhere, and something to be seen; 4 seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from pages import titles
from surefoot.reporting.writing import report
from written_runs import falling, layers, written

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
OWN = {
    "clients2.google.com",
    "update.googleapis.com",
    "accounts.google.com",
    "www.google.com",
}  # asked by the browser itself
OWN |= {"android.clients.google.com", "content-autofill.googleapis.com", "optimizationguide-pa.googleapis.com"}
OPTIONS = ["--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"]
OPTIONS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]
OPTIONS += ["--host-resolver-rules=MAP * ~NOTFOUND", "--v=0", "--window-size=900,1500"]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


class Seen:
    """What a browser made of a file: its document, its console, the hosts it asked, and a picture."""

    def __init__(self, page: Path, place: Path) -> None:
        assert BROWSER is not None
        own = [f"--user-data-dir={place / 'profile'}", f"--log-net-log={place / 'net.json'}"]
        own += [f"--screenshot={place / 'seen.png'}", "--dump-dom", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        ended = subprocess.run(
            [BROWSER, *OPTIONS, *own, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        self.document = ended.stdout
        self.console = re.findall(r":CONSOLE.*?\] (.*)", ended.stderr)
        asked = re.findall(r'"url":("(?:[^"\\]|\\.)*")', (place / "net.json").read_text())
        addresses = [urlsplit(json.loads(text)) for text in asked]
        self.hosts = {found.hostname for found in addresses if found.scheme not in ("file", "data")} - OWN
        with Image.open(place / "seen.png") as picture:
            self.picture = np.asarray(picture.convert("RGB"))


def test_a_page_is_seen_without_complaint_and_asks_nobody(tmp_path: Path) -> None:
    told = falling(2000, temperature=0.5) + [layers(step) for step in range(2000, 2100)]
    told += [{"kind": "sample", "step": 2000, "text": "<script>console.error('ran')</script>"}]
    page = report(written(tmp_path / "run", told))
    seen = Seen(page, tmp_path)
    assert seen.console == []
    assert seen.hosts == set()
    assert titles(seen.document)[1:4] == ["Loss", "Scores", "Learning rate and gradient"]
    assert seen.document.count('<svg class="plot"') == page.read_text().count('<svg class="plot"') == 10
    assert seen.picture.shape == (1500, 900, 3)
    blue = (np.abs(seen.picture.astype(int) - (0, 0x72, 0xB2)) < 8).all(axis=2)
    wide = np.flatnonzero(blue[300:].any(axis=0))
    assert wide[-1] - wide[0] > 600  # the training loss goes across


@pytest.mark.slow
def test_what_a_browser_complains_of_and_asks_for_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<script>console.error("bad"); fetch("https://one.example/x")</script><img src="http://two.example/a.png">'
    )
    seen = Seen(page, tmp_path)
    assert any("bad" in line for line in seen.console)
    assert seen.hosts == {"one.example", "two.example"}
