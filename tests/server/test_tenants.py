"""What a server learns from one key's prompts is only for that key, and takes nothing from its writers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.corpus.documents import LEARNED
from blendrag.store.disk_writer import RESERVE_BYTES, DiskWriter
from server.live import CHAT, Live, live

pytestmark = pytest.mark.timeout(120)
KEYS = "key-of-a\nkey-of-b\nkey-of-w write\n"
TEXTS = [" ".join(tiny.sentence(10 * i + k) for k in range(3)) for i in range(16)]


@contextmanager
def serving(root: Path, keys: str = KEYS, **changes: Any) -> Iterator[Live]:
    with (
        tiny.engine(
            tiny.llama(num_hidden_layers=2), root, learn=True, prefix_text=tiny.BOS, **changes
        ) as engine,
        live(engine, keys=keys) as server,
    ):
        yield server


def chat(server: Live, key: str, text: str, path: str = CHAT, **more: Any) -> dict[str, Any]:
    """A response without its id and times."""
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
        answered = client.post(path, json={"max_tokens": 3, **body, **more})
    server.engine.drain()
    assert answered.status_code == 200, answered.text
    fields = answered.json()
    about = fields["blendrag"]
    times = [name for name in about if name.endswith("_s")]
    for name in times:
        del about[name]
    return {name: value for name, value in fields.items() if name not in ("id", "created")}


def prompt(*numbers: int, question: str = "Who?") -> str:
    return tiny.LEAD + "\n\n".join(TEXTS[n] for n in numbers) + f"\n\nQuestion: {question}"


def twice(server: Live, key: str, *numbers: int) -> None:
    for question in ("Who?", "When?"):
        chat(server, key, prompt(*numbers, question=question))


def sources(response: dict[str, Any]) -> list[str]:
    return [chunk["source"] for chunk in response["blendrag"]["chunks"]]


def test_a_key_sees_what_it_sent_and_nothing_that_another_did_over_a_restart(tmp_path) -> None:
    with serving(tmp_path / "quiet") as server:
        alone = chat(server, "key-of-b", prompt(0, 1))
        salted = chat(server, "key-of-a", prompt(0, 1), cache_salt="s")
        raw = chat(server, "key-of-b", prompt(0, 1), "/v1/completions")
    with serving(tmp_path / "busy") as server:
        twice(server, "key-of-a", 0, 1)
        assert sources(chat(server, "key-of-a", prompt(1, 0))) == [LEARNED, LEARNED]
    with serving(tmp_path / "busy") as server:
        shown = chat(server, "key-of-b", prompt(0, 1))
        assert "holds no chunks" in str(shown["blendrag"]["notes"])
        for each in (shown, alone):
            each["blendrag"]["notes"] = str(each["blendrag"]["notes"]).replace("busy", "quiet")
        assert shown == alone
        assert chat(server, "key-of-a", prompt(0, 1), cache_salt="s") == salted
        assert (
            chat(server, "key-of-b", prompt(0, 1), "/v1/completions")["choices"] == raw["choices"]
        )
        assert sources(chat(server, "key-of-a", prompt(1, 0))) == [LEARNED, LEARNED]
        stored = b"".join(f.read_bytes() for f in (tmp_path / "busy").rglob("*") if f.is_file())
        assert b"key-of-" not in stored


def test_without_keys_all_learn_together(tmp_path) -> None:
    with serving(tmp_path, keys="") as server:
        twice(server, "any", 0, 1)
        assert sources(chat(server, "other", prompt(1, 0))) == [LEARNED, LEARNED]


def test_no_endpoint_shows_what_was_learned(tmp_path) -> None:
    with serving(tmp_path) as server:
        with server.client(headers={"Authorization": "Bearer key-of-w"}) as client:
            new = {"documents": [{"source": "doc", "text": tiny.document(9, 3).text}]}
            assert client.post("/v1/ingest", json=new).status_code == 200
            twice(server, "key-of-a", 0, 1)
            assert len(list(server.engine.library.entries(parent=LEARNED))) == 2
            told = [client.get(path).text for path in ("/v1/documents", "/metrics", "/v1/models")]
        assert len(json.loads(told[0])["data"]) == 1
        for text in told:
            assert not any(word in text for word in ("Place0", "Paragraph 0"))
        found = chat(server, "key-of-w", TEXTS[0], retrieve=True)["blendrag"]["sources"]
        assert {each["source"] for each in found} == {"doc"}


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_writer_ingests_whatever_a_reader_has_the_server_learn(
    tmp_path, monkeypatch, is_disk_full
) -> None:
    """The reader sends passages of three times the size that the store may hold."""
    with serving(tmp_path / "sized") as server:
        server.engine.ingest([tiny.document(9, 8)])
        document_bytes = server.engine.stats().size_bytes
    limit_bytes = 2 * document_bytes
    given: dict[str, Any] = {"disk_bytes": limit_bytes}
    if is_disk_full:
        given = {"disk_bytes": 1 << 40}

        def free(self: DiskWriter) -> int:
            used = sum(f.stat().st_size for f in (self.root / "kv").rglob("*.kv"))
            return max(0, limit_bytes - used) + RESERVE_BYTES

        monkeypatch.setattr(DiskWriter, "_free_bytes", free)
    with serving(tmp_path / "full", **given) as server:
        for number in range(0, 16, 2):
            twice(server, "key-of-a", number, number + 1)
        learned_bytes = server.engine.stats().size_bytes
        assert 0 < learned_bytes <= limit_bytes / 2
        with server.client(headers={"Authorization": "Bearer key-of-w"}) as client:
            for number in (9, 8):
                document = {"source": f"{number}", "text": tiny.document(number, 7).text}
                done = client.post("/v1/ingest", json={"documents": [document]})
                assert done.status_code == 200, done.text
        assert len(server.engine.library.ids(LEARNED)) < 16
        corpus = server.engine.require_corpus()
        assert len(corpus.documents()) == 2
        twice(server, "key-of-a", 0, 1)  # and learning goes on, or not, without harm
        assert server.engine.stats().size_bytes <= limit_bytes


def test_a_key_keeps_its_passages_whatever_another_has_the_server_learn(tmp_path) -> None:
    with serving(tmp_path / "sized") as server:
        twice(server, "key-of-a", 0, 1)
        learned_bytes = server.engine.stats().size_bytes
    with serving(tmp_path / "small", disk_bytes=12 * learned_bytes) as server:
        twice(server, "key-of-b", 0, 1)
        for number in range(2, 12, 2):
            twice(server, "key-of-a", number, number + 1)
        answer = chat(server, "key-of-b", prompt(1, 0))
        assert [chunk["outcome"] for chunk in answer["blendrag"]["chunks"]] == ["blended"] * 2
        assert server.engine.stats().size_bytes <= 4 * learned_bytes
