"""``blendrag serve`` as a command."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

import scripted
import tiny
from blendrag.cli import serve
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError, ModelLoadError, UnsupportedModelError
from blendrag.server.admission import TTFT_BUCKETS_S
from blendrag.server.cross_origin import checked_origins
from blendrag.server.running import server_of
from blendrag.server.service import open_engine
from blendrag.store import server_record
from cli.commands import invoke, refused, save_model
from server.conftest import QUESTION
from server.live import CHAT, HELLO, live, until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself."""
    return save_model(tmp_path_factory.mktemp("served-llama"))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_without_the_extra_one_sentence_names_the_remedy(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert refused("serve", "--store", tmp_path) == (
        "error: blendrag serve needs fastapi, uvicorn; pip install 'blendrag[server]'"
    )


def test_plain_messages_is_an_option_of_the_engine(monkeypatch, tmp_path) -> None:
    asked = []

    def engine_for(context: object, **given: object) -> None:
        asked.append(given.get("plain_messages"))
        raise InvalidInputError("no engine here")

    monkeypatch.setattr(serve.options, "engine_for", engine_for)
    for given in ((), ("--plain-messages",)):
        refused("serve", "--store", tmp_path, "--port", "0", *given)
    assert asked == [None, True]


def test_a_port_in_use_is_one_sentence(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("serve", "--store", tmp_path, "--port", str(port))
    assert said == (
        f"error: cannot listen on 127.0.0.1 port {port} (Address already in use); "
        "choose another --port or --host"
    )


def test_idle_connections_outlive_those_in_the_pools_of_clients() -> None:
    proxy_s = 60  # the default of nginx
    assert (
        httpx.Limits().keepalive_expiry < proxy_s < server_of(FastAPI()).config.timeout_keep_alive
    )


def test_a_host_that_is_not_here_is_one_sentence(tmp_path) -> None:
    said = refused("serve", "--store", tmp_path, "--host", "192.0.2.1", "--port", "0")
    assert "cannot listen on 192.0.2.1 port 0" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; expected one key a line"),
        ("# none\n", "holds no key; write one a line"),
        ("good\nbad key of four\n", "line 2 of --api-key-file"),
    ],
)
def test_a_wrong_key_file_is_one_sentence(key_file, text, expected) -> None:
    key_file.write_text(text)
    said = refused("serve", "--api-key-file", key_file)
    assert expected in said
    assert "bad" not in said


def test_a_missing_key_file_is_one_sentence(key_file) -> None:
    assert "cannot be read (No such file" in refused("serve", "--api-key-file", key_file)


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ((), []),
        (("--host", "0.0.0.0"), ["everybody who reaches 0.0.0.0 may ask"]),
        (("--cors-origin", "https://app.example", "--allow-host", "box.lan"), []),
        (("--cors-origin", "*"), ["every web page that a browser of this machine opens may ask"]),
        (("--host", "0.0.0.0", "--cors-origin", "*", "--api-key-file", "KEYS"), []),
    ],
)
def test_a_server_without_keys_says_who_else_may_ask(
    model_dir: Path, tmp_path: Path, key_file: Path, monkeypatch, given, notes: list[str]
) -> None:
    monkeypatch.setattr("blendrag.server.running.serve", lambda *given: None)
    key_file.write_text("a-key")
    options = [str(key_file) if each == "KEYS" else each for each in given]
    where = ("--model", model_dir, "--store", tmp_path / "store", "--mode", "full", "--port", "0")
    told = invoke("serve", *where, *options).stderr.splitlines()
    found = [line for line in told if line.startswith("note: ") and "may ask" in line]
    assert len(found) == len(notes)
    assert all(note in line for note, line in zip(notes, found, strict=True))


@pytest.mark.parametrize(
    ("option", "value"), [("--cors-origin", "app.example"), ("--allow-host", "http://box.lan")]
)
def test_a_wrong_site_or_name_is_one_sentence(tmp_path: Path, option: str, value: str) -> None:
    assert f"{option} '{value}' must be" in refused("serve", "--store", tmp_path, option, value)


def test_a_model_that_cannot_be_blended_is_refused_at_the_start(tmp_path: Path) -> None:
    model = save_model(tmp_path / "gpt2", tiny.family("gpt2"))
    store = tmp_path / "store"
    said = refused("serve", "--model", model, "--store", store, "--port", "0", status=3)
    assert "use mode full" in said


def test_a_wrong_reranker_is_refused_at_the_start(model_dir: Path, tmp_path: Path) -> None:
    given = ("--model", model_dir, "--store", tmp_path, "--reranker", tmp_path / "none")
    said = refused("serve", *given, "--port", "0")
    assert f"reranker '{tmp_path / 'none'}' cannot be loaded" in said


