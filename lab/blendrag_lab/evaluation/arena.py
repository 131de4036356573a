"""The arena: every way answers every question over the same chunks, in one run.

The chunks of a context are encoded once. Then each question is asked in every way before the next, so that a
slower machine slows all of them alike: full prefill first, whose answer everything is compared with, then the
others in a new random order. Nothing that the journal holds is asked again.

There is an engine for each way of encoding chunks, among them with a writer and without, with a store in a
temporary directory. KV is read from disk (no memory tier), so that no way finds it warmer than another. Only
idealised prefix caching has its KV in memory, from the first question on: that of the first chunk, encoded
after the text before it.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

import blendrag
from blendrag.config import DEFAULT_EMBEDDER, KVEncoding
from blendrag.corpus.embedder import Embedder, absolute_embedder
from blendrag.engine import BlendEngine, IngestReport, Options
from blendrag.engine.rendering import SEPARATOR, render
from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.model.writer import NONE as NO_WRITER
from blendrag.model.writer import Writer
from blendrag.store.identity import ChunkRecipe, chunk_key, digest_fields
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag.text.readers import Document
from blendrag_lab.evaluation.asking import ObservedAnswer, Wording, ask, prompt_of, wording_for
from blendrag_lab.evaluation.datasets import Case, Dataset, by_context
from blendrag_lab.evaluation.rows import ArenaRow, Journal, Outcome, make_rows
from blendrag_lab.evaluation.schema_prompts import add_schemas, schema_prompt
from blendrag_lab.evaluation.scoring import exact_match, f1, rouge_l, token_kl
from blendrag_lab.evaluation.ways import FULL, NONE, PREFIX, Way, with_recipe

#: Called with questions done and questions in all, before each one and at the end.
Watch = Callable[[int, int], None]
#: Called while the chunks of the whole dataset are encoded after similar ones, before the first question.
WatchIngest = Callable[[IngestReport], None]

#: Longest answers: names and numbers, a few words, a summary.
NEW_TOKENS = {"accuracy": 16, "f1": 32, "rouge_l": 256}
PACKAGES = (Path(blendrag.__file__).parent, Path(__file__).parents[1])
#: Rooms whose code does not change the answer to a given question.
OTHER_ROOMS = ("cli/", "demo/", "frameworks/", "server/", "bench/")
#: Memory limit of idealised prefix caching; it holds one chunk.
IDEAL_RAM_BYTES = 16 * 1024**3


class NoEmbedder(Embedder):
    """Zeros: nothing is searched for."""

    @property
    def dim(self) -> int:
        return 8

    def embed(
        self, texts: Sequence[str], titles: Sequence[str] | None = None, **given: object
    ) -> np.ndarray:
        return np.zeros((len(texts), self.dim), np.float32)  # [n, dim]


class Encoding(NamedTuple):
    """How the chunks of a way are encoded."""

    after: bool | str
    """The corpus's prefix (``True``), nothing (``False``), or the text before them in the prompt
    (:data:`PREFIX`)."""
    has_writer: bool = False
    encode_after: int = 0


def _encoding(way: Way) -> Encoding | None:
    """``None`` for ways that load nothing."""
    after = PREFIX if way.policy == PREFIX else way.encode_prefix
    return None if after is None else Encoding(after, bool(way.writer), way.encode_after)


class Engines:
    """Made by :func:`open_engines`; ``engines`` by the encoding of the ways that they answer."""

    def __init__(
        self,
        engines: Mapping[Encoding, BlendEngine],
        corpus: Sequence[str],
        watch: WatchIngest | None = None,
    ) -> None:
        """``corpus``: each chunk of the dataset once; similar ones are found among them."""
        self._engines, self._corpus, self._watch = engines, corpus, watch
        self._held: dict[Encoding, list[str]] = {encoding: [] for encoding in engines}

    def of(self, way: Way) -> BlendEngine:
        encoding = _encoding(way)
        return self._engines[encoding or next(iter(self._engines))]

    def hold(self, chunks: Sequence[str]) -> None:
        """Encode ``chunks`` in place of those before; where chunks are encoded after similar ones, those of
        the whole dataset, once."""
        texts = _distinct(chunks)
        if not texts:
            raise InvalidInputError(
                "the chunk list is empty, expected at least one text; give every record its contexts"
            )
        for encoding, engine in self._engines.items():
            held, wanted = self._held[encoding], texts
            if encoding.encode_after:
                if held:
                    continue
                wanted = list(self._corpus)
            elif held:
                engine.remove(held)
            if encoding.after == PREFIX:
                wanted = texts[:1]
            documents = [Document(f"chunk {i}", text, "") for i, text in enumerate(wanted)]
            watch = self._watch if encoding.encode_after else None
            report = engine.ingest(documents, watch=watch).whole()
            if report.chunks != len(wanted):
                raise InvalidInputError(
                    f"{len(wanted)} chunks of a context were cut into {report.chunks}, expected none "
                    f"over {MAX_CHUNK_TOKENS} tokens; split them"
                )
            self._held[encoding] = [document.source for document in documents]
            if encoding.after == PREFIX:
                _promote(engine, wanted[0])

    def declare(self, chunks: Sequence[str], wording: Wording) -> None:
        """Add schemas whose modules are ``chunks``, in place of those before."""
        for engine in self._engines.values():
            add_schemas(engine, chunks, wording)


def _distinct(chunks: Sequence[str]) -> list[str]:
    return [text for text in dict.fromkeys(chunk.strip() for chunk in chunks) if text]


def _promote(engine: BlendEngine, chunk: str) -> None:
    """Read the chunk's KV once, which brings it to the memory tier."""
    ids, layout = tuple(engine.tokens.encode_text(chunk)), engine.adapter.layout
    namespace = engine.adapter.identity.namespace
    key = chunk_key(namespace, engine.manifest.prefix_ids, ids)
    if reader := engine.store.open(namespace, key, layout, len(ids)):
        with closing(reader):
            shape = layout.layer_shape(0, len(ids))
            reader.read_layer(0, torch.empty(shape, dtype=layout.torch_dtype))
    engine.store.drain()


