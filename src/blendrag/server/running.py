"""The server's process: the socket, uvicorn, and what SIGTERM does."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from blendrag.errors import InvalidInputError
from blendrag.server.access import MAX_HEADER_BYTES
from blendrag.server.refusals import Refusal

#: Seconds that running requests may take after SIGTERM or Ctrl-C; then they are cancelled.
DRAIN_S = 30
#: Seconds that an idle connection stays open. Clients and proxies keep theirs for up to 60 s (httpx, and so
#: OpenAI's package, for 5 s); one that the server closes first loses the request that is just being sent.
KEEP_ALIVE_S = 75


class Connection(H11Protocol):
    """A connection that ends if no request arrives in time.

    uvicorn (0.54) waits for headers without limit, and closes nothing that a client does not read. Its other
    protocol, httptools, takes headers of any size.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, with an error object. A request whose body they were ends as if its
        client had left: its answer would have no place in the connection, and an error in the log."""
        refusal = Refusal(400, f"{msg.rstrip('.')}; send it in HTTP/1.1")
        response = refusal.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=refusal.status, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch(self) -> None:
        self._timer = self.loop.call_later(KEEP_ALIVE_S, self._end_if_still, self._state())

    def _state(self) -> tuple[object, bool, bool]:
        """The last request, whether it is over, and whether the connection is being closed."""
        cycle = self.cycle
        return cycle, cycle is None or cycle.response_complete, self.transport.is_closing()

    def _end_if_still(self, before: tuple[object, bool, bool]) -> None:
        _, is_over, is_closing = before
        if before == self._state():
            if is_closing:
                self.transport.abort()
                return
            if is_over:
                self.transport.close()
        self._watch()


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises :class:`InvalidInputError` if the address cannot be used.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        return bound
    except OSError as exc:
        bound.close()
        raise InvalidInputError(
            f"cannot listen on {host} port {port} ({exc.strerror or exc}); choose another --port or --host"
        ) from exc


def server_of(app: ASGIApp, verbose: bool = False) -> uvicorn.Server:
    """uvicorn with this project's settings."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            # without a configuration, errors go to stderr
            log_config=LOGGING_CONFIG if verbose else None,
            log_level="info" if verbose else "error",
            use_colors=False,  # the command line shows escape sequences instead of sending them
            access_log=verbose,
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )


def serve(app: ASGIApp, at: socket.socket, verbose: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests that were let in."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again after the drain; the engine is still to be closed then
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    server_of(app, verbose).run(sockets=[at])
