"""Where requests wait, a chunk without KV is encoded before it is needed instead of computed twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import Answer, BlendEngine, Options, packing_rule
from blendrag.engine.kv_writer import BackgroundWriter
from blendrag.errors import RequestCancelled, StoreFullError
from blendrag.store.identity import chunk_key

pytestmark = pytest.mark.timeout(120)
NOTE = "chunks were encoded before the answer"
BLEND = Options(mode="blend", ratio=0.3, max_new_tokens=2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store", ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(2)])
        yield made


def prompt(engine: BlendEngine) -> str:
    texts = [text for number in (0, 1) for text in tiny.chunk_texts(engine, number)]
    return "\n\n".join(["Answer the question.", *texts, "Question: what did the company do?"])


def lose(engine: BlendEngine) -> list[str]:
    """Forget the KV of document 1; its keys."""
    namespace, prefix = engine.adapter.identity.namespace, engine.resources.prefix_ids
    texts = tiny.chunk_texts(engine, 1)
    keys = [chunk_key(namespace, prefix, engine.resources.text_ids(text)) for text in texts]
    for key in keys:
        assert engine.resources.store.delete(namespace, key)
    return keys


def answers(engine: BlendEngine, count: int, options: Options = BLEND) -> list[Answer]:
    """To as many requests, all of which wait before the first begins."""
    held = threading.Event()
    engine._worker.submit(held.wait)
    text = prompt(engine)
    found: list[Future[Answer]] = [engine._start(text, options).future for _ in range(count)]
    held.set()
    return [future.result(60) for future in found]


def notes(answer: Answer) -> list[str]:
    return [note for note in answer.metrics.notes if NOTE in note]


def encodings(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each chunk encoded from now on; a leading part stands behind nothing and does not count."""
    encoded: list[int] = []
    encode = engine.resources.kv_validity.encode

    def noting(namespace: str, ids: Any, prefix: Any) -> Any:
        encoded.extend([len(ids)] if prefix else [])
        return encode(namespace, ids, prefix)

    monkeypatch.setattr(engine.resources.kv_validity, "encode", noting)
    return encoded


def test_missing_chunks_are_encoded_once_if_other_requests_wait(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answers(engine, 1)[0]
    keys = lose(engine)
    encoded = encodings(engine, monkeypatch)
    first, second = answers(engine, 2)
    assert "computed" not in [chunk.outcome for chunk in first.metrics.chunks]
    assert notes(first) == [f"{len(keys)} {NOTE} because other requests waited"]
    assert not notes(second)
    assert first.text == second.text == whole.text
    engine.drain()
    assert len(encoded) == len(keys)  # and not once more afterwards


def test_a_single_request_is_answered_before_chunks_are_encoded(engine: BlendEngine) -> None:
    keys = lose(engine)
    answer = answers(engine, 1)[0]
    computed = [chunk.outcome for chunk in answer.metrics.chunks].count("computed")
    assert computed == len(keys)
    assert not notes(answer)


@pytest.mark.parametrize("mode", ["full", "prefix"])
def test_modes_that_would_not_load_it_encode_nothing_first(engine: BlendEngine, mode: Any) -> None:
    lose(engine)
    options = Options(mode=mode, max_new_tokens=2)
    assert not any(notes(answer) for answer in answers(engine, 2, options))


def test_missing_chunks_of_a_batch_are_encoded_once(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = lose(engine)
    encoded = encodings(engine, monkeypatch)
    found = engine.batch([prompt(engine)] * 3, BLEND)
    assert "computed" not in [c.outcome for answer in found for c in answer.metrics.chunks]
    engine.drain()
    assert len(encoded) == len(keys)


def test_prefilled_prompts_do_not_look_up_missing_chunks_again(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    first = BackgroundWriter.encode_first

    def noting(background: BackgroundWriter, missing: Any, check: Any) -> int:
        asked.append(len(missing))
        return first(background, missing, check)

    keys = lose(engine)
    monkeypatch.setattr(BackgroundWriter, "encode_first", noting)
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 10_000)
    with ThreadPoolExecutor(1) as pool:
        held = threading.Event()
        engine._worker.submit(held.wait)
        batch = pool.submit(engine.batch, [prompt(engine)] * 3, BLEND)
        while len(engine._worker._foreground) < 3:
            time.sleep(0.001)
        held.set()
        found = batch.result(60)
    assert {answer.metrics.batch_size for answer in found} == {3}
    assert asked == [len(keys), 0, 0]  # once a prompt


def test_a_full_store_costs_no_answer(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(engine)
    encoded = encodings(engine, monkeypatch)

    def full(*args: Any) -> None:
        raise StoreFullError("the store is full")

    monkeypatch.setattr(engine.resources.store, "put", full)
    first, second = answers(engine, 2)
    assert first.text == second.text
    assert len(encoded) == 1  # nothing more is encoded for a store that takes nothing
    assert not notes(first)


def test_a_cancelled_request_stops_encoding_first(engine: BlendEngine) -> None:
    keys = lose(engine)
    background: BackgroundWriter = engine._background
    missing = [engine.resources.text_ids(text) for text in tiny.chunk_texts(engine, 1)]
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RequestCancelled

    with pytest.raises(RequestCancelled):
        engine._worker.run(lambda: background.encode_first(missing, check))
    store, namespace = engine.resources.store, engine.adapter.identity.namespace
    assert sum(store.contains(namespace, key) for key in keys) == 1
