"""Wrappers share an engine: configured again, copied, pickled, closed, cached and described."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import ConfigurableField
from samples import SHIPS

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import (
    BlendLLM,
    BlendRetriever,
    BlendTextSplitter,
    BlendVectorStore,
    ChatBlend,
)


def test_configurable_fields_keep_the_engine_of_a_named_wrapper(root: Path) -> None:
    llm = ChatBlend(model="demo", store=root, max_new_tokens=3)
    made: Any = llm.configurable_fields(
        mode=ConfigurableField(id="mode"), store=ConfigurableField(id="store")
    )
    full, _ = made.with_config(configurable={"mode": "full"}).prepare()
    assert (full.mode, full.max_new_tokens, full.engine is llm.engine) == ("full", 3, True)
    other, _ = made.with_config(configurable={"store": root.with_name("b")}).prepare()
    assert other.engine.root == root.with_name("b")
    retriever: Any = BlendRetriever(model="demo", store=root, k=2).configurable_fields(
        k=ConfigurableField(id="k")
    )
    more, _ = retriever.with_config(configurable={"k": 5}).prepare()
    assert (more.k, more.engine is llm.engine) == (5, True)


def test_the_loaded_model_of_an_application_answers_over_a_vector_store(root: Path) -> None:
    names: Any = {
        "model": tiny.llama(num_hidden_layers=2),
        "tokenizer": tiny.tokenizer(),
        "store": str(root),
    }
    pieces = BlendTextSplitter(**names).create_documents([SHIPS])
    store = BlendVectorStore.from_documents(pieces, DeterministicFakeEmbedding(size=16), **names)
    with ChatBlend(**names, max_tokens=2) as llm:
        prompt = f"{pieces[0].page_content}\n\nQuestion: Who built ships?"
        usage = llm.invoke(prompt).usage_metadata
        assert usage is not None
        assert usage["output_tokens"] == 2
        assert usage["input_token_details"]["cache_read"] > 0
        assert store.engine is llm.engine
        assert llm.engine.adapter.model is names["model"]


@pytest.mark.parametrize(
    "call", [BlendVectorStore, BlendVectorStore.from_documents, BlendTextSplitter, ChatBlend]
)
def test_a_signature_shows_the_names_of_the_engine(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    assert {"model", "tokenizer", "model_kwargs", "device_map", "store"} <= set(parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_copies_and_configured_wrappers_keep_a_given_engine(either: Any) -> None:
    for made in (copy.copy(either), copy.deepcopy(either), either.model_copy(deep=True)):
        assert made.engine is either.engine
        assert made == either
    configurable: Any = either.configurable_fields(mode=ConfigurableField(id="mode"))
    full, _ = configurable.with_config(configurable={"mode": "full"}).prepare()
    assert (full.mode, full.engine is either.engine) == ("full", True)
    store = BlendVectorStore(engine=either.engine)
    assert copy.deepcopy(store).engine is either.engine


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM, BlendVectorStore])
def test_a_wrapper_is_pickled_by_its_names_or_not_at_all(
    kind: Any, engine: BlendEngine, root: Path
) -> None:
    with kind(model="demo", store=root) as named:
        first = pickle.loads(pickle.dumps(named)).engine
        assert first is named.engine is BlendRetriever(model="demo", store=root / ".." / "a").engine
        assert first is not ChatBlend(model="demo", store=root.with_name("b")).engine
    assert first.closed
    assert named.engine is not first  # opened again on demand
    assert not root.exists()
    with (
        kind(engine=engine) as given,
        pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"),
    ):
        pickle.dumps(given)
    assert not engine.closed


def test_langchains_cache_depends_on_the_options(engine: BlendEngine) -> None:
    cache = InMemoryCache()
    blend, full = (ChatBlend(engine=engine, cache=cache, mode=m) for m in ("blend", "full"))
    first, again, other = (m.invoke("Where is Place32?") for m in (blend, blend, full))
    assert first.id != other.id
    assert again.response_metadata["ttft_s"] == first.response_metadata["ttft_s"]
    assert other.response_metadata["ttft_s"] != first.response_metadata["ttft_s"]
    text = [BlendLLM(engine=engine, cache=cache, mode=m) for m in ("blend", "blend", "full")]
    made = [bool(llm.generate(["Where is Place32?"]).llm_output) for llm in text]
    assert made == [True, False, True]


def test_descriptions_hold_the_options_and_not_the_engine(either: Any, engine: BlendEngine) -> None:
    assert "engine" not in either.model_dump()
    assert "engine" not in repr(either)
    assert either._identifying_params["mode"] == "blend"
    assert either._identifying_params["min_ratio"] == engine.settings.min_ratio
    assert type(either)(engine=engine, min_ratio=0.3)._identifying_params["min_ratio"] == 0.3
