"""Material for a writer: what of a store is trained on, and how it is grouped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny
from blendrag.config import settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import LEARNED, Entry, NewEntry
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunk, chunk_id_of, learned_id
from blendrag_lab.distillation.sources import corpus_of
from blendrag_lab.evaluation.datasets import embedder_for


def put(corpus: Corpus, entry: Entry, chunk_id: str = "") -> None:
    chunk = Chunk(entry.text, 0, len(entry.text), 20, chunk_id or chunk_id_of(entry.text))
    learned = entry.parent == LEARNED
    vector = np.zeros(0) if learned else np.eye(1, corpus.vectors.dim(), dtype=np.float32)[0]
    corpus.entries.put([NewEntry(entry, chunk, "digest", vector)])


def test_entries_of_one_document_are_a_group_and_learned_passages_are_in_none(
    tmp_path: Path,
) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)]).whole()
        corpus, tokens = engine.require_corpus(), engine.adapter.tokens
        for number in (2, 0, 1):
            text = f"Part {number} of the report on the mill of Garth. " * 3
            put(corpus, Entry(f"id{number}", text, {"source": "/reports/mill.md"}, start=number))
        private = "The board of Quillon Works alone knows the price. " * 3
        chunk_id = learned_id("acme", private)
        put(corpus, Entry(chunk_id, private, parent=LEARNED), chunk_id)
    made = corpus_of(tokens, tmp_path / "s", (), ())
    groups = [
        {(each.name, each.text[:6]) for each in group.passages}
        for group in made.groups
        if group.passages[0].name == "mill.md"
    ]
    assert groups == [{("mill.md", f"Part {n}") for n in range(3)}]
    assert not any("Quillon" in each.text for group in made.groups for each in group.passages)


def test_chunks_of_a_store_are_trained_on_as_it_encodes_them_or_as_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", encode_after=1) as engine:
        engine.ingest([tiny.document(0)]).whole()
        tokens = engine.adapter.tokens

    def encode_after(given: int | None) -> int:
        return corpus_of(tokens, tmp_path / "s", (), (), encode_after=given).encode_after

    assert (encode_after(None), encode_after(0)) == (1, 0)
    monkeypatch.setenv("BLENDRAG_ENCODE_AFTER", "3")
    settings.cache_clear()
    try:
        assert (encode_after(None), encode_after(0)) == (3, 0)
    finally:
        settings.cache_clear()


def test_code_of_an_embedder_is_trusted_if_it_is_named_with_the_option(tmp_path: Path) -> None:
    tokens = Tokens(tiny.tokenizer())
    (tmp_path / "mill.md").write_text("The mill of Garth was built in 1874. " * 5)
    for trusts in (False, True):
        made = corpus_of(
            tokens, None, [tmp_path / "mill.md"], (), embedder="named", trust_remote_code=trusts
        )
        evaluated = embedder_for("named", None, None, trusts)
        assert made.embedder is not None
        assert (
            made.embedder.__reduce__()[1] == evaluated.__reduce__()[1] == ("named", False, trusts)
        )
