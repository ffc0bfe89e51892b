"""A server for the page of a running run, for browsers on this machine. The page is rendered again after new records.

Other paths, methods and host names are refused, so that a foreign website cannot read the page by DNS rebinding.
"""

import hashlib
import os
import threading
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer

from surefoot.errors import ConfigError
from surefoot.report.page import POLICY
from surefoot.report.write import page_of
from surefoot.tracking.run_reader import is_running

HERE = "127.0.0.1"
EVERY_S = 3.0
_PATIENCE_S = 10.0  # timeout of a request
_LAST_PORT = 65_535
_SHOWN = {"metrics.jsonl", "config.toml", "environment.json", "panels.json", "crash", "checkpoints"}
# the script replaces the body without a reload: scroll position, toggles, focus and open details stay
_SCRIPT = """
(function () {
  var tag = "";
  function key(one) {
    var figure = one.closest("figure"), label = one.closest("label,details").textContent;
    return (figure ? figure.id : "") + "\\n" + label.trim().split("\\n")[0];
  }
  function exchange(body) {
    var before = new Map(), all = "input,details", focus = document.activeElement;
    focus = focus.matches("input") ? key(focus) : "";
    document.querySelectorAll(all).forEach(function (one) {
      before.set(key(one), one);
    });
    document.body.replaceChildren.apply(document.body, body.childNodes);
    document.querySelectorAll(all).forEach(function (one) {
      var old = before.get(key(one));
      if (old && old.matches("input")) one.checked = old.checked;
      if (old && old.matches("details")) one.open = old.open;
      if (key(one) === focus) one.focus({preventScroll: true});
    });
  }
  function look() {
    fetch("/", {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"}).then(function (answer) {
      tag = answer.headers.get("ETag") || "";
      return answer.status === 200 ? answer.text() : "";
    }).then(function (text) {
      if (text) {
        var page = new DOMParser().parseFromString(text, "text/html");
        document.documentElement.dataset.state = page.documentElement.dataset.state;
        document.title = page.title;
        exchange(page.body);
      }
      setTimeout(look, EVERY_MS);
    }).catch(function () {
      setTimeout(look, EVERY_MS);
    });
  }
  setTimeout(look, EVERY_MS);
})();
""".replace("EVERY_MS", str(round(1000 * EVERY_S)))
_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = f"{POLICY}; script-src 'sha256-{_HASH}'; connect-src 'self'"


def create_server(paths: Sequence[Path], *, port: int = 0) -> ThreadingTCPServer:
    """Create a server of the page on the loopback interface. The caller calls `serve_forever`. Port 0 selects a free port."""
    if port > _LAST_PORT:
        raise ConfigError(
            f"--port {port} does not exist: the highest port is {_LAST_PORT}\n  choose another --port, or omit --port for a free one"
        )
    lock = threading.Lock()

    @lru_cache(maxsize=1)
    def page_at(signatures: tuple[object, ...]) -> tuple[bytes, str]:
        tag = hashlib.sha256(repr(signatures).encode()).hexdigest()[:16]
        return page_of(paths, script=_SCRIPT, policy=_POLICY).encode(), f'"{tag}"'

    def now() -> tuple[bytes, str]:
        with lock:
            return page_at(tuple(_signature(path) for path in paths))

    now()

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S
        server_version, sys_version = "surefoot", ""

        def do_GET(self) -> None:
            if self.headers.get("Host") not in allowed:
                self.send_error(421, "Misdirected Request")
            elif self.path != "/":
                self.send_error(404)
            else:
                page, tag = now()
                same = self.headers.get("If-None-Match") == tag
                self.send_response(304 if same else 200)
                for name, value in _HEADERS:
                    self.send_header(name, value)
                self.send_header("ETag", tag)
                self.send_header("Content-Length", "0" if same else str(len(page)))
                self.end_headers()
                if not same:
                    self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log, because the only client is a person on this machine."""

    server = ThreadingTCPServer((HERE, port), Handler, bind_and_activate=False)
    server.daemon_threads, server.allow_reuse_address = True, True
    try:
        server.server_bind()
        server.server_activate()
    except OSError as problem:
        server.server_close()
        raise ConfigError(
            f"cannot serve on {HERE}:{port}: {problem.strerror or problem}\n  choose another --port, or omit --port for a free one"
        ) from problem
    allowed = {f"{name}:{server.server_address[1]}" for name in (HERE, "localhost")}
    return server


_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", f"{_POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


def _signature(path: Path) -> tuple[object, ...]:
    with suppress(OSError):  # a file may be deleted meanwhile
        stats = {entry.name: entry.stat() for entry in os.scandir(path) if entry.name in _SHOWN}
        return is_running(path), *sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    return ()
