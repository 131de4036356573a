"""Prompts to distil from: several questions over the same chunks, cut into tokens as a request's are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blendrag.engine.rendering import build_rag_prompt, render
from blendrag.engine.request import Options
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunk, canonical, chunk_id_of
from blendrag.text.known_chunks import recognise
from blendrag.text.prompt import Segment, SegmentedPrompt, segment_prompt


@dataclass(frozen=True)
class TrainingPassage:
    """The text of a chunk, and the name of its document, which prompts may cite."""

    text: str
    name: str = ""
    source: str = ""

    @property
    def chunk(self) -> Chunk:
        """What an ingest stores of it."""
        text = canonical(self.text)
        return Chunk(text, 0, len(text), 0, chunk_id_of(text))


@dataclass(frozen=True)
class ChunkPrompt:
    """Questions over the same chunks in the same order. Positions are those of the prompt."""

    head: tuple[int, ...]
    """Ids before the first chunk."""
    chunks: tuple[Segment, ...]
    contexts: tuple[tuple[int, ...], ...]
    """Ids of the similar chunks that each chunk is encoded after, behind the prefix; none: alone."""
    between: tuple[tuple[int, int], ...]
    """Position and id of each token between two chunks."""
    tails: tuple[tuple[int, ...], ...]
    """What follows the last chunk, for each question."""
    questions: tuple[str, ...]
    task: str = ""

    @property
    def end(self) -> int:
        """The position that every tail begins at."""
        return self.chunks[-1].end

    @property
    def shared_ids(self) -> list[int]:
        """Ids up to the tails, in order."""
        at = dict(self.between)
        at |= enumerate(self.head)
        for chunk in self.chunks:
            at |= enumerate(chunk.ids, chunk.position)
        return [at[position] for position in range(self.end)]


def chunk_prompt(
    tokens: Tokens,
    passages: Sequence[TrainingPassage],
    questions: Sequence[str],
    task: str = "",
    template: str | None = None,
) -> ChunkPrompt | None:
    """Prompts for these questions over chunks that are encoded alone, in the wording of ``ask`` or by a
    ``template``; ``None`` if they hold no chunk that could be stored."""
    known = {chunk_id_of(canonical(each.text)): each for each in passages}
    ids = {name: tuple(tokens.encode_text(canonical(each.text))) for name, each in known.items()}
    cut = [_segments(tokens, passages, known, ids, asked, template) for asked in questions]
    first = cut[0].chunks
    if not first:
        return None
    end, shared = first[-1].end, cut[0].ids[: first[-1].end]
    inside = {at for chunk in first for at in range(chunk.position, chunk.end)}
    begin = first[0].position
    between = [(at, shared[at]) for at in range(begin, end) if at not in inside]
    kept = [(n, each.ids[end:]) for n, each in enumerate(cut) if each.ids[:end] == shared]
    tails, asked = tuple(tail for _, tail in kept), tuple(questions[n] for n, _ in kept)
    alone = ((),) * len(first)
    return ChunkPrompt(shared[:begin], first, alone, tuple(between), tails, asked, task)


def _segments(
    tokens: Tokens,
    passages: Sequence[TrainingPassage],
    known: Mapping[str, TrainingPassage],
    chunk_ids: Mapping[str, tuple[int, ...]],
    question: str,
    template: str | None,
) -> SegmentedPrompt:
    texts = [passage.text for passage in passages]
    named = tokens.names_sources and all(passage.name for passage in passages)
    names = [passage.name for passage in passages] if named else None
    asked = build_rag_prompt(question, texts, names, template=template)
    rendered = render(asked, tokens, Options())
    found = recognise(
        rendered,
        tokens.control_spans(rendered.text),
        None,
        lambda matches: {m.chunk_id: known[m.chunk_id] for m in matches if m.chunk_id in known},
    )
    return segment_prompt(rendered.text, found.chunks, tokens, chunk_ids.__getitem__, found.plain)
