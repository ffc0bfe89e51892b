"""The page of a directory of runs: what a row shows, who gets the page, what is read for it; 3
seconds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import error_of
from pages import Elements
from served_pages import Client, serving
from surefoot.tools.report import directory_watch
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.live_server import create_directory_server
from surefoot.tools.report.watched_run import WatchedRun
from surefoot.tracking import jsonl
from surefoot.tracking.jsonl import line
from surefoot.tracking.run_directory import RunDirectory
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


def work_through(watch: DirectoryWatch) -> None:
    while watch.work():
        pass


def read_all(runs: Path) -> DirectoryWatch:
    """A page that has read all records."""
    watch = DirectoryWatch(runs)
    watch.look()
    work_through(watch)
    return watch


def text_of(watch: DirectoryWatch, *chosen: str) -> str:
    text, _ = watch.page(chosen, script="", policy="")
    return text


def tag_of(watch: DirectoryWatch) -> str:
    """What tells a page from an earlier one."""
    _, tag = watch.page([], script="", policy="")
    return tag


def run_named(watch: DirectoryWatch, name: str) -> WatchedRun:
    (run,) = [run for run in watch.runs.values() if run.name == name]
    return run


def row_of(watch: DirectoryWatch, name: str) -> dict[str, Any]:
    row = run_named(watch, name).row
    assert row is not None
    return row


def names(watch: DirectoryWatch) -> set[str]:
    return {run.name for run in watch.runs.values()}


def test_all_runs_are_there_with_their_states_the_newest_first(runs: Path) -> None:
    watch = read_all(runs)
    states = {run.name: run.state for run in watch.runs.values()}
    assert states == {"stopped": "stopped", "sweep/finished": "finished", "killed": "dead"}
    beginnings = [run.began for run in watch.runs.values()]
    assert beginnings == sorted(beginnings, reverse=True)

    page = text_of(watch)
    Elements(page)
    state_texts = [run.state.replace("dead", "not running") for run in watch.runs.values()]
    assert re.findall(r'<span class="state \w+"[^>]*>([^<]+)', page) == state_texts
    assert "data-ask" not in page  # there is nothing to ask of what is not running
    assert "<dd>200<small> of 200</small></dd>" in page


def test_a_run_that_is_locked_is_running_until_it_is_not(runs: Path) -> None:
    directory = RunDirectory(runs / "killed")
    directory.open()
    try:
        watch = read_all(runs)
        run = run_named(watch, "killed")
        assert run.state == "running"
        assert text_of(watch).count("data-ask=") == 2
    finally:
        directory.close()

    watch.look()
    assert run.state == "dead"
    work_through(watch)
    assert row_of(watch, "killed")["state"] == "dead"


def test_curves_are_drawn_of_the_runs_that_are_chosen(runs: Path) -> None:
    watch = read_all(runs)
    keys = [run_named(watch, name).key for name in ("killed", "stopped")]
    assert "<figure" not in text_of(watch)

    page = text_of(watch, *keys, "unknown")

    Elements(page)
    titles = re.findall(r"<figcaption><h3>([^<]*)", page)
    assert titles[:3] == ["Training loss, smoothed", "val/loss", "val/accuracy"]
    line_names = re.findall(r'class="t\d" checked/>.*?</svg>([^<]*)', page)
    assert line_names[:2] == ["killed", "stopped"]


def test_findings_are_those_of_diagnose_and_stay_in_the_cache(runs: Path) -> None:
    nan = float("nan")
    skipped = [train(step, nan, skipped=10, skipped_steps=[step]) for step in range(60, 100, 10)]
    end = {"kind": "event", "step": 90, "event": "diverged"}
    run_dir = written(runs / "bad", [*falling(50), *skipped, end], config=CONFIG)

    first = read_all(runs)
    from_cache = DirectoryWatch(runs)
    from_cache.look()

    for watch in (first, from_cache):
        finding, *_ = row_of(watch, "bad")["findings"]
        page = text_of(watch)
        assert finding["name"] == "diverged"
        assert finding["severity"] == "error"
        assert '<b class="error">diverged</b>' in page
        assert finding["causes"][0] in page
        assert finding["try"][0] in page
    assert {path.name for path in run_dir.iterdir()} == {"config.toml", "metrics.jsonl"}


def test_all_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    name = '"><script>alert(1)<'
    hostile = [
        {"kind": "eval", "step": 10, f"{HOSTILE[:60]}/loss": 1.0},
        {"kind": "event", "step": 9, "event": HOSTILE},
    ]
    written(tmp_path / "runs" / name, [*falling(100, **{HOSTILE: 3.0}), *hostile], config=CONFIG)
    watch = read_all(tmp_path / "runs")
    page = text_of(watch, run_named(watch, name).key)
    tags = {tag for tag, _ in Elements(page).elements}
    assert tags.isdisjoint({"script", "img"})
    assert "&lt;script&gt;" in page


def test_fifty_runs_are_shown_from_the_cache_without_reading_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(50):
        written(tmp_path / "runs" / f"run-{index}", falling(1000), config=CONFIG)
    first_page = text_of(read_all(tmp_path / "runs"))

    def refuse(path: Path) -> Any:
        pytest.fail(f"{path} was read")

    monkeypatch.setattr(jsonl, "open_regular", refuse)
    watch = DirectoryWatch(tmp_path / "runs")
    watch.look()

    page = text_of(watch)

    body, _, _ = page.partition("<footer>")
    first_body, _, _ = first_page.partition("<footer>")
    assert body == first_body
    assert len(page.encode()) < 200_000
    assert not watch.work()
    assert "<figure" in text_of(watch, next(iter(watch.runs)))


def test_a_page_has_another_tag_after_a_record_and_only_then(runs: Path) -> None:
    watch = read_all(runs)
    tag = tag_of(watch)
    assert tag_of(watch) == tag
    append_record(runs / "killed", train(160, 0.5))
    watch.look()
    work_through(watch)
    assert tag_of(watch) != tag


def append_record(run_dir: Path, record: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line(record) + "\n")


def test_a_running_run_goes_on_and_a_deleted_one_goes(runs: Path) -> None:
    watch = read_all(runs)
    append_record(runs / "killed", train(160, 0.5))
    for file in (runs / "stopped").iterdir():
        file.unlink()

    watch.look()
    work_through(watch)

    assert names(watch) == {"killed", "sweep/finished"}
    assert row_of(watch, "killed")["step"] == 160
    assert row_of(watch, "sweep/finished")["step"] == 200


def test_a_link_to_a_run_is_shown_and_a_link_to_a_directory_is_not_followed(
    runs: Path, tmp_path: Path
) -> None:
    outside = written(tmp_path / "elsewhere" / "run", falling(30), config=CONFIG)
    (runs / "link").symlink_to(outside)
    (runs / "others").symlink_to(outside.parent)
    (runs / "sweep" / "loop").symlink_to(runs)

    watch = read_all(runs)

    assert names(watch) == {"stopped", "sweep/finished", "killed", "link"}
    assert "<dd>30<small> of 200</small></dd>" in text_of(watch)
    assert {path.name for path in outside.iterdir()} == {"config.toml", "metrics.jsonl"}


def test_records_of_another_program_are_a_row_and_no_error(runs: Path) -> None:
    lines = [
        '{"kind": "train", "step": 3, "loss": "low", "grad_norm": [1]}',
        "no json",
        '{"kind": "event", "step": 4}',
    ]
    (runs / "strange").mkdir()
    (runs / "strange" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    watch = read_all(runs)
    Elements(text_of(watch, *watch.runs))
    assert row_of(watch, "strange")["step"] == 4


def test_a_run_that_cannot_be_read_is_named_with_its_file(runs: Path) -> None:
    (runs / "unreadable").mkdir()
    (runs / "unreadable" / "config.toml").write_text("= = =")
    (runs / "unreadable" / "metrics.jsonl").mkdir()
    watch = read_all(runs)
    page = text_of(watch, *watch.runs)
    Elements(page)
    assert "metrics.jsonl " in page


@pytest.fixture
def watch(runs: Path) -> DirectoryWatch:
    return read_all(runs)


@pytest.fixture
def client(watch: DirectoryWatch) -> Iterator[Client]:
    with create_directory_server(watch, token=TOKEN) as server, serving(server) as client:
        yield client


@pytest.fixture
def key(watch: DirectoryWatch) -> str:
    """What the page calls its newest run."""
    return next(iter(watch.runs))


PAGE = f"/{TOKEN}/"


def test_the_page_is_served_on_this_machine_alone_and_runs_its_own_script_alone(
    client: Client,
) -> None:
    address, _ = client.server.server_address
    assert address == "127.0.0.1"
    answer = client.get(PAGE)
    assert answer.status == 200
    assert len(Elements(answer.text).with_tag("script")) == 1
    _, _, scripts = answer.headers["Content-Security-Policy"].partition("script-src")
    assert scripts != ""
    assert "unsafe-inline" not in scripts
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_a_page_that_the_browser_has_is_not_sent_again(client: Client, key: str) -> None:
    tag = client.get(PAGE).headers["ETag"]
    assert client.get(PAGE, If_None_Match=tag).status == 304
    assert client.get(f"{PAGE}?run={key}", If_None_Match=tag).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?",
        f"/{TOKEN}",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}/save",
        f"/{TOKEN}/../",
    ],
)
def test_the_page_needs_the_token(path: str, client: Client) -> None:
    assert client.get(path).status == 404


@pytest.mark.parametrize(
    "host", ["elsewhere.example", "elsewhere.example:{port}", "127.0.0.1", "127.0.0.1:{next_port}"]
)
def test_the_page_needs_a_name_of_this_machine(host: str, client: Client) -> None:
    host = host.format(port=client.port, next_port=client.port + 1)
    assert client.get(PAGE, Host=host).status == 421


@pytest.fixture
def requests(watch: DirectoryWatch, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was requested with buttons: the key of a run, and what it is to do."""
    requests: list[tuple[str, str]] = []

    def request(key: str, name: str) -> str:
        requests.append((key, name))
        return "done"

    monkeypatch.setattr(watch, "request", request)
    return requests


