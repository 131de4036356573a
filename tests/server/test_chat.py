"""Chats through the ``openai`` package."""

from __future__ import annotations

import openai
import pytest

from server.conftest import ANSWER, QUESTION
from server.live import Live


@pytest.fixture
def client(served: Live):
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(context: str):
    return [{"role": "user", "content": f"{context}\n\nQuestion: {QUESTION}\nAnswer:"}]


def test_a_chat_is_answered_with_usage_and_what_was_reused(client, asked) -> None:
    made = client.chat.completions.create(model="demo", messages=asked)
    (choice,) = made.choices
    assert ANSWER in choice.message.content
    assert choice.finish_reason == "stop"
    assert made.object == "chat.completion"
    about = made.model_extra["blendrag"]
    cached = made.usage.prompt_tokens_details.cached_tokens
    assert cached == about["reused_tokens"] > 50
    assert 0 < about["recomputed_tokens"] < cached
    assert {chunk["outcome"] for chunk in about["chunks"]} <= {"exact", "blended"}
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_a_stream_has_the_same_text_and_ends_with_usage_if_asked(client, asked) -> None:
    whole = client.chat.completions.create(model="demo", messages=asked)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=asked, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert pieces[-1].model_extra["blendrag"]["reused_tokens"] > 50
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len(pieces) >= 3  # the role, the text, the end
