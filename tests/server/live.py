"""A real server in a thread of this process, on a free port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from blendrag.engine import BlendEngine
from blendrag.server.access import ApiKeys
from blendrag.server.app import create_app
from blendrag.server.running import bound_socket, server_of
from blendrag.server.service import Limits, Service

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Live:
    service: Service
    port: int
    services: tuple[Service, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def engine(self) -> BlendEngine:
        return self.service.engine

    def client(self, **more: object) -> httpx.Client:
        # loading certificates, which plain HTTP does without, takes longer than most requests
        return httpx.Client(base_url=self.url, timeout=300, verify=False, **more)  # type: ignore[arg-type]

    def settled(self) -> None:
        """Wait until no request waits or runs."""
        until(lambda: not self.engine.scheduler.requests)


@contextmanager
def live(
    engine: BlendEngine,
    limits: Limits | None = None,
    keys: str = "",
    beside: Mapping[str, BlendEngine] | None = None,
    **more: Any,
) -> Iterator[Live]:
    """Serve ``engine``, whose model is opened; ``keys`` is the text of a key file, ``beside`` further engines
    by name, ``more`` further fields of the service."""
    engine.open()
    known = ApiKeys.parse(keys, "keys") if keys else ApiKeys()
    service = Service(engine, limits or Limits(), known, **more)
    others = [service.beside(other, name) for name, other in (beside or {}).items()]
    at = bound_socket("127.0.0.1", 0)
    server = server_of(create_app(service, *others))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]}, daemon=True)
    port = at.getsockname()[1]
    thread.start()
    try:
        until(lambda: server.started)
        yield Live(service, port, (service, *others))
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive()


def begin(server: Live, stream: bool = True) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def until(is_so, seconds: float = 120.0) -> None:
    """Wait until ``is_so()``."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
