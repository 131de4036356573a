"""Chunks whose KV the store lacks are computed for the answer and encoded once for later requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import Answer, BlendEngine, Options, background_writer, packing_rule
from blendrag.engine.background_writer import BackgroundWriter, Job
from blendrag.errors import RequestCancelled, StoreFullError
from blendrag.planning.controller import Controller

pytestmark = pytest.mark.timeout(120)
NOTE = "encoded before the answer"
BLEND = Options(mode="blend", ratio=0.3, max_new_tokens=2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(
        tiny.shared_llama(), tmp_path / "store", ram_bytes=0, prefix_text=tiny.BOS
    ) as made:
        made.ingest([tiny.document(i, 4) for i in range(2)])
        yield made


def lose(engine: BlendEngine) -> list[str]:
    """Delete the KV of document 1 and return its keys."""
    keys = tiny.chunk_keys(engine, 1)
    tiny.lose_kv(engine, *keys)
    return keys


def answers(engine: BlendEngine, count: int, options: Options = BLEND) -> list[Answer]:
    """Answers to ``count`` requests that are all queued before the first begins."""
    text = tiny.prompt(engine, 0, 1)
    with engine.scheduler.held():
        found = [engine.stream(text, options) for _ in range(count)]
    return [pieces.answer for pieces in found]


def computed(answer: Answer) -> int:
    return [chunk.outcome for chunk in answer.metrics.chunks].count("computed")


def notes(answer: Answer) -> list[str]:
    return [note for note in answer.metrics.notes if NOTE in note]


@pytest.fixture
def encodings(engine: BlendEngine) -> Iterator[list[tuple]]:
    """Namespace, ids and prefix of everything that is encoded."""
    with tiny.counted(engine.kv_namespace.validity, "encode_chunk") as calls:
        yield calls


def chunks(encodings: list[tuple]) -> int:
    """Without leading parts, which have no prefix."""
    return sum(bool(prefix) for _, _, prefix in encodings)


def test_texts_may_be_embedded_between_the_layers_of_background_encoding(engine, monkeypatch):
    validity, within = engine.kv_namespace.validity, []
    real = validity.encode_chunk

    def encode(*given, **how):
        before = len(steps)
        kv = real(*given, **how)
        within.append(len(steps) - before)
        return kv

    lose(engine)
    monkeypatch.setattr(validity, "encode_chunk", encode)
    with tiny.counted(engine.kv_namespace.corpus.embedding_turns, "before_step") as steps:
        engine.generate(tiny.prompt(engine, 0, 1), BLEND)
        engine.drain()
    assert set(within) == {len(engine.adapter.decoder_layers)}


def test_a_missing_chunk_is_computed_and_then_encoded_alone(engine):
    keys = lose(engine)
    text = tiny.prompt(engine, 0, 1)
    first = engine.generate(text, BLEND)
    assert computed(first) == len(keys)
    assert "blended" in [chunk.outcome for chunk in first.metrics.chunks]
    assert "encoded after the answer" in first.metrics.chunks[-1].reason
    assert not notes(first)
    engine.drain()
    assert computed(engine.generate(text, BLEND)) == 0
    plan, prefix = engine.segments(text), engine.manifest.prefix_ids
    for segment in plan.chunks[-len(keys) :]:
        kv = tiny.stored_kv(engine, segment.stored_ids)
        assert kv is not None
        alone = engine.adapter.encode(prefix, segment.stored_ids).layers
        assert all(torch.equal(mine, other) for mine, other in zip(kv.layers, alone, strict=True))
        here = tiny.kv_between(engine.adapter, list(plan.ids), segment.position, segment.end)
        assert tiny.difference(here.layers[-1][1], kv.layers[-1][1]) > 1e-2


def test_queries_write_only_what_was_missing(engine):
    text = tiny.prompt(engine, 0, 1)
    for _ in range(2):  # the leading part is stored when it comes back
        engine.generate(text)
        engine.drain()
    before = engine.stats().puts
    assert before > 4
    for mode in ("blend", "reuse", "prefix", "full"):
        engine.generate(text, Options(mode=mode))  # type: ignore[arg-type]
    engine.drain()
    assert engine.stats().puts == before


def test_missing_chunks_are_encoded_once_if_other_requests_wait(engine, encodings):
    whole = answers(engine, 1)[0]
    keys = lose(engine)
    first, second = answers(engine, 2)
    assert computed(first) == 0
    assert notes(first) == [f"{len(keys)} chunks were {NOTE} because other requests waited"]
    assert not notes(second)
    assert first.text == second.text == whole.text
    engine.drain()
    assert chunks(encodings) == len(keys)


def test_stored_chunks_are_looked_up_once_while_other_requests_wait(engine):
    store = engine.store
    texts = [tiny.prompt(engine, 0, 1), tiny.prompt(engine, 1, 0)]
    with tiny.counted(store, "where") as wheres, tiny.counted(store, "_open_here") as opened:
        with engine.scheduler.held():
            found = [engine.stream(text, BLEND) for text in texts]
        assert all(computed(pieces.answer) == 0 for pieces in found)
    keys = {key for i in range(2) for key in tiny.chunk_keys(engine, i)}
    looked_up = [key for _, those, *_ in wheres for key in those]
    looked_up += [key for _, key, *_ in opened]
    assert Counter(key for key in looked_up if key in keys) == dict.fromkeys(keys, 2)


def test_notes_of_what_was_done_first_survive_a_chunk_that_fails_verification(engine):
    keys = lose(engine)
    tiny.damage(engine, tiny.chunk_keys(engine, 0)[0])
    first, _ = answers(engine, 2)
    assert "failed verification" in " ".join(chunk.reason for chunk in first.metrics.chunks)
    assert notes(first) == [f"{len(keys)} chunks were {NOTE} because other requests waited"]


@pytest.mark.parametrize("target", ["planner", "controller"])
def test_an_error_behind_the_opening_of_chunks_closes_them(engine, monkeypatch, target):
    def fail(*_: Any) -> None:
        raise OSError("the store is gone")

    assert lose(engine)
    opened, closed, stock = [], [], engine.store.open_all

    def watch(reader: Any) -> None:
        opened.append(reader)
        close = reader.close
        monkeypatch.setattr(reader, "close", lambda: (closed.append(reader), close()))

    def open_all(*given: Any) -> list[Any]:
        found = stock(*given)
        for reader in filter(None, found):
            watch(reader)
        return found

    monkeypatch.setattr(engine.store, "open_all", open_all)
    if target == "planner":
        monkeypatch.setattr(engine.planner, "_why_missing", fail)
    else:
        monkeypatch.setattr(Controller, "_chunk", fail)
    with pytest.raises(OSError, match="the store is gone"):
        engine.generate(tiny.prompt(engine, 0, 1), BLEND)
    assert opened
    assert {*map(id, closed)} == {*map(id, opened)}


def test_a_mode_that_does_not_load_chunks_encodes_nothing_first(engine):
    lose(engine)
    options = Options(mode="prefix", max_new_tokens=2)
    assert not any(notes(answer) for answer in answers(engine, 2, options))


def test_missing_chunks_of_a_batch_are_looked_up_and_encoded_once(engine, encodings, monkeypatch):
    keys = lose(engine)
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 10_000)
    prompts = [tiny.prompt(engine, 0, 1)] * 3
    with tiny.counted(engine.background, "encode_first") as asked:
        found = engine.batch(prompts, BLEND)
    assert [computed(answer) for answer in found] == [0, 0, 0]
    assert {answer.metrics.batch_size for answer in found} == {3}
    assert [len(missing) for missing, _ in asked] == [len(keys)]
    engine.drain()
    assert chunks(encodings) == len(keys)


def test_a_full_store_does_not_fail_a_request(engine, encodings, monkeypatch):
    lose(engine)

    def full(*args: Any) -> None:
        raise StoreFullError("the store is full")

    monkeypatch.setattr(engine.store, "put", full)
    first, second = answers(engine, 2)
    assert first.text == second.text
    assert chunks(encodings) == 1  # nothing more is encoded once the store is full
    assert not notes(first)


def test_a_cancelled_request_stops_encoding_first(engine):
    keys = lose(engine)
    background: BackgroundWriter = engine.background
    used = engine.kv_namespace
    ids = [used.model.text_ids(text) for text in tiny.chunk_texts(engine, 1)]
    missing = [Job(each, used.corpus.prefix_ids, None) for each in ids]
    checks = iter([None, RequestCancelled()])

    def check() -> None:
        if error := next(checks):
            raise error

    with pytest.raises(RequestCancelled):
        engine.scheduler.run(lambda: background.encode_first(missing, check))
    store, namespace = engine.store, engine.adapter.identity.namespace
    assert len(store.where(namespace, keys)) == 1


def test_the_queue_of_chunks_to_encode_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(background_writer, "QUEUED_CHUNKS", 1)
    keys, text = lose(engine), tiny.prompt(engine, 0, 1)
    assert len(keys) > 1
    store, namespace = engine.store, engine.adapter.identity.namespace
    for there in (1, 2):
        engine.generate(text, BLEND)
        engine.drain()
        assert len(store.where(namespace, keys)) == there
