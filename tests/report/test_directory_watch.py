"""The page of a directory of runs: what a row shows, who gets the page, what is read for it; 3
seconds.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

import pytest

from pages import Elements
from surefoot.cli.main import main
from surefoot.tools.report import directory_watch
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.live_server import create_directory_server
from surefoot.tracking import jsonl
from surefoot.tracking.jsonl import line
from surefoot.tracking.run_directory import RunDirectory
from waiting import HANG_S
from written_runs import HOSTILE, falling, train, written

TOKEN = "a-token"
CONFIG = 'length = "200 steps"\n[program]\nkind = "script"\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    ended = [*falling(100), {"kind": "event", "step": 100, "event": "stopped by Ctrl-C"}]
    written(tmp_path / "runs" / "stopped", ended, config=CONFIG)
    written(tmp_path / "runs" / "sweep" / "finished", falling(200), config=CONFIG)
    written(tmp_path / "runs" / "killed", falling(50), config=CONFIG)
    (tmp_path / "runs" / "no-run" / "deep" / "er").mkdir(parents=True)
    return tmp_path / "runs"


def looked(runs: Path) -> DirectoryWatch:
    """A page that has read all records."""
    watch = DirectoryWatch(runs)
    watch.look()
    while watch.work():
        pass
    return watch


def text_of(watch: DirectoryWatch, *chosen: str) -> str:
    return watch.page(chosen, script="", policy="")[0]


def key_of(watch: DirectoryWatch, name: str) -> str:
    return next(run.key for run in watch.runs.values() if run.name == name)


def test_all_runs_are_there_with_their_states_the_newest_first(runs: Path) -> None:
    watch = looked(runs)
    states = {run.name: run.state for run in watch.runs.values()}
    assert states == {"stopped": "stopped", "sweep/finished": "finished", "killed": "dead"}
    began = [run.began for run in watch.runs.values()]
    assert began == sorted(began, reverse=True)
    page = text_of(watch)
    Elements(page)
    said = [run.state.replace("dead", "not running") for run in watch.runs.values()]
    assert re.findall(r'<span class="state \w+"[^>]*>([^<]+)', page) == said
    assert "data-ask" not in page  # nothing to ask of what is not running
    assert "<dd>200<small> of 200</small></dd>" in page


def test_a_run_that_is_locked_is_running_until_it_is_not(runs: Path) -> None:
    directory = RunDirectory(runs / "killed")
    directory.open()
    try:
        watch = looked(runs)
        run = watch.runs[key_of(watch, "killed")]
        assert run.state == "running"
        assert text_of(watch).count("data-ask=") == 2
    finally:
        directory.close()
    watch.look()
    assert run.state == "dead"
    while watch.work():
        pass
    assert run.row is not None
    assert run.row["state"] == "dead"


def test_curves_are_drawn_of_the_runs_that_are_chosen(runs: Path) -> None:
    watch = looked(runs)
    keys = [key_of(watch, name) for name in ("killed", "stopped")]
    assert "<figure" not in text_of(watch)
    page = text_of(watch, *keys, "unknown")
    Elements(page)
    titles = re.findall(r"<figcaption><h3>([^<]*)", page)
    assert titles[:3] == ["Training loss, smoothed", "val/loss", "val/accuracy"]
    assert re.findall(r'class="t\d" checked/>.*?</svg>([^<]*)', page)[:2] == ["killed", "stopped"]


def test_findings_are_those_of_diagnose_and_stay_in_the_cache(runs: Path) -> None:
    bad = [
        train(step, float("nan"), skipped=10, skipped_steps=[step]) for step in range(60, 100, 10)
    ]
    path = written(
        runs / "bad",
        [*falling(50), *bad, {"kind": "event", "step": 90, "event": "diverged"}],
        config=CONFIG,
    )
    watch = looked(runs)
    again = DirectoryWatch(runs)
    again.look()
    for one in (watch, again):
        row = one.runs[key_of(one, "bad")].row
        assert row is not None
        assert (row["findings"][0]["name"], row["findings"][0]["severity"]) == ("diverged", "error")
        assert '<b class="error">diverged</b>' in text_of(one)
        assert all(
            text in text_of(one)
            for text in (row["findings"][0]["causes"][0], row["findings"][0]["try"][0])
        )
    assert sorted(each.name for each in path.iterdir()) == ["config.toml", "metrics.jsonl"]


def test_all_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    name = '"><script>alert(1)<'
    hostile = [
        {"kind": "eval", "step": 10, f"{HOSTILE[:60]}/loss": 1.0},
        {"kind": "event", "step": 9, "event": HOSTILE},
    ]
    written(tmp_path / "runs" / name, [*falling(100, **{HOSTILE: 3.0}), *hostile], config=CONFIG)
    watch = looked(tmp_path / "runs")
    page = text_of(watch, key_of(watch, name))
    assert not {"script", "img"} & {tag for tag, _ in Elements(page).elements}
    assert "&lt;script&gt;" in page


def test_fifty_runs_are_shown_from_the_cache_without_reading_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(50):
        written(tmp_path / "runs" / f"run-{index}", falling(1000), config=CONFIG)
    first = text_of(looked(tmp_path / "runs"))

    def refuse(path: Path) -> Any:
        pytest.fail(f"{path} was read")

    monkeypatch.setattr(jsonl, "open_regular", refuse)
    watch = DirectoryWatch(tmp_path / "runs")
    watch.look()
    page = text_of(watch)
    assert page.partition("<footer>")[0] == first.partition("<footer>")[0]
    assert len(page.encode()) < 200_000
    assert not watch.work()
    assert "<figure" in text_of(watch, next(iter(watch.runs)))


def test_a_running_run_goes_on_and_a_deleted_one_goes(runs: Path) -> None:
    watch = looked(runs)
    before = watch.page([], script="", policy="")[1]
    assert watch.page([], script="", policy="")[1] == before
    with (runs / "killed" / "metrics.jsonl").open("a") as file:
        file.write(line(train(160, 0.5)) + "\n")
    for file in (runs / "stopped").iterdir():
        file.unlink()
    watch.look()
    while watch.work():
        pass
    assert {run.name: run.row and run.row["step"] for run in watch.runs.values()} == {
        "killed": 160,
        "sweep/finished": 200,
    }
    assert watch.page([], script="", policy="")[1] != before


def test_a_link_to_a_run_is_shown_and_a_link_to_a_directory_is_not_followed(
    runs: Path, tmp_path: Path
) -> None:
    outside = written(tmp_path / "elsewhere" / "run", falling(30), config=CONFIG)
    for name, target in (("link", outside), ("others", outside.parent), ("sweep/loop", runs)):
        (runs / name).symlink_to(target)
    watch = looked(runs)
    assert {run.name for run in watch.runs.values()} == {
        "stopped",
        "sweep/finished",
        "killed",
        "link",
    }
    assert "<dd>30<small> of 200</small></dd>" in text_of(watch)
    assert sorted(each.name for each in outside.iterdir()) == ["config.toml", "metrics.jsonl"]


def test_records_of_another_program_are_a_row_and_no_error(runs: Path) -> None:
    strange = '{"kind": "train", "step": 3, "loss": "low", "grad_norm": [1]}\nno json\n{"kind": "event", "step": 4}\n'
    (runs / "strange").mkdir()
    (runs / "strange" / "metrics.jsonl").write_text(strange)
    (runs / "unreadable").mkdir()
    (runs / "unreadable" / "config.toml").write_text("= = =")
    (runs / "unreadable" / "metrics.jsonl").mkdir()
    watch = looked(runs)
    page = text_of(watch, *watch.runs)
    Elements(page)
    assert "metrics.jsonl " in page
    row = watch.runs[key_of(watch, "strange")].row
    assert row is not None
    assert row["step"] == 4


@dataclass
class Asked:
    server: ThreadingTCPServer
    watch: DirectoryWatch

    def __call__(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.server.server_address[1], timeout=HANG_S
        )
        connection.request(
            method, path, body, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        answer = connection.getresponse()
        told = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return told

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def asked(runs: Path) -> Iterator[Asked]:
    watch = looked(runs)
    with create_directory_server(watch, token=TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Asked(server, watch)
        server.shutdown()
        thread.join()


def test_the_page_needs_the_token_and_a_name_of_this_machine(asked: Asked) -> None:
    port = asked.server.server_address[1]
    assert asked.server.server_address[0] == "127.0.0.1"
    status, headers, page = asked(f"/{TOKEN}/")
    assert status == 200
    assert [tag for tag, _ in Elements(page).elements if tag == "script"] == ["script"]
    assert "unsafe-inline" not in headers["Content-Security-Policy"].partition("script-src")[2]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert asked(f"/{TOKEN}/", If_None_Match=headers["ETag"])[0] == 304
    assert (
        asked(f"/{TOKEN}/?run={next(iter(asked.watch.runs))}", If_None_Match=headers["ETag"])[0]
        == 200
    )
    for path in (
        "/",
        "/?",
        f"/{TOKEN}",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}/save",
        f"/{TOKEN}/../",
    ):
        assert asked(path)[0] == 404
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
    ):
        assert asked(f"/{TOKEN}/", Host=host)[0] == 421


def test_a_button_needs_token_host_and_origin(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed: list[tuple[str, str]] = []
    monkeypatch.setattr(
        asked.watch, "request", lambda key, request: pressed.append((key, request)) or "done"
    )
    key = next(iter(asked.watch.runs))
    origin = {"Origin": asked.origin}
    assert asked(f"/{TOKEN}/save", "POST", key)[0] == 403  # no browser's page
    for other in (
        "http://elsewhere.example",
        "null",
        "https://127.0.0.1",
        f"{asked.origin}.example",
    ):
        assert asked(f"/{TOKEN}/save", "POST", key, Origin=other)[0] == 403
    assert asked(f"/{TOKEN}/save", "POST", key, **origin, Host="elsewhere.example")[0] == 421
    for path in ("/save", "/wrong/save", f"/{TOKEN}/", f"/{TOKEN}/delete", f"/{TOKEN}/save/"):
        assert asked(path, "POST", key, **origin)[0] == 404
    assert asked(f"/{TOKEN}/save", "POST", "unknown", **origin)[0] == 404
    assert asked(f"/{TOKEN}/save", "POST", "x" * 200, **origin)[0] == 413
    assert pressed == []
    assert asked(f"/{TOKEN}/save", "POST", key, **origin)[::2] == (200, "done")
    assert asked(f"/{TOKEN}/stop", "POST", key, **origin)[0] == 200
    assert pressed == [(key, "save"), (key, "stop")]
    assert asked(f"/{TOKEN}/save?", "POST", key, **origin)[0] == 404


def test_a_request_for_a_run_that_nobody_trains_is_refused_and_says_so(asked: Asked) -> None:
    key = key_of(asked.watch, "killed")
    status, _, text = asked(f"/{TOKEN}/stop", "POST", key, Origin=asked.origin)
    assert status == 409
    assert text.endswith("[run-not-training]")
    assert text.splitlines()[0] in asked(f"/{TOKEN}/")[2]


def test_what_cannot_be_watched_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (["--watch", str(runs), "--out", "x.html"], "writes no file"),
        (
            [str(runs / "killed"), "--watch", "--alert", "true"],
            "[option-missing]",
        ),
        ([str(runs / "killed"), "--alert", "true"], "[option-missing]"),
        (["--watch", str(runs / "absent")], "no run"),
        (["--watch"], "[argument-missing]"),
        (
            ["--watch", str(runs), "--alert", "no-such-command --now"],
            "neither a web address nor a command that exists",
        ),
        (["--watch", str(runs), "--port", "70000"], "[port-not-usable]"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["report", *words])
        assert end.value.code == 2
        assert why in capsys.readouterr().err


def test_a_directory_that_cannot_be_read_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    watch = DirectoryWatch(tmp_path, say=lines.append)
    looks = 0

    def fail() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            watch.over.set()
        raise OSError(5, f"failure {looks // 4}")

    monkeypatch.setattr(watch, "look", fail)
    monkeypatch.setattr(directory_watch, "EVERY_S", 0.0)
    watch._follow()
    assert len(lines) == 2
    assert "failure 0" in lines[0]
    assert "failure 1" in lines[1]
