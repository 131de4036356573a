"""An agent with a retriever tool: the KV of what the tool returns is loaded, too.

Needs a model whose chat template supports tools, and a directory of texts:
python examples/langchain_agent.py Qwen/Qwen2.5-0.5B-Instruct ./docs "What is the town known for?"
"""

import sys

from langchain.agents import create_agent
from langchain_core.tools import create_retriever_tool

from blendrag import BlendEngine
from langchain_blendrag import BlendRetriever, ChatBlend


def ask(engine, question):
    """The agent's last message; its metadata has the reused tokens."""
    search = create_retriever_tool(
        BlendRetriever(engine=engine, k=4), "search", "Searches the documents for a question."
    )
    agent = create_agent(ChatBlend(engine=engine, max_new_tokens=128), [search])
    return agent.invoke({"messages": [("human", question)]})["messages"][-1]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, documents, question = sys.argv[1:]
    with BlendEngine(model, "kv") as engine:
        engine.ingest([documents])
        message = ask(engine, question)
        print(message.content, message.usage_metadata, sep="\n")
