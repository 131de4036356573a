"""The ingress over replicas that are applications of this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message

from blendrag.engine.exposition import joined
from blendrag.serving.open_requests import OpenRequest
from blendrag_ray.forwarding import Relayed, WholeRequest, answered
from blendrag_ray.ingress import MAX_REPLICAS_TRIED, Ingress
from blendrag_ray.nodes import versions
from blendrag_ray.settings import ServedCluster
from server.live import CHAT, HELLO

EVENTS = "text/event-stream"


class Replicas:
    """Stands for the handle of Serve; the n-th request goes to the n-th application, then to the last."""

    def __init__(self, *apps: ASGIApp) -> None:
        self.apps = list(apps)
        self.chunks: list[Mapping[str, int]] = []
        self.progress: list[OpenRequest | None] = []

    def options(self, **given: Any) -> Replicas:
        return self

    def remote(self, request: WholeRequest, chunks: Mapping[str, int]) -> AsyncIterator[Message]:
        self.chunks.append(chunks)
        self.progress.append(request.progress)
        return answered(self.apps.pop(0) if len(self.apps) > 1 else self.apps[0], request)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    request = Request(scope, receive)
    told = {
        "path": request.url.path,
        "query": request.url.query,
        "body": (await request.body()).decode(),
    }
    await JSONResponse(told, headers={"x-kept": "yes"})(scope, receive, send)


def dies_after(*events: str) -> ASGIApp:
    """An application whose process ends after it has sent these events."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> AsyncIterator[str]:
            for event in events:
                yield event
            raise ActorDiedError()

        if not events:
            raise ActorDiedError()
        await StreamingResponse(body(), media_type=EVENTS)(scope, receive, send)

    return app


@pytest.fixture
def asking(store: Path) -> Callable[..., httpx.AsyncClient]:
    def client(replicas: Replicas, **given: Any) -> httpx.AsyncClient:
        served = ServedCluster(model="demo", store=str(store), **given)
        ingress = Ingress(served, versions(), replicas)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await ingress(Request(scope, receive))
            assert isinstance(response, Response)  # what Serve sends
            await response(scope, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")

    return client


JSON = {"Content-Type": "application/json"}


async def test_a_request_and_its_answer_pass_unchanged(asking):
    reply = await asking(Replicas(echo)).post("/v1/x?y=z", content=b"\xc3\xa4", headers=JSON)
    assert reply.json() == {"path": "/v1/x", "query": "y=z", "body": "ä"}
    assert reply.headers["x-kept"] == "yes"


async def test_the_router_is_told_the_chunks(asking, texts: list[str]):
    replicas = Replicas(echo)
    await asking(replicas).post(CHAT, json={"messages": [{"role": "user", "content": texts[0]}]})
    await asking(replicas).post(CHAT, json={"messages": HELLO})
    assert [len(chunks) for chunks in replicas.chunks] == [1, 0]


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse({"error": {}}, 400)(scope, receive, send)


async def test_the_router_learns_only_from_computed_answers(asking):
    replicas = Replicas(echo, echo, refuse)
    async with asking(replicas) as client:
        for path in ("/health", "/v1/completions", "/v1/completions"):
            await client.post(path, json={"model": "demo"})
    health, computed, refused = replicas.progress
    assert health is None
    assert computed.begun_at is not None
    assert (refused.begun_at, refused.has_ended) == (None, True)


async def test_a_replica_that_ends_before_it_answers_is_replaced(asking):
    replicas = Replicas(*[dies_after()] * (MAX_REPLICAS_TRIED - 1), echo)
    assert (await asking(replicas).post("/v1/x")).status_code == 200
    reply = await asking(Replicas(dies_after())).post("/v1/x")
    assert reply.status_code == 503
    assert "send the request again" in reply.json()["error"]["message"]


async def test_too_many_waiting_requests_are_refused(asking):
    async def full(scope: Any, receive: Any, send: Any) -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    assert (await asking(Replicas(full)).post("/v1/x")).status_code == 429


async def test_a_stream_whose_replica_ends_has_an_error_as_its_last_event(asking):
    reply = await asking(Replicas(dies_after("data: {}\n\n"))).post(CHAT)
    first, error, done = reply.text.strip().split("\n\n")
    assert (first, done) == ("data: {}", "data: [DONE]")
    assert "replica" in json.loads(error.removeprefix("data: "))["error"]["message"]


PING = ": ping\n\n"


def streaming(*events: str) -> ASGIApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> AsyncIterator[str]:
            for event in events:
                yield event

        await StreamingResponse(body(), media_type=EVENTS)(scope, receive, send)

    return app


async def test_a_stream_of_comments_only_is_begun_anew_by_another_replica(asking):
    replicas = Replicas(dies_after(PING), dies_after(PING, PING), streaming(PING, "data: {}\n\n"))
    reply = await asking(replicas).post(CHAT)
    assert reply.text.replace(PING, "") == "data: {}\n\n"
    assert reply.headers["content-type"].startswith(EVENTS)


@pytest.mark.parametrize("last", [refuse, dies_after()])
async def test_an_error_after_the_comments_of_a_stream_is_an_event(asking, last: ASGIApp):
    reply = await asking(Replicas(dies_after(PING), last)).post(CHAT)
    ping, error, done = reply.text.strip().split("\n\n")
    assert (reply.status_code, ping, done) == (200, PING.strip(), "data: [DONE]")
    assert "error" in json.loads(error.removeprefix("data: "))


async def test_comments_are_no_answer_for_the_router():
    async def send(message: Message) -> None:
        pass

    reply, told = Relayed(send), []
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", EVENTS.encode())],
    }
    bodies = [
        {"type": "http.response.body", "body": each} for each in (PING.encode(), b"data: {}\n\n")
    ]
    for message in (head, *bodies):
        await reply.pass_on(message)
        told.append(reply.is_answer)
    assert told == [False, False, True]


