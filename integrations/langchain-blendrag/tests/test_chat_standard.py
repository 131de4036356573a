"""LangChain's own tests of a chat model, over a scripted model with tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests
from samples import whole

import scripted
import tiny
from blendrag.engine import BlendEngine
from blendrag.engine.library import Entry
from langchain_blendrag import ChatBlend, close_shared_engines

#: The suite's defaults without max_retries: no network is used.
STANDARD: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": []}
LONG = "The cat sat on the mat of the house beside the harbour, where ships came in. " * 4


class OfBlendrag:
    """What the model supports, for both suites."""

    chat_model_class = ChatBlend
    standard_chat_model_params = STANDARD
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_anthropic_inputs = True
    supports_model_override = False  # a call cannot change its engine's model
    chat_model_params: Any = None
    supported_usage_metadata_details: ClassVar = {
        "invoke": ["cache_read_input", "cache_creation_input"],
        "stream": ["cache_read_input", "cache_creation_input"],
    }

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self.invoke_with_cache_creation_input(stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        """Over a stored chunk: some of the prompt is read, some is new."""
        model = ChatBlend(**self.chat_model_params)
        model.engine.library.add([Entry("cat", LONG)])
        question = f"{LONG}\n\nWhere did the cat sit?"
        answer = whole(model.stream(question)) if stream else model.invoke(question)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model whose template renders tools."""
    path = tmp_path_factory.mktemp("models") / "tooled"
    tiny.llama().save_pretrained(path)
    scripted.tokenizer().save_pretrained(path)
    return path


class TestUnit(OfBlendrag, ChatModelUnitTests):
    """Construction, tools, tracing and serialization of a model with tools."""

    chat_model_params: ClassVar = {"model": "tooled", "store": "kv"}  # relative, to be compared

    @pytest.fixture(autouse=True)
    def _named(self, tooled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tooled.parent)
        yield
        close_shared_engines()


class TestIntegrationWithTools(OfBlendrag, ChatModelIntegrationTests):
    """Answers, tools and structured output of a scripted model."""

    @pytest.fixture(autouse=True)
    def _engine(self, talkative: BlendEngine) -> None:
        self.chat_model_params = {"engine": talkative}


class TestStructuredAnswers(OfBlendrag, ChatModelTests):
    """Structured output as an answer instead of a call."""

    structured_output_kwargs: ClassVar = {"method": "json_schema"}
    test_structured_output = ChatModelIntegrationTests.test_structured_output
    test_optional = ChatModelIntegrationTests.test_structured_output_optional_param

    @pytest.fixture(autouse=True)
    def _engine(self, talkative: BlendEngine) -> None:
        self.chat_model_params = {"engine": talkative}
