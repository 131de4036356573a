"""One server over several stores: the field ``model`` says which."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import tiny
from blendrag.cli import served as serving
from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from blendrag.store import server_record
from cli.commands import invoke, save_model
from server.conftest import ANSWER, QUESTION
from server.live import CHAT, Live, live

KEY = {"Authorization": "Bearer editor"}


@pytest.fixture(scope="module")
def server(demo_engine: BlendEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("several")
    given = {"chunk_tokens": 64, "max_new_tokens": 12, "learn": False}
    with (
        BlendEngine("demo", demo_engine.root, **given) as first,
        BlendEngine("demo", root / "people", beside=first, **given) as people,
        tiny.engine(tiny.llama(num_hidden_layers=2), root / "other", beside=first) as other,
    ):
        for engine in (first, people):
            engine.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
        people.ingest([demo_corpus_path() / "anna-bell.txt"]).whole()
        other.ingest([tiny.document(1)]).whole()
        beside = {"people": people, "other": other}
        with live(first, keys="editor write", beside=beside) as server:
            yield server


@pytest.fixture
def client(server: Live) -> Iterator[httpx.Client]:
    with server.client(headers=KEY) as client:
        yield client


def files(client: httpx.Client, model: str) -> set[str]:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "retrieve": True}
    response = client.post(CHAT, json={**asked, "model": model, "max_tokens": 8})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == (model if model != "default" else "demo")
    if model != "other":
        assert ANSWER in answer["choices"][0]["message"]["content"]
    return {each["file_name"] for each in answer["blendrag"]["sources"]}


def test_a_request_is_answered_from_the_store_that_it_names(client: httpx.Client) -> None:
    assert len(files(client, "demo")) > 1
    assert files(client, "default") == files(client, "demo")
    assert files(client, "people") == {"anna-bell.txt"}
    assert files(client, "other") == {"doc1.txt"}


def test_one_model_is_in_memory_once(server: Live) -> None:
    first, people, other = (each.engine for each in server.services)
    assert first.adapter is people.adapter is not other.adapter


def test_the_models_are_listed_and_others_refused_with_the_list(
    server: Live, client: httpx.Client
) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="editor", max_retries=0) as named:
        ids = [each.id for each in named.models.list()]
        assert ids[:3] == ["demo", "people", "other"]
        assert named.models.retrieve("people").id == "people"
        with pytest.raises(openai.NotFoundError, match="one of 'demo', 'people', 'other'"):
            named.models.retrieve("papers")
    for path in ("/v1/documents?model=papers", "/v1/uploads?model=papers"):
        response = client.get(path)
        assert response.json()["error"]["code"] == "model_not_found"
    asked = {"messages": [], "model": "papers"}
    assert client.post(CHAT, json=asked).status_code == 404
    assert client.post("/v1/embeddings", json={"input": "a", "model": "papers"}).status_code == 404


def test_documents_and_vectors_are_those_of_the_store_that_is_named(client: httpx.Client) -> None:
    def sources(model: str) -> list[str]:
        data = client.get("/v1/documents", params={"model": model}).json()["data"]
        return [each["source"] for each in data]

    new = {"documents": [{"source": "note", "text": "The mill was built in 1874."}]}
    response = client.post("/v1/ingest", params={"model": "people"}, json=new)
    assert response.json()["documents"] == 1
    assert "note" in sources("people")
    assert "note" not in sources("demo") + sources("other")
    where = {"model": "people", "source": "note"}
    assert client.delete("/v1/documents", params=where).json()["deleted"] == 1
    for model in ("people", "other"):
        response = client.post("/v1/embeddings", json={"input": "a", "model": model})
        assert response.status_code == 200


def test_health_and_counters_are_of_all(client: httpx.Client, server: Live) -> None:
    assert client.get("/health").status_code == 200
    text = client.get("/metrics").text
    assert text.count("# TYPE blendrag_store_puts_total") == 1
    for service in server.services:
        assert f'blendrag_store_puts_total{{store="{service.engine.root}"}}' in text
    assert text.count('blendrag_queue_waiting{queue="model"}') == 1


def test_the_page_asks_the_store_that_is_chosen(server: Live, visit) -> None:
    page = visit(server)
    page.get_by_label("API key").fill("editor")
    page.keyboard.press("Enter")
    page.get_by_label("Answer with").select_option("people")
    page.get_by_role("button", name="Documents").click()
    page.get_by_text("1 document.").wait_for()
    page.get_by_role("button", name="Documents").click()
    page.get_by_label("Question", exact=True).fill(QUESTION)
    with page.expect_request(f"**{CHAT}") as asked:
        page.keyboard.press("Enter")
    assert asked.value.post_data_json["model"] == "people"
    page.locator(".report").wait_for()


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--serve", "a"], "must be a name of letters"),
        (["--serve", "default=x"], "other than default"),
        (["--serve", "a/b=x"], "must be a name of letters"),
        (["--serve", "a=x", "--serve", "a=y"], "has the name 'a' twice"),
        (["--serve", "a=x", "--ray"], "--serve with --ray, expected one of them"),
    ],
)
def test_further_stores_need_names(given: list[str], says: str) -> None:
    result = invoke("serve", *given)
    assert result.exit_code == 2
    assert says in result.stderr
    assert tiny.one_sentence(result.stderr.strip())


def test_a_further_store_is_not_called_as_the_first_ones_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one would answer in its place."""
    monkeypatch.setattr("blendrag.server.running.serve", lambda *given: None)
    store = tmp_path / "one"
    result = invoke(
        "serve", "--model", "demo", "--store", store, "--serve", "demo=x", "--port", "0"
    )
    assert result.exit_code == 2
    assert "'demo' is what requests call the model of the first store" in result.stderr
    assert tiny.one_sentence(result.stderr.strip())


def test_a_further_store_that_is_not_there_is_refused_before_a_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("blendrag.cli.serve._open")
    given = "--model", "demo", "--store", tmp_path / "one", "--serve", f"two={tmp_path / 'two'}"
    result = invoke("serve", *given, "--port", "0")
    assert result.exit_code == 2
    assert f"there is no corpus at {tmp_path / 'two'}" in result.stderr


@pytest.mark.slow
def test_the_command_serves_them_and_questions_over_each_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, roots = save_model(tmp_path / "model"), [tmp_path / "one", tmp_path / "two"]
    with tiny.engine(str(model), roots[0], tokenizer=None) as engine:
        engine.ingest([tiny.document(1)]).whole()
    shutil.copytree(*roots)
    found = []

    def serve(*given: object) -> None:
        for root in roots:
            record = server_record.read(root)
            assert record is not None
            body = serving.body_for({}, record)
            found.append((record.secret, (body or {}).get("model")))

    monkeypatch.setattr("blendrag.server.running.serve", serve)
    result = invoke("serve", "--store", roots[0], "--serve", f"two={roots[1]}", "--port", "0")
    assert result.exit_code == 0, result.stderr
    (secret, first), (same, second) = found
    assert secret == same
    assert (first, second) == (None, "two")
    assert f"serving: two: model over {roots[1]}" in result.stderr
