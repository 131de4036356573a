"""Test suites for LlamaIndex LLMs, as classes to subclass, like ``langchain-tests`` for LangChain.

Depends on LlamaIndex and pytest only::

    class TestMyLLM(LLMAnswerTests, LLMToolTests):
        def made(self, **changes):
            return MyLLM(**{"model": "tiny", **changes})

A model without tools takes ``LLMWithoutToolsTests`` instead of ``LLMToolTests``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from llama_index.core.agent.react import ReActChatFormatter, ReActOutputParser
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

#: A deterministic model gives the same answer in every way of calling.
QUESTION = "Where is the harbour?"
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=QUESTION),
]
ASKING = PromptTemplate("Where is the {thing}?")
Response = ChatResponse | CompletionResponse
T = TypeVar("T")


class LLMTests:
    """Base of all suites. Input that cannot be used must raise a :class:`ValueError`."""

    def made(self, **changes: Any) -> LLM:
        """An LLM whose answers are deterministic and a few words long. ``changes``: further arguments."""
        raise NotImplementedError

    @pytest.fixture
    def llm(self) -> LLM:
        return self.made()

    async def assert_refused(
        self,
        llm: LLM,
        messages: list[ChatMessage],
        match: str | None = None,
        error: type[Exception] = ValueError,
        **options: Any,
    ) -> None:
        """Chatting raises in each way, with a text that has the pattern ``match``."""
        with pytest.raises(error, match=match):
            llm.chat(messages, **options)
        with pytest.raises(error, match=match):
            list(llm.stream_chat(messages, **options))
        with pytest.raises(error, match=match):
            await llm.achat(messages, **options)
        with pytest.raises(error, match=match):
            await gathered(llm.astream_chat(messages, **options))


def text_of(response: Response) -> str:
    if isinstance(response, CompletionResponse):
        return response.text
    return response.message.content or ""


async def gathered(stream: Awaitable[AsyncIterator[T]]) -> list[T]:
    return [each async for each in await stream]


async def all_ways(llm: LLM, question: str = QUESTION, **options: Any) -> list[Response]:
    """The last response in each of the eight ways of calling."""
    messages = [ChatMessage(role="user", content=question)]
    return [
        llm.complete(question, **options),
        llm.chat(messages, **options),
        list(llm.stream_complete(question, **options))[-1],
        list(llm.stream_chat(messages, **options))[-1],
        await llm.acomplete(question, **options),
        await llm.achat(messages, **options),
        (await gathered(llm.astream_complete(question, **options)))[-1],
        (await gathered(llm.astream_chat(messages, **options)))[-1],
    ]


class LLMAnswerTests(LLMTests):
    """Compares answers with one another, so any deterministic model will do."""

    async def test_every_way_of_calling_gives_the_same_answer(self, llm: LLM) -> None:
        responses = await all_ways(llm)
        (answer,) = {text_of(response) for response in responses}
        assert answer
        chats = [r.message for r in responses if isinstance(r, ChatResponse)]
        assert {message.role for message in chats} == {MessageRole.ASSISTANT}

    async def test_deltas_add_up_to_the_text_so_far(self, llm: LLM) -> None:
        responses, so_far = list(llm.stream_chat(MESSAGES)), ""
        for response in responses:
            so_far += response.delta or ""
            assert response.message.content == so_far
            assert response.message.role == MessageRole.ASSISTANT
        assert len(responses) > 1
        assert responses[-1].message == llm.chat(MESSAGES).message
        chatted = await gathered(llm.astream_chat(MESSAGES))
        assert [r.delta for r in chatted] == [r.delta for r in responses]
        completed = await gathered(llm.astream_complete(QUESTION))
        assert [r.text for r in completed] == [r.text for r in llm.stream_complete(QUESTION)]

    async def test_predict_and_stream_format_a_template(self, llm: LLM) -> None:
        whole = llm.complete(QUESTION).text
        assert llm.predict(ASKING, thing="harbour") == whole
        assert await llm.apredict(ASKING, thing="harbour") == whole
        assert "".join(llm.stream(ASKING, thing="harbour")) == whole
        assert "".join(await gathered(llm.astream(ASKING, thing="harbour"))) == whole
        template = ChatPromptTemplate(message_templates=MESSAGES)
        assert llm.predict(template) == llm.chat(MESSAGES).message.content

    def test_the_system_prompt_is_the_system_message_of_predict(self, llm: LLM) -> None:
        briefly = self.made(system_prompt="Be brief.")
        assert briefly.predict(PromptTemplate(QUESTION)) == llm.chat(MESSAGES).message.content

    def test_all_turns_are_read_and_none_is_modified(self, llm: LLM) -> None:
        answer = list(llm.stream_chat(MESSAGES))[-1].message
        turns = [*MESSAGES, answer, ChatMessage(role="user", content="Why?")]
        before = [message.model_copy(deep=True) for message in turns]
        read = [usage_of(llm.chat(asked)) for asked in (MESSAGES[1:], MESSAGES, turns)]
        assert read[0]["prompt_tokens"] < read[1]["prompt_tokens"] < read[2]["prompt_tokens"]
        assert before == turns

    def test_a_message_in_several_blocks_is_answered(self, llm: LLM) -> None:
        blocks = [TextBlock(text="Where is"), TextBlock(text="the harbour?")]
        assert llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content

    def test_any_script_is_read(self, llm: LLM) -> None:
        for text in "Où est-ce ?", "港はどこですか。", "أين الميناء؟", "🚢?":
            assert llm.complete(text).text

    def test_max_tokens_of_a_call(self, llm: LLM) -> None:
        response = llm.chat(MESSAGES, max_tokens=2)
        assert usage_of(response)["completion_tokens"] == 2
        assert llm.chat(MESSAGES).message.content.startswith(response.message.content)

    async def test_stop_in_every_way_of_calling(self, llm: LLM) -> None:
        pieces = [r.delta or "" for r in llm.stream_complete(QUESTION)]
        whole, stop = "".join(pieces), pieces[0][-1:] + pieces[1][:1]  # across tokens
        for response in await all_ways(llm, stop=[stop]):
            assert text_of(response) == whole[: whole.index(stop)]

    async def test_usage_and_logprobs_in_every_way_of_calling(self, llm: LLM) -> None:
        responses = await all_ways(llm, logprobs=True)
        usage = usage_of(responses[0])
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["total_tokens"] == total > usage["completion_tokens"] > 0
        for response in responses:
            assert usage_of(response) == usage
            assert response.logprobs is not None
            assert "".join(place[0].token for place in response.logprobs) == text_of(response)
            assert all(place[0].logprob <= 0 for place in response.logprobs)
        assert llm.chat(MESSAGES).logprobs is None

    def test_logprobs_of_the_likeliest(self, llm: LLM) -> None:
        places = llm.chat(MESSAGES, logprobs=True, top_logprobs=3).logprobs or []
        assert places
        for place in places:
            assert 3 <= len(place) <= 4
            assert bytes(place[0].bytes).decode() == place[0].token

    async def test_many_at_once_on_an_event_loop_and_on_threads(self, llm: LLM) -> None:
        questions = [f"Where is Place{i}?" for i in range(3)]
        expected = [llm.complete(question).text for question in questions]
        found = await asyncio.gather(*(llm.acomplete(question) for question in questions))
        assert [response.text for response in found] == expected
        with ThreadPoolExecutor(3) as pool:
            assert [r.text for r in pool.map(llm.complete, questions)] == expected


def usage_of(response: Any) -> dict[str, int]:
    """Token counts where LlamaIndex's token counter looks for them."""
    kept = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: response.raw["usage"][name] for name in kept}


