"""A stock LangChain retrieval chain with blendrag's LLM and retriever. Runs offline."""

import tempfile

from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path
from langchain_blendrag import BlendRetriever, ChatBlend

QUESTION = "Which sport does Anna Bell enjoy?"
PROMPT = PromptTemplate.from_template(
    "Use the following pieces of context to answer the question.\n\n"
    "{context}\n\nQuestion: {input}\nHelpful Answer:"
)


class Usage(BaseCallbackHandler):
    """Prints the tokens of each answer: ``cache_read`` tokens of the prompt were loaded, not computed."""

    def on_llm_end(self, response, **kwargs):
        print(response.generations[0][0].message.usage_metadata)


with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine("demo", store, chunk_tokens=64, embedder="minilm-offline") as engine,
):
    engine.ingest([demo_corpus_path()])
    llm, retriever = ChatBlend(engine=engine, max_new_tokens=16), BlendRetriever(engine=engine, k=6)

    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
    print(chain.invoke({"input": QUESTION}, config={"callbacks": [Usage()]})["answer"])
