"""Removing documents: all that were asked for or none, their KV with them, whoever else writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.store.identity import chunk_key
from blendrag.text.readers import Document


def has_kv(engine: BlendEngine, text: str) -> bool:
    resources = engine.resources
    namespace = engine.adapter.identity.namespace
    key = chunk_key(namespace, resources.prefix_ids, resources.text_ids(text))
    return resources.store.contains(namespace, key)


def below(directory: str, number: int) -> Document:
    return Document(f"{directory}/d{number}.txt", tiny.document(number).text, "title")


def test_one_unknown_path_leaves_everything_there(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        texts = tiny.chunk_texts(engine, 0)
        with pytest.raises(InvalidInputError, match=r"missing\.txt is not in the corpus"):
            engine.remove(["doc0.txt", "missing.txt"])
        assert tiny.chunk_texts(engine, 0) == texts
        assert all(has_kv(engine, text) for text in texts)


def test_a_document_named_twice_is_removed_once(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([below("docs", 0), below("docs", 1), below("more", 2)])
        assert engine.remove(["docs", "docs/d0.txt", "docs"]) == 2
        assert engine.remove(["more/d2.txt", "more"]) == 1


def test_the_last_document_takes_its_kv_along_behind_any_prefix(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", prefix_text="<|bos|>Answer.") as engine:
        engine.ingest([tiny.document(0)])
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        texts = tiny.chunk_texts(engine, 0)
        assert all(has_kv(engine, text) for text in texts)
        engine.remove(["doc0.txt"])
    with tiny.engine(tiny.llama(), tmp_path / "s", prefix_text="<|bos|>Answer.") as engine:
        assert not any(has_kv(engine, text) for text in texts)


def test_a_document_ingested_anew_meanwhile_is_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        real = Corpus.remove_source

        def ingested_anew_before(corpus: Corpus, source: str) -> list[str]:
            monkeypatch.setattr(Corpus, "remove_source", real)
            engine.ingest([Document(source, tiny.document(5).text, "title")])
            return real(corpus, source)

        monkeypatch.setattr(Corpus, "remove_source", ingested_anew_before)
        assert engine.remove(["doc0.txt"]) == 1
        assert engine.resources.require_corpus().sources() == []
        assert Corpus.remove_source is real
        assert not has_kv(engine, tiny.document(5).text.split("\n\n")[0])
        assert engine.stats().entries == 1, "only the probe is left"
