"""Ask a question over a folder of texts with a local model. With blendrag: after.py."""

import os
import sys
from pathlib import Path

from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import ChatHuggingFace, HuggingFaceEmbeddings, HuggingFacePipeline
from langchain_text_splitters import RecursiveCharacterTextSplitter

if len(sys.argv) != 3:
    sys.exit(f"usage: [MODEL=hub-id-or-directory] python {sys.argv[0]} FOLDER QUESTION")

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question from the context.\n\n{context}"), ("human", "{input}")]
)

splitter = RecursiveCharacterTextSplitter(chunk_size=2000, chunk_overlap=0)
files = [Document(p.read_text(), metadata={"source": p.name}) for p in Path(sys.argv[1]).iterdir()]
vectors = FAISS.from_documents(splitter.split_documents(files), HuggingFaceEmbeddings())

llm = ChatHuggingFace(llm=HuggingFacePipeline.from_model_id(MODEL, task="text-generation"))
retriever = vectors.as_retriever(search_kwargs={"k": 6})
chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
print(chain.invoke({"input": sys.argv[2]})["answer"])
