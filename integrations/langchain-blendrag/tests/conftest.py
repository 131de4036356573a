"""A tiny random Llama with a tokenizer of its own, and an engine over five documents; and a model that
says what it is told to, with tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from transformers import PreTrainedTokenizerFast

from blendrag.engine import BlendEngine
from langchain_blendrag import ChatBlend

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import paragraphs
import scripted
import tiny


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return paragraphs.tokenizer()


@pytest.fixture(scope="session")
def engine(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlendEngine]:
    with paragraphs.engine(tokenizer, tmp_path_factory.mktemp("blendrag")) as engine:
        yield engine


class Seen(BaseCallbackHandler):
    """What LangChain's callbacks are told: prompts, tokens and results."""

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
        """Of each answer so far, in order."""
        infos = [r.generations[0][0].generation_info for r in self.results]
        return [info["blendrag"] for info in infos if info]


@pytest.fixture
def seen() -> Seen:
    return Seen()


#: What the scripted model gives each tool.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "my_adder_tool": {"a": 1, "b": 2},
    "unicode_customer": {"customer_name": "你好 こんにちは", "description": "Hello Group"},
    "Joke": {"setup": "Why did the cat sit?", "punchline": "It could."},
    "JokeDict": {"setup": "Why did the cat sit?", "punchline": "It could."},
}
#: How a call that must be made has been begun for it.
BEGUN = '<tool_call>\n{"name": "'


def said(prompt: str) -> str:
    """The scripted model's reply, and the rest of one that was begun for it."""
    _, begun, name = prompt.rpartition(BEGUN)
    if begun and name.endswith('", "arguments":'):
        return f" {written(name.partition(chr(34))[0])}}}\n</tool_call>"
    if begun and not name:
        first = next(name for name in ARGUMENTS if f'"name": "{name}"' in prompt)
        return f'{first}", "arguments": {written(first)}}}\n</tool_call>'
    question = prompt.rpartition("<|start|>user\n")[2]
    if "JSON" in question:
        return written("Joke")
    if "What is the weather" in question and "get_weather" in prompt:
        return "I will look.\n" + scripted.call("get_weather", **ARGUMENTS["get_weather"])
    return "Hello to you, too."


def written(name: str) -> str:
    return json.dumps(ARGUMENTS[name], ensure_ascii=False)


@pytest.fixture(scope="session")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine whose model has tools and says :func:`said`."""
    with scripted.engine(said, tmp_path_factory.mktemp("scripted") / "store") as engine:
        yield engine


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine)


@pytest.fixture
def talker(talkative: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=talkative)


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model whose template has tools."""
    path = tmp_path_factory.mktemp("models") / "tooled"
    tiny.llama().save_pretrained(path)
    scripted.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """The embedded model over an empty store."""
    root = tmp_path_factory.mktemp("demo") / "store"
    with BlendEngine("demo", root, chunk_tokens=64, embedder="minilm-offline") as engine:
        yield engine
