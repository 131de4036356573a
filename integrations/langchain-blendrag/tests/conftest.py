"""Engines over a tiny random model with five documents, and over a scripted model with tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from blendrag.engine import BlendEngine
from langchain_blendrag import BlendLLM, ChatBlend

sys.path.insert(0, str(Path(__file__).resolve().parent))

import scripted
from paragraphs import _changing, empty, engine, own, root

__all__ = ["_changing", "empty", "engine", "own", "root"]


class Seen(BaseCallbackHandler):
    """Records LangChain's callbacks: prompts, tokens, results and errors."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.tokens: list[str] = []
        self.results: list[LLMResult] = []
        self.errors: list[BaseException] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts += prompts

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each answer so far."""
        infos = [r.generations[0][0].generation_info for r in self.results]
        return [info["blendrag"] for info in infos if info]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def vcr() -> None:
    """Of pytest-recording, which records requests: an engine sends none."""


JOKE = {"setup": "Why did the cat sit?", "punchline": "It could."}
#: Arguments that the scripted model gives each tool.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "my_adder_tool": {"a": 1, "b": 2},
    "unicode_customer": {"customer_name": "你好 こんにちは", "description": "Hello Group"},
    "Joke": JOKE,
    "JokeDict": JOKE,
}
#: The beginning of a required call in the prompt.
BEGUN = '<tool_call>\n{"name": "'


def reply_to(prompt: str) -> str:
    """The scripted model's reply, or the rest of a call that was begun for it."""
    _, begun, name = prompt.rpartition(BEGUN)
    if begun and name.endswith('", "arguments":'):
        return f" {json_arguments(name.partition(chr(34))[0])}}}\n</tool_call>"
    if begun and not name:
        first = next(name for name in ARGUMENTS if f'"name": "{name}"' in prompt)
        return f'{first}", "arguments": {json_arguments(first)}}}\n</tool_call>'
    question = prompt.rpartition("<|start|>user\n")[2]
    if "JSON" in question:
        return json_arguments("Joke")
    if "What is the weather" in question and "get_weather" in prompt:
        return "I will look.\n" + scripted.call("get_weather", **ARGUMENTS["get_weather"])
    return "Hello to you, too."


def json_arguments(name: str) -> str:
    return json.dumps(ARGUMENTS[name], ensure_ascii=False)


@pytest.fixture(scope="session")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine whose model has tools and replies with :func:`reply_to`."""
    with scripted.engine(reply_to, tmp_path_factory.mktemp("scripted") / "store") as engine:
        yield engine


@pytest.fixture(params=[ChatBlend, BlendLLM], ids=lambda kind: kind.__name__)
def either(request: Any, engine: BlendEngine) -> Any:
    """Each of the two models over the same engine."""
    return request.param(engine=engine)


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine)


@pytest.fixture
def talker(talkative: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=talkative)
