"""Questions over the corpus: retrieved chunks, a prompt over them, and room for the answer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from blendrag.config import SearchMode
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.filters import FilterLike, nothing_found
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.lazy_model import LazyModel
from blendrag.engine.model_corpus import ModelCorpus
from blendrag.engine.prompts import Prompts
from blendrag.engine.rendering import NEXT_QUESTION, build_rag_prompt
from blendrag.engine.request import Options, RagPrompt, Request
from blendrag.engine.request_spans import retrieval
from blendrag.errors import InvalidInputError

#: Room that a conversation leaves for an answer without a limit, as a share of the context.
ANSWER_SHARE = 0.25


class Asking:
    """Makes prompts of the questions of one engine. Thread-safe."""

    def __init__(self, model: LazyModel, corpus: ModelCorpus, prompts: Prompts) -> None:
        self._model, self._corpus, self._prompts = model, corpus, prompts

    def prompt(
        self,
        question: str,
        top_k: int | None,
        history: Sequence[tuple[str, str]],
        options: Options,
        filter: FilterLike | None = None,
    ) -> tuple[RagPrompt, Options]:
        """The prompt of ``question`` over what is retrieved, and options that end its answer.

        Raises :class:`InvalidOptionError` for a filter that no document passes.
        """
        check_history(history)
        earlier = history[-1][0] if history else ""
        began = time.perf_counter()
        with self._corpus.one_look():
            self.open()
            opened = time.perf_counter()
            chunks = self.retrieve(question, top_k, earlier, filter=filter)
        if filter is not None and not chunks:
            raise nothing_found(filter)
        retrieval_s = time.perf_counter() - opened
        prompt = self.over(question, chunks, history, options)
        if not self._prompts.uses_template(options):  # where no template ends the answer
            options = replace(options, stop=(*options.stop, NEXT_QUESTION))
        return replace(prompt, retrieval_s=retrieval_s, opening_s=opened - began), options

    def open(self) -> None:
        """See :meth:`BlendEngine.open_retrieval`."""
        _ = self._corpus.retriever().embedder.dim
        self.open_reranker()

    def open_reranker(self) -> None:
        """Load the reranker, if there is one. Raises :class:`ModelLoadError`, :class:`InvalidInputError`."""
        if (reranker := self._corpus.reranker) is not None:
            reranker.open()

    def retrieve(
        self,
        question: str,
        top_k: int | None,
        earlier: str = "",
        check: Check = proceed,
        search: SearchMode | None = None,
        filter: FilterLike | None = None,
    ) -> list[RetrievedChunk]:
        """See :meth:`BlendEngine.retrieve`."""
        k = self._corpus.settings.top_k if top_k is None else top_k
        with retrieval(self._corpus.root, k):
            retriever = self._corpus.retriever()
            return retriever.retrieve(question, k, check, earlier, search=search, filter=filter)

    def over(
        self,
        question: str,
        chunks: Sequence[RetrievedChunk],
        history: Sequence[tuple[str, str]],
        options: Options,
    ) -> RagPrompt:
        """The prompt of a question over retrieved chunks, after earlier questions and answers."""
        tokens, texts = self._model.tokens, [chunk.text for chunk in chunks]
        names = [chunk.file_name for chunk in chunks] if tokens.names_sources else None
        template = options.prompt_template or self._corpus.settings.prompt_template
        if not self._prompts.uses_template(options):
            prompt = build_rag_prompt(question, texts, names, history, template)
            return replace(prompt, retrieved=tuple(chunks))
        turns = ((("user", asked), ("assistant", answer)) for asked, answer in history)
        messages = tuple({"role": role, "content": text} for turn in turns for role, text in turn)
        prompt = build_rag_prompt(question, texts, names, template=template)
        return replace(prompt, history=messages, retrieved=tuple(chunks))

    def without_oldest(
        self, prompt: RagPrompt, question: str, history: Sequence[tuple[str, str]], options: Options
    ) -> Callable[[int], RagPrompt]:
        """Makes ``prompt`` without so many of the oldest questions and answers."""

        def without(left_out: int) -> RagPrompt:
            over = self.over(question, prompt.retrieved, history[left_out:], options)
            return replace(over, retrieval_s=prompt.retrieval_s, opening_s=prompt.opening_s)

        return without

    def trimmed(
        self, prompts: Callable[[int], RagPrompt], most: int, options: Options
    ) -> tuple[Request, int]:
        """The request for the first of ``prompts(0)`` to ``prompts(most)``, each shorter than the one before,
        that leaves its answer room, and its number; the last if none does."""
        asked_at = time.perf_counter()

        def request(left_out: int) -> Request:
            return self._prompts.request(prompts(left_out), options, asked_at)

        whole, numbers = request(0), range(most + 1)
        if not most or not self._is_full(whole):
            return whole, 0
        fits = bisect_left(numbers, True, lo=1, key=lambda n: not self._is_full(request(n)))
        return request(min(fits, most)), min(fits, most)

    def _is_full(self, request: Request) -> bool:
        """Whether the answer has room neither for what was asked for nor for a share of the context."""
        context = self._model.context_tokens
        longest = min(request.max_new_tokens, context)
        return len(request.prompt.ids) > context - min(longest, round(ANSWER_SHARE * context))


def check_history(history: Sequence[tuple[str, str]]) -> None:
    """Raise :class:`InvalidInputError` for anything else than pairs of texts."""
    for at, turn in enumerate(history):
        pair = isinstance(turn, Sequence) and not isinstance(turn, str) and len(turn) == 2
        if not pair or not all(isinstance(text, str) for text in turn):
            types = ", ".join(type(x).__name__ for x in turn) if pair else type(turn).__name__
            raise InvalidInputError(
                f"history[{at}] is {types}, expected a pair of texts: (question, answer.text)"
            )
