"""What goes into a request and what comes out of it, and out of a change to the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blendrag.metrics import RequestMetrics
from blendrag.text.matches import Match

if TYPE_CHECKING:
    pass

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
