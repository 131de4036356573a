"""Wrappers share an engine, are serialised by their names, and can be imported from several namespaces."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import TextNode
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms import blendrag as package
from llama_index.llms.blendrag import BlendLLM, BlendRetriever


def test_metadata_of_a_named_model_does_not_load_its_weights(root: Path) -> None:
    named = BlendLLM(model="demo", store=root)
    about = named.metadata
    assert not named.engine.kv_namespace.model.is_loaded
    assert about.is_chat_model
    assert about.context_window == named.engine.adapter.context_tokens
    assert named.metadata == about


def test_the_loaded_model_of_an_application_is_used_by_all_wrappers(root: Path) -> None:
    names: Any = {
        "model": tiny.llama(num_hidden_layers=2),
        "tokenizer": tiny.tokenizer(),
        "store": str(root),
    }
    node = TextNode(text=tiny.document(1, paragraphs=2).text)
    package.BlendPrecompute(**names)([node])
    llm = BlendLLM(**names, max_tokens=2)
    assert BlendRetriever(**names).engine is llm.engine
    usage = llm.complete(f"{node.text}\n\nQuestion: Who built ships?").raw["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert llm.to_dict()["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize("call", [BlendLLM, BlendRetriever, package.BlendVectorStore])
def test_a_signature_shows_the_names_of_the_engine(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    assert {"model", "tokenizer", "model_kwargs", "device_map", "store"} <= set(parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    "name",
    ["BlendLLM", "BlendNodeParser", "BlendEmbedding", "BlendPrecompute", "BlendVectorStore"],
)
def test_a_wrapper_is_pickled_by_its_names_or_not_at_all(
    name: str, engine: BlendEngine, root: Path
) -> None:
    kind = getattr(package, name)
    named = kind(model="demo", store=root)
    again = [pickle.loads(pickle.dumps(named)), kind.from_dict(named.to_dict())]
    again.append(kind.from_json(named.to_json()))
    for copy in again:
        assert copy.engine is named.engine is BlendRetriever("demo", root).engine
    described = json.loads(named.to_json())
    assert (described["class_name"], described["store"]) == (name, str(root))
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled"):
        pickle.dumps(kind(engine=engine))


def test_the_engine_is_only_mentioned_in_the_wrappers_description(llm: BlendLLM) -> None:
    described = llm.to_dict()
    assert described["engine"] == "BlendEngine"
    assert "engine" not in repr(llm)
    with pytest.raises(ValidationError, match="give it again, or model= and store= instead"):
        BlendLLM.from_dict(described)
    assert BlendLLM.from_dict(described, engine=llm.engine).engine is llm.engine


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("retrievers", "BlendRetriever"),
        ("node_parser", "BlendNodeParser"),
        ("vector_stores", "BlendVectorStore"),
        ("embeddings", "BlendEmbedding"),
    ],
)
def test_a_class_can_be_imported_from_the_namespace_of_its_kind(kind: str, name: str) -> None:
    leaf = importlib.import_module(f"llama_index.{kind}.blendrag")
    assert leaf.__all__ == [name]
    assert getattr(leaf, name) is getattr(package, name)


@pytest.mark.slow
def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import llama_index.llms.blendrag, sys; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
