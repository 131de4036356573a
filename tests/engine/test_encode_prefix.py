"""Chunks encoded behind the corpus's prefix, and behind nothing to see what that is worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError
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


def test_the_corpus_remembers_it_and_whoever_asks_need_not_say_so(tmp_path: Path) -> None:
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


def test_a_prefix_and_none_at_once_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="encode_prefix=False") as raised:
        tiny.engine(tiny.llama(), tmp_path / "s", encode_prefix=False, prefix_text="Read:\n")
    assert tiny.one_sentence(str(raised.value))
