"""An LCEL chain over a vector store that LangChain's own index() keeps in step. Runs offline."""

import tempfile

from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path
from langchain_blendrag import BlendTextSplitter, BlendVectorStore, ChatBlend

QUESTION = "In which town does Albert Lange live?"
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question from the context.\n\n{context}"), ("human", "{question}")]
)


def format_docs(documents):
    return "\n\n".join(document.page_content for document in documents)


with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine,
):
    files = [
        Document(path.read_text(), metadata={"source": path.name})
        for path in sorted(demo_corpus_path().glob("*.txt"))
    ]
    pieces = BlendTextSplitter(engine=engine).split_documents(files)

    # Run it again after files have changed: new texts get KV, removed texts lose it.
    vectors, records = BlendVectorStore(engine=engine), InMemoryRecordManager(namespace="demo")
    records.create_schema()
    how = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    print(index(pieces, records, vectors, **how))

    retriever = vectors.as_retriever(search_kwargs={"k": 6})
    llm = ChatBlend(engine=engine, max_new_tokens=16)
    chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm

    answer = None
    for piece in chain.stream(QUESTION):
        print(piece.content, end="", flush=True)
        answer = piece if answer is None else answer + piece
    print("\n", answer.usage_metadata)  # cache_read: tokens whose KV was loaded
