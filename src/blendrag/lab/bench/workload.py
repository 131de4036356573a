"""What is measured: a prompt of random chunks and a question, and how it is blended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag.store.encodings import ENCODINGS
from blendrag.store.identity import NATIVE_ENCODING
from blendrag.text.prompt import PromptPlan, Segment

#: Behind what the bench's chunks are encoded; the prompt begins with a chunk, so none of them is exact.
PREFIX_IDS = (1,)
#: Headroom of a blended cache, in tokens of the answer.
NEW_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """A prompt of chunks and a question, and how it is blended."""

    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = 0.15
    policy: str = DEFAULT_POLICY
    schedule: str = UNCALIBRATED_SCHEDULE
    rounds: int = 5
    encoding: str = NATIVE_ENCODING


def random_plan(adapter: ModelAdapter, workload: Workload) -> PromptPlan:
    """Chunks of random ids, back to back, and a question of random ids."""
    check(adapter, workload)
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    segments: list[Segment] = []
    position = 0
    lengths: Sequence[int] = [workload.chunk_tokens] * workload.chunks
    for number, length in enumerate([*lengths, workload.question_tokens]):
        ids = tuple(torch.randint(2, vocab, (length,), generator=generator).tolist())
        chunk = f"chunk-{number}" if number < workload.chunks else None
        segments.append(Segment("", ids, position, chunk, ids if chunk else ()))
        position += length
    return PromptPlan(tuple(segments))


def check(adapter: ModelAdapter, workload: Workload) -> None:
    """Raise :class:`InvalidInputError` for a workload that cannot be measured on this model."""
    counts = (workload.chunks, workload.chunk_tokens, workload.question_tokens, workload.rounds)
    if min(counts) < 1:
        raise InvalidInputError(
            "chunks, chunk-tokens, question-tokens and rounds must be 1 or more, not "
            f"{', '.join(map(str, counts))}"
        )
    if workload.encoding not in ENCODINGS:
        raise InvalidInputError(
            f"encoding {workload.encoding!r} is not one of {', '.join(ENCODINGS)}; take one of them"
        )
    total = workload.chunks * workload.chunk_tokens + workload.question_tokens
    if total > adapter.context_tokens:
        raise InvalidInputError(
            f"a prompt of {total} tokens passes the context of {adapter.context_tokens}; "
            "take fewer or shorter chunks"
        )
    if not 0.0 <= workload.ratio <= 1.0:
        raise InvalidInputError(f"ratio {workload.ratio} is outside [0, 1]")


def whole_numbers(text: str, what: str, example: str) -> list[int]:
    """``"1,2,4"`` → numbers; raises :class:`InvalidInputError`, naming ``what`` they are."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InvalidInputError(
            f"{what} {text!r}, expected whole numbers from 1 on, with commas between them; write {example}"
        )
    return [int(part) for part in parts]