def test_a_button_requests_something_of_its_run(
    client: Client, key: str, requests: list[tuple[str, str]]
) -> None:
    answer = client.post(f"{PAGE}save", key, Origin=client.origin)
    assert answer.status == 200
    assert answer.text == "done"
    assert client.post(f"{PAGE}stop", key, Origin=client.origin).status == 200
    assert requests == [(key, "save"), (key, "stop")]


def test_a_button_needs_the_origin_and_the_host_of_the_page(
    client: Client, key: str, requests: list[tuple[str, str]]
) -> None:
    others = ["http://elsewhere.example", "null", "https://127.0.0.1", f"{client.origin}.example"]
    assert client.post(f"{PAGE}save", key).status == 403  # no browser's page
    for origin in others:
        assert client.post(f"{PAGE}save", key, Origin=origin).status == 403
    answer = client.post(f"{PAGE}save", key, Origin=client.origin, Host="elsewhere.example")
    assert answer.status == 421
    assert requests == []


@pytest.mark.parametrize(
    "path",
    ["/save", "/wrong/save", PAGE, f"{PAGE}delete", f"{PAGE}save/", f"{PAGE}save?"],
)
def test_a_button_needs_the_token_and_a_request_that_there_is(
    path: str, client: Client, key: str, requests: list[tuple[str, str]]
) -> None:
    assert client.post(path, key, Origin=client.origin).status == 404
    assert requests == []


