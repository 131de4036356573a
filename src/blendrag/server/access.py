"""Who may send a request, and how much: bearer keys, names of this machine, and the limits of a body.

A key file has one key a line. A line may end in ``write``: that key may also change documents. Empty lines
and lines that begin with ``#`` are skipped. Without keys everybody may ask and nobody may change documents.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendrag.errors import InvalidInputError
from blendrag.server.refusals import ClientGoneError, Refusal
from blendrag.wording import quoted, shortened

#: Seconds that a client may take to send a body.
BODY_TIMEOUT_S = 60.0
MAX_HEADER_BYTES = 64 * 1024
#: The request whose body is a file: its route reads it, as it comes. A browser asks
#: before it sends such a request to another site.
UPLOAD = "PUT", "/v1/documents"
#: Paths below this need a key.
GUARDED = "/v1"
#: Ends of names that no web site has, because the public DNS never holds them: RFC 6761 (localhost), RFC 6762
#: (local, which only machines of the same network answer for), RFC 8375 (home.arpa) and internal, which ICANN
#: reserved for private use. So no site of the internet can point such a name to 127.0.0.1.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_WRITE = "write"


@dataclass(frozen=True)
class Limits:
    """What one server takes."""

    max_requests: int = 256
    """Waiting and running at once; more are refused with 429."""
    max_body_bytes: int = 8 * 1024**2
    max_upload_bytes: int = 64 * 1024**2
    max_tokens: int | None = None
    """Longest answer that a request may ask for; ``None``: what fits the model's context."""


class Bearer(NamedTuple):
    """Who sent a request."""

    may_write: bool = False
    tenant: str | None = None
    """A digest of the key; the same after a restart. ``None`` without keys."""


