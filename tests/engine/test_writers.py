"""A store whose chunks were encoded with a writer: ingest, questions, other engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
import writers
from blendrag.engine import BlendEngine, Options
from blendrag.model.writer import Writer
from blendrag.store import writer_files

NUMBERS = (0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return writers.writer(tiny.llama(), tmp_path / "given")


@pytest.fixture
def root(tmp_path: Path, folder: Path) -> Path:
    """A store that was ingested with the writer."""
    with tiny.engine(tiny.llama(), tmp_path / "store", writer=str(folder)) as engine:
        ingest(engine)
    return tmp_path / "store"


def ingest(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(number) for number in NUMBERS]).whole()


def ask(engine: BlendEngine, **options: object) -> tuple[torch.Tensor, int]:
    """Logits of the first token, and how many tokens were reused."""
    logits, answer = tiny.first_logits(engine, tiny.prompt(engine, *NUMBERS), Options(**options))
    return logits, answer.metrics.reused_tokens


def test_chunks_are_stored_as_the_writer_encodes_them(root: Path, folder: Path) -> None:
    made = writers.with_lora(tiny.llama())
    with tiny.engine(tiny.llama(), root) as engine:
        used = engine.kv_namespace
        for text in tiny.chunk_texts(engine, 0):
            ids = used.model.text_ids(text)
            stored = tiny.stored_kv(engine, ids)
            expected = writers.by_peft(made, used.corpus.prefix_ids, ids)
            assert stored is not None
            for one, other in zip(stored.layers, expected.layers, strict=True):
                assert (one - other).abs().max() < 1e-5
    assert writer_files.kept_in(root) == [Writer.load(folder).fingerprint]


def test_an_engine_without_options_uses_the_writer_of_the_store(root: Path) -> None:
    with tiny.engine(tiny.llama(), root) as engine:
        with_writer, reused = ask(engine, mode="reuse")
        assert reused > 0
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 0))
        ask(engine)
        engine.drain()  # encodes them again
        again, reused_again = ask(engine, mode="reuse")
    assert reused_again >= reused  # the beginning is stored, too, when it is seen again
    assert tiny.difference(again, with_writer) < 1e-5


def test_kv_with_and_without_a_writer_is_kept_apart(root: Path) -> None:
    with tiny.engine(tiny.llama(), root, writer="none") as engine:
        _, reused = ask(engine, mode="reuse")
        assert reused == 0
        engine.drain()
        stock, reused_stock = ask(engine, mode="reuse")
        assert reused_stock > 0  # computed for the store, which has both now
    with tiny.engine(tiny.llama(), root) as engine:
        with_writer, reused_with = ask(engine, mode="reuse")
    assert reused_with > 0
    assert tiny.difference(stock, with_writer) > 1e-3
