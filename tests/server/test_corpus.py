"""Documents in a request, retrieval, vectors, and changing the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.engine.lazy_model import LazyModel
from server.conftest import ANSWER, QUESTION
from server.live import Live, live

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(served: Live):
    with served.client() as made:
        yield made


def answered(client, **body: object):
    response = client.post(CHAT, json={"messages": ASKED, **body})
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"].strip(" ."), made["blendrag"]


def test_retrieve_answers_like_ask_and_cites_its_sources(served: Live, client) -> None:
    text, about = answered(client, retrieve=True, blendrag={"top_k": 4})
    alone = served.engine.ask(QUESTION, 4)
    assert text == alone.text.strip(" .")
    assert about["sources"] == [each.as_dict() for each in alone.sources]
    assert about["reused_tokens"] == alone.metrics.reused_tokens > 50
    assert about["sources"][0]["file_name"] == Path(about["sources"][0]["source"]).name
    assert len(answered(client, retrieve=True, blendrag={"top_k": 1})[1]["sources"]) == 1


def test_a_history_is_trimmed_after_its_system_message_and_only_with_retrieve(
    client, monkeypatch
) -> None:
    monkeypatch.setattr(LazyModel, "context_tokens", 700)
    turns = [
        {"role": role, "content": "word " * 30} for _ in range(12) for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "Be short."}, *turns, *ASKED]
    trim = {"trim_history": True}
    _, about = answered(client, messages=messages, retrieve=True, blendrag=trim)
    assert 0 < about["left_out"] < 24
    assert about["left_out"] % 2 == 0
    assert "left_out" not in answered(client, retrieve=True, blendrag=trim)[1]
    refused = client.post(CHAT, json={"messages": ASKED, "blendrag": trim})
    assert refused.json()["error"]["param"] == "blendrag.trim_history"


def test_retrieve_searches_what_passes_the_filters(client) -> None:
    """In the form of OpenAI's file search."""
    bells = {"type": "glob", "key": "source", "value": "anna-bell.*"}
    either = {"type": "or", "filters": [bells, {"type": "eq", "key": "title", "value": "none"}]}
    for filters in (bells, either):
        more = {"retrieve": True, "filters": filters, "blendrag": {"top_k": 2}}
        found = [Path(each["source"]).stem for each in answered(client, **more)[1]["sources"]]
        assert found == ["anna-bell"] * len(found) != []


def test_filters_are_also_written_as_on_the_command_line(client) -> None:
    for blendrag in (
        {"only": "anna-*"},
        {"only": ["none.txt", "anna-bell.txt"], "where": ["extension=.txt"]},
        {"where": "file_name~ANNA"},
    ):
        found = answered(client, retrieve=True, blendrag=blendrag)[1]["sources"]
        assert {each["file_name"] for each in found} == {"anna-bell.txt"}
    not_anna = {"type": "ne", "key": "file_name", "value": "anna-bell.txt"}
    for more, param, says in (
        ({"blendrag": {"where": "year"}}, "blendrag.where", "'year' is no condition"),
        ({"blendrag": {"only": "/"}}, "blendrag.only", "is no pattern"),
        ({"blendrag": {"where": "yaer=1"}}, "filters", "names the field 'yaer'"),
        ({"blendrag": {"only": "anna-*"}, "filters": not_anna}, "filters", "leaves no passage"),
        ({"blendrag": {"only": "a"}, "retrieve": False}, "blendrag.only", "retrieve"),
    ):
        response = client.post(CHAT, json={"messages": ASKED, "retrieve": True, **more})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert says in error["message"]
        assert tiny.one_sentence(error["message"])


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        (
            {"type": "eq", "key": "yaer", "value": 1},
            "filters names the field 'yaer', which no docu",
        ),
        (
            {"type": "is", "key": "title", "value": 1},
            "filters has the type 'is'; expected one of eq",
        ),
        ({"type": "eq", "key": "title", "value": 1}, "'title' with 1, but it holds texts"),
        ({"type": "eq", "key": "title", "value": "none"}, "'title' = 'none') leaves no passage"),
        ([], "filters is [], expected"),
    ],
)
def test_filters_that_cannot_match_are_refused(client, filters: object, says: str) -> None:
    response = client.post(CHAT, json={"messages": ASKED, "retrieve": True, "filters": filters})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "filters")
    assert says in error["message"]
    assert tiny.one_sentence(error["message"])


