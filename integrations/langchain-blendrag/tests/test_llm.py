"""``BlendLLM``: prompts, options, streaming and results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.text.rendered import Rendered
from langchain_blendrag import BlendLLM
from langchain_blendrag._convert import to_dicts
from langchain_blendrag.llms import RenderedPrompt

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Where is Place32?")]
RENDERED = (
    "<|bos|><|start|>system\nBe brief.<|end|>\n<|start|>user\nWhere is Place32?<|end|>\n"
    "<|start|>assistant\n"
)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


@pytest.mark.parametrize(
    ("has_template", "call", "prompt"),
    [
        (True, {}, RENDERED),
        (True, {"apply_chat_template": False}, "System: Be brief.\nHuman: Where is Place32?"),
        (False, {"apply_chat_template": True}, RENDERED),
        (
            True,
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            RENDERED.removesuffix("<|start|>assistant\n"),
        ),
    ],
)
async def test_callbacks_get_the_prompt_as_the_call_renders_it(
    engine: BlendEngine, seen: Any, has_template: bool, call: dict[str, Any], prompt: str
) -> None:
    llm = BlendLLM(engine=engine, apply_chat_template=has_template)
    config: Any = {"callbacks": [seen]}
    llm.invoke(MESSAGES, config, **call)
    llm.batch([MESSAGES], config, **call)
    list(llm.stream(MESSAGES, config, **call))
    await llm.ainvoke(MESSAGES, config, **call)
    assert [piece async for piece in llm.astream(MESSAGES, config, **call)]
    llm.bind(**call).invoke(MESSAGES, config)
    llm.generate_prompt([ChatPromptValue(messages=MESSAGES)], callbacks=[seen], **call)
    assert seen.prompts == [prompt] * 7
    tokens = len(engine.segments(prompt, Options(apply_chat_template=False)).ids)
    assert {metrics["prompt_tokens"] for metrics in seen.metrics} == {tokens}


def test_a_rendered_prompt_survives_pickling() -> None:
    prompt = RenderedPrompt(Rendered("text", ((0, 4),)))
    copy = pickle.loads(pickle.dumps(prompt))
    assert (copy, copy.rendered) == (prompt, prompt.rendered)


def test_a_prompt_is_rendered_once(engine: BlendEngine) -> None:
    llm = BlendLLM(engine=engine)
    llm.invoke(MESSAGES)  # the template is looked at
    with tiny.counted(engine.tokens, "render") as directly:
        engine.segments(to_dicts(MESSAGES))
    with tiny.counted(engine.tokens, "render") as rendered:
        llm.invoke(MESSAGES)
    assert len(rendered) == len(directly)
    with tiny.counted(engine.tokens, "render") as rendered:
        assert list(llm.stream(MESSAGES))
    assert len(rendered) == len(directly)


def test_thinking_is_rendered_as_the_call_wants_it(engine: BlendEngine, seen: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '[think]' if enable_thinking }}"
    )
    llm = BlendLLM(engine=engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokens.tokenizer, "chat_template", template)
        for thinks in (True, False):
            llm.invoke([HumanMessage("Where?")], {"callbacks": [seen]}, enable_thinking=thinks)
    assert seen.prompts == ["Where?[think]", "Where?"]


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