BLOCKS = [
    ImageBlock(url="http://localhost/x.png"),
    AudioBlock(url="http://localhost/x.wav"),
    VideoBlock(url="http://localhost/x.mp4"),
    DocumentBlock(url="http://localhost/x.pdf", title="x"),
]


#: Options of a call whose answer takes many seconds.
LONG = {"max_tokens": 3000}


class LLMConductTests(LLMTests):
    """Errors, and requests that are given up."""

    #: The answer to it takes many seconds with :data:`LONG`.
    long_question = QUESTION

    @pytest.fixture
    def long_messages(self) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=self.long_question)]

    async def test_content_that_is_not_text_is_refused(self, llm: LLM) -> None:
        for block in BLOCKS:
            messages = [ChatMessage(role="user", blocks=[block])]
            await self.assert_refused(llm, messages, block.block_type)

    @pytest.mark.parametrize("texts", [[], [""], [" \n", ""]], ids=["no", "one", "two"])
    async def test_empty_messages_are_refused(self, llm: LLM, texts: list[str]) -> None:
        messages = [ChatMessage(role="user", content=text) for text in texts]
        await self.assert_refused(llm, messages, "empty" if texts else None)
        for text in texts:
            with pytest.raises(ValueError):
                llm.complete(text)
            with pytest.raises(ValueError):
                await llm.acomplete(text)

    async def test_a_prompt_longer_than_the_context_is_refused(self, llm: LLM) -> None:
        prompt = "harbour " * llm.metadata.context_window
        messages = [ChatMessage(role="user", content=prompt)]
        await self.assert_refused(llm, messages, r"\d+ over")

    async def test_a_stream_left_early_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        for _ in llm.stream_chat(long_messages, **LONG):
            break
        assert llm.chat(MESSAGES, max_tokens=2)
        stream = await llm.astream_chat(long_messages, **LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        # LlamaIndex leaves closing the stream to the event loop, which must run for that
        assert await asyncio.wait_for(llm.achat(MESSAGES, max_tokens=2), 120)

    async def test_a_cancelled_task_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.achat(long_messages, **LONG), 0.1)
        assert llm.chat(MESSAGES, max_tokens=2)

    async def test_a_timeout_ends_it_and_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        await self.assert_refused(llm, long_messages, error=TimeoutError, timeout=0.1, **LONG)
        assert llm.chat(MESSAGES, max_tokens=2)

    async def test_an_exhausted_stream_stays_exhausted(self, llm: LLM) -> None:
        stream = llm.stream_chat(MESSAGES)
        assert list(stream)
        assert list(stream) == []
        awaited = await llm.astream_chat(MESSAGES)
        assert [response async for response in awaited]
        assert [response async for response in awaited] == []

    def test_it_serves_one_event_loop_after_another(self, llm: LLM) -> None:
        answers = {asyncio.run(llm.acomplete(QUESTION)).text for _ in range(2)}
        assert answers == {llm.complete(QUESTION).text}


