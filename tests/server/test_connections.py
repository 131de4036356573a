"""Many clients at once, clients that leave, clients that never read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, suppress
from typing import Any

import openai
import pytest

import scripted
from blendrag.engine import BlendEngine, Options, Prompt
from blendrag.frameworks.streaming import astream_pieces
from blendrag.server import chats, events, running, service
from blendrag.server.asking import ServedRequest, chat_request
from blendrag.server.service import Limits
from server.conftest import ANSWER, QUESTION
from server.live import CHAT, HELLO, Live, begin, live, until

LONG = "word " * 2900


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Answers for at least a minute, if nobody stops it. Lets three requests in."""
    root, given = (
        tmp_path_factory.mktemp("slow") / "store",
        {"mode": "full", "max_new_tokens": 3000},
    )
    with scripted.engine((), root, default=LONG, **given) as engine:
        engine.adapter.model.pause_s = 0.02
        with live(engine, Limits(max_requests=3)) as server:
            yield server


def outcomes(server: Live) -> dict[str, int]:
    return dict(server.service.admission.outcomes)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(slow: Live, stream: bool) -> None:
    model, requests = slow.engine.adapter.model, slow.engine.scheduler.requests
    before, began = outcomes(slow)["cancelled"], model.forwards
    connection = begin(slow, stream)
    until(lambda: model.forwards > began + 2)
    assert len(requests) == 1
    connection.close()
    until(lambda: outcomes(slow)["cancelled"] == before + 1)
    slow.settled()
    slow.engine.drain()  # the worker has left it
    assert model.forwards < began + 2900


def test_a_client_that_leaves_the_queue_is_never_computed(slow: Live) -> None:
    model, prompts = slow.engine.adapter.model, len(slow.engine.adapter.model.prompts)
    running = begin(slow)
    until(lambda: slow.engine.scheduler.requests.counts == (0, 1))
    queued = begin(slow)
    until(lambda: slow.engine.scheduler.requests.counts[0] == 1)
    queued.close()
    until(lambda: slow.engine.scheduler.requests.counts[0] == 0)
    running.close()
    slow.settled()
    slow.engine.drain()
    assert len(model.prompts) == prompts + 1


@pytest.mark.parametrize("seconds", [0.000001, 0.3])
def test_a_request_that_takes_too_long_is_refused(slow: Live, seconds: float) -> None:
    failed = outcomes(slow)["failed"]
    body = {"messages": HELLO, "blendrag": {"timeout_s": seconds}}
    with slow.client() as client:
        late = client.post(CHAT, json=body)
        assert late.status_code == 504
        assert "no answer within the timeout" in late.json()["error"]["message"]
    assert outcomes(slow)["failed"] == failed + 1


def test_the_timeout_counts_what_precedes_the_queue(slow: Live, monkeypatch) -> None:
    may_go_on, seen = threading.Event(), []

    def prepared(*given: Any) -> ServedRequest:
        may_go_on.wait()
        return chat_request(*given)

    def begun(engine: BlendEngine, prompt: Prompt, options: Options, **more: Any) -> Any:
        seen.append(options.timeout_s)
        return astream_pieces(engine, prompt, options, **more)

    monkeypatch.setattr(chats, "chat_request", prepared)
    monkeypatch.setattr(service, "astream_pieces", begun)
    with slow.client() as client:
        body = {"messages": HELLO, "blendrag": {"timeout_s": 0.1}, "max_tokens": 1}
        try:
            late = client.post(CHAT, json=body)
        finally:
            may_go_on.set()
        assert late.status_code == 504
        assert "within the timeout of 0.1 s" in late.json()["error"]["message"]
        body["blendrag"] = {"timeout_s": 60}
        assert client.post(CHAT, json=body).status_code == 200
    assert len(seen) == 1
    assert seen[0] < 60


def test_a_client_is_told_that_a_defect_closes_its_connection(slow: Live, monkeypatch) -> None:
    def failed(*given: Any) -> ServedRequest:
        raise RuntimeError("a defect")

    monkeypatch.setattr(chats, "chat_request", failed)
    with slow.client() as client:
        for _ in range(3):  # a closed connection that is used again is no answer
            response = client.post(CHAT, json={"messages": HELLO})
            assert response.status_code == 500
            assert response.headers["connection"] == "close"


def test_more_requests_than_allowed_are_asked_to_come_back(slow: Live) -> None:
    before = outcomes(slow)["rejected"]
    held = [begin(slow) for _ in range(3)]
    # an answer that begins later would change turn_s
    until(lambda: slow.engine.scheduler.requests.counts == (0, 3))
    with slow.client() as client:
        for stream, turn_s, retry_after_s in (
            (True, None, "2"),
            (False, 7.5, "8"),
            (False, 999.0, "60"),
        ):
            slow.engine.scheduler.requests.turn_s = turn_s
            refused = client.post(CHAT, json={"messages": HELLO, "stream": stream})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == retry_after_s
            assert refused.json()["error"]["code"] == "server_overloaded"
        assert client.get("/health").status_code == 200
        text = client.get("/metrics").text
    assert outcomes(slow)["rejected"] == before + 3
    assert f'blendrag_requests_total{{outcome="rejected"}} {before + 3}' in text
    now = re.findall(r"^blendrag_requests_(?:running|waiting) (\d)$", text, re.MULTILINE)
    assert sum(map(int, now)) == 3
    for connection in held:
        connection.close()
    slow.settled()