@dataclass(frozen=True)
class ApiKeys:
    """Keys and whether each may write."""

    may_write: dict[bytes, bool] = field(default_factory=dict, repr=False)
    all_may_write: bool = False
    """Whether everybody may change documents if there are no keys."""

    @classmethod
    def parse(cls, text: str, where: str) -> ApiKeys:
        """The keys of a file's text. Raises :class:`InvalidInputError`, which names no key."""
        keys: dict[bytes, bool] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if words[1:] not in ([], [_WRITE]):
                raise InvalidInputError(
                    f"line {number} of {where} has {len(words)} words, expected one key, or a key and "
                    f"'{_WRITE}'"
                )
            keys[words[0].encode()] = len(words) > 1
        if not keys:
            raise InvalidInputError(
                f"{where} holds no key; write one a line, or leave out --api-key-file"
            )
        return cls(keys)

    def bearer(self, authorization: str | None) -> Bearer:
        """The bearer of this header. Raises :class:`Refusal` without a known key."""
        if not self.may_write:
            return Bearer(self.all_may_write)
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip(" \t").encode("latin-1")  # as it came over the wire
        found = [writes for key, writes in self.may_write.items() if hmac.compare_digest(key, sent)]
        if scheme.lower() != "bearer" or not found:
            wrong = "is not one of this server" if authorization else "is missing"
            raise Refusal(
                401,
                f"the API key {wrong}; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Bearer(found[0], hmac.digest(sent, b"tenant of blendrag serve", "sha256").hex())


def require_writer(request: Request) -> None:
    """Refuse a request whose key may not write."""
    if request.state.may_write:
        return
    if request.state.tenant is None:
        raise Refusal(
            403,
            "this server changes no documents; start it with --writable, or with --api-key-file and a line "
            f"that ends in '{_WRITE}'",
            code="read_only_server",
        )
    raise Refusal(
        403,
        "documents are changed only with a key whose line in the server's --api-key-file ends in "
        f"'{_WRITE}'; send such a key",
        code="read_only_key",
    )


def checked_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """Names for :func:`check_host`. Raises :class:`InvalidInputError`."""
    for name in given:
        if not _NAME.fullmatch(name.rstrip(".").lower()):
            raise InvalidInputError(
                f"--allow-host {quoted(name)} must be a name without scheme and port, such as "
                "box.example.org; for any name start the server with --api-key-file"
            )
    return tuple(name.rstrip(".").lower() for name in given)


def check_host(scope: Scope, host: str, allowed: Collection[str] = ()) -> None:
    """Refuse a request without a key that reached this machine by the name of a web site, unless the name is
    one of ``allowed``.

    A page of that site could have changed what its name stands for (DNS rebinding), and would read the store
    through the user's browser. Addresses and names without a dot cannot be changed in this way.
    """
    address, _ = scope.get("server") or ("", None)
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if (
        not is_loopback(address)
        or "." not in name
        or name.endswith(LOCAL_SUFFIXES)
        or name in allowed
    ):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Refusal(
            403,
            f"the host {quoted(name)} is a name that web pages can take; use localhost or the address, or "
            f"start the server with --allow-host {shortened(name)} or with --api-key-file",
            code="host_not_allowed",
        ) from None


def check_framing(scope: Scope, headers: Headers) -> None:
    """Refuse a request that a proxy before this server may read in another way (request smuggling).

    h11 (0.16) refuses the others: lengths that differ, chunks that are broken, more than one host.
    """
    wrong = ""
    if "transfer-encoding" in headers:
        if "content-length" in headers:
            wrong = "the request has a Content-Length and a Transfer-Encoding, expected one of them"
        elif scope["http_version"] == "1.0":
            wrong = "the request is HTTP/1.0 with a Transfer-Encoding, expected a Content-Length"
    if not scope["path"].startswith("/"):
        wrong = f"the target is {quoted(scope['path'])}, expected a path such as /v1/models"
    if wrong:  # what follows on this connection is anybody's guess
        raise Refusal(400, f"{wrong}; send it again", headers={"Connection": "close"})


def check_content_type(headers: Headers) -> None:
    """Refuse a body that is not called JSON.

    A browser sends a page's request to another site without asking that site only if it calls the body a
    form, a text or nothing: without this, any web page could make a server on its reader's machine work.
    FastAPI before 0.132 reads a body without a content type as JSON.
    """
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "")
    essence = kind.partition(";")[0].strip().lower()
    if essence != "application/json" and not re.fullmatch(r"application/[\w.-]+\+json", essence):
        said = f"content-type {shortened(kind)}" if kind else "no content-type"
        raise Refusal(
            415,
            f"{said}, expected application/json; send JSON with that header, or a file as {' '.join(UPLOAD)}",
        )


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class AccessControlMiddleware:
    """ASGI middleware: checks the host or the key before the body is read, and limits the body.

    A path means the same with a slash at its end, without a redirect to the host that the request names.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int, hosts: Collection[str] = ()
    ) -> None:
        """``hosts``: those of :func:`checked_hosts`."""
        self.app = app
        self.keys = keys
        self.max_body_bytes = max_body_bytes
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        path = scope["path"].rstrip("/") or "/"
        body: bytes | None = b""
        try:
            check_framing(scope, headers)
            self._check_headers(scope)
            if not self.keys.may_write:
                check_host(scope, headers.get("host", ""), self.hosts)
            if scope["path"].startswith(GUARDED):  # nothing else needs a body
                bearer = self.keys.bearer(headers.get("authorization"))
                scope.setdefault("state", {}).update(bearer._asdict())
                if (scope["method"], path) == UPLOAD:
                    body = None
                else:
                    check_content_type(headers)
                    length = headers.get("content-length", "0")
                    if length.isdecimal() and int(length) > self.max_body_bytes:
                        raise self._too_large()
                    body = await self._read(receive)
        except Refusal as refusal:
            return await refusal.response()(scope, receive, send)
        except ClientGoneError:
            return None

        scope = {**scope, "path": path}
        if body is None:
            return await self.app(scope, receive, send)
        sent = False

        async def receive_read() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, receive_read, send)

    def _check_headers(self, scope: Scope) -> None:
        """h11 limits only headers that come in several reads."""
        size_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if (
            size_bytes + len(scope.get("raw_path", b"")) + len(scope["query_string"])
            > MAX_HEADER_BYTES
        ):
            raise Refusal(
                400, f"the path and the headers have over {MAX_HEADER_BYTES:,} bytes; send fewer"
            )

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError(
                            "the connection was closed before the body was complete"
                        )
                    body += message.get("body", b"")
                    if len(body) > self.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Refusal(
                408, f"the body was not complete after {BODY_TIMEOUT_S:g} s; send it at once"
            ) from None

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"the body is larger than {self.max_body_bytes} bytes, the limit of this server (--max-body); "
            f"send less at once, or a file as {' '.join(UPLOAD)}",
        )
