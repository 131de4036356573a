"""Conversations that other models and clients left are answered, whatever their form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import scripted
import tiny
from server.live import CHAT, Live, live

#: As Mistral: ids of nine characters, and no system role.
NINE = scripted.MISTRAL.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
)
USER = {"role": "user", "content": "Where?"}


@pytest.fixture(scope="module", params=[scripted.TEMPLATE, NINE], ids=["Hermes", "Mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.tokenizer()
    made.chat_template = request.param
    root = tmp_path_factory.mktemp("scripted") / "store"
    with (
        scripted.engine([], root, default="Fine.", tokenizer=made, mode="full") as engine,
        live(engine) as server,
    ):
        yield server


def posted(served: Live, messages: list[dict[str, Any]], **more: Any) -> Any:
    with served.client() as client:
        return client.post(CHAT, json={"messages": messages, **more})


def prompt_of(served: Live, messages: list[dict[str, Any]], **more: Any) -> str:
    """The prompt to which ``messages`` were answered."""
    reply = posted(served, messages, **more)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "Fine."
    return str(served.engine.adapter.model.prompts[-1])


def called(arguments: Any, call_id: str | None = "call_abc123def456") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "bad"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


ARGUMENTS: list[tuple[Any, str]] = [
    ('{"town": "Öre', '"arguments": {"town": "Öre"}'),
    ("", '"arguments": {}'),
    ("null", '"arguments": {}'),
    (None, '"arguments": {}'),
    ("[]", '"arguments": {}'),
    ('"x"', '"x'),
    ("x", '"x"'),
    ({"town": "x"}, '"arguments": {"town": "x"}'),
    ('{"a": 1}{"b": 2}', '"arguments": {"a": 1, "b": 2}'),
    ('{"t": "a\nb", "n": NaN}', '{"t": "a\\nb", "n": "NaN"}'),
]


@pytest.mark.parametrize(("arguments", "shown"), ARGUMENTS)
def test_broken_arguments_of_an_earlier_call_are_answered(
    served: Live, arguments: Any, shown: str
) -> None:
    assert shown in prompt_of(served, called(arguments))


@pytest.mark.parametrize(
    "call_id", ["call_abc123def456", "chatcmpl-tool-0123456789abcdef", None, ""]
)
def test_ids_of_other_models_are_answered(served: Live, call_id: str | None) -> None:
    assert "bad" in prompt_of(served, called("{}", call_id))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ({"temp": 3}, '{"temp": 3}'),
        (7, "7"),
        ([1, 2], "[1, 2]"),
        ("", ""),
        (None, ""),
    ],
)
def test_results_of_tools_may_be_any_json(served: Live, content: Any, shown: str) -> None:
    messages = called("{}")
    messages[-1]["content"] = content
    assert shown in prompt_of(served, messages)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be brief."}, USER],
        [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, USER],
        [USER, {"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "tool", "content": "Be brief.", "tool_call_id": "a"}, USER],
        [USER, USER, {"role": "user", "content": "Be brief."}],
        [{"role": "assistant", "content": "Be brief."}, USER],
        [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
            {"role": "function", "name": "f", "content": "Be brief."},
        ],
        [{"role": "assistant", "content": "x", "reasoning_content": "I think."},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Be brief."}]}],
    ],
)  # fmt: skip
def test_roles_in_any_order_are_answered(served: Live, messages: list[dict[str, Any]]) -> None:
    assert "Be brief." in prompt_of(served, messages)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "messages[1].content[1]"),
        ([{"type": "input_audio"}], "messages[1].content[0]"),
    ],
)
def test_what_is_no_text_is_refused_by_its_field(served: Live, content: Any, param: str) -> None:
    error = posted(served, [USER, {"role": "user", "content": content}])
    assert error.status_code == 400
    told = error.json()["error"]
    assert told["param"] == param
    assert told["message"].startswith(f"{param} is a content part of type")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Documents under a template without a system role whose roles must alternate."""
    made = tiny.tokenizer()
    made.chat_template = (
        "<|bos|>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
        "{% endfor %}<|start|>assistant\n"
    )
    root = tmp_path_factory.mktemp("stored") / "store"
    model = scripted.model(default="Fine.")
    with tiny.engine(model, root, tokenizer=made) as engine:
        engine.ingest([tiny.document(i) for i in range(3)])
        with live(engine) as server:
            yield server


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "Hello."}]])
def test_chunks_are_reused_behind_a_system_text_in_the_users_message(
    stored: Live, before: list[dict[str, Any]]
) -> None:
    system = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "What did it build?"}
    told = posted(stored, [system, *before, asked], blendrag={"top_k": 2}, retrieve=True).json()
    chunks = told["blendrag"]["chunks"]
    assert {chunk["outcome"] for chunk in chunks} <= {"blended", "exact"}
    assert told["blendrag"]["reused_tokens"] > 0
    alone = posted(stored, [asked], blendrag={"top_k": 2}, retrieve=True).json()
    assert {c["outcome"] for c in alone["blendrag"]["chunks"]} <= {"blended", "exact"}
    assert alone["blendrag"]["chunks"][0]["outcome"] == "exact"
    pasted = "\n\n".join(chunk.text for chunk in stored.engine.retrieve("What did it build?", 2))
    plain = [
        system,
        *before,
        {"role": "user", "content": f"{pasted}\n\nQuestion: What did it build?"},
    ]
    assert posted(stored, plain).json()["blendrag"]["reused_tokens"] > 0
    mid = [
        *before,
        asked,
        {"role": "assistant", "content": "Ships."},
        {"role": "system", "content": pasted},
    ]
    again = posted(stored, [*mid, {"role": "user", "content": "And then?"}]).json()
    assert again["blendrag"]["reused_tokens"] > 0