@pytest.mark.parametrize(("unknown", "status"), [("unknown", 404), ("x" * 200, 413)])
def test_a_button_needs_a_run_of_the_page(
    unknown: str, status: int, client: Client, requests: list[tuple[str, str]]
) -> None:
    assert client.post(f"{PAGE}save", unknown, Origin=client.origin).status == status
    assert requests == []


@pytest.mark.parametrize("request_of_button", ["stop", "half-rates"])
def test_a_request_for_a_run_that_nobody_trains_is_refused_and_says_so(
    watch: DirectoryWatch, client: Client, request_of_button: str
) -> None:
    key = run_named(watch, "killed").key
    answer = client.post(f"{PAGE}{request_of_button}", key, Origin=client.origin)
    assert answer.status == 409
    assert answer.text.endswith("[run-not-training]")
    sentence, *_ = answer.text.splitlines()
    assert sentence in client.get(PAGE).text


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("--watch . --out x.html", "writes no file"),
        ("killed --watch --alert true", "[option-missing]"),
        ("killed --alert true", "[option-missing]"),
        ("--watch absent", "no run"),
        ("--watch", "[argument-missing]"),
        (
            "--watch . --alert 'no-such-command --now'",
            "neither a web address nor a command that exists",
        ),
        ("--watch . --port 70000", "[port-not-usable]"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    typed: str,
    reason: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    assert reason in error_of(capsys, "report", *shlex.split(typed))


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
    first, second = lines
    assert "failure 0" in first
    assert "failure 1" in second
