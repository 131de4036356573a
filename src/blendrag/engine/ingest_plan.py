"""What an ingest has to do, counted before it works: documents read ahead, their chunks, which have no KV.

Work is counted in tokens to encode, so that equal work takes about equal time. A text without KV counts once,
however often it occurs, and what is stored counts nothing. Files that were not read yet count as much per
byte as those of their kind that were.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blendrag.errors import InvalidInputError
from blendrag.text.chunking import Chunk
from blendrag.text.readers import Document

#: Characters of documents that are read before their turn. Encoding them takes a quarter of an hour or more.
READ_AHEAD_CHARS = 1 << 23
#: A chunk costs as much as so many tokens more: even a short forward reads all weights.
CHUNK_WORK = 32
#: Embedding a token costs such a share of encoding it, about.
EMBEDDING_WORK = 1 / 16


@dataclass
class FilesRead:
    """Which files a run has read, and which kind of file it is reading."""

    unread: Counter[str] = field(default_factory=Counter)
    """Bytes that are yet to be read, by the suffix of their file."""
    kind: str = ""
    """Suffix of the file whose documents come now; empty for those that were given as documents."""
    read: set[str] = field(default_factory=set)
    """Names of the files that were read to their end."""
    begun: Callable[[str], None] = lambda step: None
    """Called with the step before a file is read."""


@dataclass(frozen=True)
class PlannedDocument:
    """A document, cut into chunks, whose turn is to come."""

    document: Document
    size_bytes: float
    """Its share of its file's bytes."""
    digest: str
    chunks: Sequence[Chunk] = ()
    tokens: Sequence[int] = ()
    """Tokens of each chunk, as the model reads it."""
    missing: Collection[str] = ()
    """Ids of the chunks without KV."""
    work: Mapping[str, float] = field(default_factory=dict)
    """By chunk id: those without KV that no document before it has."""
    embedding: float = 0.0
    """Work of embedding, if nothing is to be encoded. Otherwise it is a small part of the time per token."""
    bad: InvalidInputError | None = None
    """Why it cannot be ingested."""

    @property
    def total(self) -> float:
        return sum(self.work.values()) + self.embedding


class WorkAhead:
    """The documents of a run in order, and how much work is left in them and in what is unread."""

    def __init__(
        self,
        documents: Iterable[tuple[Document, float]],
        plan: Callable[[Document, float], PlannedDocument],
        reading: FilesRead,
        told: Callable[[], None],
    ) -> None:
        """``told`` is called when a document was read."""
        self._documents = iter(documents)
        self._plan, self._reading, self._told = plan, reading, told
        self._held = deque[PlannedDocument]()
        self._held_chars = 0
        self.planned = 0.0
        """Work of the documents that were read."""
        self.chunk_tokens = Counter[int]()
        """How many chunks without KV have so many tokens."""
        self._bytes, self._work = defaultdict[str, float](float), defaultdict[str, float](float)

    def __iter__(self) -> Iterator[PlannedDocument]:
        while True:
            while self._held_chars < READ_AHEAD_CHARS and self._read_one():
                pass
            if not self._held:
                return
            planned = self._held.popleft()
            self._held_chars -= len(planned.document.text)
            yield planned

    def _read_one(self) -> bool:
        found = next(self._documents, None)
        if found is None:
            return False
        planned = self._plan(*found)
        self._held.append(planned)
        self._held_chars += len(planned.document.text)
        self.planned += planned.total
        sizes = {chunk.chunk_id: n for chunk, n in zip(planned.chunks, planned.tokens, strict=True)}
        self.chunk_tokens.update(sizes[chunk_id] for chunk_id in planned.work)
        self._bytes[self._reading.kind] += planned.size_bytes
        self._work[self._reading.kind] += planned.total
        self._told()
        return True

    @property
    def total(self) -> float:
        """Work of all documents, as far as it is known."""
        of_any_kind = self.planned / (sum(self._bytes.values()) or 1.0)
        ahead = 0.0
        for kind, size_bytes in self._reading.unread.items():
            known = self._bytes.get(kind)
            ahead += size_bytes * (self._work[kind] / known if known else of_any_kind)
        return self.planned + ahead
