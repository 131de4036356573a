"""``BlendLLM`` beyond the standard suites: metadata, prompts and options."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.prompts import PromptTemplate

import loops
from blendrag.engine import BlendEngine, Options
from llama_index.llms.blendrag import BlendLLM

QUESTION = "Where is Place32?"
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=QUESTION),
]
DICTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


def test_metadata_describes_the_model(llm: BlendLLM) -> None:
    about = llm.metadata
    assert (about.context_window, about.num_output) == (4096, 8)
    assert about.is_chat_model
    assert not about.is_function_calling_model
    assert not BlendLLM(engine=llm.engine, apply_chat_template=False).metadata.is_chat_model


def test_messages_go_through_the_models_template(llm: BlendLLM, engine: BlendEngine) -> None:
    expected, response = engine.generate(DICTS), llm.chat(MESSAGES)
    assert response.message.content == expected.text
    assert response.message.role == MessageRole.ASSISTANT
    assert response.raw["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens


def test_a_completed_string_is_one_user_message(llm: BlendLLM, engine: BlendEngine) -> None:
    expected = engine.generate([{"role": "user", "content": QUESTION}])
    response = llm.complete(QUESTION)
    assert response.text == expected.text
    assert response.raw["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    formatted = llm.complete(QUESTION, formatted=True)  # without the template
    assert formatted.raw["usage"]["prompt_tokens"] < expected.metrics.prompt_tokens


FLAT = "system: Be brief.\nuser: Where is Place32?\nassistant: "


async def test_messages_are_flattened_without_the_template(
    llm: BlendLLM, engine: BlendEngine
) -> None:
    expected = engine.generate(FLAT, Options(apply_chat_template=False))
    raw = BlendLLM(engine=engine, apply_chat_template=False)
    off = {"apply_chat_template": False}
    responses = [
        raw.chat(MESSAGES),
        llm.chat(MESSAGES, **off),
        list(llm.stream_chat(MESSAGES, **off))[-1],
        await llm.achat(MESSAGES, **off),
        [r async for r in await llm.astream_chat(MESSAGES, **off)][-1],
    ]
    for response in responses:
        assert response.message.content == expected.text
        assert response.raw["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    assert raw.chat(MESSAGES, apply_chat_template=True).message == llm.chat(MESSAGES).message


def test_a_model_without_a_template_gets_flattened_messages(
    llm: BlendLLM, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.resources.tokens.tokenizer, "chat_template", None)
    expected = engine.generate(FLAT).metrics.prompt_tokens
    assert llm.chat(MESSAGES).raw["usage"]["prompt_tokens"] == expected
    own = BlendLLM(engine=engine, messages_to_prompt=lambda messages: "Where?")
    assert own.chat(MESSAGES).raw["usage"]["prompt_tokens"] < expected


def test_predict_uses_the_chat_template_and_the_system_prompt(
    engine: BlendEngine, seen: Any
) -> None:
    llm = BlendLLM(engine=engine, system_prompt="Be brief.")
    answer = llm.predict(PromptTemplate("Where is {place}?"), place="Place32")
    assert [(m.role.value, m.content) for m in seen.prompts[0]] == [
        ("system", "Be brief."),
        ("user", QUESTION),
    ]
    assert answer == engine.generate(DICTS).text


def test_text_blocks_are_joined_and_roles_are_mapped(llm: BlendLLM, engine: BlendEngine) -> None:
    blocks = [TextBlock(text="one"), TextBlock(text="two")]
    messages = [ChatMessage(role="developer", content="x"), ChatMessage(role="user", blocks=blocks)]
    dicts = [{"role": "system", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    assert llm.chat(messages).message.content == engine.generate(dicts).text


@pytest.mark.alone
async def test_the_event_loop_runs_while_the_model_works(llm: BlendLLM) -> None:
    model = llm.engine.adapter.model
    assert await loops.turns_while(model, llm.achat(MESSAGES))
    assert await loops.turns_while(model, llm.acomplete(QUESTION))

    async def blocking() -> None:
        llm.chat(MESSAGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "BLOCKED_S", 0.2)
        assert not await loops.turns_while(model, blocking())
