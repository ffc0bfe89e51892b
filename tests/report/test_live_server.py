"""The served page: to whom, of what, when it changes; and how `surefoot report --watch` ends; 2
seconds.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from pages import Elements
from refused import refused
from served_pages import Client, serving
from surefoot.config.paths import open_regular
from surefoot.tools.report import live_server
from surefoot.tools.report.live_server import create_server
from surefoot.tools.report.write import page_of
from surefoot.tracking import jsonl
from waiting import HANG_S
from written_runs import falling, train, written

TOKEN = "a-token"
PAGE = f"/{TOKEN}/"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("watched") / "run", falling(100))


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Client]:
    with create_server([run], token=TOKEN) as server, serving(server) as client:
        yield client


def test_the_page_is_served_and_looks_for_a_newer_one(client: Client) -> None:
    answer = client.get(PAGE)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert len(Elements(answer.text).with_tag("script")) == 1
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', answer.text)
    assert policy is not None
    assert "connect-src &#39;self&#39;" in policy[1]
    _, _, scripts = answer.headers["Content-Security-Policy"].partition("script-src")
    assert scripts != ""
    assert "unsafe-inline" not in scripts


def test_the_page_is_served_by_a_name_of_this_machine_alone(client: Client) -> None:
    address, port = client.server.server_address
    assert address == "127.0.0.1"
    assert client.get(PAGE, Host=f"localhost:{port}").status == 200
    others = [
        "elsewhere.example",
        f"elsewhere.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
    ]
    for host in others:
        assert client.get(PAGE, Host=host).status == 421


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?",
        "*",
        f"/{TOKEN}",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        "/report.html",
        f"{PAGE}config.toml",
        f"{PAGE}../metrics.jsonl",
        f"{PAGE}report.html",
    ],
)
def test_nothing_but_the_page_is_served(path: str, client: Client) -> None:
    assert client.get(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_a_page_is_read_alone(method: str, client: Client) -> None:
    assert client.send(method, PAGE).status == 501


def test_the_head_of_the_page_is_that_of_the_page_without_the_page(client: Client) -> None:
    head = client.send("HEAD", PAGE)
    page = client.get(PAGE)
    assert head.status == 200
    assert head.text == ""
    assert head.headers["ETag"] == page.headers["ETag"]
    assert head.headers["Content-Length"] == page.headers["Content-Length"]
    assert client.send("HEAD", "/config.toml").status == 404


def test_a_page_is_made_anew_when_there_are_new_records_and_not_before(
    client: Client, run: Path
) -> None:
    first = client.get(PAGE)
    tag = first.headers["ETag"]
    unchanged = client.get(PAGE, If_None_Match=tag)
    assert unchanged.status == 304
    assert unchanged.headers["ETag"] == tag
    assert unchanged.text == ""
    assert "step 123" not in first.text

    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 123, "loss": 1.5, "skipped": 0}\n')

    newer = client.get(PAGE, If_None_Match=tag)
    assert newer.status == 200
    assert newer.headers["ETag"] != tag
    assert "step 123" in newer.text


class ByteCount:
    """Opens files, and counts the bytes that are read of them."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def open(self, path: Path) -> Iterator[mock.Mock]:
        with open_regular(path) as file:
            read = self._count(file.read)
            readline = self._count(file.readline)
            yield mock.Mock(wraps=file, read=read, readline=readline)

    def _count(self, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def read_and_count(size: int) -> bytes:
            content = read(size)
            self.bytes += len(content)
            return content

        return read_and_count


def without_time_of_day(page: str) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "", page)


def test_a_newer_page_reads_only_what_is_new_and_equals_that_of_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", falling(3000))
    count = ByteCount()
    monkeypatch.setattr(jsonl, "open_regular", count.open)
    new_records = [
        train(3001),
        {"kind": "sample", "step": 3001, "text": "a new sample"},
        {"kind": "event", "step": 3001, "event": "stopped"},
        {"kind": "resume", "step": 2900},
        train(2901),
    ]
    with create_server([run], token=TOKEN) as server, serving(server) as client:
        client.get(PAGE)
        assert count.bytes >= (run / "metrics.jsonl").stat().st_size
        for record in new_records:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            count.bytes = 0
            page = client.get(PAGE).text
            if record["kind"] != "resume":  # it supersedes records: all are read again
                assert count.bytes < 2000
            with monkeypatch.context() as patch:
                patch.setattr(jsonl, "open_regular", open_regular)
                expected = page_of([run], script=live_server._SCRIPT, policy=live_server._POLICY)
            assert without_time_of_day(page) == without_time_of_day(expected)


