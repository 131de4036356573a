"""``BlendLLM`` passes the standard suites, with and without tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal

import pytest
from llm_standard_tests import (
    ABOUT,
    LLMAnswerTests,
    LLMConductTests,
    LLMInstrumentationTests,
    LLMStructuredStreamTests,
    LLMStructuredTests,
    LLMTests,
    LLMToolTests,
    LLMWithoutToolsTests,
)
from pydantic import BaseModel

import scripted
import tiny
from blendrag.engine import BlendEngine
from chat_forms import ODD
from llama_index.llms.blendrag import BlendLLM

PLACE = {"name": "harbour", "year": 1874, "builders": ["the company"]}
CALL_PLACE = f'<tool_call>{{"name": "Place", "arguments": {json.dumps(PLACE)}}}</tool_call>'
LONG = "Tell a long story."
MULTIPLY = scripted.call("multiply", a=6, b=7)
LOOK_UP = scripted.call("look_up", query="Café")
REACT = 'Thought: I need a tool.\nAction: multiply\nAction Input: {"a": 6, "b": 7}'


def reply(prompt: str) -> str:
    """The reply of a capable model."""
    opened = prompt.rpartition("<|start|>assistant\n")[2].split()
    reply = _reply(prompt)
    for word in opened:  # a forced call is begun already
        reply = reply.lstrip().removeprefix(word)
    return reply


def _reply(prompt: str) -> str:
    has_tools = "<tools>" in prompt
    if LONG in prompt:
        return "they built ships, " * 400
    if "<tool_response>" in prompt or "Observation: 42" in prompt:
        return "Thought: I know.\nAnswer: It is 42." if "Observation" in prompt else "It is 42."
    if "as a Place" in prompt:
        return CALL_PLACE if has_tools else json.dumps(PLACE)
    if "6 times 7" in prompt and not has_tools:
        return REACT if "Action Input" in prompt else "I cannot multiply."
    for question, calls in (
        ("and look up Café", f"Both.\n{MULTIPLY}\n{LOOK_UP}"),
        ("6 times 7", MULTIPLY),
        ("What time", scripted.call("clock")),
    ):
        if question in prompt:
            return calls
    return "It is near the town, by the river."


@pytest.fixture(scope="module")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with scripted.engine(reply, tmp_path_factory.mktemp("capable")) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """The same model with a chat template that does not render tools."""
    root = tmp_path_factory.mktemp("plain")
    with scripted.engine(reply, root, tokenizer=tiny.tokenizer()) as engine:
        yield engine


class OverAnEngine(LLMTests):
    """Created with an engine."""

    engine: BlendEngine

    def made(self, **changes: Any) -> BlendLLM:
        return BlendLLM(engine=self.engine, **changes)


class StructuredTests(LLMStructuredTests):
    """Answers and calls follow the schema."""

    def test_what_does_not_fit_is_an_error(self) -> None:
        """It cannot be said: the answer follows the schema, whatever the model would say."""

        class Ship(BaseModel):
            tonnage: Literal[1, 2]

        assert self.made().structured_predict(Ship, ABOUT, thing="harbour").tonnage in (1, 2)


class TestWithTools(
    OverAnEngine,
    LLMAnswerTests,
    LLMConductTests,
    LLMInstrumentationTests,
    LLMToolTests,
    StructuredTests,
    LLMStructuredStreamTests,
):
    long_question = LONG

    @pytest.fixture(autouse=True)
    def _engine(self, capable: BlendEngine) -> None:
        self.engine = capable


class TestWithoutTools(OverAnEngine, LLMWithoutToolsTests, StructuredTests):
    @pytest.fixture(autouse=True)
    def _engine(self, plain: BlendEngine) -> None:
        self.engine = plain


@pytest.mark.parametrize("template", [ODD, "{{ tools }}" + tiny.CHAT_TEMPLATE])
class TestWithToolsThatCannotBeCalled(OverAnEngine):
    """The template writes calls that cannot be read, or none: JSON is asked for instead."""

    @pytest.fixture(autouse=True)
    def _engine(
        self,
        plain: BlendEngine,
        template: str,
        monkeypatch: pytest.MonkeyPatch,
        request: pytest.FixtureRequest,
    ) -> None:
        if version("llama-index-core") == "0.14.19" and "stream" in request.function.__name__:
            pytest.skip("its programs of text do not stream")
        self.engine = plain
        monkeypatch.setattr(plain.tokens.tokenizer, "chat_template", template)
        assert plain.tokens.has_tools
        assert not self.made().metadata.is_function_calling_model

    test_structured_predict = LLMStructuredTests.test_structured_predict
    test_stream_structured_predict = LLMStructuredStreamTests.test_stream_structured_predict
