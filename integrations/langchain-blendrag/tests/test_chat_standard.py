"""LangChain's own tests of a chat model: over a scripted model with tools, and over the embedded one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

import scripted
import tiny
from blendrag.engine import BlendEngine
from blendrag.engine.library import Entry
from langchain_blendrag import ChatBlend, close_shared_engines

#: The suite's defaults without max_retries: no network is used.
STANDARD: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": []}
LONG = "The cat sat on the mat of the house beside the harbour, where ships came in. " * 4

Usage = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


class OfBlendrag:
    """What the model supports, for both suites."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return STANDARD

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # a call cannot change the model that its wrapper's engine has loaded

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Usage]]:
        both: list[Usage] = ["cache_read_input", "cache_creation_input"]
        return {"invoke": both, "stream": both}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self.invoke_with_cache_creation_input(stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        """Over a stored chunk: some of the prompt is read, some is new."""
        model = self.chat_model_class(**self.chat_model_params)  # type: ignore[attr-defined]
        model.engine.library.add([Entry("cat", LONG)])
        question = f"{LONG}\n\nWhere did the cat sit?"
        if not stream:
            return model.invoke(question)  # type: ignore[no-any-return]
        full: AIMessageChunk | None = None
        for chunk in model.stream(question):
            full = chunk if full is None else full + chunk
        assert full is not None
        assert full.usage_metadata is not None
        assert full.usage_metadata["input_token_details"]["cache_read"] > 0
        return full


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model whose template renders tools."""
    path = tmp_path_factory.mktemp("models") / "tooled"
    tiny.llama().save_pretrained(path)
    scripted.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """The embedded model over an empty store."""
    root = tmp_path_factory.mktemp("demo") / "store"
    with BlendEngine("demo", root, chunk_tokens=64, embedder="minilm-offline") as engine:
        yield engine


class TestUnit(OfBlendrag, ChatModelUnitTests):
    """Construction, tools, tracing and serialization of a model with tools."""

    @pytest.fixture(autouse=True)
    def _named(self, tooled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tooled.parent)
        yield
        close_shared_engines()

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tooled", "store": "kv"}  # relative, as what is serialized is compared


@pytest.mark.slow
class TestUnitOfTheEmbeddedModel(OfBlendrag, ChatModelUnitTests):
    """The embedded model, whose template does not render tools."""

    @pytest.fixture(autouse=True)
    def _close(self) -> Iterator[None]:
        yield
        close_shared_engines()

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "store": "kv"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False  # the suite tests it by function calling


class TestIntegrationWithTools(OfBlendrag, ChatModelIntegrationTests):
    """Answers, tools and structured output of a scripted model."""

    @pytest.fixture(autouse=True)
    def _engine(self, talkative: BlendEngine) -> None:
        self.engine = talkative

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}


@pytest.mark.slow
class TestIntegrationOfTheEmbeddedModel(OfBlendrag, ChatModelIntegrationTests):
    """The embedded model, whose template does not render tools."""

    @pytest.fixture(autouse=True)
    def _engine(self, demo: BlendEngine) -> None:
        self.engine = demo

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 24}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False  # it writes no JSON

    @property
    def supports_json_mode(self) -> bool:
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False  # the suite's test offers a tool
