"""Wrappers share an engine: configured again, copied, pickled, closed, cached and described."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.runnables import ConfigurableField

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendLLM, BlendRetriever, BlendVectorStore, ChatBlend


def test_configurable_fields_keep_the_engine_of_a_named_wrapper(root: Path) -> None:
    llm = ChatBlend(model="demo", store=root, max_tokens=3)
    made: Any = llm.configurable_fields(
        mode=ConfigurableField(id="mode"), store=ConfigurableField(id="store")
    )
    full, _ = made.with_config(configurable={"mode": "full"}).prepare()
    assert (full.mode, full.max_tokens, full.engine is llm.engine) == ("full", 3, True)
    other, _ = made.with_config(configurable={"store": root.with_name("b")}).prepare()
    assert other.engine.resources.root == root.with_name("b")
    retriever: Any = BlendRetriever(model="demo", store=root, k=2).configurable_fields(
        k=ConfigurableField(id="k")
    )
    more, _ = retriever.with_config(configurable={"k": 5}).prepare()
    assert (more.k, more.engine is llm.engine) == (5, True)


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
