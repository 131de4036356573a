"""How the LLM under test is made, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.llms import LLM

#: Whatever a model makes of it, it makes the same of it in every way of asking.
QUESTION = "Where is the harbour?"
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=QUESTION),
]
Response = ChatResponse | CompletionResponse


class LLMTests:
    """Common to all suites."""

    @property
    def llm_class(self) -> type[LLM]:
        raise NotImplementedError

    @property
    def llm_params(self) -> dict[str, Any]:
        """Arguments it is made with, for deterministic answers of a few words."""
        return {}

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens"

    @property
    def refusal(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What input that cannot be used raises."""
        return ValueError

    @pytest.fixture
    def llm(self) -> LLM:
        return self.llm_class(**self.llm_params)

    def made(self, **changes: Any) -> LLM:
        """The LLM with other arguments."""
        return self.llm_class(**{**self.llm_params, **changes})


def text_of(response: Response) -> str:
    if isinstance(response, CompletionResponse):
        return response.text
    return response.message.content or ""


async def all_ways(llm: LLM, question: str = QUESTION, **options: Any) -> dict[str, Response]:
    """The last response to one question in each of the eight ways to ask it."""
    messages = [ChatMessage(role="user", content=question)]
    return {
        "complete": llm.complete(question, **options),
        "chat": llm.chat(messages, **options),
        "stream_complete": list(llm.stream_complete(question, **options))[-1],
        "stream_chat": list(llm.stream_chat(messages, **options))[-1],
        "acomplete": await llm.acomplete(question, **options),
        "achat": await llm.achat(messages, **options),
        "astream_complete": [r async for r in await llm.astream_complete(question, **options)][-1],
        "astream_chat": [r async for r in await llm.astream_chat(messages, **options)][-1],
    }
