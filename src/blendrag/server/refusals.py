"""From an exception to a status and OpenAI's error object.

::

    {"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from blendrag.config import EngineOptions
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    InvalidInputError,
    InvalidOptionError,
    RequestTimeout,
    SchemaError,
    StoreFullError,
    UnsupportedModelError,
    is_out_of_memory,
)
from blendrag.option import did_you_mean, near_names
from blendrag.server.bodies import UNSUPPORTED, BlendOptions, ChatBody, CompletionBody
from blendrag.wording import SHOWN_CHARS, printable, printable_line, shortened

log = logging.getLogger(__name__)

#: Names of the engine's options in a body.
OPTION_FIELDS = {
    "max_new_tokens": "max_tokens",
    "filter": "filters",
    "logprobs": "top_logprobs",
    **{name: f"blendrag.{name}" for name in BlendOptions.model_fields},
}
#: What an unknown path is answered with.
PATHS = (
    "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /v1/documents, /v1/ingest, "
    "/v1/uploads, /health and /metrics"
)
#: Status of a client that has gone, as nginx writes it to its log; nobody receives it.
CLIENT_GONE = 499


#: How pydantic begins what it says.
_PYDANTIC = re.compile("^(Input should be|Value error,) ")


class Refusal(BlendragError):
    """A request that is answered with an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def fields(self) -> dict[str, Any]:
        attributes = {"type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": {"message": printable(str(self)), **attributes}}

    def response(self) -> Response:
        return Response(
            json.dumps(self.fields), self.status, self.headers, media_type="application/json"
        )


def wrong_field(name: str, what: str) -> Refusal:
    """The refusal of a field of the body: ``what`` is wrong with it, and what to send."""
    return Refusal(400, f"{name} {what}", param=name)


def over_limit(name: str, what: str) -> Refusal:
    """The refusal of a field that an engine takes, and that is too much for this server."""
    return Refusal(400, f"{name} {what}", param=name, code="server_limit")


class ClientGoneError(BlendragError):
    """The client closed the connection, or reads no more of it."""


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


#: Status and field of errors, the first that fits.
_STATUS: tuple[tuple[type[BlendragError], int, str | None], ...] = (
    (SchemaError, 400, "messages"),
    (InvalidInputError, 400, None),
    (UnsupportedModelError, 400, "blendrag.mode"),
    (RequestTimeout, 504, None),
    (StoreFullError, 507, None),
    (BlendragError, 503, None),  # the store, the model or the system, not the request
)


def refusal_of(error: BaseException) -> Refusal:
    """What a client is told about ``error``."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextOverflowError):
        message = (
            f"this model's context is {error.context_tokens} tokens; the prompt has {error.prompt_tokens}, "
            "which leaves no room for an answer; shorten it or retrieve fewer chunks (blendrag.top_k)"
        )
        return Refusal(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, InvalidOptionError):
        name = OPTION_FIELDS.get(error.name, error.name)
        return Refusal(400, str(error.called(name)), param=name)
    for kind, status, param in _STATUS:
        if isinstance(error, kind):
            return Refusal(status, str(error), param=param)
    if is_out_of_memory(error):
        return Refusal(503, "out of memory; send a shorter prompt or fewer requests at once")
    return Refusal(500, "internal error; the log of the server has its traceback")


def install_refusals(app: FastAPI) -> None:
    """Answer every exception with an error object."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            return of_http(request, error).response()
        if isinstance(error, RequestValidationError):
            return of_body(error).response()
        refusal = refusal_of(error)
        if not isinstance(error, BlendragError):
            # uvicorn (0.54) logs its traceback and closes the connection without telling the client
            refusal.headers["Connection"] = "close"
        return refusal.response()

    for kind in (HTTPException, RequestValidationError, BlendragError, Exception):
        app.add_exception_handler(kind, refuse)


def of_http(request: Request, error: HTTPException) -> Refusal:
    """Unknown paths, wrong methods, and bodies that cannot be read."""
    status, path = error.status_code, request.url.path
    message = str(error.detail)
    if status == 404:
        message = f"there is nothing at {shortened(path)}; the server has {PATHS}"
    elif status == 405:
        taken = sorted({name for route in request.app.routes for name in _methods(route, request)})
        message = f"{shortened(request.method)} is not allowed at {shortened(path)}; use {', '.join(taken)}"
        error.headers = {"Allow": ", ".join(taken)}
        if "access-control-request-method" in request.headers:
            message += "; for pages of other sites start the server with --cors-origin"
    elif status == 400:
        message = "the body cannot be read as JSON in UTF-8; send one JSON object"
    return Refusal(status, message, headers=error.headers)


