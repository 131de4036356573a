"""What clients send back is read: calls with broken arguments, results of any kind, the parts of others."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tiny
from blendrag.chat.messages import arguments_of, cleaned

ARGUMENTS: list[tuple[Any, Any]] = [
    ('{"town": "Öre"}', {"town": "Öre"}),
    ({"town": "Öre"}, {"town": "Öre"}),
    ("", {}),
    (None, {}),
    ("null", {}),
    ("[]", {}),
    ("{}", {}),
    ('{"town": "Öre', {"town": "Öre"}),
    ('{"a": 1, "to', {"a": 1}),
    ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
    ('{"a": "x\\', {"a": "x"}),
    ("{", {}),
    ('{"t": "a\nb"}', {"t": "a\nb"}),
    ('{"a": 1}{"b": 2}', {"a": 1, "b": 2}),
    ('{"a": 1}{"a": 2}', '{"a": 1}{"a": 2}'),
    ('[{"a": 1}]', {"a": 1}),
    ('"{\\"a\\": 1}"', {"a": 1}),
    ('"x"', '"x"'),
    ("x", "x"),
    ("5", "5"),
    (5, "5"),
    ('{"n": NaN, "m": -Infinity, "o": 1e999}', {"n": "NaN", "m": "-Infinity", "o": "1e999"}),
    ({"n": math.nan, "m": [math.inf]}, {"n": "NaN", "m": ["Infinity"]}),
    ('{"a": 1} and more', '{"a": 1} and more'),
    ("{" * 1000, "{" * 1000),
]


@pytest.mark.parametrize(("given", "expected"), ARGUMENTS)
def test_arguments_are_an_object_or_text(given: Any, expected: Any) -> None:
    assert arguments_of(given) == expected


RESULTS: list[tuple[Any, str]] = [
    ("x", "x"),
    ("", ""),
    (None, ""),
    (7, "7"),
    (True, "true"),
    ({"temp": 3}, '{"temp": 3}'),
    ([1, 2], "[1, 2]"),
    ([{"temp": "ö"}], '[{"temp": "ö"}]'),
    ([], ""),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ([{"type": "json", "json": {"a": 1}}], '{"type": "json", "json": {"a": 1}}'),
    ({"type": "text", "text": "a"}, "a"),
]


@pytest.mark.parametrize(("content", "text"), RESULTS)
def test_a_result_may_be_any_json(content: Any, text: str) -> None:
    (made,) = cleaned([{"role": "tool", "content": content, "tool_call_id": "a"}])
    assert made == {"role": "tool", "content": text, "tool_call_id": "a"}


def call(call_id: str | None, name: str = "find", **arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**made, "id": call_id} if call_id else made


def test_parts_of_other_apis_become_text_calls_results_and_reasoning() -> None:
    made = cleaned(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "human", "content": ["Where", {"text": " is it?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look."},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"q": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"text": "Hill"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "ai", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    )
    assert made == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "tool_calls": [call("toolu_1", q="x")],
        },
        {"role": "tool", "content": "Hill", "tool_call_id": "toolu_1", "name": "find"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "No."},
    ]
    assert cleaned(made) == made


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_any_name(name: str) -> None:
    (made,) = cleaned([{"role": "assistant", "content": None, name: "I look."}])
    assert made == {"role": "assistant", "content": "", "reasoning_content": "I look."}


def test_calls_without_ids_get_one_and_so_do_their_results() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": "{}"}}
    made = cleaned(
        [
            {"role": "assistant", "content": None, "tool_calls": [call(None), call(None, "g")]},
            {"role": "tool", "content": "of g", "name": "g"},
            {"role": "tool", "content": "of find"},
            old,
            {"role": "function", "name": "g", "content": "again"},
            {"role": "tool", "content": "of nobody"},
        ]
    )
    ids = [each["id"] for message in made for each in message.get("tool_calls", ())]
    assert len(set(ids)) == 3
    assert all(len(each) == 9 for each in ids)
    assert [m["tool_call_id"] for m in made[1:3]] == [ids[1], ids[0]]
    assert made[4]["tool_call_id"] == ids[2]
    assert made[5]["tool_call_id"] not in ids


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]},
         r"^messages\[1\].content\[1\] is a content part of type 'image_url', expected text"),
        ({"role": "tool", "content": [{"type": "image", "source": {}}]},
         r"^messages\[1\].content\[0\] is a content part of type 'image'"),
        ({"role": "user", "content": 7}, r"^messages\[1\].content is 7, expected a text"),
        ({"role": "user", "content": [7]}, r"^messages\[1\].content\[0\] is 7"),
        ({"content": "a"}, r"^messages\[1\].role is None, expected system"),
        ({"role": "assistant", "tool_calls": "x"}, r"^messages\[1\].tool_calls is 'x', expected a list"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"^messages\[1\].tool_calls\[0\] is "),
        ({"role": "user", "content": "\ud800"}, r"^messages\[1\].content holds a lone surrogate"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_by_its_field(message: dict[str, Any], sentence: str) -> None:
    with tiny.refuses(sentence):
        cleaned([{"role": "user", "content": "a"}, message])