async def test_requests_are_refused_before_they_reach_a_replica(asking):
    replicas = Replicas(echo)
    client = asking(replicas, api_keys="secret write", max_body_bytes=10)
    assert (await client.post("/v1/x")).status_code == 401
    client.headers["Authorization"] = "Bearer secret"
    assert (await client.post("/v1/x", content=b"x" * 11, headers=JSON)).status_code == 413
    assert (await client.post("/v1/x", content=b"x")).status_code == 415
    assert (await client.post("/v1/ingest", json={})).status_code == 403
    assert (await client.delete("/v1/documents?source=x")).status_code == 403
    assert (await client.put("/v1/documents?source=x", content=b"x" * 11)).status_code == 403
    assert (await client.get("/v1/uploads")).status_code == 403
    assert not replicas.chunks
    assert (await client.post("/v1/x")).status_code == 200


async def test_names_and_sites_are_those_of_the_arguments(asking):
    client = asking(Replicas(echo), allow_hosts=("Box.lan",), cors_origins=("https://app.example",))
    client.headers["Origin"] = "https://app.example"
    for status, host in ((200, "box.lan"), (200, "x.internal"), (403, "evil.example")):
        reply = await client.post("http://127.0.0.1/v1/x", headers={"Host": host})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert (await client.post("/v1/ingest/", json={})).status_code == 403


async def test_a_client_that_leaves_ends_the_request_in_the_replica():
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await receive()
        finally:
            seen.append("ended")

    messages = answered(app, WholeRequest({"type": "http"}, b""))
    assert (await anext(messages))["status"] == 200
    await messages.aclose()
    assert seen == ["ended"]


def test_samples_of_all_replicas_name_them():
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total {}\na_bucket{{le="1"}} 2\n'
    assert joined(
        [('replica="x"', text.format(1)), ('replica="y"', text.format(5))]
    ).splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="x"} 1',
        'a_bucket{replica="x",le="1"} 2',
        'a_total{replica="y"} 5',
        'a_bucket{replica="y",le="1"} 2',
    ]
