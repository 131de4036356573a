"""How much of what stock LlamaIndex engines retrieve has its KV loaded. Runs offline; see reuse_table.py."""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_index.core import PromptHelper, VectorStoreIndex
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
from pydantic import Field

from blendrag import BlendEngine
from blendrag.chunking import chunk_id_of
from blendrag.demo import demo_corpus_path, demo_questions
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendLLM,
    BlendPromptHelper,
    BlendRetriever,
    BlendReuseEvent,
    BlendSynthesizer,
    BlendVectorStore,
)

QUESTIONS = [question.text for question in demo_questions()[:3]]
LOADED = {"exact", "blended", "reused"}
HISTORY = [ChatMessage(role="user", content="Hi."), ChatMessage(role="assistant", content="Hello.")]
#: Long enough to hold line breaks and quotes, which lists and JSON escape.
CHUNK_TOKENS = 256
#: Leaves less room than four chunks take, beside a refine prompt.
NARROW = {"context_window": 900, "num_output": 8}


class Watch(BaseEventHandler, arbitrary_types_allowed=True):
    """Which chunks were retrieved, and how many tokens of each were loaded in some call."""

    engine: BlendEngine
    retrieved: dict[str, int] = Field(default_factory=dict)
    loaded: dict[str, int] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def handle(self, event, **kwargs):
        if isinstance(event, RetrievalEndEvent):
            for found in event.nodes:
                text = found.node.get_content(MetadataMode.NONE).strip()
                tokens = len(self.engine.resources.text_ids(text))
                self.retrieved[chunk_id_of(text)] = tokens
        if isinstance(event, BlendReuseEvent):
            self.notes += event.notes if self.retrieved else []
            for chunk in event.chunks:
                if chunk["outcome"] in LOADED:
                    most = max(chunk["tokens"], self.loaded.get(chunk["chunk_id"], 0))
                    self.loaded[chunk["chunk_id"]] = most

    def counted(self):
        """Tokens loaded, and tokens retrieved."""
        loaded = sum(min(self.loaded.get(c, 0), n) for c, n in self.retrieved.items())
        return loaded, sum(self.retrieved.values())


@contextmanager
def watched(engine: BlendEngine) -> Iterator[Watch]:
    dispatcher, watch = get_dispatcher(), Watch(engine=engine)
    dispatcher.add_event_handler(watch)
    try:
        yield watch
    finally:
        dispatcher.event_handlers.remove(watch)


def query_engine(mode, **more):
    return lambda llm, retriever: (
        RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, **more).query
    )


def citation(llm, retriever):
    return CitationQueryEngine.from_args(None, llm=llm, retriever=retriever).query


def whole_chunks(llm, retriever):
    helper = BlendPromptHelper(llm, **NARROW)
    synthesizer = BlendSynthesizer(llm, prompt_helper=helper)
    return RetrieverQueryEngine(retriever, response_synthesizer=synthesizer).query


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
    "the same with `BlendSynthesizer`": whole_chunks,
}
AGENTS: dict[str, Callable] = {
    "agent with a `RetrieverTool`": agent_of(retriever_tool),
    "agent with a `QueryEngineTool`": agent_of(query_tool),
    "agent with a tool that returns JSON": agent_of(json_tool),
}


def share(engine, ask, questions=QUESTIONS):
    """Loaded tokens of all retrieved, over some questions; and why not all of them."""
    counts, notes = [], {}
    for question in questions:
        with watched(engine) as watch:
            ask(question)
        counts.append(watch.counted())
        notes |= dict.fromkeys(watch.notes)
    loaded, retrieved = (sum(n) for n in zip(*counts, strict=True))
    return loaded / retrieved, "; ".join(notes) if loaded < retrieved else ""


@contextmanager
def demo_engine() -> Iterator[BlendEngine]:
    """The embedded model over its corpus."""
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine("demo", store, chunk_tokens=CHUNK_TOKENS, embedder="minilm-offline") as engine,
    ):
        engine.ingest([demo_corpus_path()])
        yield engine


@contextmanager
def tooled_engine() -> Iterator[BlendEngine]:
    """A model that calls a tool and then answers: the embedded one has no place for tools."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import scripted

    def script(prompt):
        asked = prompt.rpartition("<|start|>user\n")[2].partition("<|end|>")[0]
        if "<tools>" not in prompt or "<tool_response>" in asked:
            return "So."
        return scripted.call("search", input=asked)

    with (
        tempfile.TemporaryDirectory() as store,
        scripted.engine(script, store, chunk_tokens=CHUNK_TOKENS) as engine,
    ):
        engine.ingest([demo_corpus_path()])
        yield engine


def rows() -> list[tuple[str, float, str]]:
    """Path, share, and why it is not all."""
    with demo_engine() as engine:
        llm = BlendLLM(engine=engine, max_tokens=8)
        retriever = BlendRetriever(engine=engine, similarity_top_k=4)
        found = [(name, *share(engine, make(llm, retriever))) for name, make in PATHS.items()]
        index = VectorStoreIndex.from_vector_store(
            BlendVectorStore(engine=engine), embed_model=BlendEmbedding(engine=engine)
        )
        own = index.as_query_engine(llm=llm, similarity_top_k=4).query
        found.append(("`BlendVectorStore` in a `VectorStoreIndex`, compact", *share(engine, own)))
    with tooled_engine() as engine:
        llm = BlendLLM(engine=engine)
        retriever = BlendRetriever(engine=engine, similarity_top_k=4)
        found += [(name, *share(engine, make(llm, retriever))) for name, make in AGENTS.items()]
    return found


if __name__ == "__main__":
    for path, reused, note in rows():
        print(f"{reused:7.1%}  {path}  {note}")
