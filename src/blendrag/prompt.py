"""A rendered prompt becomes a :class:`PromptPlan`: fresh and chunk segments with ids and positions.

Owns the cutting. Prompts are cut where chunks *are*, found by content, not where a separator is; each
segment is tokenised on its own, chunk text as plain text. Does not know stores: whether a chunk has
KV is decided later. The mode ``full`` means a stock prefill of exactly ``plan.ids``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

Encode = Callable[[str], Sequence[int]]
#: Of text, and whether the prompt begins with it.
EncodeTemplate = Callable[[str, bool], Sequence[int]]


class ChunkMatch(Protocol):
    """A chunk found at ``prompt[start:end]`` (:class:`blendrag.anchors.Match`)."""

    @property
    def chunk_id(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def complete(self) -> bool: ...


@dataclass(frozen=True)
class Segment:
    """A stretch of the prompt tokenised on its own, beginning at token ``position``."""

    text: str
    ids: tuple[int, ...]
    position: int
    chunk_id: str | None = None
    stored_ids: tuple[int, ...] = ()
    """Ids of the whole chunk; ``ids`` is a prefix of them, shorter where the tail was cut off."""

    @property
    def end(self) -> int:
        return self.position + len(self.ids)

    @property
    def complete(self) -> bool:
        return len(self.ids) == len(self.stored_ids)


@dataclass(frozen=True)
class PromptPlan:
    """Segments in order; together they are the prompt."""

    segments: tuple[Segment, ...]

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for segment in self.segments for i in segment.ids)

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.chunk_id is not None)

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Ids before the first chunk; all of them where there is none."""
        ids: list[int] = []
        for segment in self.segments:
            if segment.chunk_id is not None:
                break
            ids.extend(segment.ids)
        return tuple(ids)


def make_plan(
    rendered: str,
    matches: Sequence[ChunkMatch],
    encode_template: EncodeTemplate,
    encode_chunk: Callable[[str], tuple[int, ...]],
    encode_text: Encode,
    plain: Sequence[tuple[int, int]] = (),
) -> PromptPlan:
    """Cut ``rendered`` at ``matches`` (ascending, disjoint) and tokenise each segment on its own.

    ``encode_chunk(chunk_id)`` gives the ids of the whole chunk, ``encode_text`` those of cut text and of
    the spans in ``plain`` (ascending, outside of matches): computed, but their control tokens are text.
    """
    segments: list[Segment] = []
    position = at = 0
    left = deque(plain)

    def add(
        text: str, ids: Sequence[int], chunk_id: str | None = None, stored: tuple[int, ...] = ()
    ) -> None:
        nonlocal position
        if ids:
            segments.append(Segment(text, tuple(ids), position, chunk_id, stored))
            position += len(ids)

    def add_fresh(start: int, end: int) -> None:
        while left and left[0][0] < end:
            low, high = left.popleft()
            add(rendered[start:low], encode_template(rendered[start:low], start == 0))
            add(rendered[low:high], encode_text(rendered[low:high]))
            start = high
        add(rendered[start:end], encode_template(rendered[start:end], start == 0))

    for match in matches:
        add_fresh(at, match.start)
        stored = encode_chunk(match.chunk_id)
        text = rendered[match.start : match.end]
        if match.complete:
            add(text, stored, match.chunk_id, stored)
        else:
            # The cut may fall inside a token: only the ids both tokenisations share are the chunk's.
            ids = tuple(encode_text(text))
            shared = _common_prefix(ids, stored)
            add(text, ids[:shared], match.chunk_id, stored)
            add("", ids[shared:])
        at = match.end
    add_fresh(at, len(rendered))
    return PromptPlan(tuple(segments))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
