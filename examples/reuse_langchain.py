"""How much retrieved KV stock LangChain chains reuse. Runs offline; see reuse_table.py."""

from collections.abc import Callable

from langchain.agents import create_agent
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableConfig, RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
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

from langchain_blendrag import BlendRetriever, BlendVectorStore, ChatBlend

CHUNK_TOKENS = 64
TOOLED_CHUNK_TOKENS = 128

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this.\n\n{context}"), ("human", "{input}")]
)
HISTORY = ChatPromptTemplate.from_messages(
    [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Make it one question.")]
)


class Watch(BaseCallbackHandler):
    """Counts what callbacks report."""

    def __init__(self, engine):
        self.counts = Counts(engine)

    def on_retriever_end(self, documents, **kwargs):
        for document in documents:
            self.counts.was_retrieved(document.page_content)

    def on_llm_end(self, response, **kwargs):
        metrics = response.generations[0][0].generation_info["blendrag"]
        self.counts.was_answered(metrics["chunks"], metrics["notes"])


def join(documents):
    return "\n\n".join(document.page_content for document in documents)


def stuff(llm, retriever):
    chain = create_stuff_documents_chain(llm, PROMPT)
    return lambda q, config: chain.invoke(
        {"input": q, "context": retriever.invoke(q, config)}, config
    )


def lcel(llm, retriever):
    sources = {"context": retriever | join, "input": RunnablePassthrough()}
    return (sources | PROMPT | llm | StrOutputParser()).invoke


def retrieval_chain(llm, retriever):
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
    return lambda q, config: chain.invoke({"input": q}, config)


def document_prompt(llm, retriever):
    around = PromptTemplate.from_template("Source: {source}\nTitle: {title}\n{page_content}")
    documents = create_stuff_documents_chain(llm, PROMPT, document_prompt=around)
    chain = create_retrieval_chain(retriever, documents)
    return lambda q, config: chain.invoke({"input": q}, config)


def history_aware(llm, retriever):
    aware = create_history_aware_retriever(llm, retriever, HISTORY)
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(llm, PROMPT))
    history = [HumanMessage("Good morning.")]
    return lambda q, config: chain.invoke({"input": q, "chat_history": history}, config)


def conversational(llm, retriever):
    chain = ConversationalRetrievalChain.from_llm(llm, retriever)
    return lambda q, config: chain.invoke({"question": q, "chat_history": []}, config)


def legacy(chain_type):
    def made(llm, retriever):
        chain = RetrievalQA.from_chain_type(llm, chain_type=chain_type, retriever=retriever)
        return lambda q, config: chain.invoke({"query": q}, config)

    return made


PATHS: dict[str, Callable] = {
    "stuff (`create_stuff_documents_chain`)": stuff,
    "LCEL": lcel,
    "`create_retrieval_chain`": retrieval_chain,
    "`document_prompt` with metadata": document_prompt,
    "`create_history_aware_retriever`": history_aware,
    "`ConversationalRetrievalChain`": conversational,
    "`RetrievalQA`, stuff": legacy("stuff"),
    "`RetrievalQA`, map_reduce": legacy("map_reduce"),
    "`RetrievalQA`, refine": legacy("refine"),
}


def share(engine, ask, questions=QUESTIONS):
    """The share of retrieved tokens that was loaded, and the reason if it is not all."""
    watches = [Watch(engine) for _ in questions]
    for question, watch in zip(questions, watches, strict=True):
        ask(question, {"callbacks": [watch]})
    return share_of([watch.counts for watch in watches])


def searches(prompt):
    """A model that calls a tool and then answers."""
    asked = question_in(prompt)
    if "<tool_response>" in asked:
        return "So."
    return scripted_models().call("search", query=asked)


def agent(llm, retriever):
    search = create_retriever_tool(retriever, "search", "Searches the documents.")
    graph = create_agent(llm, [search])
    return lambda q, config: graph.invoke({"messages": [HumanMessage(q)]}, config)


def agent_of_json(llm, retriever):
    @tool
    def search(query: str, config: RunnableConfig) -> list[dict]:
        """Searches the documents."""
        found = retriever.invoke(query, config)
        return [{"title": d.metadata["title"], "text": f"“{d.page_content}”\n"} for d in found]

    graph = create_agent(llm, [search])
    return lambda q, config: graph.invoke({"messages": [HumanMessage(q)]}, config)


def rows_of_defaults() -> list[tuple[str, float, str]]:
    """With the default sizes of LangChain's splitter and of blendrag."""
    splitter = RecursiveCharacterTextSplitter()
    pieces = splitter.create_documents([page.read_text(encoding="utf-8") for page in PAGES])
    two = {"search_kwargs": {"k": 2}}  # four do not fit the embedded model's context
    with demo_engine(documents=()) as engine:
        store = BlendVectorStore(engine=engine)
        store.add_documents(pieces)
        ask = lcel(ChatBlend(engine=engine, max_new_tokens=8), store.as_retriever(**two))
        name = "`RecursiveCharacterTextSplitter()`, `BlendVectorStore`, LCEL"
        found = [(name, *share(engine, ask, PAGE_QUESTIONS))]
    with demo_engine(documents=PAGES) as engine:
        other = InMemoryVectorStore.from_documents(pieces, DeterministicFakeEmbedding(size=32))
        ask = lcel(ChatBlend(engine=engine, max_new_tokens=8), other.as_retriever(**two))
        name = "the same pieces of documents that were ingested"
        return [*found, (name, *share(engine, ask, PAGE_QUESTIONS))]


def rows() -> list[tuple[str, float, str]]:
    """Path, share of tokens reused, and the reason if it is not all."""
    with demo_engine(CHUNK_TOKENS) as engine:
        llm, retriever = (
            ChatBlend(engine=engine, max_new_tokens=8),
            BlendRetriever(engine=engine, k=4),
        )
        found = [(name, *share(engine, make(llm, retriever))) for name, make in PATHS.items()]
        own = BlendVectorStore(engine=engine).as_retriever(search_kwargs={"k": 4})
        found.append(("`BlendVectorStore.as_retriever`, LCEL", *share(engine, lcel(llm, own))))
    with tooled_engine(searches, TOOLED_CHUNK_TOKENS) as engine:
        llm, retriever = ChatBlend(engine=engine), BlendRetriever(engine=engine, k=4)
        found.append(("agent with a retriever tool", *share(engine, agent(llm, retriever))))
        name = "agent with a tool that returns JSON"
        found.append((name, *share(engine, agent_of_json(llm, retriever))))
    return found + rows_of_defaults()


if __name__ == "__main__":
    raise SystemExit("This is a part of reuse_table.py: python examples/reuse_table.py")
