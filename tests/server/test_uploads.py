"""Files that clients send are ingested in the background, by those who may write."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import tiny
from blendrag.engine import BlendEngine
from blendrag.server.access import ApiKeys, Limits
from blendrag.server.app import create_app
from blendrag.server.service import Service
from blendrag.server.upload_folders import PREFIX, UploadFolder, remove_left
from cli.commands import invoke
from server.conftest import ANSWER, QUESTION
from server.live import Live, live, until

DOCUMENTS, UPLOADS = "/v1/documents", "/v1/uploads"
TEXT = "The mill at the river was built of brick in the year 1874."


def writable_engine(root: Path, **options: Any) -> BlendEngine:
    engine = BlendEngine("demo", root, chunk_tokens=64, max_new_tokens=12, **options)
    engine.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
    return engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with (
        writable_engine(tmp_path_factory.mktemp("uploads") / "store") as engine,
        live(engine, Limits(max_upload_bytes=100_000), keys="editor write\nreader") as server,
    ):
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[httpx.Client]:
    with server.client(headers={"Authorization": "Bearer editor"}) as client:
        yield client
        for each in client.get(DOCUMENTS).json()["data"]:
            client.delete(DOCUMENTS, params={"source": each["source"]})


def send(client: httpx.Client, source: str, content: bytes | str) -> httpx.Response:
    return client.put(DOCUMENTS, params={"source": source}, content=content)


def upload_of(client: httpx.Client, source: str) -> dict[str, Any]:
    """The last upload of this source, once it has ended."""

    def found() -> dict[str, Any]:
        listed = client.get(UPLOADS).json()["data"]
        return next(each for each in listed if each["source"] == source)

    until(lambda: found()["status"] not in ("waiting", "running"))
    return found()


def sources(client: httpx.Client) -> list[str]:
    return [each["source"] for each in client.get(DOCUMENTS).json()["data"]]


@pytest.fixture
def held(server: Live) -> Iterator[Callable[[], None]]:
    """The model encodes nothing until this is called."""
    go_on, begun = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    writer = server.engine.kv_namespace.validity
    stock = writer.encode_chunk
    writer.encode_chunk = lambda *given, **more: (wait(), stock(*given, **more))[1]  # type: ignore
    yield go_on.set
    go_on.set()
    del writer.encode_chunk


def test_a_file_is_ingested_in_the_background_asked_and_removed(
    client: httpx.Client, context: str
) -> None:
    response = send(client, "people/anna.txt", context)
    assert response.status_code == 202
    assert response.json()["source"] == "people/anna.txt"
    assert upload_of(client, "people/anna.txt") == {
        "object": "upload",
        "source": "people/anna.txt",
        "bytes": len(context.encode()),
        "status": "stored",
        "done": 1.0,
        "messages": [],
    }
    (listed,) = client.get(DOCUMENTS).json()["data"]
    assert (listed["source"], listed["title"]) == ("people/anna.txt", "anna")
    asked = {"messages": [{"role": "user", "content": QUESTION}], "retrieve": True}
    answer = client.post("/v1/chat/completions", json=asked).json()
    assert ANSWER in answer["choices"][0]["message"]["content"]
    assert answer["blendrag"]["sources"][0]["file_name"] == "anna.txt"
    assert send(client, "people/anna.txt", TEXT).status_code == 202
    upload_of(client, "people/anna.txt")
    assert client.delete(DOCUMENTS, params={"source": "people/anna.txt"}).json()["deleted"] == 1
    assert sources(client) == []


def test_lines_of_json_are_replaced_and_removed_with_their_file(client: httpx.Client) -> None:
    lines = ['{"id": "a", "text": "One mill."}', '{"id": "b", "text": "Two mills."}', "{"]
    send(client, "mills.jsonl", "\n".join(lines))
    (said,) = upload_of(client, "mills.jsonl")["messages"]
    assert said.startswith("mills.jsonl: line 3 is not valid JSON")
    assert sources(client) == ["mills.jsonl#a", "mills.jsonl#b"]
    send(client, "mills.jsonl", lines[1])
    upload_of(client, "mills.jsonl")
    assert sources(client) == ["mills.jsonl#b"]
    assert client.delete(DOCUMENTS, params={"source": "mills.jsonl"}).json()["deleted"] == 1
    assert client.delete(DOCUMENTS, params={"source": "mills.jsonl"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.bin",
            b"\x00\xff\x00" * 99,
            "a.bin: is binary, expected text; convert it to text first",
        ),
        ("b.txt", b" ", "b.txt: is empty, expected text; remove it or fill it"),
        ("c.pdf", b"%PDF-1.4 nothing", "c.pdf: "),
    ],
)
def test_a_file_that_cannot_be_read_fails_with_one_sentence(
    client: httpx.Client, name: str, content: bytes, says: str
) -> None:
    send(client, name, content)
    upload = upload_of(client, name)
    assert upload["status"] == "failed"
    (said,) = upload["messages"]
    assert said.startswith(says)
    assert tiny.one_sentence(said)


@pytest.mark.parametrize("is_told", [True, False])
def test_too_large_a_file_is_refused_while_it_arrives(client: httpx.Client, is_told: bool) -> None:
    content: Any = b"x" * 100_001 if is_told else iter([b"x" * 50_000] * 3)
    response = client.put(DOCUMENTS, params={"source": "x.txt"}, content=content)
    assert response.status_code == 413
    assert "larger than 97.7 KiB, the limit of this server (--max-upload)" in response.text


@pytest.mark.parametrize("source", ["", "a/", "..", "a/..", "a\0b", "x" * 256, "x" * 5000])
def test_a_source_must_end_in_the_name_of_a_file(client: httpx.Client, source: str) -> None:
    assert send(client, source, TEXT).status_code == 400


def test_requests_are_answered_and_uploads_cancelled_while_one_is_ingested(
    client: httpx.Client, held: Callable[[], None]
) -> None:
    for name in ("first.txt", "second.txt"):
        send(client, name, f"{name} {TEXT}")
    until(lambda: client.get(UPLOADS).json()["data"][-2]["status"] == "running")
    assert client.get(UPLOADS).json()["data"][-1]["status"] == "waiting"
    assert client.get("/v1/models").status_code == 200
    with httpx.Client(base_url=client.base_url, headers=client.headers, timeout=60) as other:
        removing = threading.Thread(
            target=other.delete,
            args=(DOCUMENTS,),
            kwargs={"params": {"source": ["first.txt", "second.txt"]}},
        )
        removing.start()
        until(lambda: client.get(UPLOADS).json()["data"][-1]["status"] == "cancelled")
        held()
        removing.join(60)
    assert upload_of(client, "first.txt")["status"] == "cancelled"
    assert sources(client) == []


def test_no_upload_is_cancelled_by_a_removal_that_is_refused(
    client: httpx.Client, held: Callable[[], None]
) -> None:
    send(client, "kept.txt", f"Kept: {TEXT}")
    response = client.delete(DOCUMENTS, params={"source": ["kept.txt", "unknown.txt"]})
    assert response.status_code == 404
    held()
    assert upload_of(client, "kept.txt")["status"] == "stored"


def test_files_that_wait_when_the_server_ends_are_counted_and_not_kept(
    server: Live, held: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        live(server.engine, keys="editor write") as ending,
        ending.client(headers={"Authorization": "Bearer editor"}) as client,
    ):
        for name in ("first.txt", "second.txt"):
            assert send(client, name, f"Then {name} {TEXT}").status_code == 202
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []
    assert ending.service.uploads.left == 2
    held()


def test_files_that_a_killed_server_left_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = UploadFolder()
    killed = tmp_path / f"{PREFIX}x"
    killed.mkdir()
    (killed / "a.txt").write_text(TEXT)
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    assert remove_left() == 1
    assert {each.name for each in tmp_path.iterdir()} == {
        held.path.name, f"{PREFIX}link", "other",
    }  # fmt: skip
    held.remove()
    assert not held.path.exists()
    assert remove_left() == 0


def test_only_those_who_may_write_see_and_send_files(server: Live, tmp_path: Path) -> None:
    with server.client(headers={"Authorization": "Bearer reader"}) as reader:
        for response in (send(reader, "a.txt", TEXT), reader.get(UPLOADS)):
            assert response.json()["error"]["code"] == "read_only_key"
    for keys, code in ((ApiKeys(), "read_only_server"), (ApiKeys(all_may_write=True), None)):
        app = create_app(Service(server.engine, keys=keys))
        response = TestClient(app, base_url="http://127.0.0.1").get(UPLOADS)
        assert response.json().get("error", {}).get("code") == code


def test_a_store_that_is_read_only_takes_no_files(demo_engine: BlendEngine) -> None:
    with (
        writable_engine(demo_engine.root, read_only=True) as engine,
        live(engine, keys="editor write") as server,
        server.client(headers={"Authorization": "Bearer editor"}) as client,
    ):
        for response in (
            send(client, "a.txt", TEXT),
            client.post("/v1/ingest", json={"documents": [{"source": "a", "text": TEXT}]}),
            client.get(UPLOADS),
        ):
            assert response.json()["error"]["code"] == "read_only_store"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--api-key-file", "none"], "expected one of them"),
        (["--cors-origin", "*"], "every web page"),
        (["--host", "0.0.0.0", "--port", "0"], "expected an address of this machine only"),
        (["--read-only"], "--writable with --read-only, expected one of them"),
        (["--ray"], "expected no --writable"),
    ],
)
def test_who_may_write_without_a_key_is_limited(options: list[str], says: str) -> None:
    result = invoke("serve", "--writable", *options)
    assert result.exit_code == 2
    assert says in result.stderr
    assert tiny.one_sentence(result.stderr.strip())
