"""LlamaIndex's stock `CitationQueryEngine`: it numbers the sources, and their KV is loaded. Runs offline."""

import tempfile

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.query_engine import CitationQueryEngine

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path
from llama_index.llms.blendrag import (
    BlendLLM,
    BlendRetriever,
    BlendReuseEvent,
)

QUESTION = "Which sport does Anna Bell enjoy?"


class Reuse(BaseEventHandler):
    """Prints which share of the prompt was loaded, and why not more."""

    def handle(self, event, **kwargs):
        if isinstance(event, BlendReuseEvent):
            print(f"{event.reused_share:.0%} of the prompt reused", *event.notes)


with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine,
):
    engine.ingest([demo_corpus_path()])
    llm = BlendLLM(engine=engine, max_new_tokens=16)
    retriever = BlendRetriever(engine=engine, similarity_top_k=6)
    get_dispatcher().add_event_handler(Reuse())

    answer = CitationQueryEngine.from_args(None, llm=llm, retriever=retriever).query(QUESTION)
    print(answer)
    for number, found in enumerate(answer.source_nodes, 1):
        print(number, found.node.ref_doc_id.rpartition("/")[2], found.text.split("\n")[1][:60])