def test_clients_that_never_read_do_not_stall_others(served: Live, asked_body) -> None:
    held = [begin(served) for _ in range(20)]
    with served.client() as client:
        made = client.post(CHAT, json=asked_body)
    assert ANSWER in made.json()["choices"][0]["message"]["content"]
    for connection in held:
        connection.close()
    served.settled()


@pytest.mark.parametrize("sent", [0, 1, 5])
async def test_a_client_that_stops_reading_counts_as_gone(monkeypatch, sent: int) -> None:
    monkeypatch.setattr(events, "SEND_TIMEOUT_S", 0.01)
    closed = []

    async def chunks():
        try:
            while True:
                yield {}
        finally:
            closed.append(True)

    left = [{}] * sent

    async def send(message) -> None:
        if not left:
            await asyncio.Event().wait()
        left.pop()

    stream = event_stream(chunks())
    async with asyncio.timeout(120):
        await stream.stream_response(send)
    assert closed == [True]


@pytest.mark.parametrize(
    "half", ["POST /v1/chat", "HEADERS", "HEADERS{", "not HTTP at all\r\n\r\n"]
)
def test_half_a_request_is_dropped_without_a_word(served: Live, caplog, half: str) -> None:
    headers = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(half.replace("HEADERS", headers).encode())
    connection.close()
    with served.client() as client:
        assert client.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture
def asked_body(context: str) -> dict[str, object]:
    text = f"{context}\n\nQuestion: {QUESTION}\nAnswer:"
    return {"messages": [{"role": "user", "content": text}]}


async def test_sixty_clients_at_once_get_their_own_answers(served: Live) -> None:
    async with openai.AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
        chat = client.chat.completions

        async def ask(number: int) -> tuple[str, int]:
            given = {"model": "demo", "messages": HELLO, "max_tokens": 1 + number % 2}
            if number % 4 < 2:
                made = await chat.create(**given)
                return made.choices[0].message.content, made.usage.completion_tokens
            stream = await chat.create(**given, stream=True, stream_options={"include_usage": True})
            *chunks, last = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return text, last.usage.completion_tokens

        before = outcomes(served)["answered"]
        found = await asyncio.gather(*(ask(number) for number in range(60)))
    assert [tokens for _, tokens in found[:2]] == [1, 2]
    assert all(each == found[number % 2] for number, each in enumerate(found))
    assert outcomes(served)["answered"] == before + 60


def test_two_hundred_open_connections_are_all_answered(served: Live) -> None:
    held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    for connection in reversed(held):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    for connection in held:
        with connection, connection.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_an_error_after_the_first_chunk_is_an_event() -> None:
    async def chunks():
        yield {"n": 1}
        raise OSError("unplugged")

    ping, *sent, done = [each async for each in event_stream(chunks()).body_iterator]
    assert (ping, done) == (events.PING, "data: [DONE]\n\n")
    (first, failed) = (json.loads(each.removeprefix("data: ")) for each in sent)
    assert first == {"n": 1}
    assert failed["error"]["type"] == "server_error"
    assert "unplugged" not in str(failed)


def event_stream(chunks: AsyncGenerator[Any, None]) -> events.EventStream:
    return events.EventStream(asyncio.ensure_future(anext(chunks)), chunks)


def test_headers_without_end_are_refused(served: Live) -> None:
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=120)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"a" * 100_000)
        with suppress(ConnectionError):
            assert connection.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(served: Live, monkeypatch, begun) -> None:
    monkeypatch.setattr(running, "KEEP_ALIVE_S", 0.05)
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=120)) as connection:
        connection.sendall(begun)
        assert connection.recv(100) == b""


def test_a_connection_with_a_request_is_not_closed(slow: Live, monkeypatch) -> None:
    monkeypatch.setattr(running, "KEEP_ALIVE_S", 0.05)
    slow.settled()
    with slow.client() as client:
        made = client.post(CHAT, json={"messages": HELLO, "max_tokens": 30})
    assert made.status_code == 200


@pytest.mark.parametrize("part_bytes", [1000, 10_000, 1_000_000])
def test_headers_have_one_limit_however_they_arrive(served: Live, part_bytes: int) -> None:
    for size_bytes, status in ((60_000, b"200"), (70_000, b"400")):
        request = (
            f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: {'x' * size_bytes}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            with suppress(OSError):  # refused before all was sent
                for at in range(0, len(request), part_bytes):
                    connection.sendall(request[at : at + part_bytes].encode())
            got = b""
            with suppress(OSError):
                while data := connection.recv(65536):
                    got += data
        assert got.startswith(b"HTTP/1.1 " + status) or (status == b"400" and not got)
