"""Streams begin at once, and stay open while nothing is said."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

import scripted
import tiny
from blendrag.server import chats, events
from blendrag.server.asking import chat_request
from server.live import CHAT, HELLO, Live, begin, live, until

NAME = "unnamed"
COMPLETIONS = "/v1/completions"
TEXT = "It built ships in 1874."
PING = events.PING.strip()


class Brake:
    """Holds the forwards of a model, or lets them pass."""

    def __init__(self, model: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        self.held = 0
        self.fails = False
        model.model.register_forward_pre_hook(self._wait)  # an ingest runs no more of it

    def _wait(self, *_: Any) -> None:
        if self.fails:
            raise RuntimeError("unplugged")
        self.held += 1
        try:
            assert self.open.wait(120), "never released"
        finally:
            self.held -= 1

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold every forward that begins in the context."""
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("streams") / "store"
    with scripted.engine((), root, TEXT, mode="full") as engine, live(engine) as made:
        yield made


@pytest.fixture(scope="module")
def brake(server: Live) -> Brake:
    return Brake(server.engine.adapter.model)


@pytest.fixture
def pinging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.001)


BODIES = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "Hello"}}


@contextmanager
def streaming(server: Live, path: str = CHAT, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that are not empty. Its headers have come."""
    with (
        server.client() as client,
        client.stream("POST", path, json={**BODIES[path], "stream": True, **more}) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        yield (line for line in response.iter_lines() if line)


def text_of(lines: Iterator[str]) -> str:
    *told, done = [line.removeprefix("data: ") for line in lines if line != PING]
    assert done == "[DONE]"
    choices = [each for line in told for each in json.loads(line)["choices"]]
    return "".join(
        each.get("text") or each.get("delta", {}).get("content") or "" for each in choices
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_before_its_prefill_ends(server: Live, brake: Brake, path: str) -> None:
    with brake(), streaming(server, path) as lines:
        assert next(lines) == PING
        brake.open.set()
        assert text_of(lines) == TEXT


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_while_it_waits_in_the_queue(server: Live, brake: Brake, path: str) -> None:
    with brake(), streaming(server) as first:
        until(lambda: brake.held == 1)
        with streaming(server, path) as second:
            assert (next(first), next(second)) == (PING, PING)
            brake.open.set()
            assert text_of(second) == text_of(first) == TEXT


def test_a_stream_begins_while_an_ingest_holds_the_model(server: Live, brake: Brake) -> None:
    with brake():
        ingest = threading.Thread(target=server.engine.ingest, args=([tiny.document(0)],))
        ingest.start()
        until(lambda: brake.held == 1)
        with streaming(server) as lines:
            assert next(lines) == PING
            brake.open.set()
            assert text_of(lines) == TEXT
    ingest.join()


@pytest.mark.usefixtures("pinging")
def test_a_stream_sends_comments_as_long_as_nothing_comes(server: Live, brake: Brake) -> None:
    with brake(), streaming(server) as lines:
        assert [next(lines) for _ in range(5)] == [PING] * 5
        brake.open.set()
        assert text_of(lines) == TEXT


def test_comments_come_between_slow_tokens_and_clients_skip_them(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PING_S", 0)  # every token is slow
    with streaming(server) as lines:
        told = list(lines)
    first = next(i for i, line in enumerate(told) if line != PING)
    assert PING in told[first + 1 : -1]
    assert text_of(iter(told)) == TEXT
    given = {"api_key": "none", "max_retries": 0}
    with openai.OpenAI(base_url=server.v1, **given) as client:
        chunks = list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True))
        pieces = list(client.completions.create(model=NAME, prompt="Hello", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert "".join(chunk.choices[0].text for chunk in pieces) == TEXT
    chain = ChatOpenAI(model=NAME, base_url=server.v1, **given)
    assert "".join(piece.content for piece in chain.stream("Hello")) == TEXT
    index = OpenAILike(model=NAME, api_base=server.v1, is_chat_model=True, **given)
    streamed = list(index.stream_chat([ChatMessage(role="user", content="Hello")]))
    assert streamed[-1].message.content == TEXT


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_the_first_token_is_an_event(
    server: Live, brake: Brake, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    brake.fails = True
    try:
        with streaming(server, path) as lines:
            ping, error, done = lines
        assert (ping, done) == (PING, "data: [DONE]")
        fields = json.loads(error.removeprefix("data: "))["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        given = {"base_url": server.v1, "api_key": "none", "max_retries": 0}
        with (
            openai.OpenAI(**given) as client,
            pytest.raises(openai.APIError, match=fields["message"]),
        ):
            list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True))
        with pytest.raises(openai.APIError, match=fields["message"]):
            list(ChatOpenAI(model=NAME, **given).stream("Hello"))
    finally:
        brake.fails = False


def test_what_is_wrong_with_a_request_has_a_status_while_the_model_is_busy(
    server: Live, brake: Brake
) -> None:
    wrong = (
        {"temperature": -1},
        {"blendrag": {"policy": "best"}},
        {"messages": []},
        {"max_tokens": 0},
    )
    with brake(), streaming(server), server.client() as client:
        for fields in wrong:
            reply = client.post(CHAT, json={"messages": HELLO, "stream": True, **fields})
            assert reply.status_code == 400
        long = {"prompt": "word " * 9000, "stream": True}
        assert client.post(COMPLETIONS, json=long).status_code == 400
        brake.open.set()


@pytest.mark.usefixtures("pinging")
def test_a_request_that_is_long_in_preparation_begins_its_stream(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search waits for the embedder, for example. Then an error is an event."""
    may_go_on = threading.Event()

    def prepared(*given: Any) -> Any:
        assert may_go_on.wait(120)
        return chat_request(*given)

    monkeypatch.setattr(chats, "chat_request", prepared)
    with streaming(server, tool_choice="weather") as lines:
        assert next(lines) == PING
        may_go_on.set()
        error, done = [line for line in lines if line != PING]
    assert "tool_choice" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


@pytest.mark.usefixtures("pinging")
@pytest.mark.parametrize("is_queued", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_not_answered(
    server: Live, brake: Brake, is_queued: bool
) -> None:
    server.settled()
    before = server.service.admission.outcomes["cancelled"]
    prompts = len(server.engine.adapter.model.prompts)
    with brake():
        connections = [begin(server)]
        until(lambda: brake.held == 1)
        if is_queued:
            connections.append(begin(server))
            until(lambda: server.engine.scheduler.requests.counts[0] == 2)
        # one whose thread still submits it is cancelled later than it is counted
        until(lambda: not any(queue.running for queue in server.engine.own_queues))
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
        left = len(connections)
        until(lambda: server.service.admission.outcomes["cancelled"] == before + left)
    server.engine.drain()
    assert len(server.engine.adapter.model.prompts) == prompts + 1


def test_usage_counts_no_comment_as_a_first_token(server: Live, brake: Brake) -> None:
    server.settled()
    with brake(), streaming(server) as lines:
        next(lines)
        assert server.engine.scheduler.requests.counts == (1, 0)
        brake.open.set()
        text_of(lines)
