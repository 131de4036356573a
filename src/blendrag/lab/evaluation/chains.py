"""MapReduce and MapRerank: LangChain's own chains over the same model, as CacheBlend compares with.

Owns how a chain is asked and what it costs: every chunk is read by full prefill in a prompt of its
own. Time to first token is what passes until the chain's last answer begins, all its answers before
it included. The chains are ``langchain-classic``'s with its prompts; only models that follow
instructions can follow them. LangChain is imported here alone, when a chain is asked for.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from typing import Any

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.asking import Reply
from blendrag.lab.evaluation.cases import Case

log = logging.getLogger(__name__)

PACKAGES = ("langchain_classic", "langchain_blendrag")
#: What MapReduce may take over from a chunk: its prompt asks for "any relevant text verbatim", which
#: has no room in the few words of an answer.
PASSAGE_TOKENS = 128
#: What MapRerank says behind an answer: how sure it is.
SCORE_TOKENS = 16


def require_chains() -> None:
    """Raises :class:`InvalidInputError` unless LangChain's chains can be imported."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"map-reduce and map-rerank need {' and '.join(missing)}, which is not installed; "
            "pip install langchain-blendrag langchain-classic"
        )


def ask_chain(engine: BlendEngine, name: str, case: Case, max_new_tokens: int) -> Reply:
    """``map-reduce`` or ``map-rerank`` over the case's chunks.

    Where the chain cannot go on with what the model replies (no score, too long), nothing is answered.
    """
    require_chains()
    from langchain_core.documents import Document

    costs = _costs()
    documents = [Document(page_content=chunk) for chunk in case.chunks]
    given = {"input_documents": documents, "question": case.question}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of agents, which these are not
        chain = _chain(engine, name, max_new_tokens)
        began = time.perf_counter()
        text = _answer(chain, given, costs)
    took = time.perf_counter() - began
    engine.drain()
    # MapReduce's last answer streams from its first token on; MapRerank's is known when all are.
    ttft_s = took - costs.last_decode_s if name == "map-reduce" else took
    return Reply(text, (), None, 1.0, 1.0, ttft_s)


def _chain(engine: BlendEngine, name: str, max_new_tokens: int) -> Any:
    from langchain_classic.chains.question_answering import load_qa_chain

    from langchain_blendrag import BlendLLM

    def llm(tokens: int) -> BlendLLM:
        return BlendLLM(engine=engine, mode="full", max_new_tokens=tokens)

    if name == "map-rerank":
        return load_qa_chain(llm(max_new_tokens + SCORE_TOKENS), chain_type="map_rerank")
    return load_qa_chain(
        llm(max(max_new_tokens, PASSAGE_TOKENS)),
        chain_type="map_reduce",
        reduce_llm=llm(max_new_tokens),
        # What fits is joined at once; LangChain's own bound of 3,000 is less than its prompt takes
        # up with some tokenizers.
        token_max=engine.adapter.context_tokens - max_new_tokens,
    )


def _answer(chain: Any, given: dict[str, Any], costs: Any) -> str:
    try:
        return str(chain.invoke(given, config={"callbacks": [costs]})["output_text"])
    except ValueError as exc:
        if costs.model_failed:
            raise
        log.info("a chain cannot go on: %s", exc)
        return ""


def _costs() -> Any:
    from langchain_core.callbacks import BaseCallbackHandler

    class Costs(BaseCallbackHandler):
        """How long the last answer took behind its first token, and whether one failed."""

        last_decode_s = 0.0
        model_failed = False

        def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
            self.model_failed = True

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            metrics = response.generations[-1][0].generation_info["blendrag"]
            self.last_decode_s = metrics["total_s"] - metrics["ttft_s"]

    return Costs()
