"""Agents of LangChain over models that think, in the formats of some families; LlamaIndex has others."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import create_retriever_tool

from langchain_blendrag import BlendRetriever, ChatBlend
from thinkers import ANSWER, QUESTION, thinker


@pytest.mark.parametrize("name", ["harmony", "mistral", "granite"])
def test_an_agent_searches_answers_streams_and_reuses_its_chunks(tmp_path: Path, name: str) -> None:
    with thinker(name, tmp_path / "store") as engine:
        search = create_retriever_tool(
            BlendRetriever(engine=engine, k=1), "search", "Searches the documents."
        )
        agent = create_agent(ChatBlend(engine=engine), [search])
        asked = {"messages": [("human", QUESTION)]}
        _, called, result, answered = agent.invoke(asked)["messages"]
        assert [call["args"] for call in called.tool_calls] == [{"query": QUESTION}]
        assert (called.content, result.type, answered.content) == ("", "tool", ANSWER)
        thoughts = [m.additional_kwargs["reasoning_content"].strip() for m in (called, answered)]
        assert thoughts == ["I must look.", "I know it."]
        assert len(answered.response_metadata["blendrag"]["chunks"]) == 1
        assert answered.usage_metadata["input_token_details"]["cache_read"] > 0
        pieces = [
            message
            for message, _ in agent.stream(asked, stream_mode="messages")
            if isinstance(message, AIMessageChunk)
        ]
        assert "".join(str(piece.content) for piece in pieces) == ANSWER
        assert [call["name"] for piece in pieces for call in piece.tool_call_chunks] == ["search"]
