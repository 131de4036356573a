"""Answers are taken apart into text, reasoning and calls, in the form of the model's chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import scripted
import tiny
from blendrag.chat.calls import ToolCall
from blendrag.chat.formats import ORDER, _known
from blendrag.chat.learned import format_of
from blendrag.chat.reply import Part, Reply, ReplyStream, take_apart
from blendrag.text.matches import common_prefix

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "year": {"type": "integer"},
                "share": {"type": ["number", "null"]},
                "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
Q, R = {"q": "x"}, {"q": "y"}
THINK = "<think>\nHm.\n</think>\n\n"
CHANNEL = "<|start|>assistant<|channel|>"
SECTION = "<|tool_calls_section_begin|>"
KIMI = "<|tool_call_begin|>functions.search:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def as_json(arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": "search", key: arguments})


def hermes(arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{as_json(arguments)}\n</tool_call>"


#: Of each form: text that its chat template contains, an answer, and its text, reasoning and arguments.
Case = tuple[str, str, str, str, Sequence[dict[str, Any]]]
CASES: dict[str, Case] = {
    "hermes": ("<tool_call>", f"I look.\n{hermes(Q)}\n{hermes(R)}", "I look.", "", (Q, R)),
    "hermes thinks": ("<tool_call>", f"{THINK}I look.\n{hermes(Q)}", "I look.", "Hm.", (Q,)),
    "hermes answers": ("<tool_call>", f"{THINK}It built ships.", "It built ships.", "Hm.", ()),
    "hermes, open": ("<tool_call>", f"<tool_call>{as_json(Q)}{hermes(R)}", "", "", (Q, R)),
    "hermes in a fence": ("<tool_call>", f"```json\n{hermes(Q)}\n```", "", "", (Q,)),
    "qwen coder": (
        "<tool_call>",
        "<tool_call>\n<function=search>\n<parameter=q>\nx\n y\n</parameter>\n<parameter=year>\n1874\n"
        "</parameter>\n<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        ({"q": "x\n y", "year": 1874, "deep": True},),
    ),
    "glm": (
        "<tool_call>",
        "<think></think>\n<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>',
        "",
        "",
        ({"q": "x", "tags": ["a", "b"]},),
    ),
    "llama": ("", as_json(Q, "parameters"), "", "", (Q,)),
    "llama, more": ("", f"{as_json(Q)}; {as_json(R)}", "", "", (Q, R)),
    "llama, tag": ("", f"<|python_tag|>{as_json(Q, 'parameters')}", "", "", (Q,)),
    "llama speaks": ("", f"I look.\n{as_json(Q, 'parameters')}", "I look.", "", (Q,)),
    "llama in a fence": ("", f"```json\n{as_json(Q)}\n```", "", "", (Q,)),
    "llama, list": ("", f"[{as_json(Q)}, {as_json(R)}]", "", "", (Q, R)),
    "llama, python": ("", '[search(q="x"), search(q="y")]', "", "", (Q, R)),
    "gemma": ("", '```tool_code\nsearch(q="x")\n```', "", "", (Q,)),
    "mistral": ("[TOOL_CALLS]", f"I look.[TOOL_CALLS][{as_json(Q)}]", "I look.", "", (Q,)),
    "mistral, named": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS]{"q": "x"}[TOOL_CALLS]search[ARGS]{"q": "y"}',
        "",
        "",
        (Q, R),
    ),
    "magistral": (
        "[TOOL_CALLS]",
        '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]search{"q": "x"}',
        "I look.",
        "Hm.",
        (Q,),
    ),
    "harmony calls": (
        "<|channel|>",
        f"<|channel|>analysis<|message|>Hm.<|end|>{CHANNEL}commentary to=functions.search "
        '<|constrain|>json<|message|>{"q": "x"}<|call|>',
        "",
        "Hm.",
        (Q,),
    ),
    "harmony speaks": (
        "<|channel|>",
        f"<|channel|>commentary<|message|>I look.<|end|>{CHANNEL}commentary to=functions.search"
        '<|message|>{"q": "x"}<|call|>',
        "I look.",
        "",
        (Q,),
    ),
    "harmony answers": (
        "<|channel|>",
        f"<|channel|>analysis<|message|>Hm.<|end|>{CHANNEL}final<|message|>It built ships.<|return|>",
        "It built ships.",
        "Hm.",
        (),
    ),
    "deepseek r1": (
        "<｜tool▁call▁begin｜>",
        f"{THINK}<｜tool▁calls▁begin｜>{R1.format(json.dumps(Q))}\n{R1.format(json.dumps(R))}"
        "<｜tool▁calls▁end｜>",
        "",
        "Hm.",
        (Q, R),
    ),
    "deepseek v3.1": (
        "<｜tool▁call▁begin｜>",
        f"I look.<｜tool▁calls▁begin｜>{V31.format(json.dumps(Q))}{V31.format(json.dumps(R))}"
        "<｜tool▁calls▁end｜>",
        "I look.",
        "",
        (Q, R),
    ),
    "granite": ("<|tool_call|>", f"<|tool_call|>[{as_json(Q)}]", "", "", (Q,)),
    "granite thinks": (
        "<|tool_call|><response>",
        "<think>Hm.</think>\n<response>It built ships.</response>",
        "It built ships.",
        "Hm.",
        (),
    ),
    "granite 3.2": (
        "<|tool_call|>",
        "Here is my thought process:\nHm.\n\nHere is my response:\nIt built ships.",
        "It built ships.",
        "Hm.",
        (),
    ),
    "phi": ("<|tool_call|>", f"<|tool_call|>[{as_json(Q)}]<|/tool_call|>", "", "", (Q,)),
    "kimi": (
        "<|tool_call_begin|>",
        f"I look.{SECTION}{KIMI.format(0, json.dumps(Q))}{KIMI.format(1, json.dumps(R))}"
        "<|tool_calls_section_end|>",
        "I look.",
        "",
        (Q, R),
    ),
    "command calls": (
        "<|START_ACTION|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "search", "parameters": {"q": "x"}}\n]<|END_ACTION|>',
        "",
        "Hm.",
        (Q,),
    ),
    "command answers": (
        "<|START_ACTION|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>It built ships.<|END_RESPONSE|>",
        "It built ships.",
        "Hm.",
        (),
    ),
    "command r": (
        "Action:```json",
        'Action:```json\n[{"tool_name": "search", "parameters": {"q": "x"}}]\n```',
        "",
        "",
        (Q,),
    ),
    "nemotron": ("<TOOLCALL>", f"{THINK}<TOOLCALL>[{as_json(Q)}]</TOOLCALL>", "", "Hm.", (Q,)),
    "functionary 3.1": (
        "<function=",
        'I look.<function=search>{"q": "x"}</function>',
        "I look.",
        "",
        (Q,),
    ),
    "functionary 3.2": (
        ">>>all",
        '>>>all\nI look.>>>search\n{"q": "x"}>>>search\n{"q": "y"}',
        "I look.",
        "",
        (Q, R),
    ),
    "seed": (
        "<seed:tool_call>",
        "<seed:think>Hm.</seed:think>I look.<seed:tool_call>\n<function=search>\n<parameter=q>x</parameter>"
        "\n<parameter=share>0.5</parameter>\n</function>\n</seed:tool_call>",
        "I look.",
        "Hm.",
        ({"q": "x", "share": 0.5},),
    ),
    "olmo": (
        "<function_calls>",
        '<function_calls>\nsearch(q="x", year=1874)\n</function_calls>',
        "",
        "",
        ({"q": "x", "year": 1874},),
    ),
}
TYPED = {"q": 'say "x"\n日本 </tool_call>', "year": 3, "deep": True, "tags": ["a", "b c"]}


def xml(open_call: str, close_call: str, argument: str, arguments: dict[str, Any]) -> str:
    values = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()]
    return open_call + "".join(argument.format(*pair) for pair in values) + close_call


#: More forms: text of the template, reasoning, and two calls with ``Q`` and ``TYPED``.
DIALECTS: dict[str, tuple[str, str, str]] = {
    "minimax": (
        "<minimax:tool_call>",
        THINK,
        "<minimax:tool_call>\n"
        + "".join(
            xml(
                '<invoke name="search">\n',
                "</invoke>\n",
                '<parameter name="{}">{}</parameter>\n',
                a,
            )
            for a in (Q, TYPED)
        )
        + "</minimax:tool_call>",
    ),
    "deepseek v3.2": (
        "function_calls>",
        THINK,
        "<｜DSML｜function_calls>\n"
        + "".join(
            xml(
                '<｜DSML｜invoke name="search">\n',
                "</｜DSML｜invoke>\n",
                '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n',
                a,
            )
            for a in (Q, TYPED)
        )
        + "</｜DSML｜function_calls>",
    ),
    "seed": (
        "<seed:tool_call>",
        "<seed:think>Hm.</seed:think>",
        "".join(
            xml(
                "<seed:tool_call>\n<function=search>\n",
                "</function>\n</seed:tool_call>",
                "<parameter={}>{}</parameter>\n",
                a,
            )
            for a in (Q, TYPED)
        ),
    ),
    "qwen coder without its first tag": (
        "<tool_call>",
        THINK,
        "\n".join(
            xml(
                "<function=search>\n",
                "</function>\n</tool_call>",
                "<parameter={}>\n{}\n</parameter>\n",
                a,
            )
            for a in (Q, TYPED)
        ),
    ),
    "hunyuan": (
        "<tool_calls:opensource>",
        "<think:opensource>Hm.</think:opensource>",
        "<tool_calls:opensource>\n"
        + "".join(
            xml(
                "<tool_call:opensource>search<tool_sep:opensource>\n",
                "</tool_call:opensource>\n",
                "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
                a,
            )
            for a in (Q, TYPED)
        )
        + "</tool_calls:opensource>",
    ),
    "longcat": (
        "<longcat_tool_call>",
        "<longcat_think>Hm.</longcat_think>",
        "".join(
            xml(
                "<longcat_tool_call>search\n",
                "</longcat_tool_call>\n",
                "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n",
                a,
            )
            for a in (Q, TYPED)
        ),
    ),
    "kimi k3": (
        "<|open|>",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>",
        "<|open|>tools<|sep|>"
        + "".join(
            xml(
                '<|open|>call tool="search" index="1"<|sep|>',
                "<|close|>call<|sep|>",
                '<|open|>argument key="{}" type="string"<|sep|>{}<|close|>argument<|sep|>',
                a,
            )
            for a in (Q, TYPED)
        )
        + "<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    "gemma 4": (
        "<|tool_call>",
        "<|channel>thought\nHm.<channel|>",
        '<|tool_call>call:search{q:<|"|>x<|"|>}<tool_call|><|tool_call>call:search{deep:true,q:<|"|>'
        + TYPED["q"]
        + '<|"|>,tags:[<|"|>a<|"|>,<|"|>b c<|"|>],year:3}<tool_call|>',
    ),
    "lfm": (
        "<|tool_call_start|>",
        THINK,
        "<|tool_call_start|>[search(q='x'), search(q='"
        + TYPED["q"]
        + '\', year=3, deep=True, tags=\'["a", "b c"]\')]<|tool_call_end|>',
    ),
    "apriel": (
        "[BEGIN FINAL RESPONSE]",
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n",
        f"<tool_calls>[{as_json(Q)}, {as_json(TYPED)}]</tool_calls>",
    ),
    "solar": (
        "<|tool_call:begin|>",
        "<|think|>Hm.<|end|><|begin|>assistant",
        "<|tool_calls|>"
        + "".join(
            f"<|tool_call:begin|>{i}<|tool_call:name|>search<|tool_call:args|>{json.dumps(a)}<|tool_call:end|>"
            for i, a in enumerate((Q, TYPED))
        ),
    ),
    "apertus": (
        "<|tools_prefix|>",
        "<|inner_prefix|>Hm.<|inner_suffix|>",
        f'<|tools_prefix|>[{{"search": {json.dumps(Q)}}}, {{"search": {json.dumps(TYPED)}}}]<|tools_suffix|>',
    ),
    "mcp": (
        "<use_mcp_tool>",
        THINK,
        "".join(
            "\n<use_mcp_tool>\n<server_name>s</server_name>\n<tool_name>search</tool_name>\n<arguments>\n"
            f"{json.dumps(a)}\n</arguments>\n</use_mcp_tool>"
            for a in (Q, TYPED)
        ),
    ),
    "minicpm": (
        "<|tool_call_start|>",
        "<|thought_start|>Hm.<|thought_end|>",
        "<|tool_call_start|>\n```python\n"
        + "\n".join(f"search({', '.join(f'{k}={v!r}' for k, v in a.items())})" for a in (Q, TYPED))
        + "\n```\n<|tool_call_end|>",
    ),
    "hermes": ("<tool_call>", THINK, f"{hermes(Q)}\n{hermes(TYPED)}"),
    "mistral": (
        "[TOOL_CALLS]",
        "[THINK]Hm.[/THINK]",
        f"[TOOL_CALLS][{as_json(Q)}, {as_json(TYPED)}]",
    ),
}
for _name, (_markup, _thinks, _calls) in DIALECTS.items():
    CASES[f"{_name}, two"] = (_markup, _thinks + _calls, "", "Hm.", (Q, TYPED))
CASES["gigachat"] = (
    "'function call'",
    f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{as_json(TYPED)}",
    "I look.",
    "",
    (TYPED,),
)
CASES["hunyuan answers"] = (
    "<tool_calls><answer>",
    "<think>\nHm.\n</think>\n<answer>\nIt built ships.\n</answer>",
    "It built ships.",
    "Hm.",
    (),
)


@cache
def form(markup: str) -> Any:
    return format_of(scripted.tokens(f"{{{{ messages }}}}{markup}"))


def streamed(stream: ReplyStream, answer: str, sizes: Sequence[int]) -> list[Part]:
    parts, at, draw = [], 0, random.Random(str(sizes))
    while at < len(answer):
        size = draw.choice(sizes)
        parts += stream.add(answer[at : at + size])
        at += size
    return parts + stream.finish()


def told(reply: Reply) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    return reply.text, reply.reasoning, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_taken_apart_whole_and_streamed(name):
    markup, answer, text, reasoning, calls = CASES[name]
    expected = (text, reasoning, [("search", arguments) for arguments in calls])
    whole = take_apart(answer, form(markup), [SEARCH])
    assert told(whole) == expected
    assert whole.invalid == ()
    assert len({call.id for call in whole.calls}) == len(calls)
    for sizes in ((1,), (1, 2, 3), (2, 5, 9), (40,)):
        stream = ReplyStream(form(markup), [SEARCH])
        parts = streamed(stream, answer, sizes)
        assert told(stream.reply) == expected
        assert "".join(part.text for part in parts if part.kind == "text") == text
        assert "".join(p.text for p in parts if p.kind == "reasoning").strip() == reasoning
        assert [p.call for p in parts if p.call] == list(stream.reply.calls)


@pytest.mark.parametrize("name", CASES)
def test_of_a_cut_answer_at_most_an_unfinished_mark_is_text(name):
    markup, answer, text, _, calls = CASES[name]
    for end in range(1, len(answer), 1 + len(answer) // 80):
        reply = take_apart(answer[:end], form(markup), [SEARCH])
        assert len(reply.calls) <= len(calls)
        assert all(tiny.one_sentence(call.error) for call in reply.invalid)
        rest = reply.text[common_prefix(reply.text, text) :]
        assert answer[:end].rstrip().endswith(rest.strip())


@pytest.mark.parametrize("name", ORDER)
def test_ordinary_text_is_never_held_back_for_long_and_never_dropped(name):
    answer = (
        "See [1] and [TOOL_BOX], {braces}, a < b, `x` and:\n\n```python\nprint({1: 2})\n```\n"
        "<b>bold</b> <|x|>\n- item\n\n  two  spaces\n"
    )
    stream = ReplyStream(_known(name)[1], [SEARCH])
    shown, longest = "", 0
    for at, character in enumerate(answer, start=1):
        shown += "".join(part.text for part in stream.add(character))
        longest = max(longest, len(answer[:at].rstrip()) - len(shown))
    assert longest < 24
    assert shown + "".join(part.text for part in stream.finish()) == answer


@pytest.mark.parametrize(
    "text",
    [
        'The answer is {"name": "search"}.',
        '{"name": "Place", "built": 1874}',
        '["search", {"query": "ships"}]',
        "",
        "  two  spaces are kept\n",
        "print(1)",
    ],
)
@pytest.mark.parametrize("markup", ["", "<tool_call>", "[TOOL_CALLS]", "<|channel|>"])
def test_other_answers_are_text(markup, text):
    assert take_apart(text, form(markup), [SEARCH]) == Reply(text)


@pytest.mark.parametrize("markup", ["<tool_call>", "[TOOL_CALLS]", "<|channel|>"])
@pytest.mark.parametrize(
    "answer",
    [
        as_json(Q),
        f"```json\n{as_json(Q)}\n```",
        f"\n [{as_json(Q)}]\n",
        f"```\n{as_json(Q)}\n```\n",
    ],
)
def test_an_answer_that_is_nothing_but_a_call_without_tags_is_one(markup, answer):
    """Qwen2.5-Coder forgets the tags that its template asks for."""
    for size in (1, 3, len(answer)):
        stream = ReplyStream(form(markup), [SEARCH])
        parts = streamed(stream, answer, [size])
        assert told(stream.reply) == ("", "", [("search", Q)])
        assert [part.kind for part in parts] == ["call"]


@pytest.mark.parametrize(
    "answer",
    [
        f"{as_json(Q)}\nThat is how you search.",
        f"Like this: {as_json(Q)}",
        as_json(Q).replace("search", "sing"),
        as_json(Q)[:-6],
        f'{{"type": "answer", "value": {json.dumps(Q)}}}',
        '{"year": 1874}',
    ],
)
def test_other_json_without_tags_stays_text(answer):
    stream = ReplyStream(form("<tool_call>"), [SEARCH])
    parts = streamed(stream, answer, [2])
    assert stream.reply.text == "".join(part.text for part in parts) == answer
    assert not stream.reply.calls


def test_without_tools_calls_are_text_and_reasoning_is_apart():
    answer = f"{THINK}Write {hermes(Q)} to search."
    assert told(take_apart(answer, form("<tool_call>"))) == (
        f"Write {hermes(Q)} to search.",
        "Hm.",
        [],
    )
    later = f"Tags such as {THINK}are text."
    assert take_apart(later, form("")).text == later


@pytest.mark.parametrize(
    ("markup", "opens", "closes"),
    [
        ("<tool_call>", "<think>", "</think>"),
        ("<｜tool▁call▁begin｜>", "<think>", "</think>"),
        ("<|tool_call_begin|>", "<think>", "</think>"),
        ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ("<|tool_call:begin|>", "<|think|>", "<|end|>"),
        ("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    ],
)
def test_reasoning_ends_with_its_closing_tag_and_not_after_the_next_token(markup, opens, closes):
    stream = ReplyStream(form(markup), [SEARCH], opens)
    stream.add("Hm.")
    assert stream.is_thinking
    stream.add(closes)
    assert not stream.is_thinking


@pytest.mark.parametrize("begun", ["<think>", "<think>\n"])
def test_reasoning_that_the_prompt_has_begun(begun):
    said = f"Hm.\n</think>\n\n{hermes(Q)}"
    assert told(take_apart(said, form("<tool_call>"), [SEARCH], begun)) == (
        "",
        "Hm.",
        [("search", Q)],
    )
    cut = take_apart("Hm. So", form("<tool_call>"), [SEARCH], begun)
    assert (cut.text, cut.reasoning) == ("", "Hm. So")


@pytest.mark.parametrize(
    ("markup", "answer", "reason"),
    [
        ("<tool_call>", '<tool_call>\n{"name": "search", "arguments": {"que', "not JSON"),
        ("<tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("<tool_call>", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "a list"),
        ("<tool_call>", "<tool_call>7</tool_call>", "no name"),
        ("<tool_call>", "<tool_call></tool_call>", "empty"),
        ("<tool_call>", "<tool_call><function=search><parameter=q>x", "cut off"),
        ("<tool_call>", "<tool_call>search<arg_key>q</arg_key><arg_value>x", "cut off"),
        ("", '{"name": "search", "parameters": {"que', "not JSON"),
        ("", "<|python_tag|>search(ships)", "named arguments"),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "se', "not JSON"),
        ("[TOOL_CALLS]", '[TOOL_CALLS]search[ARGS]{"que', "not JSON"),
        ("<function_calls>", "<function_calls>search(q=open('x'))</function_calls>", "literal"),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000, "JSON"),
    ],
)
def test_a_malformed_call_is_invalid_with_a_reason(markup, answer, reason):
    reply = take_apart(answer, form(markup), [SEARCH])
    (invalid,) = reply.invalid
    assert (reply.calls, reply.text) == ((), "")
    assert reason in invalid.error
    assert invalid.text or "empty" in reason
    assert tiny.one_sentence(invalid.error)


def test_the_complete_calls_of_a_cut_list_count():
    reply = take_apart(f'[TOOL_CALLS][{as_json(Q)}, {{"name": "se', form("[TOOL_CALLS]"), [SEARCH])
    assert [call.arguments for call in reply.calls] == [Q]
    assert len(reply.invalid) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"year": "1874"}, {"year": 1874}),
        ({"year": "1874.0"}, {"year": 1874}),
        ({"year": "soon"}, {"year": "soon"}),
        ({"q": "1874"}, {"q": "1874"}),
        ({"share": "none"}, {"share": None}),
        ({"share": "NaN"}, {"share": "NaN"}),
        ({"deep": "False"}, {"deep": False}),
        ({"tags": "['a']"}, {"tags": ["a"]}),
        ({"other": "7"}, {"other": "7"}),
    ],
)
def test_arguments_are_cast_by_the_schema_of_the_tool(given, expected):
    reply = take_apart(hermes(given), form("<tool_call>"), [SEARCH])
    assert reply.calls[0].arguments == expected
    bare = take_apart(hermes(given), form("<tool_call>"), [SEARCH["function"]])
    assert bare.calls[0].arguments == expected


@pytest.mark.parametrize(
    ("markup", "answer", "text", "calls"),
    [
        ("<tool_call>", f"Write `{hermes(Q)}` to search.", f"Write `{hermes(Q)}` to search.", []),
        ("<tool_call>", f"I look.\n```json\n{hermes(Q)}\n```\nDone.", "I look.\n\nDone.", [Q]),
        ("<tool_call>", f"{hermes(Q)}\n```python\nx = 1\n```", "```python\nx = 1\n```", [Q]),
        ("<tool_call>", f"I look.\n{hermes(Q)}\nI wait.", "I look.\n\nI wait.", [Q]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{as_json(Q)}]\nI wait.", "I wait.", [Q]),
        ("<tool_call>", "Use `<think>` here.\n<think>\nNo.\n</think>", None, []),
        ("<tool_call>", "<answer>7</answer>", "<answer>7</answer>", []),
        ("<tool_call>", f"{THINK}<answer>7</answer>", "<answer>7</answer>", []),
        ("<tool_call>", "<think>\n\n</think>\n\nYes.", "Yes.", []),
        ("<tool_call>", "<tool_code>1</tool_code> and <tools>", None, []),
        ("<tool_call>", '<tool_call>{"name": "f" "x"}</tool_call>\n' + hermes(Q), "", [Q]),
        ("<tool_call>", '<tool_call>{"name": "f, "arguments": {}}</tool_call>\n' + hermes(Q), "", [Q]),
        ("<tool_call>", "<tool_call>\nsearch\n</tool_call>", "", [{}]),
        (
            "<tool_call>",
            "".join(f"<function=search><parameter=q>{q}</parameter></function>" for q in "xy"),
            "",
            [Q, R],
        ),
    ],
)  # fmt: skip
def test_what_stands_around_calls_is_kept(markup, answer, text, calls):
    whole = take_apart(answer, form(markup), [SEARCH])
    assert whole.text == (answer if text is None else text)
    assert [call.arguments for call in whole.calls] == calls
    stream = ReplyStream(form(markup), [SEARCH])
    streamed(stream, answer, (1, 3))
    assert told(stream.reply) == told(whole)


OWN = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "thinking": {"open": "<mull>", "close": "</mull>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def test_a_tokenizer_that_brings_a_response_template_is_read_by_it():
    tokens = scripted.tokens("{{ tools }}<tool_call>")
    tokens.tokenizer.response_template = OWN
    own = format_of(tokens)
    answer = f"<mull>Hm.</mull>I look.<call>{as_json(Q)}</call>"
    assert told(take_apart(answer, own, [SEARCH])) == ("I look.", "Hm.", [("search", Q)])
    assert take_apart(hermes(Q), own, [SEARCH]).text == hermes(Q)
    (invalid,) = take_apart('<call>{"name": </call>', own, [SEARCH]).invalid
    assert tiny.one_sentence(invalid.error)
    tokens.tokenizer.response_template = OWN | {
        "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "int"}}
    }
    for answer in ("<call>many</call>", "<call>many"):  # also if it is cut
        (invalid,) = take_apart(answer, format_of(tokens), [SEARCH]).invalid
        assert invalid.text == answer


def test_ids_are_those_of_the_model_or_nine_letters():
    found = take_apart(CASES["kimi"][1], form("<|tool_call_begin|>"), [SEARCH])
    assert [call.id for call in found.calls] == ["functions.search:0", "functions.search:1"]
    (call,) = take_apart(hermes(Q), form("<tool_call>"), [SEARCH]).calls
    assert isinstance(call, ToolCall)
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_the_text_of_an_answer_of_many_wrong_calls_is_kept_once():
    for markup, wrong in (
        ("", "<|python_tag|>" + '{"a": 1};' * 2000),
        ("[TOOL_CALLS]", "[TOOL_CALLS]" + '{"a": 1}' * 2000),
    ):
        found = take_apart(wrong, form(markup), [SEARCH])
        assert len(found.invalid) == 2000
        assert sum(len(call.text) for call in found.invalid) <= len(wrong)
    answer = json.dumps([{"a": 1}] * 500)
    found = take_apart(f"[TOOL_CALLS]{answer}", form("[TOOL_CALLS]"), [SEARCH])
    assert [call.text for call in found.invalid] == [answer, *[""] * 499]


@pytest.mark.parametrize(
    ("markup", "answer"),
    [
        ("[TOOL_CALLS]", "[TOOL_CALLS]search" + " " * 200_000),  # once took quadratic time
        ("[TOOL_CALLS]", "[TOOL_CALLS]" + "a" * 200_000),
        ("[TOOL_CALLS]", "[TOOL_CALLS]a[CALL_ID]" * 20_000),
        ("<tool_call>", "<tool_call>" * 50_000),
        ("<tool_call>", "<tool_call><function=f>" + "<parameter=q>" * 50_000),
        ("<tool_call>", "<tool_call><function=f>" + "<parameter=q>" * 50_000 + "</parameter>"),
        ("<tool_call>", "<tool_call>" + "<function=f>" * 50_000),
        ("<tool_call>", "<tool_call>f" + "<arg_key>q</arg_key>" * 30_000 + "<arg_value>"),
        ("<tool_call>", "<tool_call>f(" + (")" + " " * 1000) * 200 + "x"),
        ("<tool_call>", "<tool_call>" + "f(" * 100_000),
        ("", '{"name": "search", "parameters": ' + " " * 1_000_000),
        ("", "<|python_tag|>" + " ;," * 200_000),
        ("", "\n`" * 20_000),
        ("", "[" * 100_000),
        ("<tool_call>", "<tool_call>" + "[ " * 5_000),
    ],
)
def test_a_long_answer_is_read(markup, answer):
    found = take_apart(answer, form(markup), [SEARCH])
    assert not found.calls
    assert all(len(call.error) < 1000 for call in found.invalid)


@pytest.mark.parametrize("markup", ["", "<tool_call>", "[TOOL_CALLS]", "<|channel|>"])
@pytest.mark.parametrize("word", ["word ", " ", "<", "\n<tool", "["])
def test_each_piece_of_a_long_answer_is_looked_at_once(markup, word, monkeypatch):
    """Not the whole answer for every piece."""

    def looked_at(pieces: int) -> int:
        stream, seen = ReplyStream(form(markup), [SEARCH]), []
        real = stream._grow
        monkeypatch.setattr(
            stream, "_grow", lambda text: seen.append(len(stream._held)) or real(text)
        )
        for _ in range(pieces):
            stream.add(word)
        return sum(seen)

    if word.strip():  # white space may come before a call, and is held
        assert looked_at(2000) <= 10.5 * looked_at(200) + 200


@pytest.mark.parametrize("name", ORDER)
def test_white_space_before_an_answer_is_searched_once(name):
    stream = ReplyStream(_known(name)[1], [SEARCH])
    for _ in range(200):
        stream.add(" ")
    assert len(stream._held) > 150  # the parser has let go of it
