"""Stock clients: LangChain, LlamaIndex and curl."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from server.conftest import ANSWER, QUESTION
from server.live import Live


@pytest.fixture
def text(context: str) -> str:
    return f"{context}\n\nQuestion: {QUESTION}\nAnswer:"


def test_chat_openai_of_langchain(served: Live, text: str) -> None:
    llm = ChatOpenAI(
        model="demo", base_url=served.v1, api_key="none", max_retries=0, stream_usage=True
    )
    whole = llm.invoke([HumanMessage(text)])
    assert ANSWER in whole.content
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 50
    assert whole.response_metadata["finish_reason"] == "stop"
    pieces = list(llm.stream(text))
    assert "".join(piece.content for piece in pieces) == whole.content
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert [each["output_tokens"] for each in usages] == [whole.usage_metadata["output_tokens"]]
    retrieving = llm.bind(extra_body={"retrieve": True})
    assert ANSWER in retrieving.invoke(QUESTION).content


def test_openai_like_of_llama_index(served: Live, text: str) -> None:
    given = {"model": "demo", "api_base": served.v1, "api_key": "none", "max_retries": 0}
    chat = OpenAILike(**given, is_chat_model=True)
    whole = chat.chat([ChatMessage(role="user", content=text)])
    assert ANSWER in whole.message.content
    pieces = list(chat.stream_chat([ChatMessage(role="user", content=text)]))
    assert pieces[-1].message.content == whole.message.content
    plain = OpenAILike(**given)
    prompt = f"<|bos|><|user|>{text}<|end|><|assistant|>"
    assert ANSWER in plain.complete(prompt).text
    assert ANSWER in list(plain.stream_complete(prompt))[-1].text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Live) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--no-buffer", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "retrieve": True})
    asked = [f"{served.v1}/chat/completions", "--json", body]
    assert ANSWER in json.loads(curl(*asked))["choices"][0]["message"]["content"]
    asked[-1] = body[:-1] + ', "stream": true}'
    ping, *chunks, done, _ = curl(*asked).split("\n\n")
    assert (ping, done) == (": ping", "data: [DONE]")
    assert all(json.loads(each.removeprefix("data: ")) for each in chunks)
    assert "blendrag_store_hits_total" in curl(f"{served.url}/metrics")
