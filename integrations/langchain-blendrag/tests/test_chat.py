"""``ChatBlend`` beyond the standard suites: what it sends, reports and streams."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from samples import get_weather, last_prompt, whole

from blendrag.engine import BlendEngine
from langchain_blendrag import ChatBlend

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
DICTS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is Place32?"},
]


def test_messages_go_through_the_models_template_once(llm: ChatBlend, engine: BlendEngine) -> None:
    expected = engine.generate(DICTS)
    answer = llm.invoke(MESSAGES)
    assert answer.content == expected.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == expected.metrics.prompt_tokens
    assert llm.get_num_tokens_from_messages(MESSAGES) == expected.metrics.prompt_tokens
    text_ids = engine.tokens.encode_text("Where is Place32?")
    assert llm.get_num_tokens("Where is Place32?") == len(text_ids)


def test_calls_and_results_keep_their_roles(talker: ChatBlend) -> None:
    call = {"name": "get_weather", "args": {"location": "Rome"}, "id": "1", "type": "tool_call"}
    turns = [
        HumanMessage("Look it up."),
        AIMessage([{"type": "text", "text": "I will."}], tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="1"),
    ]
    talker.bind_tools([get_weather]).invoke(turns)
    sent = last_prompt(talker.engine)
    assert sent.count("<|bos|>") == 1
    assert '"name": "get_weather", "description": "The weather."' in sent
    assert 'I will.<tool_call>\n{"name": "get_weather", "arguments": {"location": "Rome"}}' in sent
    assert "<tool_response>\nsunny\n</tool_response>" in sent
    talker.invoke(MESSAGES, apply_chat_template=False)
    assert last_prompt(talker.engine).endswith("System: Be brief.\nHuman: Where is Place32?")


def test_usage_and_metadata_report_reuse(llm: ChatBlend, engine: BlendEngine) -> None:
    chunk = engine.retrieve("Place32")[0].text
    question = HumanMessage(f"{chunk}\n\nWhere is Place32?")
    for answer in (llm.invoke([question]), whole(llm.stream([question]))):
        usage, told = answer.usage_metadata, answer.response_metadata
        assert usage is not None
        details = usage["input_token_details"]
        assert details["cache_read"] >= len(engine.kv_namespace.model.text_ids(chunk))
        assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
        assert usage["output_tokens"] == 8
        assert told["model_name"] == engine.model_name
        assert told["ttft_s"] > 0
        assert told["finish_reason"] == "length"
        assert [c["outcome"] for c in told["blendrag"]["chunks"]] == ["blended"]
    usage = llm.invoke([question], mode="full").usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] == 0


def test_logprobs_are_in_openais_form(llm: ChatBlend) -> None:
    for answer in (
        llm.invoke("Where is Place32?", logprobs=True, top_logprobs=2),
        whole(llm.stream("Where is Place32?", logprobs=True, top_logprobs=2)),
    ):
        places = answer.response_metadata["logprobs"]["content"]
        assert "".join(place["token"] for place in places) == answer.content
        for place in places:
            best = place["top_logprobs"]
            assert len(best) == 2
            assert place["logprob"] == best[0]["logprob"] >= best[1]["logprob"]
    assert "logprobs" not in llm.invoke("Where is Place32?").response_metadata


def test_callbacks_receive_tokens_of_streams_and_of_streaming_models(
    engine: BlendEngine, seen: Any
) -> None:
    config: Any = {"callbacks": [seen]}
    plain, streaming = ChatBlend(engine=engine), ChatBlend(engine=engine, streaming=True)
    first = plain.invoke("Where is Place32?", config)
    assert not seen.tokens
    second = streaming.invoke("Where is Place32?", config)
    assert "".join(seen.tokens) == second.content == first.content
    seen.tokens.clear()
    chunks = []
    for chunk in plain.stream("Where is Place32?", config):
        chunks.append(chunk)
        assert len(seen.tokens) == len(chunks)  # before the chunk is yielded
    assert chunks[-1].chunk_position == "last"
    assert len(chunks) > 2