@contextmanager
def leaving_server(find: Callable[[str], tuple[bytes, str]]) -> Iterator[Callable[[], str]]:
    """A server of pages by `find`; the value asks for the page and leaves while it is sent, and
    returns what the terminal shows once the server has seen that.
    """
    with live_server._server(find, port=0, token=TOKEN) as server:
        is_seen = threading.Event()
        terminal = io.StringIO()
        handle_error = server.handle_error

        def handle(request: object, client_address: object) -> None:
            with redirect_stderr(terminal):
                handle_error(request, client_address)
            is_seen.set()

        def leave() -> str:
            is_seen.clear()
            host = "127.0.0.1", int(server.server_address[1])
            with socket.create_connection(host, timeout=HANG_S) as client:
                # closing sends a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                name = f"{host[0]}:{host[1]}"
                client.sendall(f"GET /{TOKEN}/ HTTP/1.0\r\nHost: {name}\r\n\r\n".encode())
                client.recv(10)
            assert is_seen.wait(HANG_S)
            return terminal.getvalue()

        with mock.patch.object(server, "handle_error", handle):
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield leave
            server.shutdown()
            thread.join()


def test_a_browser_that_leaves_is_no_news() -> None:
    page = bytes(50_000_000)  # more than the system takes while nobody reads
    with leaving_server(lambda _: (page, '"tag"')) as leave:
        assert [leave() for _ in range(3)] == ["", "", ""]


def test_a_page_that_fails_is_one_line(run: Path) -> None:
    def fail(_: str) -> tuple[bytes, str]:
        raise ValueError("a damaged\x1b file\nin many lines")

    line = "note: the page could not be made: ValueError: a damaged\ufffd file\n"
    with leaving_server(fail) as leave:
        assert [leave() for _ in range(3)] == [line, line, line]


@pytest.mark.parametrize(
    ("problem", "is_silent"),
    [
        (BrokenPipeError(), True),
        (ConnectionResetError(), True),
        (ConnectionAbortedError(), True),
        (TimeoutError(), True),
        (OSError(28, "No space left on device"), False),
        (KeyError("run"), False),
    ],
    ids=repr,
)
def test_only_errors_of_the_connection_are_silent(
    problem: Exception, is_silent: bool, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    server: Any = client.server
    try:
        raise problem
    except Exception:
        server.handle_error(None, ("127.0.0.1", 1))
    line_count = 0 if is_silent else 1
    assert len(capsys.readouterr().err.splitlines()) == line_count


def test_a_port_that_is_taken_is_refused(client: Client, run: Path) -> None:
    with refused("port-not-usable", value=client.port):
        create_server([run], port=client.port, token=TOKEN)


def test_a_port_that_there_is_not_is_refused(run: Path) -> None:
    with refused("port-not-usable", value=70_000):
        create_server([run], port=70_000, token=TOKEN)


@contextmanager
def watching(*arguments: str, **variables: str) -> Iterator[str]:
    """`surefoot report --watch` in a process of its own, and the line that it prints. It ends with
    Ctrl-C, and says so.
    """
    command = [sys.executable, "-c", "from surefoot.cli.main import main; main()", "report"]
    process = subprocess.Popen(
        [*command, *arguments, "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    assert process.stdout is not None
    yield process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert errors == "\nserver stopped\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_watching_with_130_and_says_so(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [train(1), train(2)], config="seed = 1")
    with watching(str(run)) as line:
        assert re.fullmatch(r"open http://127.0.0.1:\d+/[\w-]{22}/ .*Ctrl-C.*\n", line)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_a_directory_is_watched_and_its_address_differs_each_time(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a", [train(1), train(2)], config="seed = 1")
    tokens = set()
    for _ in range(2):
        with watching(str(tmp_path / "runs"), XDG_CACHE_HOME=str(tmp_path / "cache")) as line:
            address = re.match(r"open (http://127.0.0.1:\d+)/([\w-]{22})/ on this machine;", line)
            assert address is not None
            origin, token = address.groups()
            tokens.add(token)
            assert status_of(f"{origin}/{token}/") == 200
            assert status_of(f"{origin}/") == 404
    assert len(tokens) == 2


def status_of(address: str) -> int:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.netloc, timeout=HANG_S)
    connection.request("GET", url.path)
    status = connection.getresponse().status
    connection.close()
    return status
