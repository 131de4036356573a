"""Pages of other sites: an option, preflights, and errors that a page can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.server import chats
from blendrag.server.cross_origin import checked_origins
from blendrag.server.service import Limits
from server.live import CHAT, HELLO, Live, live

APP = "https://app.example"
OTHER = "https://evil.example"
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def guarded(demo_engine: BlendEngine) -> Iterator[Live]:
    origins = checked_origins(["https://APP.example:443/", "http://localhost:5173"])
    limits = Limits(max_body_bytes=1000)
    with live(demo_engine, limits, keys="a-key", origins=origins) as server:
        yield server


@pytest.fixture(scope="module")
def opened(demo_engine: BlendEngine) -> Iterator[Live]:
    with live(demo_engine, origins=checked_origins(["*"])) as server:
        yield server


def preflight(server: Live, origin: str, method: str = "POST", **more: str) -> httpx.Response:
    """What a browser asks before it sends a request with a key in JSON."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        **more,
    }
    with server.client() as client:
        return client.options(CHAT, headers=asked)


@pytest.mark.parametrize("origin", [APP, "http://localhost:5173"])
def test_a_browser_is_told_what_pages_of_an_allowed_origin_may_do(guarded: Live, origin) -> None:
    reply = preflight(guarded, origin)
    assert (reply.status_code, reply.content) == (204, b"")
    assert reply.headers[ALLOWED] == origin
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed.split(","))
    assert "Origin" in reply.headers["vary"]
    assert "access-control-allow-credentials" not in reply.headers
    private = preflight(guarded, origin, **{"Access-Control-Request-Private-Network": "true"})
    assert (private.status_code, private.headers["access-control-allow-private-network"]) == (
        204,
        "true",
    )


@pytest.mark.parametrize(
    "origin",
    [OTHER, "http://app.example", "https://app.example:8443", "https://x.app.example", "null"],
)
def test_pages_of_other_origins_read_nothing(guarded: Live, origin: str) -> None:
    reply = preflight(guarded, origin)
    assert reply.status_code == 403
    assert "--cors-origin" in reply.json()["error"]["message"]
    assert ALLOWED not in reply.headers
    with guarded.client(headers={"Origin": origin, "Authorization": "Bearer a-key"}) as client:
        assert ALLOWED not in client.get("/v1/models").headers


def test_a_method_that_no_path_has_is_refused(guarded: Live) -> None:
    reply = preflight(guarded, APP, "PATCH")
    assert reply.status_code == 403
    assert "PATCH" in reply.json()["error"]["message"]


def test_answers_streams_and_errors_are_readable_by_pages(guarded: Live, monkeypatch) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    known = {"Authorization": "Bearer a-key"}

    def failed(*given: Any) -> Any:
        raise RuntimeError("a defect")

    with guarded.client(headers={"Origin": APP}) as client:
        replies = [
            client.post(CHAT, json=body, headers=known),
            client.post(CHAT, json={**body, "stream": True}, headers=known),
            client.post(CHAT, json=body),
            client.post("/v1/ingest", json={"documents": []}, headers=known),
            client.get("/nowhere"),
            client.put(CHAT, headers=known),
            client.post(CHAT, json={"messages": HELLO, "user": "x" * 1000}, headers=known),
            client.post(CHAT, content="x", headers=known),
            client.post(CHAT, json={**body, "temperature": -1}, headers=known),
        ]
        monkeypatch.setattr(chats, "chat_request", failed)
        replies.append(client.post(CHAT, json=body, headers=known))
    statuses = [reply.status_code for reply in replies]
    assert statuses == [200, 200, 401, 403, 404, 405, 413, 415, 400, 500]
    assert {reply.headers[ALLOWED] for reply in replies} == {APP}
    assert all("Origin" in reply.headers["vary"] for reply in replies)


def test_all_origins_are_a_star(opened: Live) -> None:
    reply = preflight(opened, OTHER)
    assert (reply.status_code, reply.headers[ALLOWED]) == (204, "*")
    with opened.client(headers={"Origin": OTHER}) as client:
        assert client.get("/v1/models").headers[ALLOWED] == "*"
        # the name of the server is checked all the same
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403


def test_without_the_option_a_preflight_names_it(served: Live) -> None:
    reply = preflight(served, APP)
    assert reply.status_code == 405
    assert "--cors-origin" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    [
        "app.example",
        "https://app.example/path",
        "https://*.example",
        "null",
        "",
        "https://a b",
        "://a",
    ],
)
def test_what_is_no_origin_is_refused_in_one_sentence(origin: str) -> None:
    with tiny.refuses("--cors-origin .* must be a scheme and a host"):
        checked_origins([origin])


def test_origins_are_compared_as_browsers_write_them() -> None:
    given = [
        "HTTP://A.example:80",
        "http://a.example",
        "app://obsidian.md",
        "http://[::1]:5173",
        "*",
    ]
    expected = ("http://a.example", "app://obsidian.md", "http://[::1]:5173", "*")
    assert checked_origins(given) == expected
