"""Settings of a new corpus: prefix, encoding, chunk size; who creates it first decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.store.identity import chunk_key


def stored(engine: BlendEngine, prefix: tuple[int, ...]) -> torch.Tensor | None:
    """Values of the last layer of the first document's first chunk, stored behind ``prefix``."""
    namespace, used = engine.adapter.identity.namespace, engine.resources
    ids = used.text_ids(tiny.chunk_texts(engine, 0)[0])
    layout = engine.adapter.layout
    reader = used.store.open(namespace, chunk_key(namespace, prefix, ids), layout, len(ids))
    if reader is None:
        return None
    out = torch.empty(layout.layer_shape(len(layout.layers) - 1, len(ids)))
    reader.read_layer(len(layout.layers) - 1, out)
    reader.close()
    return out[1]


def test_without_a_prefix_chunks_are_encoded_and_found_behind_nothing(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "bare", encode_prefix=False) as engine:
        engine.ingest([tiny.document(0)])
        assert engine.resources.prefix_ids == ()
        bare = stored(engine, ())
        assert bare is not None
        ids = engine.resources.text_ids(tiny.chunk_texts(engine, 0)[0])
        alone = engine.adapter.encode((), ids).layers[-1][1]
        assert tiny.difference(bare, alone) < 1e-5
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did they build?"])
        metrics = engine.generate(prompt).metrics
        assert {chunk.outcome for chunk in metrics.chunks} == {"blended"}
    with tiny.engine(tiny.llama(), tmp_path / "bos") as engine:
        engine.ingest([tiny.document(0)])
        behind = stored(engine, engine.resources.prefix_ids)
        assert stored(engine, ()) is None  # the prefix is part of the key
        assert behind is not None
        assert tiny.difference(behind, bare) > 1e-2


def test_at_ratio_one_it_makes_no_difference(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", encode_prefix=False) as engine:
        engine.ingest([tiny.document(0)])
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did they build?"])
        full, _ = tiny.first_logits(engine, prompt, Options(mode="full"))
        blended, _ = tiny.first_logits(engine, prompt, Options(mode="blend", ratio=1.0))
        reused, _ = tiny.first_logits(engine, prompt, Options(mode="reuse"))
        assert tiny.difference(blended, full) < 1e-4
        assert tiny.difference(reused, full) > 1e-2


def test_the_corpus_remembers_encode_prefix(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", encode_prefix=False) as engine:
        engine.ingest([tiny.document(0)])
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        assert engine.resources.prefix_ids == ()
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did they build?"])
        assert engine.generate(prompt).metrics.reused_tokens > 0


def test_a_corpus_behind_a_prefix_stays_behind_it(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    with (
        tiny.engine(tiny.llama(), tmp_path / "s", encode_prefix=False) as engine,
        pytest.raises(InvalidInputError, match="behind a prefix of 1 tokens") as raised,
    ):
        engine.ingest([tiny.document(1)])
    assert tiny.one_sentence(str(raised.value))


def test_prefix_text_without_encode_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="encode_prefix=False") as raised:
        tiny.engine(tiny.llama(), tmp_path / "s", encode_prefix=False, prefix_text="Read:\n")
    assert tiny.one_sentence(str(raised.value))


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
def test_of_two_ingests_that_create_a_store_with_other_settings_one_is_refused(
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


def test_an_ingest_without_explicit_settings_follows_the_first_when_repeated(
    tmp_path: Path,
) -> None:
    with made(tmp_path / "s") as slow, made(tmp_path / "s", encoding="int8") as fast:
        in_between(slow, lambda: fast.ingest(DOCUMENTS[:1]).whole())
        with pytest.raises(CorpusError, match="encoding 'int8' instead of 'native'"):
            slow.ingest(DOCUMENTS)
        assert slow.ingest(DOCUMENTS).whole().chunks_computed > 0
        assert slow.resources.encoding == "int8"
        assert reused_share(slow) == 1
        assert reused_share(fast) == 1


def test_two_ingests_can_create_a_store_with_equal_settings(tmp_path: Path) -> None:
    with (
        made(tmp_path / "s", encoding="int8") as slow,
        made(tmp_path / "s", encoding="int8") as fast,
    ):
        in_between(slow, lambda: fast.ingest(DOCUMENTS).whole())
        slow.ingest(DOCUMENTS).whole()
        assert reused_share(slow) == reused_share(fast) == 1


def test_settings_of_an_empty_store_can_change(tmp_path: Path) -> None:
    with made(tmp_path / "s", encoding="int8") as gave_up:
        gave_up.resources.create_corpus()
    with made(tmp_path / "s", encoding="fp8") as engine:
        engine.ingest(DOCUMENTS).whole()
        assert engine.resources.encoding == "fp8"
        assert reused_share(engine) == 1
