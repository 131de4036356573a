"""``BlendSynthesizer`` and ``BlendPromptHelper`` pack whole chunks in order, as many as fit."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode

from blendrag.engine import BlendEngine
from blendrag.errors import ContextOverflowError, InvalidInputError
from llama_index.llms.blendrag import (
    BlendLLM,
    BlendPromptHelper,
    BlendRetriever,
    BlendSynthesizer,
)

QUESTION = "What does document 3 say about the town of Place32?"
#: Leaves room for the question, two prompts around it, and about two chunks of 64 tokens.
NARROW = {"context_window": 1000, "num_output": 8}


def texts_of(engine: BlendEngine) -> list[str]:
    corpus = engine.corpus
    assert corpus is not None
    return [c.text for source in corpus.sources() for c in corpus.chunks_of(source)]


def test_chunks_are_packed_whole_in_order_and_fill_the_window(
    llm: BlendLLM, engine: BlendEngine
) -> None:
    texts = texts_of(engine)
    plain = PromptTemplate("{context_str}?")
    assert BlendPromptHelper(llm).repack(plain, [*texts, " "]) == ["\n\n".join(texts)]
    assert BlendPromptHelper(llm).truncate(plain, ["long " * 3000]) == ["long " * 3000]
    template = DEFAULT_TEXT_QA_PROMPT_SEL.partial_format(query_str=QUESTION)
    packs = BlendPromptHelper(llm, **NARROW).repack(template, texts, llm=llm)
    assert 1 < len(packs) < len(texts)
    assert "\n\n".join(packs) == "\n\n".join(texts)
    for pack in packs:
        asked = template.format_messages(llm=llm, context_str=pack)
        assert llm.count_tokens(asked) + 8 <= 1000
    first = "\n\n".join([packs[0], packs[1].split("\n\n")[0]])
    fuller = template.format_messages(llm=llm, context_str=first)
    assert llm.count_tokens(fuller) + 8 > 1000 - 250  # with a quarter free for an answer so far


@pytest.mark.parametrize("streaming", [False, True])
def test_every_chunk_is_reused_though_they_do_not_fit_one_prompt(
    llm: BlendLLM, engine: BlendEngine, seen: Any, streaming: bool
) -> None:
    retriever = BlendRetriever(engine=engine, similarity_top_k=12)
    narrow = BlendPromptHelper(llm, **NARROW)
    synthesizer = BlendSynthesizer(llm, prompt_helper=narrow, streaming=streaming)
    response = RetrieverQueryEngine(retriever, response_synthesizer=synthesizer).query(QUESTION)
    assert str(response) is not None
    found = [chunk for call in seen.metrics for chunk in call["chunks"]]
    assert [chunk["chunk_id"] for chunk in found] == [n.node_id for n in response.source_nodes]
    assert {chunk["outcome"] for chunk in found} <= {"blended", "exact"}
    assert len(seen.metrics) > 1


async def test_its_async_answer_is_its_sync_answer(llm: BlendLLM, engine: BlendEngine) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts_of(engine)[:3]]
    synthesizer = BlendSynthesizer(llm)
    assert str(await synthesizer.asynthesize(QUESTION, nodes)) == str(
        synthesizer.synthesize(QUESTION, nodes)
    )
    assert str(synthesizer.synthesize(QUESTION, [])) == "Empty Response"


def test_a_chunk_longer_than_the_window_says_by_how_much(llm: BlendLLM) -> None:
    node = NodeWithScore(node=TextNode(text="Place32 " * 3000))
    with pytest.raises(ContextOverflowError, match=r"\d+ over the model's context of 4096"):
        BlendSynthesizer(llm).synthesize(QUESTION, [node])


def test_another_llm_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="llm is a MockLLM, expected a BlendLLM"):
        BlendSynthesizer(MockLLM())