def test_retrieve_searches_for_the_question_before_too(client) -> None:
    """The second question names no subject."""
    question = {"role": "user", "content": "And when?"}
    found = set()
    for earlier in ("Which dance ends Apple Festival?", "Who is Anna Bell?"):
        before = [{"role": "user", "content": earlier}, {"role": "assistant", "content": "Well."}]
        more = {"retrieve": True, "blendrag": {"top_k": 1}}
        ((source,),) = [answered(client, messages=[*before, question], **more)[1]["sources"]]
        found.add(Path(source["source"]).stem)
    assert found == {"apple-festival", "anna-bell"}


def test_a_change_of_topic_finds_what_the_question_finds_alone(client) -> None:
    earlier = [
        {"role": "user", "content": "Which dance ends Apple Festival?"},
        {"role": "assistant", "content": "A foxtrot."},
    ]
    for top_k in (2, 6):
        more = {"retrieve": True, "blendrag": {"top_k": top_k}}
        alone, after = (
            answered(client, messages=[*history, *ASKED], **more)[1]["sources"]
            for history in ((), earlier)
        )
        best = min(alone, key=lambda source: source["distance"])
        assert best["text"] in [source["text"] for source in after]


def test_explain_shows_what_became_of_each_token(client) -> None:
    _, about = answered(client, retrieve=True, blendrag={"explain": True})
    ranges = about["explanation"]["ranges"]
    tokens = {"reused": 0, "recomputed": 0, "computed": 0}
    for each in ranges:
        tokens[each["state"]] += len(each["texts"])
        assert (0 < each["layers"] <= about["explanation"]["layers"]) == (
            each["state"] == "recomputed"
        )
    assert sum(tokens.values()) == about["prompt_tokens"]
    assert tokens["reused"] + tokens["recomputed"] == about["reused_tokens"]
    assert tokens["recomputed"] >= about["recomputed_tokens"] > 0
    text = "".join(text for each in ranges for text in each["texts"])
    assert all(source["text"] in text for source in about["sources"])
    for number, chunk in enumerate(about["chunks"], start=1):
        inside = [each for each in ranges if each["chunk"] == number]
        assert sum(len(each["texts"]) for each in inside) == chunk["tokens"]
    for unasked in (None, {}, {"explain": False}):
        assert "explanation" not in answered(client, retrieve=True, blendrag=unasked)[1]


