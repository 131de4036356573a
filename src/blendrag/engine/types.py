"""What goes into a request and what comes out of it, and out of a change to the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blendrag.corpus.documents import Entry
from blendrag.errors import StoreFullError
from blendrag.metrics import RequestMetrics
from blendrag.text.matches import Match

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RagPrompt:
    """One user message of which it is known what is chunk and what is question; nothing is searched."""

    text: str
    chunks: tuple[Match, ...]
    """Ascending, disjoint, in characters of ``text``."""
    question: tuple[int, int]


Prompt = str | Sequence[Message] | RagPrompt


@dataclass(frozen=True)
class Source:
    """A retrieved chunk an answer rests on."""

    chunk_id: str
    source: str
    title: str
    distance: float
    text: str


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer and how likely the model's own distribution made it, in nats.

    ``token`` is the text this token added, empty for the first bytes of a character; ``top`` has the
    most likely tokens at its place, the likeliest first, each as the text it would have added.
    """

    token: str
    id: int
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """An answer with what it cost.

    ``texts`` has one entry per returned sequence; ``text`` is the first. ``finish_reason`` is
    ``stop`` (end token or stop string) or ``length``. ``logprobs``, where asked for, has one entry per
    token of ``text``: their texts joined begin with it, and are it unless a stop string cut a token.
    """

    text: str
    texts: tuple[str, ...]
    finish_reason: str
    metrics: RequestMetrics
    sources: tuple[Source, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class IngestReport:
    """Totals of one ingest run."""

    documents: int
    documents_unchanged: int
    chunks: int
    chunks_computed: int
    chunks_skipped: int
    failed: int
    tokens: int
    tokens_per_s: float
    bytes: int
    seconds: float
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    interrupted: bool = False
    stopped: str = ""
    """Why ingest stopped before the end (store full), empty otherwise."""

    def whole(self) -> IngestReport:
        """This report, if the run reached its end.

        Raises what ended it before: :class:`KeyboardInterrupt` or :class:`StoreFullError`.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        if self.stopped:
            raise StoreFullError(self.stopped)
        return self


@dataclass(frozen=True)
class DryRun:
    """What an ingest would do."""

    documents: int
    chunks: int
    tokens: int
    bytes: int
    seconds: float
    failed: int
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hit:
    """An entry found by search.

    ``distance`` is L2 between unit vectors, in [0, 2]; ``vector`` is the entry's, float32 [dim].
    """

    entry: Entry
    distance: float
    vector: np.ndarray

    @property
    def similarity(self) -> float:
        """Cosine of the angle between the vectors, in [-1, 1]."""
        return 1.0 - self.distance**2 / 2.0


@dataclass(frozen=True)
class Added:
    """What one addition to the library did, in entries and in KV."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    computed: int = 0
    """Chunks whose KV was computed in this call."""
    tokens: int = 0
    """Tokens of those."""
    bytes: int = 0
    seconds: float = 0.0
