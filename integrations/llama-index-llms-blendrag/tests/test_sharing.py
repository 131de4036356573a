"""Wrappers share an engine, and are serialised by their names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendLLM,
    BlendNodeParser,
    BlendPrecompute,
    BlendRetriever,
    BlendVectorStore,
    close_shared_engines,
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A store directory; shared engines are closed afterwards."""
    yield tmp_path / "a"
    close_shared_engines()


def test_wrappers_of_the_same_names_share_one_engine(root: Path) -> None:
    llm = BlendLLM(store=root)
    assert llm.engine is BlendRetriever("demo", root / ".." / "a").engine
    assert llm.engine is not BlendRetriever(store=root.with_name("b")).engine
    assert not root.exists()


def test_metadata_of_a_named_model_does_not_load_its_weights(root: Path) -> None:
    named = BlendLLM(model="demo", store=root)
    about = named.metadata
    assert not named.engine.resources.is_loaded
    assert about.is_chat_model
    assert about.context_window == named.engine.adapter.context_tokens
    assert named.metadata == about


@pytest.mark.parametrize(
    "kind", [BlendLLM, BlendNodeParser, BlendEmbedding, BlendPrecompute, BlendVectorStore]
)
def test_a_wrapper_is_pickled_by_its_names_or_not_at_all(
    kind: Any, engine: BlendEngine, root: Path
) -> None:
    named = kind(model="demo", store=root)
    again = [pickle.loads(pickle.dumps(named)), kind.from_dict(named.to_dict())]
    again.append(kind.from_json(named.to_json()))
    for copy in again:
        assert copy.engine is named.engine
    described = json.loads(named.to_json())
    assert (described["class_name"], described["store"]) == (kind.__name__, str(root))
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"):
        pickle.dumps(kind(engine=engine))


def test_the_engine_is_only_mentioned_in_the_wrappers_description(llm: BlendLLM) -> None:
    described = llm.to_dict()
    assert described["engine"] == "BlendEngine"
    assert "engine" not in repr(llm)
    with pytest.raises(ValidationError, match="give it again, or model= and store= instead"):
        BlendLLM.from_dict(described)
    assert BlendLLM.from_dict(described, engine=llm.engine).engine is llm.engine
