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
from blendrag.evaluation.asking import Reply
from blendrag.evaluation.cases import Case

log = logging.getLogger(__name__)

PACKAGES = ("langchain_classic", "langchain_blendrag")


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
    from langchain_classic.chains.question_answering import load_qa_chain
    from langchain_core.documents import Document

    from langchain_blendrag import BlendLLM

    costs = _costs()
    llm = BlendLLM(engine=engine, mode="full", max_new_tokens=max_new_tokens)
    documents = [Document(page_content=chunk) for chunk in case.chunks]
    given = {"input_documents": documents, "question": case.question}
    # What fits is joined at once; LangChain's own bound of 3,000 is less than its prompt takes up
    # with some tokenizers.
    room_tokens = engine.adapter.context_tokens - max_new_tokens
    bound: dict[str, Any] = {"token_max": room_tokens} if name == "map-reduce" else {}
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of agents, which these are not
        chain = load_qa_chain(llm, chain_type=name.replace("-", "_"), **bound)
        text = _answer(chain, given, costs)
    took = time.perf_counter() - began
    engine.drain()
    # MapReduce's last answer streams from its first token on; MapRerank's is known when all are.
    ttft_s = took - costs.last_decode_s if name == "map-reduce" else took
    return Reply(text, (), None, 1.0, 1.0, ttft_s)


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
