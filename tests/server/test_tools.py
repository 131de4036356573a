"""Tool calls, with a model whose replies are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest

import scripted
from server.live import CHAT, HELLO, Live, live

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = scripted.call("weather", town="Örebro")
HALF = '<tool_call>\n{"name": "wea\\ud83dther", "arguments": {"town": "\\ud83d"}}\n</tool_call>'
SCRIPT = (
    ("half a character", HALF),
    ("tool_response", "It rains."),
    ("Again and again", f' {{"town": "A"}}}}\n</tool_call>{CALL}{CALL}'),
    ("weather in two", f"I look.\n{CALL}\n{CALL}"),
    ("weather", f"I look.\n{CALL}"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("scripted") / "store"
    with scripted.engine(SCRIPT, root, mode="full") as engine, live(engine) as server:
        yield server


@pytest.fixture
def ask(served: Live):
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
        yield lambda text, **more: client.chat.completions.create(
            model=served.service.model_id,
            messages=text if isinstance(text, list) else [{"role": "user", "content": text}],
            tools=[TOOL],
            **more,
        )


def test_a_call_is_parsed_and_its_result_answered(ask) -> None:
    (choice,) = ask("weather in one").choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"town": "Örebro"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    told = ask([{"role": "user", "content": "weather in one"}, choice.message, result])
    assert told.choices[0].message.content == "It rains."
    assert told.choices[0].finish_reason == "stop"


def test_a_stream_hides_the_text_of_a_call_and_ends_with_the_call(ask) -> None:
    chunks = [chunk.choices[0] for chunk in ask("weather in two", stream=True)]
    assert "".join(each.delta.content or "" for each in chunks).strip() == "I look."
    calls = [call for each in chunks for call in each.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert chunks[-1].finish_reason == "tool_calls"


def test_parallel_calls_can_be_refused(ask) -> None:
    assert len(ask("weather in two").choices[0].message.tool_calls) == 2
    one = ask("weather in two", parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


def test_a_required_call_that_is_to_be_the_only_one_ends_the_answer(ask) -> None:
    several = ask("Again and again.", tool_choice="required")
    assert len(several.choices[0].message.tool_calls) == 3
    one = ask("Again and again.", tool_choice="required", parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.usage.completion_tokens < several.usage.completion_tokens / 2


def test_a_call_can_be_required_or_forbidden(served: Live, ask) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    ask("Say hello.", tool_choice=choice)
    prompts = served.engine.adapter.model.prompts
    assert prompts[-1].endswith('<tool_call>\n{"name": "weather", "arguments":')
    ask("Say hello.", tool_choice="none")
    assert "weather" not in prompts[-1]
    with pytest.raises(openai.BadRequestError, match="tool_choice 'cook' is not one of auto"):
        ask("Say hello.", tool_choice="cook")


@pytest.mark.parametrize("stream", [True, False])
def test_arguments_of_a_required_call_follow_the_schema(served: Live, stream) -> None:
    """The model would say "I do not know."."""
    days = {"type": "object", "properties": {"day": {"enum": ["Mo", "Tu"]}}, "required": ["day"]}
    tool = {"type": "function", "function": {"name": "open", "parameters": days}}
    body = {"messages": HELLO, "tools": [TOOL, tool], "stream": stream}
    with served.client() as client:
        body["tool_choice"] = {"type": "function", "function": {"name": "open"}}
        answer = client.post(CHAT, json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
        (said,) = [
            call["function"]["arguments"]
            for line in lines
            for choice in json.loads(line)["choices"]
            for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls", ())
        ]
        assert json.loads(said)["day"] in ("Mo", "Tu")


def test_several_answers_with_tools_are_refused(ask) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 2 with tools") as caught:
        ask("weather", n=2, temperature=1.0)
    assert caught.value.param == "n"


@pytest.mark.parametrize("stream", [True, False])
def test_half_a_character_in_a_call_does_not_break_the_answer(ask, stream) -> None:
    made = ask("half a character", stream=stream)
    if stream:
        calls = [call for chunk in made for call in chunk.choices[0].delta.tool_calls or ()]
    else:
        calls = made.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["wea?ther"]
    assert json.loads(calls[0].function.arguments) == {"town": "?"}


def nested(depth: int) -> str:
    return '{"a":' * depth + "{}" + "}" * depth


def offered(parameters: str = "{}", description: str = '"d"', name: str = '"f"') -> str:
    fields = f'"name":{name},"description":{description},"parameters":{parameters}'
    return f'{{"type":"function","function":{{{fields}}}}}'


def called(arguments: str) -> str:
    call = f'{{"id":"abcdefghi","function":{{"name":"f","arguments":{json.dumps(arguments)}}}}}'
    return f'{{"role":"assistant","tool_calls":[{call}]}},{{"role":"user","content":"x"}}'


@pytest.mark.parametrize(
    ("tools", "turns", "words"),
    [
        (offered(nested(10_000)), "", "cannot be read as JSON"),
        (offered(nested(400)), "", "tools[0] is nested more than 128 deep"),
        (offered('{"x":' + "[" * 300 + "]" * 300 + "}"), "", "tools[0] is nested more than 128"),
        (offered('{"x":{"default":NaN}}'), "", "tools[0] holds nan"),
        (offered('{"\\ud800":{}}'), "", "tools[0] holds a lone surrogate"),
        (offered(name="5"), "", "tools[0].function.name is 5"),
        (offered(description=json.dumps("x" * 2_000_000)), "", "context"),
        (",".join(offered(name=f'"f{i}"') for i in range(5000)), "", "context"),
        (
            offered(),
            called(nested(10_000)),
            "the arguments of messages[1].tool_calls[0] are nested",
        ),
        (offered(), called(nested(300)), "a tool call in message 1 is nested more than 128 deep"),
        (offered(), called(json.dumps({"a": "x" * 2_000_000})), "context"),
    ],
)
def test_tools_without_bounds_are_refused_in_a_sentence(
    served: Live, monkeypatch: pytest.MonkeyPatch, tools: str, turns: str, words: str
) -> None:
    encoded: list[int] = []
    tokens = served.engine.tokens
    real = tokens.encode_prompt
    monkeypatch.setattr(
        tokens,
        "encode_prompt",
        lambda text, *a, **k: encoded.append(len(text)) or real(text, *a, **k),
    )
    asks = '{"role":"user","content":"hello"}'
    body = f'{{"messages":[{asks}{turns and "," + turns}],"max_tokens":2,"tools":[{tools}]}}'
    with served.client() as client:
        headers = {"content-type": "application/json"}
        reply = client.post("/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert words in message
    assert len(message) < 400
    # only the beginning of what is far over the context is tokenised
    assert sum(encoded) <= 16 * served.engine.context_tokens + 1000


def test_the_client_assembles_a_streamed_call_and_parses_its_arguments(served: Live) -> None:
    class Town(pydantic.BaseModel):
        town: str

    tool = openai.pydantic_function_tool(Town, name="weather")
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
        asked = {
            "model": served.service.model_id,
            "messages": [{"role": "user", "content": "weather in one"}],
            "tools": [tool],
        }
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion()
        parsed = client.chat.completions.parse(**asked)
    assert "tool_calls.function.arguments.done" in kinds
    for completion in (streamed, parsed):
        (choice,) = completion.choices
        (call,) = choice.message.tool_calls
        assert (choice.message.content or "").strip() == "I look."
        assert call.function.parsed_arguments == Town(town="Örebro")
        assert choice.finish_reason == "tool_calls"
