"""What a writer is trained on: passages in groups, questions about them, and prompts drawn from both.

A group is a part of a document, or the passages that came with a question. No group that is trained on has
a passage of a held-out one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from blendrag.engine.neighbours import Neighbours, context_ids
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import MIN_CHUNK_TOKENS, Chunker, canonical, chunk_id_of
from blendrag_lab.distillation.prompts import ChunkPrompt, TrainingPassage, chunk_prompt

#: The smallest corpus that can be trained on: groups to train on and to hold out, and chunks of a prompt.
MIN_GROUPS, MIN_PROMPT_CHUNKS = 6, 2
#: Neighbouring chunks of a document in one group.
GROUP_CHUNKS = 8
#: Share of groups that are held out, and the most prompts made of them.
HELD_OUT_SHARE, MAX_HELD_OUT = 0.1, 32
#: Share of chunks of a prompt from other groups.
DISTRACTORS = 1 / 3
#: Share of prompts whose chunks are half as long.
SHORT_SHARE = 0.2
#: Share of prompts worded as ``ask`` words them; the others are worded as prompts of frameworks are.
OWN_WORDING_SHARE = 0.4
WORDINGS = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, "
    "just say that you don't know, don't try to make up an answer.\n\n{context}\n\n"
    "Question: {question}\nHelpful Answer:",
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\n"
    "Query: {question}\nAnswer: ",
    "{context}\n\nQuestion: {question}\nReply with the shortest possible answer, no sentence. Answer:",
)
#: Draws before a corpus is given up on.
MAX_DRAWS = 50


@dataclass(frozen=True)
class Asked:
    """A question, and the number of the passage that it is about; ``None`` if of its whole group."""

    question: str
    about: int | None = None


@dataclass(frozen=True)
class Group:
    passages: tuple[TrainingPassage, ...]
    asked: tuple[Asked, ...] = ()
    task: str = ""


@dataclass(frozen=True)
class Similar:
    """Finds what chunks are encoded after, as an ingest with ``encode_after`` does."""

    tokens: Tokens
    neighbours: Neighbours
    most: int
    prefix_tokens: int
    limit: int
    """Most tokens of prefix, similar chunks and chunk together."""

    def context(self, passage: TrainingPassage, tokens: int) -> tuple[int, ...]:
        """Ids for a chunk of so many ``tokens`` that is ``passage`` or a part of it."""
        found = self.neighbours.texts(passage.name, passage.chunk)
        others = (self.tokens.encode_text(text) for text in found)
        return context_ids(others, self.most, self.prefix_tokens, tokens, self.limit)


@dataclass(frozen=True)
class Material:
    """Draws prompts. Equal material and an equal random generator give equal prompts."""

    tokens: Tokens
    groups: tuple[Group, ...]
    top_k: int
    questions: int
    """Most questions of a prompt."""
    chunk_tokens: int
    similar: Similar | None = None
    """What chunks are encoded after; ``None``: alone."""

    def draw(self, rng: random.Random, is_short: bool | None = None) -> ChunkPrompt:
        """A prompt of at most ``top_k`` chunks in random order and ``questions`` questions, in one of several
        wordings."""
        asked_of = [n for n, group in enumerate(self.groups) if group.asked]
        for _ in range(MAX_DRAWS):
            number = rng.choice(asked_of)
            group = self.groups[number]
            main = rng.choice(group.asked)
            made = self._around(group, main, number, rng)
            short = rng.random() < SHORT_SHARE if is_short is None else is_short
            whole = {
                (self._cut(passage, rng) if short else passage).text: passage for passage, _ in made
            }
            picked = [replace(passage, text=text) for text, passage in whole.items()]
            also = [question for _, questions in made for question in questions]
            also += [each.question for each in group.asked if each.about is None]
            rng.shuffle(also)
            questions = list(dict.fromkeys([main.question, *also]))[: self.questions]
            is_own = rng.random() < OWN_WORDING_SHARE
            template = None if is_own else rng.choice(WORDINGS)
            found = chunk_prompt(self.tokens, picked, questions, group.task, template)
            if found is not None and found.tails and len(picked) >= MIN_PROMPT_CHUNKS:
                return self._behind_similar(found, whole)
        raise InvalidInputError(
            f"none of {MAX_DRAWS} prompts drawn from {len(self.groups)} documents has chunks that can be "
            "recognised; train on longer documents"
        )

    def _around(
        self, group: Group, main: Asked, number: int, rng: random.Random
    ) -> list[tuple[TrainingPassage, list[str]]]:
        """Passages for a question, in random order, each with the questions about it."""
        own = list(range(len(group.passages)))
        rng.shuffle(own)
        if (about := main.about) is not None:  # it, and its neighbours first
            own.sort(key=lambda n: abs(n - about))
        others = sum(len(g.passages) for n, g in enumerate(self.groups) if n != number)
        wanted = sum(rng.random() < DISTRACTORS for _ in range(self.top_k - 1))
        wanted = min(others, max(wanted, self.top_k - len(own)))
        picked = [(number, n) for n in own[: self.top_k - wanted]]
        while len(picked) < min(self.top_k, len(own) + others) and others:
            other = rng.randrange(len(self.groups))
            place = (other, rng.randrange(len(self.groups[other].passages)))
            if other != number and place not in picked:
                picked.append(place)
        rng.shuffle(picked)
        return [
            (of.passages[n], [asked.question for asked in of.asked if asked.about == n])
            for of, n in ((self.groups[at], n) for at, n in picked)
        ]

    def _behind_similar(
        self, prompt: ChunkPrompt, whole: Mapping[str, TrainingPassage]
    ) -> ChunkPrompt:
        """``prompt`` with what its chunks are encoded after; ``whole``: their passages by text."""
        if self.similar is None:
            return prompt
        passages = {chunk_id_of(canonical(text)): passage for text, passage in whole.items()}
        contexts = [
            self.similar.context(passages[chunk.chunk_id or ""], len(chunk.ids))
            for chunk in prompt.chunks
        ]
        return replace(prompt, contexts=tuple(contexts))

    def _cut(self, passage: TrainingPassage, rng: random.Random) -> TrainingPassage:
        parts = Chunker(self.tokens.text, max(MIN_CHUNK_TOKENS, self.chunk_tokens // 2)).split(
            passage.text
        )
        return replace(passage, text=rng.choice(parts).text) if parts else passage


def split(groups: Sequence[Group], seed: int) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Groups to train on, and held-out ones that share no passage with them.

    Raises :class:`InvalidInputError` for a corpus that is too small.
    """
    groups = [group for group in groups if group.passages]
    if len(groups) < MIN_GROUPS:
        many = "" if len(groups) == 1 else "s"
        raise InvalidInputError(
            f"the material is too small to train a writer on: {len(groups)} group{many} of up to "
            f"{GROUP_CHUNKS} chunks, expected {MIN_GROUPS} or more, some of which are held out; add documents"
        )
    shuffled = list(groups)
    random.Random(seed).shuffle(shuffled)
    count = min(MAX_HELD_OUT, max(2, round(HELD_OUT_SHARE * len(groups))))
    held = shuffled[:count]
    texts = {passage.text for group in held for passage in group.passages}
    rest = []
    for group in shuffled[count:]:
        if not any(passage.text in texts for passage in group.passages):
            rest.append(group)
    if len(rest) < MIN_GROUPS - 2:
        raise InvalidInputError(
            f"of {len(groups)} groups of chunks, {len(rest)} have no text of the {len(held)} held-out ones, "
            f"expected {MIN_GROUPS - 2} or more; add other documents"
        )
    return tuple(rest), tuple(held)


