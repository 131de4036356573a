"""A stock LlamaIndex query engine with blendrag's LLM and retriever. Runs offline."""

import tempfile

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.query_engine import RetrieverQueryEngine

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, BlendReuseEvent

QUESTION = "Which sport does Anna Bell enjoy?"


class ReusePrinter(BaseEventHandler):
    """Prints what was measured for each answer."""

    def handle(self, event, **kwargs):
        if isinstance(event, BlendReuseEvent):
            print(f"{event.reused_tokens} of {event.prompt_tokens} prompt tokens reused")
            print(f"first token after {event.ttft_s:.2f} s", *event.notes, sep="; ")


with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine,
):
    engine.ingest([demo_corpus_path()])
    llm = BlendLLM(engine=engine, max_new_tokens=16)
    retriever = BlendRetriever(engine=engine, similarity_top_k=6)

    get_dispatcher().add_event_handler(ReusePrinter())
    query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode="compact")
    print(query_engine.query(QUESTION))
