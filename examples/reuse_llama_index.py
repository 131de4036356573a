"""How much retrieved KV stock LlamaIndex engines reuse. Runs offline; see reuse_table.py."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_index.core import Document, PromptHelper, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool
from reuse_counts import (
    PAGE_QUESTIONS,
    PAGES,
    QUESTIONS,
    Counts,
    demo_engine,
    question_in,
    scripted_models,
    share_of,
    tooled_engine,
)

from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendLLM,
    BlendRetriever,
    BlendReuseEvent,
    BlendVectorStore,
)

HISTORY = [ChatMessage(role="user", content="Hi."), ChatMessage(role="assistant", content="Hello.")]
#: Long enough for line breaks and quotes, which lists and JSON escape.
CHUNK_TOKENS = 256
#: Too small for four chunks and a refine prompt.
NARROW = {"context_window": 900, "num_output": 8}


class Watch(BaseEventHandler, arbitrary_types_allowed=True):
    """Counts what LlamaIndex's instrumentation reports."""

    counts: Counts

    def handle(self, event, **kwargs):
        if isinstance(event, RetrievalEndEvent):
            for found in event.nodes:
                self.counts.was_retrieved(found.node.get_content(MetadataMode.NONE))
        if isinstance(event, BlendReuseEvent):
            self.counts.was_answered(event.chunks, event.notes)


@contextmanager
def watched(engine) -> Iterator[Counts]:
    dispatcher, watch = get_dispatcher(), Watch(counts=Counts(engine))
    dispatcher.add_event_handler(watch)
    try:
        yield watch.counts
    finally:
        dispatcher.event_handlers.remove(watch)


def query_engine(mode, **more):
    return lambda llm, retriever: (
        RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, **more).query
    )


def citation(llm, retriever):
    return CitationQueryEngine.from_args(None, llm=llm, retriever=retriever).query


def context_chat(llm, retriever):
    return ContextChatEngine.from_defaults(retriever, llm=llm, chat_history=HISTORY).chat


def condense_plus_context(llm, retriever):
    memory = ChatMemoryBuffer.from_defaults(chat_history=list(HISTORY), llm=llm)
    return CondensePlusContextChatEngine.from_defaults(retriever, llm=llm, memory=memory).chat


def condense_question(llm, retriever):
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
    return CondenseQuestionChatEngine.from_defaults(engine, llm=llm, chat_history=HISTORY).chat


def agent_of(make_tool):
    def made(llm, retriever):
        agent = FunctionAgent(tools=[make_tool(llm, retriever)], llm=llm)
        return lambda question: asyncio.run(_run(agent, question))

    return made


async def _run(agent, question):
    return await agent.run(question)


def retriever_tool(llm, retriever):
    return RetrieverTool.from_defaults(retriever, name="search", description="Searches.")


def query_tool(llm, retriever):
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
    return QueryEngineTool.from_defaults(engine, name="search", description="Searches.")


def json_tool(llm, retriever):
    def search(input: str) -> list[dict]:
        """Searches the documents."""
        found = retriever.retrieve(input)
        return [{"title": n.metadata["title"], "text": f"“{n.text}”\n"} for n in found]

    return FunctionTool.from_defaults(search)


PATHS: dict[str, Callable] = {
    "compact (the default)": query_engine("compact"),
    "refine": query_engine("refine"),
    "tree_summarize": query_engine("tree_summarize"),
    "accumulate": query_engine("accumulate"),
    "compact_accumulate": query_engine("compact_accumulate"),
    "simple_summarize": query_engine("simple_summarize"),
    "`CitationQueryEngine`": citation,
    "`ContextChatEngine`": context_chat,
    "`CondensePlusContextChatEngine`": condense_plus_context,
    "`CondenseQuestionChatEngine`": condense_question,
    "compact, repacked as it overflows": query_engine(
        "compact", prompt_helper=PromptHelper(**NARROW)
    ),
}
AGENTS: dict[str, Callable] = {
    "agent with a `RetrieverTool`": agent_of(retriever_tool),
    "agent with a `QueryEngineTool`": agent_of(query_tool),
    "agent with a tool that returns JSON": agent_of(json_tool),
}


def share(engine, ask, questions=QUESTIONS):
    """The share of retrieved tokens that was loaded, and the reason if it is not all."""
    found = []
    for question in questions:
        with watched(engine) as counts:
            ask(question)
        found.append(counts)
    return share_of(found)


def searches(prompt):
    """A model that calls a tool and then answers."""
    asked = question_in(prompt)
    if "<tools>" not in prompt or "<tool_response>" in asked:
        return "So."
    return scripted_models().call("search", input=asked)


def default_index(engine, **more):
    """The pages in LlamaIndex's default nodes, of 1,024 of its tokens."""
    pages = [Document(text=page.read_text(encoding="utf-8")) for page in PAGES]
    embeddings = BlendEmbedding(engine=engine)
    return VectorStoreIndex.from_documents(pages, embed_model=embeddings, **more)


def rows_of_defaults() -> list[tuple[str, float, str]]:
    """With the default sizes of LlamaIndex and of blendrag."""
    with demo_engine(documents=()) as engine:
        llm = BlendLLM(engine=engine, max_new_tokens=8)
        own = StorageContext.from_defaults(vector_store=BlendVectorStore(engine=engine))
        index = default_index(engine, storage_context=own)
        ways = {
            "default nodes in a `BlendVectorStore`, compact": index.as_query_engine(llm=llm),
            "the same with `CitationQueryEngine`": CitationQueryEngine.from_args(index, llm=llm),
        }
        found = [(name, *share(engine, way.query, PAGE_QUESTIONS)) for name, way in ways.items()]
    with demo_engine(documents=PAGES) as engine:
        llm = BlendLLM(engine=engine, max_new_tokens=8)
        ask = default_index(engine).as_query_engine(llm=llm).query
        name = "default nodes of documents that were ingested, compact"
        return [*found, (name, *share(engine, ask, PAGE_QUESTIONS))]


def rows() -> list[tuple[str, float, str]]:
    """Path, share of tokens reused, and the reason if it is not all."""
    with demo_engine(CHUNK_TOKENS) as engine:
        llm = BlendLLM(engine=engine, max_new_tokens=8)
        retriever = BlendRetriever(engine=engine, similarity_top_k=4)
        found = [(name, *share(engine, make(llm, retriever))) for name, make in PATHS.items()]
        index = VectorStoreIndex.from_vector_store(
            BlendVectorStore(engine=engine), embed_model=BlendEmbedding(engine=engine)
        )
        own = index.as_query_engine(llm=llm, similarity_top_k=4).query
        found.append(("`BlendVectorStore` in a `VectorStoreIndex`, compact", *share(engine, own)))
    with tooled_engine(searches, CHUNK_TOKENS) as engine:
        llm = BlendLLM(engine=engine)
        retriever = BlendRetriever(engine=engine, similarity_top_k=4)
        found += [(name, *share(engine, make(llm, retriever))) for name, make in AGENTS.items()]
    return found + rows_of_defaults()


if __name__ == "__main__":
    raise SystemExit("This is a part of reuse_table.py: python examples/reuse_table.py")
