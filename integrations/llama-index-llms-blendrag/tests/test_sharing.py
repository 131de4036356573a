"""Wrappers share an engine, and are serialised by their names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core.llms import LLM
from pydantic import ValidationError

from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, close_shared_engines


@pytest.fixture
def named(tmp_path: Path) -> Iterator[BlendLLM]:
    """Created by names; the model is not loaded yet."""
    yield BlendLLM(model="demo", store=tmp_path / "kv")
    close_shared_engines()


def test_wrappers_of_the_same_names_share_one_engine(tmp_path: Path) -> None:
    try:
        llm = BlendLLM(store=tmp_path / "a")
        assert llm.engine is BlendRetriever("demo", tmp_path / "x" / ".." / "a").engine
        assert llm.engine is not BlendRetriever(store=tmp_path / "b").engine
        assert not (tmp_path / "a").exists()
    finally:
        close_shared_engines()


def test_the_engine_is_only_mentioned_in_the_wrappers_description(llm: BlendLLM) -> None:
    assert isinstance(llm, LLM)
    described = json.loads(llm.to_json())
    assert described["engine"] == "BlendEngine"
    assert "engine" not in repr(llm)
    assert described["class_name"] == "BlendLLM"


def test_a_named_wrapper_is_made_again_from_what_was_written_of_it(named: BlendLLM) -> None:
    copies = [
        BlendLLM.from_json(named.to_json()),
        BlendLLM.from_dict(named.to_dict()),
        pickle.loads(pickle.dumps(named)),
    ]
    assert json.loads(named.to_json())["store"] == str(named.store)
    for copy in copies:
        assert copy.engine is named.engine


def test_a_wrapper_of_a_given_engine_is_serialised_without_it(llm: BlendLLM) -> None:
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"):
        pickle.dumps(llm)
    with pytest.raises(ValidationError, match="give it again, or model= and store= instead"):
        BlendLLM.from_dict(llm.to_dict())
    assert BlendLLM.from_dict(llm.to_dict(), engine=llm.engine).engine is llm.engine


def test_relative_and_absolute_paths_of_a_model_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    try:
        relative = BlendLLM(model="models/mine", store="kv")
        assert relative.engine is BlendLLM(model=f"{tmp_path}/models/mine", store="kv").engine
        assert relative.engine.resources.model_name == f"{tmp_path}/models/mine"
        assert BlendLLM(model="demo", store="kv").engine.resources.model_name == "demo"
    finally:
        close_shared_engines()
