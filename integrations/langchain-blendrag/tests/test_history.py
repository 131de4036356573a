"""Histories of other models, and parts of histories, with a template that is strict about them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)

import scripted
import tiny
from langchain_blendrag import ChatBlend

#: As Mistral Nemo: no system role but the first, nine characters in ids, roles that alternate.
STRICT = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}<|bos|>"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}[CALL]{{ c.function | tojson }}{{ c.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[RESULT]{{ m.content }}{{ m.tool_call_id }}{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endif %}{% endfor %}<|start|>assistant\n"
)
FOREIGN = "chatcmpl-tool-0123456789abcdef"
CALL = {"name": "find", "args": {"q": "x"}, "id": FOREIGN, "type": "tool_call"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.tokenizer()
    made.chat_template = STRICT
    root = tmp_path_factory.mktemp("s") / "s"
    with scripted.engine([], root, default="Fine.", tokenizer=made, mode="full") as engine:
        yield ChatBlend(engine=engine)


def prompt(chat: ChatBlend, messages: list[BaseMessage]) -> str:
    assert chat.invoke(messages).content == "Fine."
    return str(chat.engine.adapter.model.prompts[-1])


def test_ids_of_other_models_are_mapped_and_stay_in_the_messages(chat: ChatBlend) -> None:
    answer = AIMessage("", tool_calls=[CALL])
    shown = prompt(
        chat, [HumanMessage("Where?"), answer, ToolMessage("Hill", tool_call_id=FOREIGN)]
    )
    (call_id,) = {shown.split("}}")[1][:9], shown.split("[RESULT]Hill")[1][:9]}
    assert call_id.isalnum()
    assert answer.tool_calls[0]["id"] == FOREIGN


def test_system_messages_and_several_turns_of_one_role_are_answered(chat: ChatBlend) -> None:
    asked = [HumanMessage("One."), HumanMessage("Two.")]
    assert "user\nBe brief.\n\nOne.\n\nTwo.<|end|>" in prompt(
        chat, [SystemMessage("Be brief."), *asked]
    )
    assert "One.\n\nTwo.\n\nBe brief.<|end|>" in prompt(chat, [*asked, SystemMessage("Be brief.")])


def test_calls_that_cannot_be_parsed_stay_calls_if_they_have_a_name(chat: ChatBlend) -> None:
    wrong = {"name": "find", "args": '{"town": "Öre', "id": "a", "error": None}
    answer = AIMessage("", invalid_tool_calls=[{**wrong, "type": "invalid_tool_call"}])
    result = ToolMessage("bad arguments", tool_call_id="a")
    shown = prompt(chat, [HumanMessage("Where?"), answer, result])
    assert '[CALL]{"name": "find", "arguments": {"town": "Öre"}}' in shown
    assert "[RESULT]bad arguments" in shown


def test_what_other_models_left_in_contents_is_read(chat: ChatBlend) -> None:
    old = AIMessage("", additional_kwargs={"function_call": {"name": "find", "arguments": "{}"}})
    shown = prompt(chat, [HumanMessage("Where?"), old, FunctionMessage("Hill", name="find")])
    assert '[CALL]{"name": "find", "arguments": {}}' in shown
    assert "[RESULT]Hill" in shown
    parts: Any = [
        {"type": "thinking", "thinking": "I look.", "signature": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": FOREIGN, "name": "find", "input": {"q": "x"}},
    ]
    result: Any = [{"type": "text", "text": "Hill"}]
    shown = prompt(chat, [HumanMessage("Where?"), AIMessage(parts, tool_calls=[CALL]),
                          ToolMessage(result, tool_call_id=FOREIGN)])  # fmt: skip
    assert shown.count("[CALL]") == 1
    assert "Let me see." in shown
    assert "I look." not in shown


HISTORY = [
    SystemMessage("Be brief."), HumanMessage("Where is the mill?"),
    AIMessage("I look.", tool_calls=[CALL]), ToolMessage("On the hill.", tool_call_id=FOREIGN),
    AIMessage("It is on the hill."), HumanMessage("Who built it?"), AIMessage("Anna built it."),
    HumanMessage("When?"),
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["first", "last"])
@pytest.mark.parametrize("partial", [False, True])
def test_trim_messages_counts_with_a_strict_template(
    chat: ChatBlend, strategy: Any, partial: bool
) -> None:
    whole = chat.get_num_tokens_from_messages(HISTORY)
    seen = set()
    for most in range(0, whole + 1, 12):
        more: Any = {"include_system": True} if strategy == "last" else {}
        kept = trim_messages(HISTORY, max_tokens=most, token_counter=chat, strategy=strategy,
                             allow_partial=partial, **more)  # fmt: skip
        seen.add(len(kept))
        if kept:
            assert chat.invoke(kept).content == "Fine."
    assert len(seen) > 4
    assert trim_messages(HISTORY, max_tokens=whole, token_counter=chat, strategy="first") == HISTORY


def test_no_messages_and_empty_ones_are_counted(chat: ChatBlend) -> None:
    assert chat.get_num_tokens_from_messages([]) == 0
    assert chat.get_num_tokens_from_messages([AIMessage("")]) > 0
