"""Requests to a server of pages on this machine, and what it answers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socketserver import ThreadingTCPServer

from waiting import HANG_S


@dataclass(frozen=True)
class Answer:
    """What a server answers to a request."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Client:
    """Sends requests to a server; a name such as If_None_Match is that of the header
    If-None-Match.
    """

    server: ThreadingTCPServer

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, body: str, **headers: str) -> Answer:
        return self.send("POST", path, body, **headers)

    def send(self, method: str, path: str, body: str | None = None, /, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        fields = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, body, fields)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return Answer(response.status, dict(response.getheaders()), text)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(server: ThreadingTCPServer) -> Iterator[Client]:
    """A server that answers until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Client(server)
    finally:
        server.shutdown()
        thread.join()
