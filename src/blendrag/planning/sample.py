"""What a calibration asks: questions over chunks of the user's own corpus.

Given questions are taken as they are, with the chunks retrieved for them. Where there are none, a
chunk's first sentence stands in for a question. Its neighbours of the same document come along: what
they say about each other is what blending can lose, and chunks drawn at random would hardly refer to
each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blendrag.corpus.corpus import Corpus
from blendrag.errors import InvalidInputError

#: Chunks of a document taken together: one and those before it, to which it may refer back.
RUN = 3
#: Longest stand-in for a question.
QUESTION_CHARS = 200
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)


@dataclass(frozen=True)
class Asked:
    """A question and the texts of the chunks in front of it, in the prompt's order."""

    question: str
    chunks: tuple[str, ...]


def sample_corpus(corpus: Corpus, prompts: int, top_k: int, seed: int) -> Iterator[Asked]:
    """``prompts`` random sets of at most ``top_k`` chunks; the same for the same corpus and seed."""
    sources = corpus.sources()
    if not sources:
        raise InvalidInputError(
            "the corpus holds no document to calibrate on; ingest first (blendrag ingest PATH…)"
        )
    rng = random.Random(f"calibrate/{seed}")
    order = rng.sample(sources, len(sources))
    for number in range(prompts):
        first = order[number % len(order)]
        runs = [_run(corpus, first, top_k, rng)]
        question = first_sentence(runs[0][-1])
        for source in rng.sample(sources, min(len(sources), top_k)):
            left = top_k - sum(map(len, runs))
            if left > 0 and source != first:
                runs.append(_run(corpus, source, left, rng))
        rng.shuffle(runs)
        yield Asked(question, tuple(text for run in runs for text in run))


def sample_questions(questions: Sequence[str], prompts: int, seed: int) -> list[str]:
    """At most ``prompts`` of ``questions``, drawn at random."""
    asked = [question for question in questions if question.strip()]
    if not asked:
        raise InvalidInputError("there is no question to calibrate on; expected one a line")
    return random.Random(f"calibrate/{seed}").sample(asked, min(prompts, len(asked)))


def first_sentence(text: str) -> str:
    """Of ``text``, at most :data:`QUESTION_CHARS` characters."""
    found = _SENTENCE.match(text.strip())
    sentence = " ".join((found[0] if found else text).split())
    return sentence[:QUESTION_CHARS]


def _run(corpus: Corpus, source: str, at_most: int, rng: random.Random) -> list[str]:
    """A random chunk of a document, behind those before it."""
    chunks = corpus.chunks_of(source)
    last = rng.randrange(len(chunks))
    return [chunk.text for chunk in chunks[: last + 1][-min(RUN, at_most) :]]
