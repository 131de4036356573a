"""Agents of LlamaIndex over models that think, in the formats of some families; LangChain has others."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.tools import RetrieverTool

from llama_index.llms.blendrag import BlendLLM, BlendRetriever
from thinkers import ANSWER, QUESTION, thinker


@pytest.mark.parametrize("name", ["hermes", "deepseek"])
async def test_an_agent_searches_answers_streams_and_reuses_its_chunks(
    tmp_path: Path, name: str
) -> None:
    with thinker(name, tmp_path / "store") as engine:
        retriever = BlendRetriever(engine=engine, similarity_top_k=1)
        search = RetrieverTool.from_defaults(retriever, name="search", description="Searches.")
        llm = BlendLLM(engine=engine)
        called = llm.chat_with_tools([search], QUESTION)
        (call,) = llm.get_tool_calls_from_response(called)
        assert (call.tool_name, next(iter(call.tool_kwargs.values()))) == ("search", QUESTION)
        handler = FunctionAgent(tools=[search], llm=llm).run(QUESTION)
        events = [e async for e in handler.stream_events() if isinstance(e, AgentStream)]
        output = await handler
        assert str(output).strip() == "".join(e.delta for e in events).strip() == ANSWER
        assert [call.tool_name for call in output.tool_calls] == ["search"]
        thoughts = "".join(e.thinking_delta or "" for e in events)
        assert "I must look." in thoughts
        assert "I know it." in thoughts
        reused = [e.raw["blendrag"]["reused_tokens"] for e in events if "blendrag" in (e.raw or {})]
        assert max(reused, default=0) > 0
