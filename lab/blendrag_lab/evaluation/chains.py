"""MapReduce and MapRerank, as in CacheBlend's comparison: LangChain's chains over the arena's engine.

The chains are those of ``langchain-classic``, with its prompts; only models that follow instructions can
follow them. Every chunk is read by full prefill in its own prompt. TTFT is the time until the chain's last
answer begins. LangChain is imported only when a chain is asked for.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from typing import Any

from blendrag.engine import BlendEngine, Options
from blendrag.errors import BlendragError, InvalidInputError
from blendrag_lab.evaluation.asking import ObservedAnswer
from blendrag_lab.evaluation.datasets import Case
from blendrag_lab.evaluation.ways import MAP_REDUCE, MAP_RERANK

log = logging.getLogger(__name__)

PACKAGE = "langchain_classic"
#: Length of what MapReduce extracts from a chunk: its prompt asks for "any relevant text verbatim".
PASSAGE_TOKENS = 128
#: Length of the score that MapRerank adds to an answer.
SCORE_TOKENS = 16


def require_chains() -> None:
    """Raises :class:`InvalidInputError` unless LangChain's chains can be imported."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise InvalidInputError(
            f"map-reduce and map-rerank need {PACKAGE}, which is not installed; "
            "pip install langchain-classic"
        )


def ask_chain(engine: BlendEngine, name: str, case: Case, max_new_tokens: int) -> ObservedAnswer:
    """``map-reduce`` or ``map-rerank`` over the case's chunks.

    The answer is empty if the chain cannot use a reply of the model (no score, or too long).
    """
    from langchain_classic.chains.question_answering import load_qa_chain
    from langchain_core.documents import Document

    Model = _model_class()
    documents = [Document(page_content=chunk) for chunk in case.chunks]
    last = Model(engine=engine, tokens=max_new_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LangChain recommends agents instead
        if name == MAP_RERANK:
            scoring = Model(engine=engine, tokens=max_new_tokens + SCORE_TOKENS)
            chain = load_qa_chain(scoring, chain_type="map_rerank")
        else:
            chain = load_qa_chain(
                Model(engine=engine, tokens=max(max_new_tokens, PASSAGE_TOKENS)),
                chain_type="map_reduce",
                reduce_llm=last,
                # Joins all that fits; LangChain's default of 3,000 is less than its prompt with some
                # tokenizers.
                token_max=engine.adapter.context_tokens - max_new_tokens,
            )
        began = time.perf_counter()
        try:
            given = {"input_documents": documents, "question": case.question}
            text = str(chain.invoke(given)["output_text"])
        except BlendragError:
            raise
        except ValueError as exc:  # LangChain's, for replies it cannot parse or join
            log.info("a chain cannot use a reply: %s", exc)
            text = ""
    took_s = time.perf_counter() - began
    engine.drain()
    # MapReduce's answer streams from its first token on; MapRerank's is known when all replies are.
    ttft_s = took_s - last.decode_s if name == MAP_REDUCE else took_s
    return ObservedAnswer(text, (), None, 1.0, 1.0, ttft_s)


def _model_class() -> Any:
    from langchain_core.language_models.llms import LLM

    class EngineModel(LLM):
        """Full prefill by the engine, as LangChain's chains call it."""

        engine: Any
        tokens: int
        decode_s: float = 0.0
        """Time that the last answer took after its first token."""

        @property
        def _llm_type(self) -> str:
            return "blendrag-arena"

        def _call(self, prompt: str, stop: list[str] | None = None, *_: Any, **__: Any) -> str:
            options = Options(mode="full", max_new_tokens=self.tokens, stop=tuple(stop or ()))
            answer = self.engine.generate(prompt, options)
            self.decode_s = answer.metrics.total_s - answer.metrics.ttft_s
            return str(answer.text)

        def get_num_tokens(self, text: str) -> int:
            return len(self.engine.adapter.tokens.encode_text(text))

    return EngineModel
