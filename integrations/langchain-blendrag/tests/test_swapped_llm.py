"""An application in which only the LLM was replaced reuses its passages from the third request on."""

import numpy as np
import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

import tiny
from langchain_blendrag import BlendLLM, ChatBlend

TEXT = PromptTemplate.from_template(
    "Use the following pieces of context to answer the question at the end.\n\n{context}\n\n"
    "Question: {question}\nHelpful Answer:"
)
QUESTION_FIRST = PromptTemplate.from_template(
    "You are an assistant. Answer from the context.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
CHAT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this.\n\n{context}"), ("human", "{question}")]
)
#: Each asks for one document in particular, so that the pieces come in different orders.
QUESTIONS = [
    f"What did the company of Place{7 * (100 * n + 1)} near the town?" for n in (0, 1, 2, 1)
]


class OwnEmbeddings(Embeddings):
    """Counts words."""

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text):
        return [float(x) for x in tiny.WordEmbedder().embed_query(text) + np.float32(1e-3)]


def page(number):
    """Four paragraphs of two sentences."""
    sentences = [tiny.sentence(100 * number + i) for i in range(8)]
    return "\n\n".join(" ".join(sentences[i : i + 2]) for i in range(0, 8, 2))


@pytest.fixture
def retriever():
    pages = [Document(page(n)) for n in range(3)]
    splitter = RecursiveCharacterTextSplitter(chunk_size=500, chunk_overlap=0)
    store = InMemoryVectorStore.from_documents(splitter.split_documents(pages), OwnEmbeddings())
    return store.as_retriever(search_kwargs={"k": 6})


@pytest.mark.parametrize(
    ("model", "prompt", "learns"),
    [
        (BlendLLM, TEXT, True),
        (BlendLLM, QUESTION_FIRST, True),
        (ChatBlend, CHAT, True),
        (ChatBlend, CHAT, False),
    ],
    ids=["text", "question first", "chat", "learns nothing"],
)
def test_nine_tenths_of_the_context_are_reused_from_the_third_request_on(
    tmp_path, retriever, seen, model, prompt, learns
):
    with tiny.engine(tiny.llama(num_hidden_layers=2), tmp_path / "kv", learn=learns) as engine:
        chain = create_stuff_documents_chain(model(engine=engine), prompt)
        pieces, shares, known = set(), [], []
        for question in QUESTIONS:
            documents = retriever.invoke(question)
            chain.invoke({"context": documents, "question": question}, {"callbacks": [seen]})
            engine.drain()  # the idle time between two questions
            metrics = seen.metrics[-1]
            texts = [document.page_content for document in documents]
            context = sum(len(engine.kv_namespace.model.text_ids(text)) for text in texts)
            found = sum(c["tokens"] for c in metrics["chunks"] if c["outcome"] != "computed")
            shares.append(found / context)
            known.append(set(texts) <= pieces)
            pieces |= set(texts)
    assert known[2:] == [True, True], "every passage of the later requests was sent before"
    assert (min(shares[2:]) >= 0.9) == learns
    assert (max(shares) > 0) == learns