def test_such_a_model_is_served_in_mode_full(tmp_path: Path) -> None:
    given = {"tokenizer": tiny.tokenizer(), "mode": "full", "max_new_tokens": 2}
    with (
        BlendEngine(tiny.family("gpt2"), tmp_path / "store", **given) as engine,
        live(engine) as server,
        server.client() as client,
    ):
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        blended_body = body | {"blendrag": {"mode": "blend"}}
        blended = client.post("/v1/chat/completions", json=blended_body)
        assert blended.status_code == 400
        assert blended.json()["error"]["param"] == "blendrag.mode"
        streamed = client.post("/v1/chat/completions", json={**blended_body, "stream": True})
        assert streamed.status_code == 400

        engine.close()
        assert client.get("/health").status_code == 503
        assert client.post("/v1/chat/completions", json=body).status_code == 503


def test_metrics_count_what_was_asked(demo_engine: BlendEngine) -> None:
    with live(demo_engine) as server, server.client() as client:
        body = {"messages": [{"role": "user", "content": QUESTION}], "retrieve": True}
        made = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        client.post("/v1/chat/completions", json=body | {"n": 2, "temperature": 0})
        text = client.get("/metrics").text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for each in families.values()
        for sample in each.samples
    }
    assert found["blendrag_requests_total", "answered"] == 2
    assert found["blendrag_requests_total", "refused"] == 1
    reused = sum(each["blendrag"]["reused_tokens"] for each in made)
    assert found["blendrag_tokens_total", "reused"] == reused > 0
    taken_s = [each["blendrag"]["ttft_s"] for each in made]
    assert families["blendrag_ttft_seconds"].type == "histogram"
    assert found["blendrag_ttft_seconds_sum",] == pytest.approx(sum(taken_s))
    assert found["blendrag_ttft_seconds_bucket", "+Inf"] == 2
    for limit in TTFT_BUCKETS_S[:-1]:
        within = sum(each <= limit for each in taken_s)
        assert found["blendrag_ttft_seconds_bucket", f"{limit:g}"] == within
    assert any(name.startswith("blendrag_store_") for name in families)


def test_a_server_and_its_engine_leave_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    origins = checked_origins(["*"])  # a layer around the application
    with (
        tiny.engine(tiny.llama(), tmp_path, tokenizer=scripted.tokenizer()) as engine,
        live(engine, origins=origins) as server,
        server.client() as client,
    ):
        asked = {"messages": HELLO, "max_tokens": 1}
        assert client.post(CHAT, json=asked).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "Hello"}).status_code == 200
        assert client.get("/v1/documents").status_code == 200
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread


def test_an_embedder_that_cannot_be_loaded_is_a_note(demo_engine, monkeypatch) -> None:
    def fails():
        raise ModelLoadError("embedder 'x' cannot be loaded")

    monkeypatch.setattr(demo_engine.kv_namespace.corpus, "retriever", fails)
    note = "retrieval and embeddings are refused: embedder 'x' cannot be loaded"
    assert open_engine(demo_engine, needs_blending=True) == note


def test_a_model_that_cannot_be_blended_is_served_in_modes_that_it_can_answer(
    tmp_path: Path,
) -> None:
    model = tiny.family("gpt2")
    for mode in ("full", "prefix"):
        with tiny.engine(model, tmp_path / mode, mode=mode) as made:
            assert open_engine(made, needs_blending=True) == ""
    with (
        tiny.engine(model, tmp_path / "blend", mode="blend") as made,
        tiny.refuses("use mode full, or prefix", UnsupportedModelError),
    ):
        open_engine(made, needs_blending=True)


def test_sigterm_lets_answers_end_and_refuses_new_ones(model_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def asked_until_sigterm() -> list[str]:
        """The lines of an answer that had begun when the signal came."""
        try:
            until(lambda: server_record.read(store) is not None)
            record = server_record.read(store)
            assert record is not None
            body = {"messages": HELLO, "max_tokens": 100, "stream": True}
            with httpx.stream("POST", f"{record.url}{CHAT}", json=body, timeout=300) as response:
                lines = response.iter_lines()
                begun = next(line for line in lines if line.startswith("data: "))
                assert begun.startswith('data: {"id"')
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: _is_refused(record.url))
                return [line for line in lines if line]
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    before = signal.getsignal(signal.SIGTERM)
    try:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(asked_until_sigterm)
            result = invoke(
                "serve", "--model", model_dir, "--store", store, "--port", "0", "--mode", "full",
                "--max-requests", "5",
            )  # fmt: skip
            *_, last, end = told.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end == "data: [DONE]"
    assert '"finish_reason":"length"' in last
    assert result.exit_code == 0
    serving, page = result.stderr.splitlines()[-2:]
    url = serving.removeprefix("serving: ").split(" at ")[1].strip().removesuffix("/v1")
    assert page == f"page: {url}/"


def _is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError as error:  # or cut off, if it came just before
        return isinstance(error, httpx.ConnectError)
    return False
