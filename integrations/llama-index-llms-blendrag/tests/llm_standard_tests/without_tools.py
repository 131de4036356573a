"""Of models that call no tools: that they say so, and that what asks for them in plain text works."""

from __future__ import annotations

import pytest
from llama_index.core.agent.react import ReActChatFormatter, ReActOutputParser
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.llms.function_calling import FunctionCallingLLM

from llm_standard_tests.base import LLMTests
from llm_standard_tests.tools import HELLO, MULTIPLY, ONE, refuses_no_tools


class LLMWithoutToolsTests(LLMTests):
    """Of a model that calls no tools: it says so, and agents that ask in plain text work."""

    @pytest.fixture
    def llm(self) -> FunctionCallingLLM:
        made = self.made()
        assert isinstance(made, FunctionCallingLLM)
        return made

    async def test_it_says_that_it_calls_no_tools(self, llm: FunctionCallingLLM) -> None:
        assert not llm.metadata.is_function_calling_model
        with pytest.raises(self.refusal, match="multiply"):
            llm.chat_with_tools(ONE, MULTIPLY)
        with pytest.raises(self.refusal, match="multiply"):
            llm.stream_chat_with_tools(ONE, MULTIPLY)
        with pytest.raises(self.refusal, match="multiply"):
            await llm.achat_with_tools(ONE, MULTIPLY)
        with pytest.raises(self.refusal, match="multiply"):
            await llm.astream_chat_with_tools(ONE, MULTIPLY)

    def test_without_tools_it_just_chats(self, llm: FunctionCallingLLM) -> None:
        assert llm.chat_with_tools([], HELLO).message.content

    async def test_a_function_agent_is_refused(self, llm: FunctionCallingLLM) -> None:
        with pytest.raises(ValueError, match="FunctionCallingLLM"):
            await FunctionAgent(tools=ONE, llm=llm).run(MULTIPLY)

    def test_predict_and_call_asks_in_plain_text(self, llm: FunctionCallingLLM) -> None:
        assert "42" in llm.predict_and_call(ONE, MULTIPLY).response

    async def test_apredict_and_call_asks_in_plain_text(self, llm: FunctionCallingLLM) -> None:
        assert "42" in (await llm.apredict_and_call(ONE, MULTIPLY)).response

    def test_predict_and_call_takes_a_formatter_and_a_parser(self, llm: FunctionCallingLLM) -> None:
        given = {"react_chat_formatter": ReActChatFormatter(), "output_parser": ReActOutputParser()}
        assert "42" in llm.predict_and_call(ONE, MULTIPLY, **given).response

    async def test_predict_and_call_that_calls_nothing_is_refused(
        self, llm: FunctionCallingLLM
    ) -> None:
        with pytest.raises(self.refusal, match="multiply"):
            llm.predict_and_call(ONE, HELLO)
        with pytest.raises(self.refusal, match="multiply"):
            await llm.apredict_and_call(ONE, HELLO)
        assert llm.predict_and_call(ONE, HELLO, error_on_no_tool_call=False).sources == []

    async def test_predict_and_call_of_no_tools_is_refused(self, llm: FunctionCallingLLM) -> None:
        await refuses_no_tools(llm, self.refusal)

    async def test_agents_that_ask_in_plain_text_work(self, llm: FunctionCallingLLM) -> None:
        assert "42" in str(await ReActAgent(tools=ONE, llm=llm).run(MULTIPLY))
