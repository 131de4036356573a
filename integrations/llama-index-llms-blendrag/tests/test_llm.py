"""``BlendLLM`` beyond the standard suites: metadata, prompts, options and invalid input."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llm_standard_tests import LLMTests, gathered

import loops
from blendrag.engine import BlendEngine, Options
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "Where is Place32?"
ASKED = [ChatMessage(role="user", content=QUESTION)]
MESSAGES = [ChatMessage(role="system", content="Be brief."), *ASKED]
DICTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
RAW: dict[str, Any] = {"apply_chat_template": False}


def prompt_tokens(response: Any) -> int:
    return int(response.raw["usage"]["prompt_tokens"])


def test_metadata_describes_the_model(llm: BlendLLM) -> None:
    about = llm.metadata
    assert (about.context_window, about.num_output) == (4096, 8)
    assert about.is_chat_model
    assert not about.is_function_calling_model
    assert not BlendLLM(engine=llm.engine, **RAW).metadata.is_chat_model
    # prompts must leave room for the answer, and have some
    assert BlendLLM(engine=llm.engine, max_tokens=4096).metadata.num_output == 2048


def test_a_query_engine_answers_with_more_tokens_than_the_context(
    engine: BlendEngine, retriever: BlendRetriever
) -> None:
    llm = BlendLLM(engine=engine, max_tokens=4096, stop=["e"])
    asked = RetrieverQueryEngine.from_args(retriever, llm=llm)
    assert str(asked.query("What does document 3 say?"))
    assert "was cut to" in str(llm.complete("What?").raw)


def test_messages_go_through_the_models_template(llm: BlendLLM, engine: BlendEngine) -> None:
    expected, response = engine.generate(DICTS), llm.chat(MESSAGES)
    assert response.message.content == expected.text
    assert prompt_tokens(response) == expected.metrics.prompt_tokens == llm.count_tokens(MESSAGES)
    brief = BlendLLM(engine=engine, system_prompt="Be brief.")
    assert brief.predict(PromptTemplate(QUESTION)) == expected.text
    assert brief.count_tokens(ASKED) == prompt_tokens(response)


def test_a_completed_string_is_one_user_message(llm: BlendLLM, engine: BlendEngine) -> None:
    expected, response = engine.generate(DICTS[1:]), llm.complete(QUESTION)
    assert response.text == expected.text
    assert prompt_tokens(response) == expected.metrics.prompt_tokens
    formatted = llm.complete(QUESTION, formatted=True)  # without the template
    assert prompt_tokens(formatted) < expected.metrics.prompt_tokens


FLAT = "system: Be brief.\nuser: Where is Place32?\nassistant: "


async def test_messages_are_flattened_without_the_template(
    llm: BlendLLM, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(FLAT, Options(apply_chat_template=False))
    raw = BlendLLM(engine=engine, **RAW)
    responses = [
        raw.chat(MESSAGES),
        llm.chat(MESSAGES, **RAW),
        list(llm.stream_chat(MESSAGES, **RAW))[-1],
        await llm.achat(MESSAGES, **RAW),
        (await gathered(llm.astream_chat(MESSAGES, **RAW)))[-1],
    ]
    for response in responses:
        assert response.message.content == expected.text
        assert prompt_tokens(response) == expected.metrics.prompt_tokens
    assert raw.chat(MESSAGES, apply_chat_template=True).message == llm.chat(MESSAGES).message
    # a model without a template
    monkeypatch.setattr(engine.tokens.tokenizer, "chat_template", None)
    flattened = engine.generate(FLAT).metrics.prompt_tokens
    assert prompt_tokens(llm.chat(MESSAGES)) == flattened
    own = BlendLLM(engine=engine, messages_to_prompt=lambda messages: "Where?")
    assert prompt_tokens(own.chat(MESSAGES)) < flattened


def test_text_blocks_are_joined_and_roles_are_mapped(llm: BlendLLM, engine: BlendEngine) -> None:
    blocks = [TextBlock(text="one"), TextBlock(text="two")]
    messages = [ChatMessage(role="developer", content="x"), ChatMessage(role="user", blocks=blocks)]
    dicts = [{"role": "system", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    assert llm.chat(messages).message.content == engine.generate(dicts).text


IMAGE = ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])


@pytest.mark.parametrize(
    ("messages", "options", "sentence"),
    [
        ([ChatMessage(content="")], RAW, "the message is empty, expected some text; ask something"),
        (
            [IMAGE],
            RAW,
            r"messages\[0\].content\[0\] is a content block of type 'image', expected text",
        ),
        ([], RAW, "messages is empty; send at least one"),
        (
            ASKED,
            {"max_length": 3},
            "max_length: not an option of a call; arguments of transformers'",
        ),
    ],
)
async def test_invalid_messages_and_options_are_refused(
    llm: BlendLLM, messages: list[ChatMessage], options: dict[str, Any], sentence: str
) -> None:
    await LLMTests().assert_refused(llm, messages, f"^{sentence}", **options)


async def test_the_event_loop_runs_while_the_model_works(llm: BlendLLM) -> None:
    model = llm.engine.adapter.model
    assert await loops.turns_while(model, llm.achat(MESSAGES))
    assert await loops.turns_while(model, llm.acomplete(QUESTION))

    async def blocking() -> None:
        llm.chat(MESSAGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "BLOCKED_S", 0.2)
        assert not await loops.turns_while(model, blocking())
