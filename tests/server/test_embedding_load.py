"""Embeddings, searches and ingests that take long, and clients that leave them: nobody else waits."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

import tiny
from blendrag.corpus import embedding_turns
from blendrag.engine import BlendEngine
from blendrag.fusor import verdicts
from blendrag.fusor.gate import REMAINING_PREFILLS
from blendrag.server import app, embeddings, service
from blendrag.server.access import ApiKeys
from blendrag.server.app import create_app
from blendrag.server.service import STUCK_S, Service
from clocks import Clock
from server.live import CHAT, HELLO, Live, live, until

#: Of one batch and of several.
SHORT, LONG = "one two three", "word " * 8000
WRITER = {"Authorization": "Bearer editor"}
SEARCH = {"messages": HELLO, "retrieve": True, "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("held") / "store"
    with tiny.engine(tiny.llama(num_hidden_layers=2), root, max_new_tokens=1) as made:
        held = tiny.HeldEmbedder(made.kv_namespace.corpus.embedding_turns)
        made.kv_namespace.corpus.__dict__["embedder"] = held
        held.allow(100)
        made.ingest([tiny.document(1)]).whole()
        yield made


@pytest.fixture
def held(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tiny.HeldEmbedder]:
    """Computes no batch until the test allows it."""
    monkeypatch.setattr(embedding_turns, "MAX_MUTUAL_WAIT_S", 0.01)
    made = tiny.HeldEmbedder(engine.kv_namespace.corpus.embedding_turns)
    engine.kv_namespace.corpus.__dict__["embedder"] = made
    yield made
    made.allow(1000)
    until(lambda: all(queue.waiting + queue.running == 0 for queue in engine.queues))


@pytest.fixture
def server(engine: BlendEngine, held: tiny.HeldEmbedder) -> Iterator[Live]:
    with live(engine, keys="editor write") as made:
        yield made
        held.allow(1000)
        until(lambda: not any(each.waiting + each.running for each in made.service.queues))


def send(server: Live, path: str, body: object) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer editor\r\nContent-Length: {len(sent)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + sent)
    return connection


def get(server: Live, path: str) -> socket.socket:
    """A connection that has asked for something and reads nothing."""
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer editor\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode())
    return connection


def state(server: Live, name: str) -> tuple[int, int]:
    (found,) = [queue for queue in server.service.queues if queue.name == name]
    return found.waiting, found.running


def answers_others(server: Live) -> None:
    """What does not embed is answered."""
    with server.client(headers=WRITER) as client:
        for path in ("/health", "/metrics", "/v1/models", "/v1/documents"):
            assert client.get(path).status_code == 200, path
        for stream in (False, True):
            asked = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "stream": stream})
            assert asked.status_code == 200


def test_eighty_searches_whose_clients_left_keep_nobody_waiting(server: Live, held) -> None:
    connections = [send(server, CHAT, SEARCH) for _ in range(80)]
    threads = service.QUESTION_THREADS
    until(lambda: state(server, "questions") == (80 - threads, threads))
    until(lambda: len(held.batches) == 1)
    answers_others(server)
    for connection in connections:
        connection.close()
    server.settled()
    until(lambda: state(server, "questions") == (0, 1))  # the batch that is being computed
    assert server.service.admission.outcomes["cancelled"] == 80
    answers_others(server)
    held.allow()
    until(lambda: state(server, "questions") == (0, 0))
    assert len(held.batches) == 1, "nothing was embedded for clients that had left"


def test_long_embeddings_end_after_the_batch_in_which_their_client_leaves(
    server: Live, held
) -> None:
    connections = [send(server, "/v1/embeddings", {"input": LONG}) for _ in range(6)]
    until(lambda: state(server, "embeddings") == (2, 4) and held.batches)
    answers_others(server)
    for connection in connections:
        connection.close()
    server.settled()
    until(lambda: state(server, "embeddings") == (0, 1))
    held.allow()
    until(lambda: state(server, "embeddings") == (0, 0))
    assert len(held.batches) == 1


def test_the_check_of_a_model_moves_with_each_layer(engine: BlendEngine, monkeypatch) -> None:
    monkeypatch.setattr(verdicts, "recall", lambda *of: None)
    with tiny.counted(engine.kv_namespace.corpus.embedding_turns, "before_step") as steps:
        assert engine.verify().blendable
    layers = len(engine.adapter.decoder_layers)
    assert len(steps) > layers * REMAINING_PREFILLS


def test_lists_whose_clients_left_keep_nobody_waiting(server: Live, held, monkeypatch) -> None:
    goes_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(app, "document_list", lambda engine: goes_on.wait() and b"{}")
        connections = [get(server, "/v1/documents") for _ in range(20)]
        threads = service.READ_THREADS
        until(lambda: state(server, "reads") == (20 - threads, threads))
        for connection in connections:
            connection.close()
        until(lambda: state(server, "reads") == (0, threads))
        goes_on.set()
    until(lambda: state(server, "reads") == (0, 0))
    answers_others(server)


def test_a_question_overtakes_long_embeddings_after_one_batch(server: Live, held) -> None:
    with closing(send(server, "/v1/embeddings", {"input": LONG})):
        until(lambda: len(held.batches) == 1)
        with ThreadPoolExecutor(2) as pool, server.client(headers=WRITER) as client:
            asked = pool.submit(client.post, CHAT, json=SEARCH)
            until(lambda: state(server, "batches of texts")[0] == 1)
            held.allow(2)
            answer = asked.result()
        assert answer.status_code == 200
        assert "Hello" in held.batches[1][0]
        assert answer.json()["blendrag"]["ttft_s"] > answer.json()["blendrag"]["retrieval_s"] > 0


def test_short_embeddings_are_computed_before_long_ones(server: Live, held) -> None:
    with closing(send(server, "/v1/embeddings", {"input": LONG})):
        until(lambda: len(held.batches) == 1)
        with ThreadPoolExecutor(2) as pool, server.client(headers=WRITER) as client:
            asked = pool.submit(client.post, "/v1/embeddings", json={"input": SHORT})
            until(lambda: state(server, "batches of texts")[0] == 1)
            held.allow(2)
            assert asked.result().status_code == 200
        assert held.batches[1] == [SHORT]


def test_embeddings_count_as_running_requests(server: Live, held) -> None:
    with ThreadPoolExecutor(1) as pool, server.client(headers=WRITER) as client:
        asked = pool.submit(client.post, "/v1/embeddings", json={"input": [SHORT, SHORT]})
        until(lambda: len(held.batches) == 1)
        text = client.get("/metrics").text
        assert "\nblendrag_requests_running 1\n" in text
        assert '\nblendrag_queue_running{queue="questions"} 1\n' in text
        assert '\nblendrag_queue_running{queue="batches of texts"} 1\n' in text
        held.allow()
        tokens = asked.result().json()["usage"]["prompt_tokens"]
        text = client.get("/metrics").text
    assert tokens >= 6
    assert "\nblendrag_embedded_texts_total 2\n" in text
    assert f"\nblendrag_embedded_tokens_total {tokens}\n" in text


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (["a"] * 2049, 400, "input has 2049 texts, expected 1 to 2048"),
        ("a" * 1_200_001, 413, "input has 1200001 characters, expected at most 1200000"),
        (["a b c d"] * 40, 413, "expected at most 100 in one request"),
        (["fine", "\ud800"], 400, "input[1] holds a lone surrogate"),
    ],
)
def test_too_much_to_embed_is_refused_before_it_is_embedded(
    server: Live, held, monkeypatch, given, status, said
) -> None:
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 100)
    with server.client(headers=WRITER | {"Content-Type": "application/json"}) as client:
        refused = client.post("/v1/embeddings", content=json.dumps({"input": given}))
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert held.batches == []


def test_an_ingest_ends_when_its_client_leaves_and_can_be_repeated(server: Live, held) -> None:
    body = {"documents": [{"source": f"new/{n}", "text": tiny.sentence(900 + n)} for n in (1, 2)]}
    connection = send(server, "/v1/ingest", body)
    until(lambda: len(held.batches) == 1)
    waiting = send(server, "/v1/ingest", body)
    until(lambda: state(server, "changes") == (1, 1))
    answers_others(server)
    connection.close()
    waiting.close()
    server.settled()
    held.allow()
    until(lambda: state(server, "changes") == (0, 0))
    assert len(held.batches) == 1
    with server.client(headers=WRITER) as client:
        held.allow(10)
        assert client.post("/v1/ingest", json=body).json()["documents"] == 2
        sources = [each["source"] for each in client.get("/v1/documents").json()["data"]]
        assert {"new/1", "new/2"} < set(sources)
        assert client.delete("/v1/documents", params={"source": ["new/1", "new/2"]}).is_success


def test_short_prompts_do_not_wait_for_long_ones(server: Live, monkeypatch) -> None:
    may_go_on, begun = threading.Event(), []
    from blendrag.server import chats

    stock = chats.chat_request

    def slow(engine, body, *more):
        if body.characters > 100_000:
            begun.append(1)
            may_go_on.wait()
        return stock(engine, body, *more)

    monkeypatch.setattr(chats, "chat_request", slow)
    long = {"messages": [{"role": "user", "content": "word " * 30_000}]}
    connections = [send(server, CHAT, long) for _ in range(10)]
    until(lambda: len(begun) == 2)
    answers_others(server)
    for connection in connections:
        connection.close()
    may_go_on.set()
    server.settled()


def test_counters_and_names_do_not_wait_for_a_store_that_is_busy(
    server: Live, engine, monkeypatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(service, "MAX_READ_WAIT_S", 0.01)
    monkeypatch.setattr(engine, "prometheus", lambda: str(may_go_on.wait()))
    with server.client(headers=WRITER) as client:
        for _ in range(4):  # more than there are threads
            assert "blendrag_requests_waiting 0" in client.get("/metrics").text
        assert len(client.get("/v1/models").json()["data"]) == 2
    may_go_on.set()


async def test_health_names_a_queue_that_does_not_move(engine: BlendEngine, held) -> None:
    clock, release = Clock(), threading.Event()
    stuck = Service(engine, keys=ApiKeys(), clock=clock)
    transport = httpx.ASGITransport(app=create_app(stuck))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        running = [stuck.questions.submit(release.wait) for _ in range(6)]
        until(lambda: stuck.questions.state.running == 4)
        clock.now += STUCK_S - 1
        assert (await client.get("/health")).json() == {"status": "ok"}
        clock.now += 1
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_stuck"
        said = answer.json()["error"]["message"]
        assert re.match(
            r"nothing has moved for 120 s in the queue 'questions': 2 wait, 4 run", said
        )
        assert tiny.one_sentence(said)
        release.set()
        for each in running:
            each.result()
        until(lambda: stuck.questions.state.running == 0)
        assert (await client.get("/health")).status_code == 200