@contextmanager
def open_engines(
    adapter: ModelAdapter,
    ways: Sequence[Way],
    head: str,
    largest_chunk: int,
    kv_encoding: KVEncoding,
    writer: Path | None,
    corpus: Sequence[str],
    embedder: Embedder,
    watch: WatchIngest | None = None,
) -> Iterator[Engines]:
    """Engines for chunks of at most ``largest_chunk`` tokens; their stores are removed afterwards.

    ``head``: the rendered prompt before its first chunk. Idealised prefix caching keeps native KV.
    ``writer``: for the ways that have one. ``corpus``: each chunk of the dataset once. ``embedder``: finds
    similar ones among them.
    """
    found = dict.fromkeys(encoding for way in ways if (encoding := _encoding(way)) is not None)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendrag-eval-")))
        engines: dict[Encoding, BlendEngine] = {}
        for encoding in found or (Encoding(True),):
            is_ideal = encoding.after == PREFIX
            engine = BlendEngine(
                adapter,
                root / str(len(engines)),
                chunk_tokens=min(max(largest_chunk, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS),
                prefix_text=head if is_ideal else None,
                encode_prefix=encoding.after is not False,
                writer=str(writer) if encoding.has_writer else NO_WRITER,
                encode_after=encoding.encode_after,
                kv_encoding="native" if is_ideal else kv_encoding,
                ram_bytes=IDEAL_RAM_BYTES if is_ideal else 0,
                decode_weights="native",
                learn=False,
            )
            searches = encoding.encode_after > 0
            engine.use_embedder(embedder if searches else NoEmbedder("none"))
            engines[encoding] = stack.enter_context(engine)
        yield Engines(engines, corpus, watch)


class Arena:
    """One dataset, one model, and several ways."""

    def __init__(
        self,
        adapter: ModelAdapter,
        dataset: Dataset,
        ways: Sequence[Way],
        seed: int = 1,
        max_new_tokens: int | None = None,
        kv_encoding: KVEncoding = "native",
        as_schema: bool = False,
        writer: Path | None = None,
        fidelity: bool = False,
        encode_after: int = 0,
        prompt_template: str | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        """``seed`` of the bootstrap and of the order of ways; ``max_new_tokens``: default by the dataset's
        metric; ``kv_encoding`` of stored chunks; ``as_schema``: prompts are those of a schema whose modules
        are the chunks; ``writer``: every way that loads chunks is also asked over chunks that it encodes;
        ``fidelity``: only full prefill answers, the other ways are compared with it and have no score;
        ``encode_after``: the ways that load chunks are also asked over chunks that are encoded after so many
        similar ones of the dataset; ``prompt_template``: prompts are worded as ``ask`` words them with it,
        by default as suits the metric; ``embedder``: finds the similar chunks, by default
        :data:`~blendrag.config.DEFAULT_EMBEDDER`."""
        if as_schema and any(case.history for case in dataset.cases):
            raise InvalidInputError(
                "cases of a chat cannot be asked with --schema; name another --dataset"
            )
        adapter.require_blendable()
        self.adapter = adapter
        self.dataset = dataset
        fingerprint = "" if writer is None else Writer.load(writer).fingerprint
        self._embedder = embedder or Embedder(DEFAULT_EMBEDDER)
        self._corpus = _distinct([chunk for case in dataset.cases for chunk in case.chunks])
        self.ways = with_recipe(ways, ChunkRecipe(fingerprint, encode_after), self._searched())
        self._writer = writer
        self.fidelity = fidelity
        self.seed = seed
        self.kv_encoding = kv_encoding
        self.as_schema = as_schema
        self._wording = (
            Wording.of(prompt_template)
            if prompt_template
            else wording_for(adapter.tokens.tokenizer, dataset.metric)
        )
        self.max_new_tokens = max_new_tokens or NEW_TOKENS[dataset.metric]
        self._keys = {case.case_id: self._key(case) for case in dataset.cases}
        self._largest_chunk = self._check_lengths()

    @property
    def digest(self) -> str:
        """Names the questions and the model, not the ways."""
        return digest_fields(key.encode() for key in self._keys.values())[:16]

    def run(
        self,
        journal: Journal | None = None,
        watch: Watch = lambda done, total: None,
        watch_ingest: WatchIngest | None = None,
    ) -> list[ArenaRow]:
        journal = journal if journal is not None else Journal()
        pending = [case for case in self.dataset.cases if self._missing(case, journal)]
        total = len(self.dataset.cases)
        done = total - len(pending)
        watch(done, total)
        if pending:
            head = self._wording.head(self.adapter.tokens)
            with open_engines(
                *(self.adapter, self.ways, head, self._largest_chunk, self.kv_encoding),
                *(self._writer, self._corpus, self._embedder, watch_ingest),
            ) as engines:
                for cases in by_context(pending):
                    engines.hold(cases[0].chunks)
                    if self.as_schema:
                        engines.declare(cases[0].chunks, self._wording)
                    if cases[0] is pending[0]:
                        self._warm_up(engines, pending, journal)
                    for case in cases:
                        journal.add(self._ask(engines, case, self._missing(case, journal)))
                        done += 1
                        watch(done, total)
        keys = self._keys.values()
        found = {way: [journal[key, way.key] for key in keys] for way in self.ways}
        return make_rows(self.dataset, found, self.seed, self.kv_encoding)

    def _missing(self, case: Case, journal: Journal) -> list[Way]:
        key = self._keys[case.case_id]
        return [way for way in self.ways if (key, way.key) not in journal]

    def _warm_up(self, engines: Engines, pending: Sequence[Case], journal: Journal) -> None:
        """Ask once in every way that is missing, over few chunks: the first answer of a way pays for its
        setup."""
        short = replace(pending[0], chunks=pending[0].chunks[:2])
        missing = (way for case in pending for way in self._missing(case, journal))
        for way in dict.fromkeys((Way(FULL), *missing)):
            self._reply(engines, short, way)

    def _ask(self, engines: Engines, case: Case, ways: Sequence[Way]) -> list[Outcome]:
        """Outcomes of ``ways``. Full prefill is asked in any case, to compare with."""
        full = self._reply(engines, case, Way(FULL))
        replies = {Way(FULL): full}
        others = [way for way in ways if way not in replies]
        random.Random(f"{self.seed}/{case.case_id}").shuffle(others)
        for way in others:
            replies[way] = self._reply(engines, case, way, full.tokens)
        return [self._judge(case, way, replies[way], full) for way in ways]

    def _reply(
        self, engines: Engines, case: Case, way: Way, answer: Sequence[int] = ()
    ) -> ObservedAnswer:
        """``answer``: tokens whose distributions are compared, by default those of the reply."""
        engine = engines.of(way)
        chunks = () if way.policy == NONE else case.chunks
        options = way.options(self.max_new_tokens if self._answers(way) else 1)
        if self.as_schema:
            made = schema_prompt(case, chunks, self._wording, way.policy)
            return ask(engine, made, options, chunks, answer)
        prompt = prompt_of(case, chunks, self._wording, self.adapter.tokens)
        return ask(engine, prompt, options, chunks, answer)

    def _answers(self, way: Way) -> bool:
        return way.policy == FULL or not self.fidelity

    def _judge(self, case: Case, way: Way, reply: ObservedAnswer, full: ObservedAnswer) -> Outcome:
        """All measures of one answer: against the accepted answers, and against full prefill."""
        metric, text = self.dataset.metric, reply.text.strip()
        if metric != "rouge_l":  # short answers end with their first line
            text = text.split("\n", 1)[0]
        answers = self._answers(way)
        kls = token_kl(full.logits, reply.logits)
        preferred = (logits.argmax(-1) for logits in (full.logits, reply.logits))  # [T]
        return Outcome(
            case_key=self._keys[case.case_id],
            way_key=way.key,
            answer=text if answers else "",
            accuracy=exact_match(text, case.answers) if answers else None,
            f1=f1(text, case.answers) if answers else None,
            rouge_l=rouge_l(text, case.answers) if answers and metric == "rouge_l" else None,
            kl=kls[0] if kls else None,
            agreement=float(torch.eq(*preferred).double().mean()),
            ratio=reply.ratio,
            charged_ratio=reply.charged_ratio,
            ttft_ms=1e3 * reply.ttft_s,
            policy=reply.policy,
            schedule=reply.schedule,
            token_kl=fmean(kls) if kls else None,
            model=self.adapter.model_id,
            dataset=self.dataset.name,
            kind=case.kind,
        )

    def _key(self, case: Case) -> str:
        """Digest of all that decides how a case is answered, besides the way."""
        fields = (
            case.digest, self.dataset.metric,
            self.adapter.identity.encoded(self.kv_encoding).namespace, self._wording.template,
            str(self.max_new_tokens), blendrag.__version__, source_digest(), *["schema"] * self.as_schema,
            *["fidelity"] * self.fidelity,
        )  # fmt: skip
        return digest_fields(field.encode() for field in fields)[:32]

    def _searched(self) -> str:
        """Digest of all that decides which chunks a chunk is encoded after, besides their number. Their order
        is part of it, because an ingest searches large corpora in groups."""
        fields = (absolute_embedder(self._embedder.name), *self._corpus)
        return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)[:16]

    def _check_lengths(self) -> int:
        """Tokens of the largest chunk. Raises :class:`InvalidInputError` unless every prompt fits."""
        tokens, new = self.adapter.tokens, self.max_new_tokens
        limit, largest = self.adapter.context_tokens, 1
        for cases in by_context(self.dataset.cases):
            sizes = [len(tokens.encode_text(chunk)) for chunk in cases[0].chunks]
            largest = max(largest, *sizes, 0)
            context = sum(sizes) + len(sizes) * len(tokens.encode_text(SEPARATOR))
            for case in cases:
                words = render(prompt_of(case, (), self._wording, tokens), tokens, Options())
                needed = len(tokens.encode_template(words.text)) + context
                if needed + new > limit:
                    raise InvalidInputError(
                        f"the prompt of {case.case_id} takes about {needed} tokens, with {new} for the "
                        f"answer more than the model's context of {limit}; take fewer --chunks or smaller "
                        "--chunk-tokens, or leave it out"
                    )
        return largest


@lru_cache(maxsize=1)
def source_digest(packages: Sequence[Path] = PACKAGES) -> str:
    """64 hex digits over the packages' modules, so that answers of changed code are not reused."""
    fields: list[bytes] = []
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            if not name.startswith(OTHER_ROOMS):
                fields += [name.encode(), path.read_bytes()]
    return digest_fields(fields)