def _methods(route: BaseRoute, request: Request) -> set[str]:
    """The methods of a route if the path of a request is its path."""
    is_same = route.matches(request.scope)[0] is not Match.NONE
    return getattr(route, "methods", None) or set() if is_same else set()


def of_body(error: RequestValidationError) -> Refusal:
    """One field that is wrong, and what it should be."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return Refusal(
            400,
            f"the body is not JSON: {reason} at character {first['loc'][-1]}; send one JSON object",
        )
    if first["loc"][0] == "query":
        name = str(first["loc"][-1])
        return wrong_field(name, f"is missing in the query; add it, as in ?{name}=…")
    if not isinstance(error.body, Mapping):
        return Refusal(400, "the body is not a JSON object; send one")
    # where several types are allowed, the one that fits best has its error deepest
    found = [(each, *_place(error.body, each)) for each in errors]
    long = [each for each in found if each[0]["type"] == "too_long"]
    first, place, value = max(long or found, key=lambda each: len(each[1]))
    param = _spelled(place)
    if first["type"] == "option":
        return wrong_field(param, first["ctx"]["wrong"])
    if first["type"] == "missing":
        return wrong_field(param, "is missing; add it")
    if first["type"] == "extra_forbidden" and param in UNSUPPORTED:
        said = (
            f"{param} is {_json(first['input'])}, which this server does not support; leave it out"
        )
        return Refusal(400, said, param=param)
    if first["type"] == "extra_forbidden" and place[-1] in EngineOptions.__annotations__:
        return wrong_field(
            param,
            "is an option of the server, not of a request; set it where the server is started",
        )
    if first["type"] == "extra_forbidden":
        meant = did_you_mean(_near_fields(error.body, place), "leave it out")
        return wrong_field(param, f"is not a field of this request; {meant}")
    if first["type"] == "too_long":
        most = first["ctx"]["max_length"]
        return wrong_field(param, f"has {len(value)} elements, expected at most {most}; send fewer")
    expected = [str(each["msg"]) for each, where, _ in found if where == place]
    joined = " or ".join(dict.fromkeys(_PYDANTIC.sub("", text) for text in expected))
    return wrong_field(param, f"is {_json(value)}, expected {joined}")


def _near_fields(body: Mapping[str, Any], place: Sequence[Any]) -> list[str]:
    """Fields of a chat or a completion that an unknown one may stand for: misspelled, an option under its
    name in Python, or inside of ``blendrag`` instead of beside it."""
    kind = ChatBody if "messages" in body else CompletionBody if "prompt" in body else None
    if kind is None or not (len(place) == 1 or place[0] == "blendrag"):
        return []
    own = {name: name for name in (each.alias or n for n, each in kind.model_fields.items())}
    fields = own | OPTION_FIELDS if place[0] == "blendrag" else OPTION_FIELDS | own
    name = str(place[-1])
    return [fields[name]] if name in fields else [fields[n] for n in near_names([name], fields)]


def _json(value: Any) -> str:
    """The beginning of a value's JSON; the rest is not written."""
    text, encoder = "", json.JSONEncoder(ensure_ascii=False)
    if isinstance(value, str):
        value = value[:SHOWN_CHARS]
    for piece in encoder.iterencode(value):
        text += piece[:SHOWN_CHARS]
        if len(text) > SHOWN_CHARS:
            break
    return shortened(text)


def _place(body: Any, error: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Where in ``body`` an error of pydantic is, without the names of types in its location, and the value
    there."""
    place: tuple[Any, ...] = ()
    value: Any = body
    is_named = error["type"] in ("missing", "extra_forbidden")  # its name comes last
    for part in error["loc"][1 : -1 if is_named else None]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        place = (*place, part)
    if is_named:
        return (*place, error["loc"][-1]), None
    return place, value


def _spelled(place: Sequence[Any]) -> str:
    """``("messages", 0, "role")`` → ``messages[0].role``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return printable_line(shortened(text.removeprefix(".")))
