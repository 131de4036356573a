"""Pipelines with ``num_workers``: each process has its own engine over the same store."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.ingestion import IngestionPipeline
from places import document

import tiny
from blendrag.config import settings
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    close_shared_engines,
)

PLACES = ["Bay", "Cape", "Dale", "Elm"]


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 64 tokens, also in workers."""
    monkeypatch.setenv("BLENDRAG_CHUNK_TOKENS", "64")
    settings.cache_clear()
    yield
    close_shared_engines()
    settings.cache_clear()


class PoolHere:
    """What a pool does, in this process: a spawned one imports torch for seconds."""

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def __enter__(self) -> PoolHere:
        return self

    def __exit__(self, *_: object) -> None:
        close_shared_engines()  # they end with their process

    def starmap(self, function: Any, arguments: Iterable[Any]) -> list[Any]:
        return [sent(function(*sent(given))) for given in arguments]


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.filterwarnings("ignore:Specified num_workers")
def test_spawned_workers_store_kv_and_forked_ones_are_refused(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Pool", PoolHere)
    names = {"model": checkpoint, "store": str(tmp_path / "kv"), "embedder": "minilm-offline"}
    precompute = BlendPrecompute(**names)
    steps = [BlendNodeParser(**names), BlendEmbedding(**names), precompute]
    made = IngestionPipeline(transformations=steps)
    documents = [document(place) for place in PLACES]
    if multiprocessing.get_start_method() == "fork":
        with pytest.raises(InvalidInputError, match="start processes by spawn") as raised:
            asyncio.run(made.arun(documents=documents, num_workers=2))
        assert "forked, and cannot be used in both" in str(raised.value)
        assert tiny.one_sentence(str(raised.value))
    nodes = made.run(documents=documents, num_workers=2)
    library = precompute.engine.library
    assert sorted({str(node.ref_doc_id) for node in nodes}) == PLACES
    assert all(node.embedding for node in nodes)
    assert all(library.has_kv([node.node_id for node in nodes]).values())


def test_a_given_engine_cannot_be_sent_to_workers(engine: BlendEngine) -> None:
    made = IngestionPipeline(transformations=[BlendPrecompute(engine=engine)])
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled") as raised:
        made.run(documents=[document("Bay"), document("Cape")], num_workers=2)
    assert tiny.one_sentence(str(raised.value))