def test_a_stream_that_retrieves_cites_its_sources(client) -> None:
    body = {"messages": ASKED, "retrieve": True, "stream": True}
    lines = client.post(CHAT, json=body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    assert '"sources":[{"source":' in lines[-2]


@pytest.mark.parametrize(
    "shape",
    [
        lambda text: text,
        lambda text: {"title": "Anna Bell", "text": text},
        lambda text: {"data": text},
        lambda text: {"id": "1", "data": {"title": "Anna Bell", "text": text}},
        lambda text: {"title": "Anna Bell", "snippet": text},
    ],
)
def test_documents_of_a_request_are_answered_from_and_reused(client, context, shape) -> None:
    documents = [shape(text) for text in context.split("\n\n")]
    text, about = answered(client, documents=documents)
    assert text == ANSWER
    assert about["reused_tokens"] > 50
    assert "sources" not in about


def test_a_title_with_a_slash_is_the_name_of_a_document(served: Live, client, monkeypatch) -> None:
    asked = []
    stock = served.engine.astream
    tokens = type(served.engine.tokens)
    monkeypatch.setattr(tokens, "names_sources", True)
    monkeypatch.setattr(
        served.engine, "astream", lambda *given: asked.append(given[0]) or stock(*given)
    )
    answered(client, documents=[{"title": "TCP/IP", "text": "A protocol."}])
    assert "[TCP/IP]" in asked[0].text


def test_vectors_are_those_of_the_store(served: Live) -> None:
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as openai_client:
        embedder = served.service.embedder_id
        both = openai_client.embeddings.create(model=embedder, input=["one", "two"])  # base64
        plain = openai_client.embeddings.create(
            model=embedder, input="two", encoding_format="float"
        )
        with pytest.raises(openai.NotFoundError, match="not served here"):
            openai_client.embeddings.create(model="text-embedding-3-small", input="one")
    expected = served.engine.library.embed(["one", "two"])
    assert np.allclose([each.embedding for each in both.data], expected, atol=1e-6)
    assert np.allclose(plain.data[0].embedding, expected[1], atol=1e-6)
    assert both.usage.prompt_tokens >= 2


def test_the_embedder_has_all_names_that_ingest_takes_for_it(served: Live) -> None:
    manifest = served.service.engine.manifest
    names = {"minilm-offline", "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"}
    with pytest.MonkeyPatch.context() as patch:
        for embedder in names:
            patch.setattr(BlendEngine, "manifest", replace(manifest, embedder=embedder))
            assert {*served.service.embedder_names} >= names


@pytest.fixture
def writable(tmp_path) -> Iterator[Live]:
    with BlendEngine("demo", tmp_path / "store", chunk_tokens=64, max_new_tokens=12) as engine:
        engine.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
        with live(engine, keys="editor write") as server:
            yield server


def test_documents_are_ingested_asked_listed_and_deleted(writable: Live, context: str) -> None:
    with writable.client(headers={"Authorization": "Bearer editor"}) as client:
        assert client.get("/v1/documents").json() == {"object": "list", "data": []}
        new = {"source": "people/anna", "text": context, "title": "Anna", "metadata": {"year": 1}}
        added = client.post("/v1/ingest", json={"documents": [new]}).json()
        assert (added["documents"], added["failed"]) == (1, 0)
        assert added["chunks_computed"] == added["chunks"] > 1
        again = client.post("/v1/ingest", json={"documents": [new]}).json()
        assert (again["documents_unchanged"], again["chunks_computed"]) == (1, 0)
        (listed,) = client.get("/v1/documents").json()["data"]
        assert (listed["source"], listed["title"]) == ("people/anna", "Anna")
        assert listed["chunks"] == added["chunks"]

        text, about = answered(client, retrieve=True)
        assert text == ANSWER
        assert about["sources"][0]["source"] == "people/anna"

        other = {"source": "people", "text": "A list of the people of the town, by year."}
        client.post("/v1/ingest", json={"documents": [other]})
        assert client.delete("/v1/documents", params={"source": "people"}).json()["deleted"] == 1
        assert [each["source"] for each in client.get("/v1/documents").json()["data"]] == [
            "people/anna"
        ]

        for wrong in ("people", "people/ann", "/"):
            missing = client.delete("/v1/documents", params={"source": [wrong, "people/anna"]})
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "document_not_found"
        gone = client.delete("/v1/documents", params={"source": "people/anna"})
        assert gone.json()["deleted"] == 1
        assert client.get("/v1/documents").json()["data"] == []
        empty = client.post(CHAT, json={"messages": ASKED, "retrieve": True})
        assert empty.status_code == 400
        assert "holds no chunks" in empty.json()["error"]["message"]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "documents is empty"),
        ([{"text": "x"}], "documents[0].source is missing"),
        ([{"source": " ", "text": "x"}], "empty source"),
        ([{"source": "x", "text": ""}], "empty source or text"),
        ([{"source": "a\0b", "text": "x"}], "source of documents[0] holds a NUL"),
        ([{"source": "x", "text": "y", "metadata": {"a": [1]}}], "documents[0].metadata.a"),
        (
            [{"source": "x", "text": "y", "metadata": {"a": float("nan")}}],
            "documents[0].metadata.a is NaN, expected a valid string or a valid integer or a finite number",
        ),
        (["x"], "documents[0]"),
        (
            [{"source": "x" * 84_000, "text": "b"}],
            "source of documents[0] has 84,000 characters ('x",
        ),
        ([{"source": "a", "text": "b", "title": "x" * 84_000}], "title of documents[0] has 84,000"),
        (
            [{"source": "a", "text": "b", "metadata": {"n": "x" * 1_100_000}}],
            "metadata of documents[0] takes 1,100,009 bytes as JSON, expected at most 1,048,576",
        ),
    ],
)
def test_documents_that_cannot_be_stored(writable: Live, documents, said) -> None:
    with writable.client(headers={"Authorization": "Bearer editor"}) as client:
        sent = json.dumps({"documents": documents})  # httpx refuses NaN
        response = client.post(
            "/v1/ingest", content=sent, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        missing = client.delete("/v1/documents")
        assert missing.status_code == 400
        assert "source is missing in the query" in missing.json()["error"]["message"]
        assert client.get("/v1/documents").json()["data"] == []
