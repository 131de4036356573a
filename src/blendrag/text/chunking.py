"""Split document text into chunks of at most ``chunk_tokens`` tokens, each an exact substring.

Cuts follow paragraphs, then sentences, then words (``semantic-text-splitter``). The caller passes a *text*
tokenizer, one for which control tokens are ordinary text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blendrag.errors import InvalidInputError, check_unicode
from blendrag.wording import quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_CHUNK_TOKENS = 64
MAX_CHUNK_TOKENS = 4096

#: The splitter takes quadratic time on text without word boundaries (0.23 of semantic-text-splitter:
#: 4 s for 80,000 CJK characters), so it sees windows of about this many chunks. All but a window's last
#: chunk are kept, and the next window starts at that last one.
WINDOW_CHUNKS = 8
#: Largest number of characters of a chunk per token it may have. Bounds the window where a tokenizer makes
#: one token of any run of characters.
MAX_CHARS_PER_TOKEN = 64
#: First guess of characters per token, replaced by what the text shows.
TYPICAL_CHARS_PER_TOKEN = 4

#: Start, end and number of tokens of a chunk within a text.
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Chunk:
    """``document.text[start:end]``, without white space at either end.

    Offsets count characters (code points). ``tokens`` is counted without special tokens.
    """

    text: str
    start: int
    end: int
    tokens: int
    chunk_id: str


def canonical(text: str) -> str:
    """The form of a chunk's text that is stored, hashed and searched for in prompts."""
    return text.strip()


def chunk_id_of(text: str) -> str:
    """SHA-256 hex of the canonical text: equal texts are one chunk, wherever they occur."""
    return hashlib.sha256(canonical(text).encode("utf-8")).hexdigest()


#: How the ids of passages begin that were learned from prompts.
_LEARNED_ID = "learned:"


def learned_id(scope: str, text: str) -> str:
    """Id of a passage that was learned from the prompts of ``scope``. Scopes share no passage, and a passage
    is no chunk of a document with the same text."""
    return f"{_LEARNED_ID}{scope}:{chunk_id_of(text)}"


def scope_of(chunk_id: str) -> str | None:
    """Where a passage was learned; ``None`` for a chunk of a document."""
    if not chunk_id.startswith(_LEARNED_ID):
        return None
    return chunk_id.removeprefix(_LEARNED_ID).partition(":")[0]


class Chunker:
    """Splits texts for one tokenizer and one limit."""

    def __init__(self, tokenizer: Tokenizer, chunk_tokens: int) -> None:
        from semantic_text_splitter import TextSplitter

        is_number = isinstance(chunk_tokens, int)
        if not is_number or not MIN_CHUNK_TOKENS <= chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidInputError(
                f"chunk_tokens is {quoted(chunk_tokens)}, expected a whole number, {MIN_CHUNK_TOKENS} to "
                f"{MAX_CHUNK_TOKENS}; 512 suits most corpora"
            )
        self.chunk_tokens = chunk_tokens
        self._tokenizer = uncapped(tokenizer)
        self._splitter = TextSplitter.from_huggingface_tokenizer(self._tokenizer, chunk_tokens)

    def count(self, text: str) -> int:
        """Tokens of ``text`` without special tokens."""
        check_unicode(text, "the text")
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def split(self, text: str) -> list[Chunk]:
        """Chunks of ``text`` in order, without the white space between them, in linear time.

        Raises :class:`InvalidInputError` for values other than valid Unicode strings.
        """
        check_unicode(text, "the text")
        return [
            Chunk(text[start:end], start, end, tokens, chunk_id_of(text[start:end]))
            for start, end, tokens in self._spans(text)
        ]

    def _spans(self, text: str) -> Iterator[Span]:
        """Spans of the whole text, window by window."""
        largest = self.chunk_tokens * MAX_CHARS_PER_TOKEN
        window = self.chunk_tokens * TYPICAL_CHARS_PER_TOKEN * WINDOW_CHUNKS
        start = 0
        while start < len(text):
            # A window starts at text, never inside white space.
            start, _ = _stripped(text, start, min(start + largest, len(text)))
            end = min(start + window, len(text))
            spans = self._window_spans(text, start, end)
            # At the end of the text, all chunks count.
            if end == len(text):
                yield from spans
                return
            # One chunk or none: the window was too small to tell, unless it is the largest.
            if len(spans) < 2 and window < largest:
                window = min(2 * window, largest)
                continue
            # The last chunk ends where the window happens to end: cut it again.
            keep = spans[:-1] or spans
            yield from keep
            start = spans[-1][0] if len(spans) > 1 else end
            chars = (keep[-1][1] - keep[0][0]) // len(keep) if keep else largest
            window = max(self.chunk_tokens, min(WINDOW_CHUNKS * chars, largest))

    def _window_spans(self, text: str, start: int, end: int) -> list[Span]:
        """Chunks of ``text[start:end]``, each within the limit."""
        return [
            span
            for offset, piece in self._splitter.chunk_indices(text[start:end])
            for span in self._within_limit(text, start + offset, start + offset + len(piece))
        ]

    def _within_limit(self, text: str, start: int, end: int) -> list[Span]:
        """The splitter's piece as a span, stripped as Python strips; cut near the middle if it is too long.

        The splitter works on a copy without ``encode_special_tokens``, so it counts a control token as one
        token, and stripping may add tokens.
        """
        start, end = _stripped(text, start, end)
        tokens = self.count(text[start:end])
        if tokens <= self.chunk_tokens:
            return [(start, end, tokens)] if start < end else []
        middle = (start + end) // 2
        space = text.rfind(" ", start, middle)
        middle = middle if space < 0 else space
        return self._within_limit(text, start, middle) + self._within_limit(text, middle, end)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    body = text[start:end].lstrip()
    start = end - len(body)
    return start, start + len(body.rstrip())


def uncapped(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or a copy without truncation and padding, which would miscount."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    copy.no_truncation()
    copy.no_padding()
    return copy
