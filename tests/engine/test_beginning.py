"""Two who begin one empty store at once, each its own way: one corpus, one way, and a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import CorpusError, InvalidInputError

DOCUMENTS = [tiny.document(i) for i in range(2)]


def made(root: Path, **changes: Any) -> BlendEngine:
    return tiny.engine(tiny.llama(), root, **changes)


def in_between(engine: BlendEngine, action: Any) -> None:
    """Run ``action`` when ``engine`` is about to write down its first document."""
    corpus = engine.resources.create_corpus()
    real = corpus.put_document

    def put_document(*args: Any) -> list[str]:
        corpus.put_document = real  # type: ignore[method-assign]
        action()
        return real(*args)

    corpus.put_document = put_document  # type: ignore[method-assign]


def reused_share(engine: BlendEngine) -> float:
    text = "\n\n".join(chunk for i in range(2) for chunk in tiny.chunk_texts(engine, i))
    metrics = engine.generate(f"{text}\n\nWhat now?", Options(mode="reuse")).metrics
    assert metrics.reused_tokens is not None
    return metrics.reused_tokens / sum(chunk.tokens for chunk in metrics.chunks)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"encoding": "native"}, {"encoding": "int8"}, "encoding 'int8' instead of 'native'"),
        ({"encoding": "fp8"}, {}, "encoding 'native' instead of 'fp8'"),
        ({"chunk_tokens": 64}, {"chunk_tokens": 128}, "chunk_tokens 128 instead of 64"),
        ({"encode_prefix": False}, {}, "prefix_ids"),
    ],
)
def test_of_two_who_begin_a_store_at_once_one_stops_in_a_sentence(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], told: str
) -> None:
    with made(tmp_path / "s", **one) as slow, made(tmp_path / "s", **other) as fast:
        in_between(slow, lambda: fast.ingest(DOCUMENTS).whole())
        with pytest.raises(CorpusError, match=told) as caught:
            slow.ingest(DOCUMENTS)
        assert "repeat the command" in str(caught.value)
        assert "\n" not in str(caught.value)
        corpus = fast.resources.require_corpus()
        assert corpus.sources() == ["doc0.txt", "doc1.txt"]
        assert corpus.manifest.namespace == fast.resources.namespace()
        assert fast.ingest(DOCUMENTS).chunks_computed == 0
        assert reused_share(fast) == 1
        if one:  # what was asked for is not what the store has now
            with pytest.raises(InvalidInputError, match="into another --store"):
                slow.ingest(DOCUMENTS)
    with made(tmp_path / "s", chunk_tokens=None) as later:
        assert later.ingest(DOCUMENTS).chunks_computed == 0
        assert reused_share(later) == 1


def test_a_store_that_is_begun_otherwise_while_kv_is_computed_is_no_change_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path / "s") as slow, made(tmp_path / "s", encoding="int8") as fast:
        assert slow.adapter.layout
        real = slow.resources.store.contains

        def contains(namespace: str, key: str) -> bool:
            monkeypatch.undo()
            fast.ingest(DOCUMENTS).whole()
            return real(namespace, key)

        monkeypatch.setattr(slow.resources.store, "contains", contains)
        with pytest.raises(CorpusError, match="encoding 'int8' instead of 'native'"):
            slow.ingest(DOCUMENTS)
        assert reused_share(fast) == 1


def test_who_did_not_ask_for_another_way_follows_when_it_is_repeated(tmp_path: Path) -> None:
    with made(tmp_path / "s") as slow, made(tmp_path / "s", encoding="int8") as fast:
        in_between(slow, lambda: fast.ingest(DOCUMENTS[:1]).whole())
        with pytest.raises(CorpusError, match="encoding 'int8' instead of 'native'"):
            slow.ingest(DOCUMENTS)
        assert slow.ingest(DOCUMENTS).whole().chunks_computed > 0
        assert slow.resources.encoding == "int8"
        assert reused_share(slow) == 1
        assert reused_share(fast) == 1


def test_two_who_begin_a_store_the_same_way_both_go_on(tmp_path: Path) -> None:
    with (
        made(tmp_path / "s", encoding="int8") as slow,
        made(tmp_path / "s", encoding="int8") as fast,
    ):
        in_between(slow, lambda: fast.ingest(DOCUMENTS).whole())
        slow.ingest(DOCUMENTS).whole()
        assert reused_share(slow) == reused_share(fast) == 1


def test_a_store_that_was_begun_and_never_filled_binds_nobody(tmp_path: Path) -> None:
    with made(tmp_path / "s", encoding="int8") as gave_up:
        gave_up.resources.create_corpus()
    with made(tmp_path / "s", encoding="fp8") as engine:
        engine.ingest(DOCUMENTS).whole()
        assert engine.resources.encoding == "fp8"
        assert reused_share(engine) == 1
