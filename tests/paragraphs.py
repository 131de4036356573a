"""Fixtures and helpers that the tests of both integrations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError
from blendrag.frameworks.engines import close_shared_engines


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine over five files of six paragraphs. For reading only."""
    root = tmp_path_factory.mktemp("blendrag")
    docs = root / "docs"
    docs.mkdir()
    for i in range(5):
        (docs / f"d{i}.txt").write_text(tiny.document(i, paragraphs=6).text)
    given = {"chunk_tokens": 64, "max_new_tokens": 8, "top_k": 4}
    with tiny.engine(tiny.llama(num_hidden_layers=2), root / "store", **given) as made:
        made.ingest([docs])
        yield made


@pytest.fixture(scope="session")
def _changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(
        tiny.llama(num_hidden_layers=2), tmp_path_factory.mktemp("kv"), chunk_tokens=64
    ) as made:
        yield made


@pytest.fixture
def empty(_changing: BlendEngine) -> Iterator[BlendEngine]:
    """An engine over an empty corpus, emptied again afterwards."""
    yield _changing
    _changing.library.clear()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine of one test."""
    with tiny.engine(tiny.llama(num_hidden_layers=2), tmp_path / "kv", chunk_tokens=64) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A store directory; shared engines are closed afterwards."""
    yield tmp_path / "a"
    close_shared_engines()


def assert_reused(
    metrics: Sequence[dict[str, Any]], chunks: dict[str, str], engine: BlendEngine
) -> None:
    """Every chunk (id and text) was found in some request, and all its tokens were loaded."""
    found = [chunk for request in metrics for chunk in request["chunks"]]
    assert {chunk["chunk_id"] for chunk in found} == set(chunks)
    assert {chunk["outcome"] for chunk in found} <= {"blended", "exact"}
    tokens = sum(len(engine.kv_namespace.model.text_ids(text)) for text in chunks.values())
    assert sum(request["reused_tokens"] for request in metrics) >= tokens > 100


def assert_end_with(engine: BlendEngine, *calls: Callable[[], Any]) -> None:
    """The calls work, and raise once the engine is closed."""
    for call in calls:
        call()
    engine.close()
    for call in calls:
        with pytest.raises(BlendragError) as raised:
            call()
        assert str(raised.value) == "this engine is closed; make a new BlendEngine"
