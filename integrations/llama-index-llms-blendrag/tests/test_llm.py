"""``BlendLLM`` by itself: prompts, options, streaming, async, what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate

import loops
from blendrag.engine import BlendEngine, Options
from llama_index.llms.blendrag import BlendLLM, close_shared_engines

pytestmark = pytest.mark.alone

QUESTION = "Where is Place32?"
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=QUESTION),
]
DICTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


def test_metadata_tells_the_truth_about_the_model(llm: BlendLLM) -> None:
    about = llm.metadata
    assert (about.context_window, about.num_output) == (4096, 8)
    assert about.is_chat_model
    assert not about.is_function_calling_model
    assert not BlendLLM(engine=llm.engine, apply_chat_template=False).metadata.is_chat_model


@pytest.fixture
def named(tmp_path: Path) -> Iterator[BlendLLM]:
    """Made by names, of a model that nothing has loaded yet."""
    yield BlendLLM(model="demo", store=tmp_path / "kv")
    close_shared_engines()


def test_metadata_of_a_named_model_does_not_load_its_weights(named: BlendLLM) -> None:
    about = named.metadata
    assert not named.engine.resources.is_loaded
    assert about.is_chat_model
    assert about.context_window == named.engine.adapter.context_tokens
    assert named.metadata == about


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


def test_formatted_text_gets_no_template(llm: BlendLLM) -> None:
    raw = llm.complete(QUESTION, formatted=True).raw
    assert raw["usage"]["prompt_tokens"] < llm.complete(QUESTION).raw["usage"]["prompt_tokens"]


FLAT = "system: Be brief.\nuser: Where is Place32?\nassistant: "


async def test_without_the_template_messages_arrive_as_llamaindex_flattens_them(
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


def test_blocks_of_text_are_joined_and_roles_are_what_templates_know(
    llm: BlendLLM, engine: BlendEngine
) -> None:
    blocks = [TextBlock(text="one"), TextBlock(text="two")]
    messages = [ChatMessage(role="developer", content="x"), ChatMessage(role="user", blocks=blocks)]
    dicts = [{"role": "system", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    assert llm.chat(messages).message.content == engine.generate(dicts).text


def test_streamed_pieces_make_the_whole_answer_and_the_last_has_the_metrics(
    llm: BlendLLM,
) -> None:
    for responses, whole in [
        (list(llm.stream_chat(MESSAGES)), llm.chat(MESSAGES).message.content),
        (list(llm.stream_complete(QUESTION)), llm.complete(QUESTION).text),
    ]:
        assert len(responses) > 2
        assert "".join(r.delta or "" for r in responses) == whole
        last: Any = responses[-1]
        assert getattr(last, "text", None) or last.message.content == whole
        assert last.raw["usage"]["completion_tokens"] == 8
        assert all(r.raw is None for r in responses[:-1])


async def test_async_answers_equal_sync_answers_inside_a_running_loop(llm: BlendLLM) -> None:
    chat, text = llm.chat(MESSAGES).message.content, llm.complete(QUESTION).text
    assert (await llm.achat(MESSAGES)).message.content == chat
    assert (await llm.acomplete(QUESTION)).text == text
    pieces = [r async for r in await llm.astream_chat(MESSAGES)]
    assert "".join(p.delta or "" for p in pieces) == chat
    assert pieces[-1].raw["blendrag"]["new_tokens"] == 8
    texts = [r async for r in await llm.astream_complete(QUESTION)]
    assert texts[-1].text == text


async def test_the_event_loop_turns_while_the_model_works(llm: BlendLLM) -> None:
    model = llm.engine.adapter.model
    assert await loops.turns_while(model, llm.achat(MESSAGES))
    assert await loops.turns_while(model, llm.acomplete(QUESTION))

    async def blocking() -> None:
        llm.chat(MESSAGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "BLOCKED_S", 0.2)
        assert not await loops.turns_while(model, blocking())


def test_stop_ends_the_answer_in_every_way_of_asking(llm: BlendLLM, engine: BlendEngine) -> None:
    whole = llm.complete(QUESTION).text
    stop = whole[2:4]
    cut = whole[: whole.index(stop)]
    response = llm.complete(QUESTION, stop=[stop])
    assert response.text == cut
    assert response.raw["finish_reason"] == "stop"
    assert list(llm.stream_complete(QUESTION, stop=stop))[-1].text == cut
    assert BlendLLM(engine=engine, stop=[stop]).complete(QUESTION).text == cut


def test_an_abandoned_stream_frees_the_model(llm: BlendLLM) -> None:
    for _ in llm.stream_chat(MESSAGES, max_tokens=3000):
        break
    began = time.perf_counter()
    assert llm.chat(MESSAGES, max_tokens=2)
    assert time.perf_counter() - began < 2


async def test_an_abandoned_async_stream_frees_the_model(llm: BlendLLM) -> None:
    stream = await llm.astream_chat(MESSAGES, max_tokens=3000)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(llm.achat(MESSAGES, max_tokens=2), 2)


async def test_a_cancelled_call_frees_the_model(llm: BlendLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.achat(MESSAGES, max_tokens=3000), 0.3)
    assert await asyncio.wait_for(llm.achat(MESSAGES, max_tokens=2), 2)


def test_a_call_may_override_the_fields(llm: BlendLLM) -> None:
    metrics = llm.chat(MESSAGES, mode="full", max_tokens=3).raw["blendrag"]
    assert (metrics["mode"], metrics["new_tokens"]) == ("full", 3)


def test_llamaindexs_token_counter_reads_our_usage(engine: BlendEngine) -> None:
    counter = TokenCountingHandler(tokenizer=engine.resources.tokens.encode_text)
    llm = BlendLLM(engine=engine, callback_manager=CallbackManager([counter]))
    usage = llm.chat(MESSAGES).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == 8
