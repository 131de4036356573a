"""The chunks of a request's body, and their keys, without the model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine import BlendEngine
from blendrag.text.readers import Document
from blendrag_ray.chunk_keys import ChunkKeys


@pytest.fixture(scope="module")
def keys(store: Path) -> Iterator[ChunkKeys]:
    with BlendEngine("demo", store, read_only=True) as engine:
        engine.add_schema(TOWN)
        yield ChunkKeys(engine)
        assert not engine.kv_namespace.model.is_loaded


TOWN = '<schema name="town"><module name="hall">The town hall is old.</module></schema>'


def found(keys: ChunkKeys, **fields: Any) -> int:
    return len(keys.of(json.dumps(fields).encode()))


def test_keys_are_those_of_the_store(keys: ChunkKeys, store: Path, texts: list[str]):
    asked = {"messages": [{"role": "user", "content": "\n\n".join(texts)}]}
    with BlendEngine("demo", store) as engine:
        _, stored = engine.store.resident(100)  # type: ignore[attr-defined]
    known = keys.of(json.dumps(asked).encode())
    assert len(known) == 2
    assert set(known) < set(stored)  # the probe entry is stored, too
    assert all(tokens > 10 for tokens in known.values())


def test_the_first_chunk_of_a_request_has_the_key_of_its_own_kv(tmp_path: Path):
    texts = [f"The mill number {n} was built near the river by a company. " * 3 for n in range(2)]
    documents = [Document(f"{n}.txt", text, "") for n, text in enumerate(texts)]
    with BlendEngine("demo", tmp_path / "kv", encode_after=1) as engine:
        engine.ingest(documents).whole()
        kept = [
            engine.kv_namespace.keys_of(engine.manifest.namespace, text.strip()) for text in texts
        ]
        known = ChunkKeys(engine).of(json.dumps({"prompt": "\n\n".join(texts)}).encode())
    assert [*known] == [kept[0][1], kept[1][0]]


def test_chunks_are_found_in_every_field_that_holds_text(keys: ChunkKeys, texts: list[str]):
    one = texts[0]
    parts = [{"type": "text", "text": one}]
    assert found(keys, prompt=one) == found(keys, prompt=texts) - 1 == 1
    assert found(keys, messages=[{"role": "user", "content": parts}]) == 1
    assert found(keys, documents=[one, {"text": texts[1]}]) == 2
    assert found(keys, documents=[{"data": {"snippet": one}}, {"data": texts[1]}]) == 2
    assert found(keys, prompt="no chunk of this corpus") == 0


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": [3, {"content": [4, {"text": 5}]}]}',
    b'{"documents": [null, {"data": []}], "prompt": [1, 2]}', b"[" * 100_000, b"\xff",
    b'{"schema": 3}', b'{"schema": "town", "messages": []}', b'{"schema": "gone", "messages": []}',
    b'{"schema": "town", "messages": [{"role": "user", "content": "<mill/>"}]}',
])  # fmt: skip
def test_bodies_that_will_be_refused_have_no_chunks(keys: ChunkKeys, body: bytes):
    assert keys.of(body) == {}