class Heard(BaseCallbackHandler):
    """Records callbacks in order."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.told: list[tuple[str, dict[str, Any]]] = []

    def on_event_start(self, event_type: CBEventType, payload: Any = None, **kw: Any) -> str:
        if event_type == CBEventType.LLM:
            self.told.append(("start", payload))
        return str(kw.get("event_id", ""))

    def on_event_end(self, event_type: CBEventType, payload: Any = None, **kw: Any) -> None:
        if event_type == CBEventType.LLM:
            self.told.append(("end", payload))

    def start_trace(self, trace_id: str | None = None) -> None: ...

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None: ...


class Events(BaseEventHandler):
    """Records events in order."""

    seen: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.seen.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.seen]


@pytest.fixture
def events() -> Iterator[Events]:
    dispatcher, handler = get_dispatcher(), Events()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)


class LLMInstrumentationTests(LLMTests):
    @pytest.fixture
    def heard(self) -> Heard:
        return Heard()

    @pytest.fixture
    def told(self, heard: Heard) -> LLM:
        return self.made(callback_manager=CallbackManager([heard]))

    async def test_callbacks_of_every_way_of_calling(self, told: LLM, heard: Heard) -> None:
        for response in await all_ways(told):
            (start, asked), (end, answered) = heard.told[:2]
            del heard.told[:2]
            assert (start, end) == ("start", "end")
            assert {EventPayload.PROMPT, EventPayload.MESSAGES} & set(asked)
            named = {EventPayload.RESPONSE, EventPayload.COMPLETION}
            (said,) = (answered[name] for name in named if name in answered)
            assert text_of(said) == text_of(response)
        assert heard.told == []

    def test_callbacks_get_errors(self, told: LLM, heard: Heard) -> None:
        with pytest.raises(ValueError):
            told.complete(" ")
        (_, _), (end, payload) = heard.told
        assert end == "end"
        assert isinstance(payload[EventPayload.EXCEPTION], Exception)

    def test_the_token_counter_counts(self, llm: LLM) -> None:
        counter = TokenCountingHandler(tokenizer=str.split)
        usage = self.made(callback_manager=CallbackManager([counter])).chat(MESSAGES).raw["usage"]
        assert counter.prompt_llm_token_count == usage["prompt_tokens"]
        assert counter.completion_llm_token_count == usage["completion_tokens"]

    async def test_events_are_in_the_span_of_their_call(self, llm: LLM, events: Events) -> None:
        response = llm.chat(MESSAGES)
        assert [n for n in events.names() if n.startswith("LLM")] == [
            "LLMChatStartEvent",
            "LLMChatEndEvent",
        ]
        assert events.seen[-1].response == response
        assert all(event.model_dump(mode="json") for event in events.seen)
        (span_id,) = {event.span_id for event in events.seen}
        assert span_id
        events.seen.clear()
        responses = list(llm.stream_chat(MESSAGES))
        assert events.names().count("LLMChatInProgressEvent") == len(responses)
        assert events.names()[-1] == "LLMChatEndEvent"
        assert len({event.span_id for event in events.seen}) == 1
        events.seen.clear()
        await llm.acomplete(QUESTION)
        assert events.names()[0] == "LLMCompletionStartEvent"
        assert events.names()[-1] == "LLMCompletionEndEvent"


MULTIPLY = "What is 6 times 7?"
TIME = "What time is it?"
BOTH = "What is 6 times 7, and look up Café."
HELLO = "Say hello."


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def look_up(query: str) -> str:
    """Looks a place up."""
    return f"{query} is at the harbour."


def clock() -> str:
    """Tells the time."""
    return "noon"


TOOLS = [FunctionTool.from_defaults(fn=fn) for fn in (multiply, look_up, clock)]
ONE = TOOLS[:1]


class LLMPlainTextTests(LLMTests):
    """What models with and without tools have in common."""

    @pytest.fixture
    def llm(self) -> FunctionCallingLLM:
        made = self.made()
        assert isinstance(made, FunctionCallingLLM)
        return made

    def test_without_tools_it_just_chats(self, llm: FunctionCallingLLM) -> None:
        assert llm.chat_with_tools([], HELLO).message.content

    async def test_predict_and_call_of_no_tools_is_refused(self, llm: FunctionCallingLLM) -> None:
        with pytest.raises(ValueError, match="no tools"):
            llm.predict_and_call([], HELLO)
        with pytest.raises(ValueError, match="no tools"):
            await llm.apredict_and_call([], HELLO)

    async def test_agents_that_ask_in_plain_text_work(self, llm: FunctionCallingLLM) -> None:
        assert "42" in str(await ReActAgent(tools=ONE, llm=llm).run(MULTIPLY))


class LLMToolTests(LLMPlainTextTests):
    """The model must call ``multiply`` for MULTIPLY, ``clock`` for TIME, ``multiply`` and ``look_up`` for
    BOTH, nothing for HELLO, and use the result of a tool in its answer."""

    def assert_multiplies(self, llm: FunctionCallingLLM, response: ChatResponse) -> None:
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("multiply", {"a": 6, "b": 7})
        assert call.tool_id
        blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
        assert [block.tool_call_id for block in blocks] == [call.tool_id]

    async def test_chat_with_tools(self, llm: FunctionCallingLLM) -> None:
        assert llm.metadata.is_function_calling_model
        response = llm.chat_with_tools(TOOLS, MULTIPLY)
        self.assert_multiplies(llm, response)
        assert response.raw["usage"]["completion_tokens"] > 0
        assert response.raw["finish_reason"] == "tool_calls"
        self.assert_multiplies(llm, await llm.achat_with_tools(TOOLS, MULTIPLY))
        message = ChatMessage(role="user", content=MULTIPLY)
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, message))
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, chat_history=[message]))
        (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(TOOLS, TIME))
        assert (call.tool_name, call.tool_kwargs) == ("clock", {})

    async def test_stream_chat_with_tools(self, llm: FunctionCallingLLM) -> None:
        *before, last = llm.stream_chat_with_tools(TOOLS, MULTIPLY)
        self.assert_multiplies(llm, last)
        assert last.raw["usage"]["completion_tokens"] > 0
        assert last.raw["finish_reason"] == "tool_calls"
        assert "multiply" not in "".join(response.delta or "" for response in [*before, last])
        assert "multiply" not in (last.message.content or "")
        for response in before:
            assert not llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        streamed = await gathered(llm.astream_chat_with_tools(TOOLS, MULTIPLY))
        self.assert_multiplies(llm, streamed[-1])

    def test_no_tool_is_called_if_none_is_needed(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, HELLO)
        assert response.message.content
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        with pytest.raises(ValueError):
            llm.get_tool_calls_from_response(response)
        streamed = list(llm.stream_chat_with_tools(TOOLS, HELLO))
        assert len(streamed) > 2
        assert "".join(r.delta or "" for r in streamed) == response.message.content
        assert streamed[-1].message.content == response.message.content

    def test_several_calls_if_they_are_allowed(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, BOTH, allow_parallel_tool_calls=True)
        calls = llm.get_tool_calls_from_response(response)
        assert [call.tool_name for call in calls] == ["multiply", "look_up"]
        assert len({call.tool_id for call in calls}) == 2
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, BOTH))
        *_, last = llm.stream_chat_with_tools(TOOLS, BOTH)
        self.assert_multiplies(llm, last)

    @pytest.mark.parametrize("choice", [{"tool_required": True}, {"tool_choice": "multiply"}])
    def test_a_required_call_is_made(self, llm: FunctionCallingLLM, choice: dict[str, Any]) -> None:
        self.assert_multiplies(llm, llm.chat_with_tools(ONE, MULTIPLY, **choice))

    def test_choosing_none_calls_none(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, MULTIPLY, tool_choice="none")
        assert not llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)

    def test_choosing_what_was_not_offered_is_refused(self, llm: FunctionCallingLLM) -> None:
        with pytest.raises(ValueError, match="look_up"):
            llm.chat_with_tools(ONE, MULTIPLY, tool_choice="look_up")

    def test_a_tools_result_is_read(self, llm: FunctionCallingLLM) -> None:
        asked = ChatMessage(role="user", content=MULTIPLY)
        called = llm.chat_with_tools(TOOLS, asked)
        (call,) = llm.get_tool_calls_from_response(called)
        known = {"tool_call_id": call.tool_id, "name": call.tool_name}
        result = ChatMessage(role="tool", content="42", additional_kwargs=known)
        answer = llm.chat_with_tools(TOOLS, chat_history=[asked, called.message, result])
        assert "42" in (answer.message.content or "")

    async def test_predict_and_call(self, llm: FunctionCallingLLM) -> None:
        response = llm.predict_and_call(TOOLS, MULTIPLY)
        assert response.response == "42"
        assert [source.tool_name for source in response.sources] == ["multiply"]
        assert (await llm.apredict_and_call(TOOLS, MULTIPLY)).response == "42"

    async def test_a_function_agent_calls_and_answers(self, llm: FunctionCallingLLM) -> None:
        output = await FunctionAgent(tools=TOOLS, llm=llm, streaming=False).run(MULTIPLY)
        assert "42" in str(output)
        assert [call.tool_name for call in output.tool_calls] == ["multiply"]
        first = FunctionAgent(tools=TOOLS, llm=llm, initial_tool_choice="multiply")
        assert "42" in str(await first.run(MULTIPLY))

    async def test_a_function_agent_streams_its_answer(self, llm: FunctionCallingLLM) -> None:
        handler = FunctionAgent(tools=TOOLS, llm=llm).run(MULTIPLY)
        deltas = [e.delta async for e in handler.stream_events() if isinstance(e, AgentStream)]
        assert "42" in "".join(deltas).strip() == str(await handler).strip()


class LLMWithoutToolsTests(LLMPlainTextTests):
    """A model without tools says so, and agents that ask in plain text work."""

    async def test_tools_are_refused(self, llm: FunctionCallingLLM) -> None:
        assert not llm.metadata.is_function_calling_model
        for call in (llm.chat_with_tools, llm.stream_chat_with_tools):
            with pytest.raises(ValueError, match="multiply"):
                call(ONE, MULTIPLY)
        for acall in (llm.achat_with_tools, llm.astream_chat_with_tools):
            with pytest.raises(ValueError, match="multiply"):
                await acall(ONE, MULTIPLY)
        with pytest.raises(ValueError, match="FunctionCallingLLM"):
            await FunctionAgent(tools=ONE, llm=llm).run(MULTIPLY)

    async def test_predict_and_call_asks_in_plain_text(self, llm: FunctionCallingLLM) -> None:
        assert "42" in (await llm.apredict_and_call(ONE, MULTIPLY)).response
        given = {"react_chat_formatter": ReActChatFormatter(), "output_parser": ReActOutputParser()}
        assert "42" in llm.predict_and_call(ONE, MULTIPLY, **given).response

    async def test_predict_and_call_that_calls_nothing_is_refused(
        self, llm: FunctionCallingLLM
    ) -> None:
        with pytest.raises(ValueError, match="multiply"):
            llm.predict_and_call(ONE, HELLO)
        with pytest.raises(ValueError, match="multiply"):
            await llm.apredict_and_call(ONE, HELLO)
        assert llm.predict_and_call(ONE, HELLO, error_on_no_tool_call=False).sources == []


class Place(BaseModel):
    """A place and who built it."""

    name: str
    year: int = Field(description="When it was built.")
    builders: list[str] = []


ABOUT = PromptTemplate("Tell me about the {thing} as a Place.")
EXPECTED = Place(name="harbour", year=1874, builders=["the company"])
ABOUT_HARBOUR = ABOUT.format(thing="harbour")


class LLMStructuredTests(LLMTests):
    """The model must describe the harbour as EXPECTED, in a call of ``Place`` or in JSON."""

    async def test_structured_predict(self) -> None:
        assert self.made().structured_predict(Place, ABOUT, thing="harbour") == EXPECTED
        assert await self.made().astructured_predict(Place, ABOUT, thing="harbour") == EXPECTED

    async def test_a_structured_llm_completes_and_chats(self) -> None:
        structured = self.made().as_structured_llm(Place)
        assert structured.complete(ABOUT_HARBOUR).raw == EXPECTED
        messages = [ChatMessage(role="user", content=ABOUT_HARBOUR)]
        response = structured.chat(messages)
        assert response.raw == (await structured.achat(messages)).raw == EXPECTED
        assert Place.model_validate_json(response.message.content or "") == EXPECTED

    def test_what_does_not_fit_is_an_error(self) -> None:
        class Ship(BaseModel):
            """A ship, which the model does not know."""

            tonnage: int

        with pytest.raises(ValueError):
            self.made().structured_predict(Ship, ABOUT, thing="harbour")


class LLMStructuredStreamTests(LLMTests):
    """Structured output grows; the last object is whole."""

    async def test_stream_structured_predict(self) -> None:
        *_, last = self.made().stream_structured_predict(Place, ABOUT, thing="harbour")
        assert Place.model_validate(last.model_dump()) == EXPECTED
        stream = self.made().astream_structured_predict(Place, ABOUT, thing="harbour")
        last = (await gathered(stream))[-1]
        assert Place.model_validate(last.model_dump()) == EXPECTED

    async def test_a_structured_llm_streams(self) -> None:
        structured = self.made().as_structured_llm(Place)
        messages = [ChatMessage(role="user", content=ABOUT_HARBOUR)]
        *_, last = structured.stream_chat(messages)
        assert Place.model_validate(last.raw.model_dump()) == EXPECTED
        last = (await gathered(structured.astream_chat(messages)))[-1]
        assert Place.model_validate_json(last.message.content or "") == EXPECTED
