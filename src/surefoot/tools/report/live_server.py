"""A server for the page of running runs or of a directory of runs, for browsers on this machine.

Its addresses begin with a token, which only the person at the terminal knows. Other paths, methods
and host names are refused, so that a foreign website cannot read the page by DNS rebinding. The
page of a directory has buttons: a POST must name this server as its origin.
"""

import hashlib
import os
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import lru_cache
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs

from surefoot.errors import ConfigError, Setting, SurefootError, first_line, visible
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.followed import FollowedRun
from surefoot.tools.report.page import POLICY
from surefoot.tools.report.run_signals import Request
from surefoot.tools.report.write import page_of
from surefoot.tracking.run_reader import is_running

HERE = "127.0.0.1"
EVERY_S = 3.0
_PATIENCE_S = 10.0  # timeout of a request
_MOST_POSTED = 100  # bytes
_REQUESTS: dict[str, Request] = {"save": "save", "stop": "stop"}  # by the last part of the path
_HALF_RATES = "half-rates"
_SHOWN = {"metrics.jsonl", "config.toml", "environment.json", "panels.json", "crash", "checkpoints"}
_SCRIPT = (
    (resources.files("surefoot.tools.report") / "live.js")
    .read_text(encoding="utf-8")
    .replace("EVERY_MS", str(round(1000 * EVERY_S)))
)
_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = f"{POLICY}; script-src 'sha256-{_HASH}'; connect-src 'self'"


Find = Callable[[str], tuple[bytes, str]]
"""From the query of an address to the page and its tag."""
Act = Callable[[str, str], tuple[int, str]]
"""From the path behind the token and body of a POST to the status and text of the answer."""


class PageServer(ThreadingTCPServer):
    """A server whose failed requests are a line on the terminal, once each. A browser that leaves
    is no failure.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler, bind_and_activate=False)
        self.reported: set[str] = set()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        problem = sys.exception()
        if problem is None or isinstance(problem, ConnectionError | TimeoutError):
            return
        text = f"{type(problem).__name__}: {first_line(problem)}"
        if text not in self.reported:
            self.reported.add(text)
            print(visible(f"note: the page could not be made: {text}"), file=sys.stderr)


def create_server(paths: Sequence[Path], *, port: int = 0, token: str) -> PageServer:
    """Create a server of the page on the loopback interface. The caller calls `serve_forever`. Port
    0 selects a free port.
    """
    lock = threading.Lock()
    followed = {path: FollowedRun(path) for path in paths}

    @lru_cache(maxsize=1)
    def page_at(signatures: tuple[object, ...]) -> tuple[bytes, str]:
        page = page_of(paths, script=_SCRIPT, policy=_POLICY, followed=followed)
        return page.encode(), _tag(signatures)

    def find(_query: str) -> tuple[bytes, str]:
        with lock:
            return page_at(tuple(_signature(path) for path in paths))

    find("")
    return _server(find, port=port, token=token)


def create_directory_server(watch: DirectoryWatch, *, port: int = 0, token: str) -> PageServer:
    """Create a server of the page of a directory."""

    def find(query: str) -> tuple[bytes, str]:
        text, differs = watch.page(parse_qs(query).get("run", []), script=_SCRIPT, policy=_POLICY)
        return text.encode(), _tag(differs)

    def act(path: str, key: str) -> tuple[int, str]:
        request = _REQUESTS.get(path)
        if (request is None and path != _HALF_RATES) or key not in watch.runs:
            return 404, "no such run or request"
        try:
            if request is None:
                return 200, watch.request_half_rates(key)
            return 200, watch.request(key, request)
        except SurefootError as problem:
            return 409, str(problem)

    find("")  # loads the templates
    return _server(find, act, port=port, token=token)


def _server(find: Find, act: Act | None = None, *, port: int, token: str) -> PageServer:
    def rest_of(path: str) -> str | None:
        prefix, slash, rest = path.removeprefix("/").partition("/")
        is_known = compare_digest(prefix.encode(errors="replace"), token.encode())
        return rest if is_known and slash else None

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S
        server_version = "surefoot"
        sys_version = ""

        def do_GET(self) -> None:
            if self.headers.get("Host") not in allowed:
                self.send_error(421, "Misdirected Request")
                return
            path, _, query = self.path.partition("?")
            if rest_of(path) != "":
                self.send_error(404)
                return
            page, tag = find(query)
            if self.headers.get("If-None-Match") == tag:
                self._answer(304, b"", tag)
            else:
                self._answer(200, page, tag)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length", "")
            if act is None:
                self.send_error(501)
            elif self.headers.get("Host") not in allowed:
                self.send_error(421, "Misdirected Request")
            elif self.headers.get("Origin", "").removeprefix("http://") not in allowed:
                # browsers name the origin of each POST
                self.send_error(403, "a page of another origin")
            elif not size.isdecimal() or int(size) > _MOST_POSTED:
                self.send_error(413)
            else:
                rest = rest_of(self.path) or ""
                status, text = act(rest, self.rfile.read(int(size)).decode(errors="replace"))
                self._answer(status, text.encode(), "", kind="text/plain; charset=utf-8")

        def _answer(
            self, status: int, content: bytes, tag: str, *, kind: str = "text/html; charset=utf-8"
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            for name, text in _HEADERS:
                self.send_header(name, text)
            if tag:
                self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log, because the only client is a person on this machine."""

    server = PageServer((HERE, port), Handler)
    try:
        server.server_bind()
        server.server_activate()
    except (OSError, OverflowError) as problem:  # OverflowError: no such port
        server.server_close()
        raise ConfigError(
            "port-not-usable",
            problem=f"cannot serve on {HERE}:{port}: {getattr(problem, 'strerror', problem)}",
            remedy=("another", Setting("port"), "or none, for a free one"),
            setting="port",
            value=port,
        ) from problem
    allowed = {f"{name}:{server.server_address[1]}" for name in (HERE, "localhost")}
    return server


def _tag(differs: object) -> str:
    return f'"{hashlib.sha256(repr(differs).encode()).hexdigest()[:16]}"'


_HEADERS = (
    (
        "Content-Security-Policy",
        f"{_POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


def _signature(path: Path) -> tuple[object, ...]:
    """Return a value that differs if the page of a run does."""
    files = []
    try:
        for entry in os.scandir(path):
            if entry.name in _SHOWN:
                status = entry.stat()
                files.append((entry.name, status.st_size, status.st_mtime_ns))
    except OSError:  # a file may be deleted meanwhile
        return ()
    return is_running(path), *sorted(files)
