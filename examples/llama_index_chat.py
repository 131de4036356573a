"""A stock LlamaIndex chat engine over a `VectorStoreIndex`: every turn loads the KV of the retrieved texts.

This engine puts retrieved texts into the system message. The embedded model was not trained to read it and
answers "unknown"; chat models do read it. Documents come through an `IngestionPipeline`, which also updates
their KV in the store when they change. Runs offline.
"""

import tempfile

from llama_index.core import VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import Document
from llama_index.core.storage.docstore import SimpleDocumentStore

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendLLM,
    BlendNodeParser,
    BlendReuseEvent,
    BlendVectorStore,
)

QUESTIONS = ["Which sport does Anna Bell enjoy?", "Where does Anna Bell live?"]


class Reuse(BaseEventHandler):
    """Prints how many tokens of each prompt were loaded, not computed."""

    def handle(self, event, **kwargs):
        if isinstance(event, BlendReuseEvent):
            print(f"{event.reused_tokens} of {event.prompt_tokens} tokens reused")


def documents():
    paths = sorted(demo_corpus_path().iterdir())
    return [Document(text=path.read_text(), doc_id=path.name) for path in paths]


with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine,
):
    vector_store = BlendVectorStore(engine=engine)
    embed_model = BlendEmbedding(engine=engine)
    pipeline = IngestionPipeline(
        transformations=[BlendNodeParser(engine=engine), embed_model],
        vector_store=vector_store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=documents())
    print(len(pipeline.run(documents=documents())), "nodes changed by running it again")

    index = VectorStoreIndex.from_vector_store(vector_store, embed_model=embed_model)
    chat_engine = ContextChatEngine.from_defaults(
        index.as_retriever(similarity_top_k=6), llm=BlendLLM(engine=engine, max_new_tokens=16)
    )
    get_dispatcher().add_event_handler(Reuse())
    for question in QUESTIONS:
        print(chat_engine.chat(question))
