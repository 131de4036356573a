"""``BlendLLM``: prompts, options, streaming and results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue

from blendrag.engine import BlendEngine
from langchain_blendrag import BlendLLM
from langchain_blendrag.llms import RenderedPrompt

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
RENDERED = (
    "<|bos|><|start|>system\nBe brief.<|end|>\n<|start|>user\nWhere is Place32?<|end|>\n"
    "<|start|>assistant\n"
)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


def test_messages_go_through_the_models_template_once(
    llm: BlendLLM, engine: BlendEngine, seen: Any
) -> None:
    expected = engine.generate(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where is Place32?"},
        ]
    )
    assert llm.invoke(MESSAGES, config={"callbacks": [seen]}) == expected.text
    llm.generate_prompt([ChatPromptValue(messages=MESSAGES)], callbacks=[seen])
    assert seen.prompts == [RENDERED] * 2
    assert seen.metrics[0]["prompt_tokens"] == expected.metrics.prompt_tokens


async def test_a_call_may_turn_the_template_off_and_on(
    llm: BlendLLM, engine: BlendEngine, seen: Any
) -> None:
    raw = BlendLLM(engine=engine, apply_chat_template=False)
    config: Any = {"callbacks": [seen]}
    for wrapper, wanted in [(llm, False), (raw, True)]:
        call = {"apply_chat_template": wanted}
        wrapper.invoke(MESSAGES, config, **call)
        wrapper.batch([MESSAGES], config, **call)
        list(wrapper.stream(MESSAGES, config, **call))
        await wrapper.ainvoke(MESSAGES, config, **call)
        assert [piece async for piece in wrapper.astream(MESSAGES, config, **call)]
        wrapper.bind(**call).invoke(MESSAGES, config)
    flat = "System: Be brief.\nHuman: Where is Place32?"
    assert seen.prompts == [flat] * 6 + [RENDERED] * 6
    tokens = [metrics["prompt_tokens"] for metrics in seen.metrics]
    assert len(set(tokens[:6])) == len(set(tokens[6:])) == 1
    assert tokens[0] != tokens[6]


def test_callbacks_get_the_prompt_rendered_with_the_calls_template_arguments(
    llm: BlendLLM, seen: Any
) -> None:
    config: Any = {"callbacks": [seen]}
    call = {"template_kwargs": {"add_generation_prompt": False}}
    llm.invoke(MESSAGES, config, **call)
    list(llm.stream(MESSAGES, config, **call))
    assert seen.prompts == [RENDERED.removesuffix("<|start|>assistant\n")] * 2


def test_a_rendered_prompt_survives_pickling() -> None:
    prompt = RenderedPrompt("text", [{"role": "user", "content": "x"}])
    copy = pickle.loads(pickle.dumps(prompt))
    assert (copy, copy.messages) == (prompt, prompt.messages)


def test_stop_ends_the_answer_in_every_way_of_calling(llm: BlendLLM, seen: Any) -> None:
    whole = llm.invoke("Where is Place32?")
    stop = whole[2:4]
    cut = whole[: whole.index(stop)]
    config = {"callbacks": [seen]}
    assert llm.invoke("Where is Place32?", config, stop=[stop]) == cut
    assert "".join(llm.stream("Where is Place32?", config, stop=[stop])) == cut
    assert BlendLLM(engine=llm.engine, stop=[stop]).invoke("Where is Place32?") == cut
    assert llm.bind(stop=[stop]).invoke("Where is Place32?") == cut
    infos = [r.generations[0][0].generation_info for r in seen.results]
    assert [info["finish_reason"] for info in infos] == ["stop", "stop"]


def test_an_answer_reports_its_usage_and_its_metrics(llm: BlendLLM) -> None:
    result = llm.generate(["Where is Place32?", "And Place11?"])
    usages = [g[0].generation_info["token_usage"] for g in result.generations]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"] == {
        name: sum(usage[name] for usage in usages) for name in usages[0]
    }
    info = result.generations[0][0].generation_info
    assert info["finish_reason"] in {"length", "stop"}
    assert info["blendrag"]["ttft_s"] > 0
    assert info["token_usage"]["completion_tokens"] == 8


def test_several_sequences_are_several_generations_and_stream_as_one_piece(
    engine: BlendEngine,
) -> None:
    two = BlendLLM(engine=engine, generate_kwargs={"num_beams": 2, "num_return_sequences": 2})
    assert len(two.generate(["Where is Place32?"]).generations[0]) == 2
    assert "".join(two.stream("Where is Place32?")) == two.invoke("Where is Place32?")
