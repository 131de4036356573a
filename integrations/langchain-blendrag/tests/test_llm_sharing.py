"""One engine behind many ``BlendLLM``: made again, pickled, described and cached."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendLLM

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
RENDERED = "<|bos|><|system|>Be brief.\n<|user|>Where is Place32?\n<|assistant|>"


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


def test_wrappers_of_the_same_names_share_one_engine(tmp_path: Any) -> None:
    from langchain_blendrag import BlendRetriever, close_shared_engines

    try:
        a, b = BlendLLM(store=tmp_path / "a"), BlendLLM(store=tmp_path / "b")
        again = BlendRetriever(model="demo", store=tmp_path / "x" / ".." / "a", k=2)
        assert a.engine is again.engine
        assert a.engine is not b.engine
        assert not (tmp_path / "a").exists()
    finally:
        close_shared_engines()


def test_a_configurable_field_rebuilds_a_named_wrapper_over_the_same_engine(tmp_path: Any) -> None:
    from langchain_blendrag import BlendRetriever, close_shared_engines

    try:
        llm = BlendLLM(store=tmp_path / "a", max_tokens=3)
        made: Any = llm.configurable_fields(
            mode=ConfigurableField(id="mode"), store=ConfigurableField(id="store")
        )
        full, _ = made.with_config(configurable={"mode": "full"}).prepare()
        assert (full.mode, full.max_tokens, full.engine is llm.engine) == ("full", 3, True)
        other, _ = made.with_config(configurable={"store": tmp_path / "b"}).prepare()
        assert other.engine.resources.root == tmp_path / "b"
        retriever: Any = BlendRetriever(store=tmp_path / "a", k=2).configurable_fields(
            k=ConfigurableField(id="k")
        )
        more, _ = retriever.with_config(configurable={"k": 5}).prepare()
        assert (more.k, more.engine is llm.engine) == (5, True)
    finally:
        close_shared_engines()


def test_a_configurable_field_rebuilds_a_wrapper_of_a_given_engine(llm: BlendLLM) -> None:
    made: Any = llm.configurable_fields(mode=ConfigurableField(id="mode"))
    full, _ = made.with_config(configurable={"mode": "full"}).prepare()
    assert (full.mode, full.engine is llm.engine) == ("full", True)


def test_a_wrapper_is_pickled_by_its_names_or_not_at_all(llm: BlendLLM, tmp_path: Any) -> None:
    from langchain_blendrag import close_shared_engines

    try:
        named = BlendLLM(store=tmp_path / "a")
        assert pickle.loads(pickle.dumps(named)).engine is named.engine
    finally:
        close_shared_engines()
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"):
        pickle.dumps(llm)


def test_the_engine_is_not_part_of_the_wrappers_description(llm: BlendLLM) -> None:
    assert "engine" not in llm.model_dump()
    assert "engine" not in repr(llm)
    assert llm._identifying_params["mode"] == "blend"


def test_the_cache_key_holds_the_least_automatic_ratio(engine: BlendEngine) -> None:
    given, own = (BlendLLM(engine=engine, min_ratio=least) for least in (None, 0.3))
    assert given._identifying_params["min_ratio"] == engine.settings.min_ratio
    assert own._identifying_params["min_ratio"] == 0.3


def test_langchains_cache_tells_modes_apart(engine: BlendEngine) -> None:
    cache = InMemoryCache()
    blend, full = (BlendLLM(engine=engine, cache=cache, mode=m) for m in ("blend", "full"))
    first = blend.generate(["Where is Place32?"])
    again = blend.generate(["Where is Place32?"])
    other = full.generate(["Where is Place32?"])
    assert first.llm_output
    assert not again.llm_output
    assert other.llm_output
