"""The arena: every way answers every question over the same chunks, in one run.

Owns the order. A context's chunks are encoded once; then its questions come one by one, and each is
asked in every way before the next (*interleaved*), the ways shuffled anew for each, so that a machine
that slows down slows all of them alike and none follows the same other every time. Full prefill
answers a question once, and everything is compared with that. What the journal holds already is not
asked again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from blendrag import __version__
from blendrag.config import KVEncoding
from blendrag.engine import Options
from blendrag.engine.rendering import SEPARATOR, render
from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.asking import FIDELITY_TOKENS, Reply, ask
from blendrag.lab.evaluation.cases import Case, Dataset, by_context
from blendrag.lab.evaluation.chains import ask_chain, require_chains
from blendrag.lab.evaluation.journal import Journal, Outcome
from blendrag.lab.evaluation.library import Library, open_library
from blendrag.lab.evaluation.metrics import (
    agreement,
    exact_match,
    f1,
    first_token_kl,
    require_rouge,
    rouge_l,
    token_kl,
)
from blendrag.lab.evaluation.rows import Row, make_rows
from blendrag.lab.evaluation.source import source_digest
from blendrag.lab.evaluation.ways import CHAINS, FULL, NONE, Way
from blendrag.lab.evaluation.wording import wording_for
from blendrag.model.adapter import ModelAdapter
from blendrag.store.identity import digest_fields

#: Called with questions done and questions in all, before each one and at the end.
Watch = Callable[[int, int], None]

#: Longest answers: names and numbers, a few words, a summary.
NEW_TOKENS = {"accuracy": 16, "f1": 32, "rouge_l": 256}


class Arena:
    """One dataset, one model, and the ways they meet."""

    def __init__(
        self,
        adapter: ModelAdapter,
        dataset: Dataset,
        ways: Sequence[Way],
        seed: int = 1,
        max_new_tokens: int | None = None,
        kv_encoding: KVEncoding = "native",
    ) -> None:
        """``seed`` of the bootstrap and of the ways' order; ``max_new_tokens`` ``None``: what the
        dataset's metric asks for; ``kv_encoding``: how chunks are kept at rest.

        Raises :class:`InvalidInputError` for a prompt that does not fit the model's context and for a
        package that is missing, :class:`UnsupportedModelError` for a model whose KV cannot be reused."""
        if any(way.policy in CHAINS for way in ways):
            require_chains()
        if dataset.metric == "rouge_l":
            require_rouge()
        adapter.require_blendable()
        self.adapter = adapter
        self.dataset = dataset
        self.ways = tuple(ways)
        self.seed = seed
        self.kv_encoding = kv_encoding
        self._wording = wording_for(adapter.tokens.tokenizer, dataset.metric)
        self.max_new_tokens = max_new_tokens or NEW_TOKENS[dataset.metric]
        self._keys = {case.case_id: self._key(case) for case in dataset.cases}
        self._largest_chunk = self._check_lengths()

    # -- the run ----------------------------------------------------------------------------------

    def run(
        self, journal: Journal | None = None, watch: Watch = lambda done, total: None
    ) -> list[Row]:
        """Ask what ``journal`` does not hold yet; rows of all of it."""
        journal = journal if journal is not None else Journal()
        total = len(self.dataset.cases)
        pending = [case for case in self.dataset.cases if self._missing(case, journal)]
        done = total - len(pending)
        watch(done, total)
        if pending:
            head = self._wording.head(self.adapter.tokens)
            with open_library(
                self.adapter, self.ways, head, self._largest_chunk, self.kv_encoding
            ) as library:
                for number, cases in enumerate(by_context(pending)):
                    library.hold(cases[0].chunks)
                    if not number:
                        self._warm_up(library, cases[0], pending, journal)
                    for case in cases:
                        journal.add(self._ask(library, case, self._missing(case, journal)))
                        done += 1
                        watch(done, total)
        return make_rows(self.dataset, self._outcomes(journal), self.seed, self.kv_encoding)

    def _ask(self, library: Library, case: Case, ways: Sequence[Way]) -> list[Outcome]:
        """Outcomes of ``ways``. Full prefill is asked in any case: the others' measure."""
        wanted = list(dict.fromkeys((Way(FULL), *ways)))
        random.Random(f"{self.seed}/{case.case_id}").shuffle(wanted)
        replies = {way: self._reply(library, case, way) for way in wanted}
        full = replies[Way(FULL)]
        followed = {way: self._follow(library, case, way, replies[way], full) for way in ways}
        return [self._judge(case, way, replies[way], full, followed[way]) for way in ways]

    def _reply(self, library: Library, case: Case, way: Way, forced: Sequence[int] = ()) -> Reply:
        """``forced``: the answer's tokens, if they are not to be its own."""
        engine = library.engine(way)
        if way.policy in CHAINS:
            return ask_chain(engine, way.policy, case, self.max_new_tokens)
        chunks = () if way.policy == NONE else case.chunks
        prompt = self._wording.prompt(chunks, case.question)
        options = way.options(len(forced) or self.max_new_tokens)
        return ask(engine, prompt, options, chunks, forced)

    def _follow(
        self, library: Library, case: Case, way: Way, reply: Reply, full: Reply
    ) -> torch.Tensor | None:
        """``[T, V]``: what ``way`` makes of full prefill's answer, token by token (teacher forcing). Where
        its own answer begins alike, that is known already. ``None`` for a chain of several prompts."""
        answer = full.tokens[:FIDELITY_TOKENS]
        if reply.logits is None or reply.tokens[: len(answer)] == answer:
            return reply.logits
        return self._reply(library, case, way, answer).logits

    def _warm_up(
        self, library: Library, case: Case, pending: Sequence[Case], journal: Journal
    ) -> None:
        """The first answer of a way pays for what is set up only once: of every way that any of
        ``pending`` will be asked in."""
        missing = (way for other in pending for way in self._missing(other, journal))
        for way in dict.fromkeys((Way(FULL), *missing)):
            self._reply(library, case, way)

    def _judge(
        self, case: Case, way: Way, reply: Reply, full: Reply, followed: torch.Tensor | None
    ) -> Outcome:
        metric, text = self.dataset.metric, reply.text.strip()
        if metric != "rouge_l":  # what follows the first line is chatter
            text = text.split("\n", 1)[0]
        kl = mean_kl = agrees = None
        if full.logits is not None and followed is not None:
            kl = first_token_kl(full.logits[0], followed[0])
            mean_kl = token_kl(full.logits, followed[: len(full.logits)])
            agrees = agreement(full.tokens, reply.tokens)
        return Outcome(
            case_key=self._keys[case.case_id],
            way_key=way.key,
            answer=text,
            accuracy=exact_match(text, case.answers),
            f1=f1(text, case.answers),
            rouge_l=rouge_l(text, case.answers) if metric == "rouge_l" else None,
            kl=kl,
            agreement=agrees,
            ratio=reply.ratio,
            charged_ratio=reply.charged_ratio,
            ttft_ms=1e3 * reply.ttft_s,
            policy=reply.policy,
            schedule=reply.schedule,
            token_kl=mean_kl,
        )

    # -- what there is ----------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """Names the questions and the model, not the ways."""
        return digest_fields(key.encode() for key in self._keys.values())[:16]

    def _missing(self, case: Case, journal: Journal) -> list[Way]:
        key = self._keys[case.case_id]
        return [way for way in self.ways if journal.get(key, way.key) is None]

    def _outcomes(self, journal: Journal) -> dict[Way, Sequence[Outcome]]:
        found: dict[Way, Sequence[Outcome]] = {}
        for way in self.ways:
            outcomes = [
                journal.get(self._keys[case.case_id], way.key) for case in self.dataset.cases
            ]
            found[way] = [outcome for outcome in outcomes if outcome is not None]
        return found

    def _key(self, case: Case) -> str:
        """Digest of all that decides how a case is answered, but for the way."""
        fields = (
            case.digest, self.dataset.metric,
            self.adapter.identity.encoded(self.kv_encoding).namespace, self._wording.template,
            str(self.max_new_tokens), __version__, source_digest(),
        )  # fmt: skip
        return digest_fields(field.encode() for field in fields)[:32]

    def _check_lengths(self) -> int:
        """Tokens of the largest chunk; every prompt fits, or :class:`InvalidInputError`."""
        largest = 0
        count = self.adapter.tokens.encode_text
        for cases in by_context(self.dataset.cases):
            sizes = [len(count(chunk)) for chunk in cases[0].chunks]
            largest = max(largest, *sizes, 1) if sizes else largest
            between = len(sizes) * len(count(SEPARATOR))
            for case in cases:
                self._check_length(case, sum(sizes) + between)
        return largest

    def _check_length(self, case: Case, chunk_tokens: int) -> None:
        tokens = self.adapter.tokens
        words = render(self._wording.prompt((), case.question), tokens, Options())
        alone = len(tokens.encode_template(words.text))
        limit, new = self.adapter.context_tokens, self.max_new_tokens
        if alone + new > limit:
            raise InvalidInputError(
                f"the question of {case.case_id} takes {alone} tokens, with {new} for the answer "
                f"more than the model's context of {limit}; leave it out"
            )
        if alone + chunk_tokens + new > limit:
            raise InvalidInputError(
                f"the prompt of {case.case_id} takes about {alone + chunk_tokens} tokens, with {new} "
                f"for the answer more than the model's context of {limit}; take fewer --chunks or "
                "smaller --chunk-tokens"
            )
