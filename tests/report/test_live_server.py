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
from socketserver import ThreadingTCPServer
from typing import Any
from unittest import mock

import pytest

from pages import Elements
from refused import refused
from surefoot.config.paths import open_regular
from surefoot.tools.report import live_server
from surefoot.tools.report.live_server import create_server
from surefoot.tools.report.write import page_of
from surefoot.tracking import jsonl
from waiting import HANG_S
from written_runs import falling, train, written

TOKEN = "a-token"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("watched") / "run", falling(100))


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ThreadingTCPServer]:
    with create_server([run], token=TOKEN) as held:
        thread = threading.Thread(target=held.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield held
        held.shutdown()
        thread.join()


def answered(
    server: ThreadingTCPServer, path: str = f"/{TOKEN}/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=HANG_S)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_the_page_is_served_and_looks_for_a_newer_one(server: ThreadingTCPServer) -> None:
    status, headers, page = answered(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    scripts = [tag for tag, _ in Elements(page).elements if tag == "script"]
    assert scripts == ["script"]
    said = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert said is not None
    assert "connect-src &#39;self&#39;" in said[1]
    assert "unsafe-inline" not in headers["Content-Security-Policy"].partition("script-src")[2]


def test_only_the_page_is_served_and_only_by_a_name_of_this_machine(
    server: ThreadingTCPServer,
) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert answered(server, Host=f"localhost:{port}")[0] == 200
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
    ):
        assert answered(server, Host=host)[0] == 421
    page = f"/{TOKEN}/"
    for path in ("/", "/?", "*", f"/{TOKEN}", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", "/report.html"):
        assert answered(server, path)[0] == 404
    for file in ("config.toml", "../metrics.jsonl", "report.html"):
        assert answered(server, page + file)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert answered(server, method=method)[0] == 501


def test_the_head_of_the_page_is_that_of_the_page_without_the_page(
    server: ThreadingTCPServer,
) -> None:
    status, headers, page = answered(server, method="HEAD")
    whole = answered(server)
    assert (status, page) == (200, "")
    assert headers["ETag"] == whole[1]["ETag"]
    assert headers["Content-Length"] == whole[1]["Content-Length"]
    assert answered(server, "/config.toml", method="HEAD")[0] == 404


def test_a_page_is_made_anew_when_there_are_new_records_and_not_before(
    server: ThreadingTCPServer, run: Path
) -> None:
    _, headers, page = answered(server)
    status, same, nothing = answered(server, If_None_Match=headers["ETag"])
    assert (status, same["ETag"], nothing) == (304, headers["ETag"], "")
    assert "step 123" not in page
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 123, "loss": 1.5, "skipped": 0}\n')
    status, newer, page = answered(server, If_None_Match=headers["ETag"])
    assert (status, newer["ETag"] != headers["ETag"]) == (200, True)
    assert "step 123" in page


def test_a_newer_page_reads_only_what_is_new_and_equals_that_of_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", falling(3000))
    count = 0

    @contextmanager
    def counted(path: Path) -> Iterator[mock.Mock]:
        def counting(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
            def read_counted(size: int) -> bytes:
                nonlocal count
                count += len(chunk := read(size))
                return chunk

            return read_counted

        with open_regular(path) as file:
            yield mock.Mock(wraps=file, read=counting(file.read), readline=counting(file.readline))

    monkeypatch.setattr(jsonl, "open_regular", counted)
    server = create_server([run], token=TOKEN)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    answered(server)
    assert count >= (run / "metrics.jsonl").stat().st_size
    texts = [
        train(3001),
        {"kind": "sample", "step": 3001, "text": "a new sample"},
        {"kind": "event", "step": 3001, "event": "stopped"},
        {"kind": "resume", "step": 2900},
        train(2901),
    ]
    for text in texts:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(text) + "\n")
        count = 0
        _, _, newer = answered(server)
        assert count < 2000 or text["kind"] == "resume"  # supersedes records: all are read again
        with monkeypatch.context() as patch:
            patch.setattr(jsonl, "open_regular", open_regular)
            expected = page_of([run], script=live_server._SCRIPT, policy=live_server._POLICY)
        pages = [
            re.sub(r"\d\d:\d\d:\d\d", "", page) for page in (newer, expected)
        ]  # without the time of day
        assert pages[0] == pages[1]
    server.shutdown()
    server.server_close()


@contextmanager
def serving(find: Callable[[str], tuple[bytes, str]]) -> Iterator[Callable[[], str]]:
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
    with serving(lambda _: (page, '"tag"')) as leave:
        assert [leave() for _ in range(3)] == ["", "", ""]


def test_a_page_that_fails_is_one_line(run: Path) -> None:
    def fail(_: str) -> tuple[bytes, str]:
        raise ValueError("a damaged\x1b file\nin many lines")

    line = "note: the page could not be made: ValueError: a damaged\ufffd file\n"
    with serving(fail) as leave:
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
    problem: Exception, is_silent: bool, server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise problem
    except Exception:
        server.handle_error(None, ("127.0.0.1", 1))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if is_silent else 1)


def test_a_port_that_is_taken_is_refused(server: ThreadingTCPServer, run: Path) -> None:
    port = server.server_address[1]
    with refused("port-not-usable", value=port):
        create_server([run], port=port, token=TOKEN)
    with refused("port-not-usable", value=70_000):
        create_server([run], port=70_000, token=TOKEN)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_watching_with_130_and_says_so(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [train(1), train(2)], config="seed = 1")
    command = [
        sys.executable,
        "-c",
        "from surefoot.cli.main import main; main()",
        "report",
        str(run),
        "--watch",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    assert re.fullmatch(r"open http://127.0.0.1:\d+/[\w-]{22}/ .*Ctrl-C.*\n", said)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=HANG_S)
    assert (process.returncode, complaint) == (130, "\nserver stopped\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_a_directory_is_watched_and_its_address_differs_each_time(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a", [train(1), train(2)], config="seed = 1")
    command = [
        sys.executable,
        "-c",
        "from surefoot.cli.main import main; main()",
        "report",
        "--watch",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    tokens = set()
    for _ in range(2):
        process = subprocess.Popen(
            [*command, str(tmp_path / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        address = re.match(
            r"open http://127.0.0.1:(\d+)/([\w-]{22})/ on this machine;", process.stdout.readline()
        )
        assert address is not None
        tokens.add(address[2])
        for path, status in ((f"/{address[2]}/", 200), ("/", 404)):
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=HANG_S)
            connection.request("GET", path)
            assert connection.getresponse().status == status
            connection.close()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=HANG_S)
        assert (process.returncode, complaint) == (130, "\nserver stopped\n")
    assert len(tokens) == 2
