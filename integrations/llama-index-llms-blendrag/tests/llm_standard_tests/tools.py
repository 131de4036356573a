"""Tools: offered, called, answered, in every way there is of asking, and by LlamaIndex's agents."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.tools import FunctionTool

from llm_standard_tests.base import LLMTests

MULTIPLY = "What is 6 times 7?"
LOOK_UP = "Look up Café 東京."
TIME = "What time is it?"
BOTH = "What is 6 times 7, and look up Café 東京."
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


async def refuses_no_tools(llm: FunctionCallingLLM, refusal: Any) -> None:
    with pytest.raises(refusal, match="no tools"):
        llm.predict_and_call([], HELLO)
    with pytest.raises(refusal, match="no tools"):
        await llm.apredict_and_call([], HELLO)


class LLMToolTests(LLMTests):
    """The model must call ``multiply`` for MULTIPLY, ``look_up`` for LOOK_UP, ``clock`` for TIME, both of
    the first for BOTH, none for HELLO, and answer with a tool's result once it has it."""

    @pytest.fixture
    def llm(self) -> FunctionCallingLLM:
        made = self.made()
        assert isinstance(made, FunctionCallingLLM)
        return made

    # -- one call -------------------------------------------------------------------------------

    def assert_multiplies(self, llm: FunctionCallingLLM, response: ChatResponse) -> None:
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("multiply", {"a": 6, "b": 7})
        assert call.tool_id
        blocks = [b for b in response.message.blocks if isinstance(b, ToolCallBlock)]
        assert [block.tool_call_id for block in blocks] == [call.tool_id]

    def test_metadata_says_so(self, llm: FunctionCallingLLM) -> None:
        assert llm.metadata.is_function_calling_model

    def test_chat_with_tools(self, llm: FunctionCallingLLM) -> None:
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, MULTIPLY))

    async def test_achat_with_tools(self, llm: FunctionCallingLLM) -> None:
        self.assert_multiplies(llm, await llm.achat_with_tools(TOOLS, MULTIPLY))

    def test_stream_chat_with_tools(self, llm: FunctionCallingLLM) -> None:
        *before, last = llm.stream_chat_with_tools(TOOLS, MULTIPLY)
        self.assert_multiplies(llm, last)
        for response in before:
            assert not llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)

    async def test_astream_chat_with_tools(self, llm: FunctionCallingLLM) -> None:
        stream = await llm.astream_chat_with_tools(TOOLS, MULTIPLY)
        self.assert_multiplies(llm, [response async for response in stream][-1])

    def test_usage_comes_with_calls_too(self, llm: FunctionCallingLLM) -> None:
        *_, last = llm.stream_chat_with_tools(TOOLS, MULTIPLY)
        for response in (llm.chat_with_tools(TOOLS, MULTIPLY), last):
            assert response.raw["usage"]["completion_tokens"] > 0
            assert response.raw["finish_reason"] == "tool_calls"

    def test_a_call_is_no_text(self, llm: FunctionCallingLLM) -> None:
        responses = list(llm.stream_chat_with_tools(TOOLS, MULTIPLY))
        assert "multiply" not in "".join(response.delta or "" for response in responses)
        assert "multiply" not in (responses[-1].message.content or "")

    def test_a_message_and_a_history_may_ask(self, llm: FunctionCallingLLM) -> None:
        message = ChatMessage(role="user", content=MULTIPLY)
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, message))
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, chat_history=[message]))

    def test_a_tool_without_arguments(self, llm: FunctionCallingLLM) -> None:
        (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(TOOLS, TIME))
        assert (call.tool_name, call.tool_kwargs) == ("clock", {})

    def test_arguments_in_any_script(self, llm: FunctionCallingLLM) -> None:
        (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(TOOLS, LOOK_UP))
        assert call.tool_kwargs == {"query": "Café 東京"}

    # -- none, or several -----------------------------------------------------------------------

    def test_no_tool_where_none_is_needed(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, HELLO)
        assert response.message.content
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        with pytest.raises(ValueError):
            llm.get_tool_calls_from_response(response)

    def test_text_is_streamed_where_no_tool_is_called(self, llm: FunctionCallingLLM) -> None:
        responses = list(llm.stream_chat_with_tools(TOOLS, HELLO))
        assert len(responses) > 2
        assert "".join(r.delta or "" for r in responses) == responses[-1].message.content
        assert responses[-1].message.content == llm.chat_with_tools(TOOLS, HELLO).message.content

    def test_several_calls_where_they_are_allowed(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, BOTH, allow_parallel_tool_calls=True)
        calls = llm.get_tool_calls_from_response(response)
        assert [call.tool_name for call in calls] == ["multiply", "look_up"]
        assert len({call.tool_id for call in calls}) == 2

    async def test_one_call_where_only_one_is_allowed(self, llm: FunctionCallingLLM) -> None:
        self.assert_multiplies(llm, llm.chat_with_tools(TOOLS, BOTH))
        *_, last = llm.stream_chat_with_tools(TOOLS, BOTH)
        self.assert_multiplies(llm, last)

    def test_without_tools_it_just_chats(self, llm: FunctionCallingLLM) -> None:
        assert llm.chat_with_tools([], HELLO).message.content

    # -- choice ---------------------------------------------------------------------------------

    def test_a_required_call_is_made(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(ONE, MULTIPLY, tool_required=True)
        self.assert_multiplies(llm, response)

    def test_a_chosen_tool_is_called(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, MULTIPLY, tool_choice="multiply")
        self.assert_multiplies(llm, response)

    def test_choosing_none_calls_none(self, llm: FunctionCallingLLM) -> None:
        response = llm.chat_with_tools(TOOLS, MULTIPLY, tool_choice="none")
        assert not llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)

    def test_choosing_what_was_not_offered_is_refused(self, llm: FunctionCallingLLM) -> None:
        with pytest.raises(self.refusal, match="look_up"):
            llm.chat_with_tools(ONE, MULTIPLY, tool_choice="look_up")

    # -- and back -------------------------------------------------------------------------------

    def test_a_tools_result_is_read(self, llm: FunctionCallingLLM) -> None:
        asked = ChatMessage(role="user", content=MULTIPLY)
        called = llm.chat_with_tools(TOOLS, asked)
        (call,) = llm.get_tool_calls_from_response(called)
        known = {"tool_call_id": call.tool_id, "name": call.tool_name}
        result = ChatMessage(role="tool", content="42", additional_kwargs=known)
        answer = llm.chat_with_tools(TOOLS, chat_history=[asked, called.message, result])
        assert "42" in (answer.message.content or "")

    def test_predict_and_call(self, llm: FunctionCallingLLM) -> None:
        response = llm.predict_and_call(TOOLS, MULTIPLY)
        assert response.response == "42"
        assert [source.tool_name for source in response.sources] == ["multiply"]

    async def test_apredict_and_call(self, llm: FunctionCallingLLM) -> None:
        assert (await llm.apredict_and_call(TOOLS, MULTIPLY)).response == "42"

    def test_predict_and_call_of_several(self, llm: FunctionCallingLLM) -> None:
        response = llm.predict_and_call(TOOLS, BOTH, allow_parallel_tool_calls=True)
        assert len(response.sources) == 2

    async def test_predict_and_call_of_no_tools_is_refused(self, llm: FunctionCallingLLM) -> None:
        await refuses_no_tools(llm, self.refusal)

    # -- agents ---------------------------------------------------------------------------------

    async def test_a_function_agent_calls_and_answers(self, llm: FunctionCallingLLM) -> None:
        for streaming in (True, False):
            agent = FunctionAgent(tools=TOOLS, llm=llm, streaming=streaming)
            output = await agent.run(MULTIPLY)
            assert "42" in str(output)
            assert [call.tool_name for call in output.tool_calls] == ["multiply"]

    async def test_a_function_agent_streams_its_answer(self, llm: FunctionCallingLLM) -> None:
        handler = FunctionAgent(tools=TOOLS, llm=llm).run(MULTIPLY)
        deltas = [e.delta async for e in handler.stream_events() if isinstance(e, AgentStream)]
        assert "".join(deltas).strip() == str(await handler).strip()

    async def test_a_function_agent_may_be_told_its_first_tool(
        self, llm: FunctionCallingLLM
    ) -> None:
        agent = FunctionAgent(tools=TOOLS, llm=llm, initial_tool_choice="multiply")
        assert "42" in str(await agent.run(MULTIPLY))

    async def test_agents_that_ask_in_plain_text_work(self, llm: FunctionCallingLLM) -> None:
        assert "42" in str(await ReActAgent(tools=ONE, llm=llm).run(MULTIPLY))
