"""A page in a real browser: no complaint on its console, no request to anywhere, and something to
be seen; 4 seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from pages import titles
from surefoot.tools.report import live_server
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.write import page_of, write_page
from surefoot.tracking.jsonl import line
from waiting import HANG_S
from written_runs import falling, layers, train, written

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
OWN = {
    "clients2.google.com",
    "update.googleapis.com",
    "accounts.google.com",
    "www.google.com",
}  # asked by the browser itself
OWN |= {
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
]
OPTIONS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]
OPTIONS += [
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--v=0",
    "--window-size=900,1500",
]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


class Seen:
    """What a browser made of a page: its document, its console, the hosts it asked, and a
    picture.
    """

    def __init__(self, page: str, place: Path, *more: str) -> None:
        assert BROWSER is not None
        own = [f"--user-data-dir={place / 'profile'}", f"--log-net-log={place / 'net.json'}"]
        own += [
            f"--screenshot={place / 'seen.png'}",
            "--dump-dom",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        ended = subprocess.run(
            [BROWSER, *OPTIONS, *own, *more, page],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        self.document = ended.stdout
        self.console = re.findall(r":CONSOLE.*?\] (.*)", ended.stderr)
        asked = re.findall(r'"url":("(?:[^"\\]|\\.)*")', (place / "net.json").read_text())
        addresses = [urlsplit(json.loads(text)) for text in asked]
        self.hosts = {
            found.hostname for found in addresses if found.scheme not in ("file", "data")
        } - OWN
        with Image.open(place / "seen.png") as picture:
            self.picture = np.asarray(picture.convert("RGB"))


def test_a_page_is_seen_without_complaint_and_asks_nobody(tmp_path: Path) -> None:
    told = falling(2000, temperature=0.5) + [layers(step) for step in range(2000, 2100)]
    told += [{"kind": "sample", "step": 2000, "text": "<script>console.error('ran')</script>"}]
    page = write_page(written(tmp_path / "run", told))
    seen = Seen(page.as_uri(), tmp_path)
    assert seen.console == []
    assert seen.hosts == set()
    assert titles(seen.document)[1:4] == ["Loss", "Metrics", "Learning rate and gradient"]
    assert (
        seen.document.count('<svg class="plot"')
        == page.read_text().count('<svg class="plot"')
        == 10
    )
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
    seen = Seen(page.as_uri(), tmp_path)
    assert any("bad" in line for line in seen.console)
    assert seen.hosts == {"one.example", "two.example"}


@pytest.mark.slow
def test_a_page_that_is_watched_exchanges_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", falling(100))

    def growing(places: Sequence[Path], **asked: str) -> str:
        """Each time it is made, there is one more record."""
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(train(int(1000 + 10 * len(made)))) + "\n")
        made.append(page_of(places, **asked))
        return made[-1]

    made: list[str] = []
    monkeypatch.setattr(live_server, "page_of", growing)
    with live_server.create_server([run], token="token") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            seen = Seen(
                f"http://127.0.0.1:{server.server_address[1]}/token/",
                tmp_path,
                "--virtual-time-budget=12000",
            )
        finally:
            server.shutdown()
            thread.join()
    assert seen.console == []
    assert seen.hosts == {"127.0.0.1"}
    assert len(made) >= 4  # the first, that of the browser, and two polls
    assert re.findall(r"ended at step ([\d,]+)", seen.document)[0] in [
        f"{1000 + 10 * place:,}" for place in range(2, len(made))
    ]


@pytest.mark.slow
def test_the_page_of_a_directory_draws_what_its_address_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "<script>console.error(1)<"):
        written(tmp_path / "runs" / name, falling(100))
    watch = DirectoryWatch(tmp_path / "runs")
    watch.start()
    with live_server.create_directory_server(watch, token="token") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address = (
                f"http://127.0.0.1:{server.server_address[1]}/token/?run={next(iter(watch.runs))}"
            )
            seen = Seen(address, tmp_path, "--virtual-time-budget=12000")
        finally:
            server.shutdown()
            thread.join()
            watch.close()
    assert seen.console == []
    assert seen.hosts == {"127.0.0.1"}
    assert seen.document.count("data-run=") == 2
    assert titles(seen.document) == ["Curves"]