#: Questions about texts, one for each; empty where none was found.
Asks = Callable[[Sequence[str]], list[str]]


def with_questions(groups: Sequence[Group], most: int, ask: Asks, seed: int) -> tuple[Group, ...]:
    """``groups`` with ``most`` questions; ``ask`` makes missing ones about passages, spread evenly."""
    rng = random.Random(seed)
    turns = [
        (turn, number, at)
        for number, group in enumerate(groups)
        for turn, at in enumerate(rng.sample(range(len(group.passages)), len(group.passages)))
    ]
    missing = max(0, most - sum(len(group.asked) for group in groups))
    places = [(number, at) for _, number, at in sorted(turns)[:missing]]
    made = ask([groups[number].passages[at].text for number, at in places])
    added: dict[int, list[Asked]] = {}
    seen: set[str] = set()
    for (number, at), question in zip(places, made, strict=True):
        if question and question.lower() not in seen:
            seen.add(question.lower())
            added.setdefault(number, []).append(Asked(question, at))
    return tuple(
        replace(group, asked=(*group.asked, *added.get(number, ())))
        for number, group in enumerate(groups)
    )


def with_nearest(
    groups: Sequence[Group], questions: Sequence[str], retrieve: Callable[[str], Sequence[str]]
) -> tuple[Group, ...]:
    """``groups`` with ``questions`` of a file, each about the passage that ``retrieve`` finds first.

    Raises :class:`InvalidInputError` if it finds none for any of them.
    """
    place = {
        passage.text: (number, at)
        for number, group in enumerate(groups)
        for at, passage in enumerate(group.passages)
    }
    added: dict[int, list[Asked]] = {}
    for question in dict.fromkeys(questions):
        found = next((place[text] for text in retrieve(question) if text in place), None)
        if found is not None:
            added.setdefault(found[0], []).append(Asked(question, found[1]))
    if questions and not added:
        raise InvalidInputError(
            f"none of {len(questions)} questions finds a passage, expected questions about the documents"
        )
    return tuple(
        Group(group.passages, (*group.asked, *added.get(number, ())), group.task)
        for number, group in enumerate(groups)
    )


def documents_as_groups(documents: Iterable[tuple[str, str, Sequence[str]]]) -> list[Group]:
    """Groups of ``(source, name, texts)``; a text that an earlier document has is left out."""
    seen: set[str] = set()
    groups = []
    for source, name, texts in documents:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        passages = [TrainingPassage(text, name, source) for text in new]
        for at in range(0, len(passages), GROUP_CHUNKS):
            groups.append(Group(tuple(passages[at : at + GROUP_CHUNKS])))
    return groups
