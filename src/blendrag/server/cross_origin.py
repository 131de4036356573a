"""Pages of other sites (CORS): which origins may read answers, and what a browser is told before it asks.

Off by default. It is no access control: what a page may do depends on the key that it sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from blendrag.errors import InvalidInputError
from blendrag.server.refusals import Refusal
from blendrag.wording import quoted

ANY = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
#: Ports that a browser leaves out.
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_PRIVATE_NETWORK = "access-control-request-private-network"


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins as browsers write them. Raises :class:`InvalidInputError`."""
    return tuple(dict.fromkeys(map(_checked, given)))


def _checked(given: str) -> str:
    if given == ANY:
        return given
    match = _ORIGIN.fullmatch(given.lower().removesuffix("/"))
    if match is None:
        raise InvalidInputError(
            f"--cors-origin {quoted(given)} must be a scheme and a host, with a port if it has one, such as "
            "https://app.example or http://localhost:5173, or * for every site"
        )
    scheme, host, port = match.groups()
    is_default = port is None or port == _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{host}" + ("" if is_default else f":{port}")


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's, around the whole application, so that errors are readable, too. Browsers send no cookies;
    keys are in a header, which pages must know."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """What Starlette answers, as 204 without a body or an error object. A page of an allowed origin may
        ask a server of the browser's own machine or network."""
        headers = MutableHeaders(raw=list(request_headers.raw))
        is_private = _PRIVATE_NETWORK in headers
        del headers[_PRIVATE_NETWORK]  # Starlette before 0.51 ignores it, later ones refuse it
        response = super().preflight_response(headers)
        if response.status_code != 200:
            origin, method = headers["origin"], headers["access-control-request-method"]
            why = f"pages of {quoted(origin)} may not ask this server; start it with --cors-origin"
            if self.is_allowed_origin(origin):
                why = f"{quoted(method)} is no method of this server; use {', '.join(self.allow_methods)}"
            return Refusal(
                403, why, code="origin_not_allowed", headers={"Vary": "Origin"}
            ).response()
        kept = {
            name: value
            for name, value in response.headers.items()
            if not name.startswith("content-")
        }
        if is_private:
            kept["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=204, headers=kept)
