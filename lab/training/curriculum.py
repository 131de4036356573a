"""What the demo model is shown, stage by stage: drills first, then ever longer documents.

Trained on questions directly, a small model learns the type of the answer and then stays at chance among
the candidates. Repeats, recall and growing documents lead it past that.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from blendrag_lab.synthetic.generator import (
    KINDS,
    Attribute,
    Dealer,
    GeneratedDocument,
    Shape,
    documents,
)
from blendrag_lab.synthetic.questions import ask, draw_keys, draw_kinds, write_context
from blendrag_lab.synthetic.samples import (
    FORMS,
    NATIVE,
    PromptChunk,
    QuestionSegment,
    Sample,
    SampleWriter,
    entries,
)
from lab.training.tokenizer import VOCAB_SIZE

QUESTIONS_PER_CONTEXT = 12
#: A pool of nearly all tokens that are not special.
ALL = VOCAB_SIZE - 8


def repeats(
    rng: random.Random,
    writer: SampleWriter,
    largest: int = ALL,
    lengths: tuple[int, int] = (4, 16),
) -> Sample:
    """Random tokens three times over, the second and third time supervised: induction forms within minutes
    on small pools of tokens and spreads to larger ones. Each sample draws a pool of 64 to `largest`."""
    pool = round(64 * (largest / 64) ** rng.random())
    return _repeated(writer, writer.random_tokens(rng, rng.randint(*lengths), pool))


def _repeated(writer: SampleWriter, once: list[int]) -> Sample:
    # The first token of the repeat cannot be known: the length of the sequence is random.
    return writer.empty([QuestionSegment(once * 3, len(once) + 1)])


def name_repeats(rng: random.Random, writer: SampleWriter) -> Sample:
    """Names and values three times over: induction extends to the tokens that matter."""
    if rng.random() < 0.1:
        return repeats(rng, writer, lengths=(6, 24))
    pairs = _pairs(rng, writer, rng.randint(2, 5), *_attribute(rng))
    return _repeated(writer, [t for pair in pairs for tokens in pair for t in tokens])


def recall(rng: random.Random, writer: SampleWriter) -> Sample:
    """A list of names, each with a value, in no sentence yet; all asked in another order. Zero to eight
    words separate name and value; with none it is the repeat already learned."""
    kind, attribute = _attribute(rng)
    words = writer.encode(" ".join((*attribute.statements, *attribute.questions)))
    said, asked = (rng.choice((0, 0, 1, 2, 4, 8)) for _ in range(2))
    pairs = _pairs(rng, writer, rng.randint(3, 8), kind, attribute)
    stop = writer.encode(".")
    sample = writer.empty()
    for name, value in pairs:
        sample.append([*name, *rng.choices(words, k=rng.randint(0, said)), *value, *stop])
    for name, value in rng.sample(pairs, len(pairs)):
        head = [*name, *rng.choices(words, k=rng.randint(0, asked))]
        sample.questions.append(QuestionSegment([*head, *value], len(head)))
    return sample


def ladder(rng: random.Random, writer: SampleWriter) -> Sample:
    """From the list to sentences and from the bare name to the question, one fact each, so that binding
    over a distance grows out of recall."""
    kind = rng.choice(list(KINDS.values()))
    attribute = rng.choice(kind.attributes)
    shape = Shape((1,), 0, introduction=False, plain=True)
    n = rng.randint(3, 6)
    written = documents(rng, "train", [kind.name] * n, [shape] * n, {kind.name: [attribute.key]})
    said, asked = rng.choice((0, 1, 1, 1, 2, 2)), rng.choice((0, 1, 2, 2))
    colon, stop = writer.encode(":"), writer.encode(".")
    words = writer.encode(" ".join(attribute.questions).replace("{n}", ""))
    questions = ask(rng, written, {"direct": n})
    sample = writer.sample(NATIVE, [PromptChunk(d.paragraphs[0]) for d in written], questions)
    if said < 2:
        sample = writer.empty(sample.questions)
        for d in written:
            # Mostly small distances: binding was never learned from long ones alone.
            distance = rng.randint(0, rng.randint(0, 8))
            gap = rng.choices(words, k=distance) if said else colon
            name, value = writer.encode(f" {d.name}"), writer.encode(f" {d.facts[0].value}")
            sample.append([*name, *gap, *value, *stop])
    if asked < 2:
        names = {d.doc_id: d.name for d in written}
        sample.questions = []
        for q in questions:
            about = names[q.document_id]
            head = writer.question(NATIVE, f"{about}?") if asked else writer.encode(f" {about}:")
            answer = writer.encode(f" {q.answer}")
            sample.questions.append(QuestionSegment([*head, *answer, writer.end], len(head)))
    return sample


def _attribute(rng: random.Random) -> tuple[str, Attribute]:
    kind = rng.choice(list(KINDS.values()))
    return kind.name, rng.choice(kind.attributes)


def _pairs(
    rng: random.Random, writer: SampleWriter, n: int, kind: str, attribute: Attribute
) -> list[tuple[list[int], list[int]]]:
    """`n` names of a kind and as many different values of the attribute, as tokens."""
    dealer = Dealer(rng, "train")
    texts = [(dealer.name(kind), dealer.value(attribute)) for _ in range(n)]
    return [(writer.encode(f" {name}"), writer.encode(f" {value}")) for name, value in texts]


@dataclass(frozen=True)
class Brief:
    """Documents in a few plain sentences: no aliases, openers or fillers; the native form.

    `facts`: bounds of the facts of each paragraph; `asked`: questions of each kind; `linked`, `dated`:
    shares of contexts whose documents link to one another or state a year.
    """

    documents: tuple[int, int]
    facts: tuple[tuple[int, int], ...]
    asked: dict[str, int]
    keys: tuple[int, int] = (2, 5)
    linked: float = 0.0
    dated: float = 0.0

    def __call__(self, rng: random.Random, writer: SampleWriter) -> Sample:
        kinds = draw_kinds(rng, rng.randint(*self.documents), rng.random() < self.linked)
        keys = draw_keys(rng, kinds, self.keys)
        shapes = [
            Shape(
                tuple(rng.randint(*bounds) for bounds in self.facts),
                size=0,
                introduction=rng.random() < 0.5,
                plain=True,
            )
            for _ in kinds
        ]
        dated = rng.random() < self.dated
        written = documents(rng, "train", kinds, shapes, keys, 0.9, dated)
        asked = ask(rng, written, self.asked)[:QUESTIONS_PER_CONTEXT]
        return writer.sample(NATIVE, entries(written), asked)


@dataclass(frozen=True)
class PromptContexts:
    """Contexts as they are measured, in the prompt forms, at positions with gaps.

    `tokens`: bounds of the context; `sizes`: sizes of its chunks, in tokens; `asked`: questions of each
    kind; `linked`: share of contexts whose documents link to one another.
    """

    tokens: tuple[int, int]
    sizes: tuple[int, ...]
    asked: dict[str, int]
    linked: float = 0.6

    def __call__(self, rng: random.Random, writer: SampleWriter) -> Sample:
        size = rng.choice(self.sizes)
        n_chunks = max(2, rng.randint(*self.tokens) // size)
        asked = {kind: 3 * n for kind, n in self.asked.items()}
        context = write_context(
            rng, "train", n_chunks, self.linked, size, lambda text: len(writer.encode(text)), asked
        )
        kept = [(d, i) for d in context.documents for i in _retrieved(rng, d)]
        present = {(d.doc_id, i) for d, i in kept}
        chunks = [PromptChunk(d.paragraphs[i], f"{d.doc_id}.txt") for d, i in kept]
        left, questions = dict(self.asked), []
        for question in context.questions:
            if present.issuperset(question.needs) and left[question.kind]:
                left[question.kind] -= 1
                questions.append(question)
        form = rng.choice(FORMS) if rng.random() < 0.5 else NATIVE
        return writer.sample(form, chunks, questions, rng if rng.random() < 0.3 else None)


def _retrieved(rng: random.Random, document: GeneratedDocument) -> Sequence[int]:
    """Paragraphs of the document that are in the prompt: one document in five lacks some."""
    n = len(document.paragraphs)
    if n > 1 and rng.random() < 0.2:
        return sorted(rng.sample(range(n), rng.randint(1, n - 1)))
    return range(n)


@dataclass(frozen=True)
class Stage:
    """A stage ends when its accuracy reaches `move_on_at`, or at the share `until` of the whole run."""

    name: str
    make: Callable[[random.Random, SampleWriter], Sample]
    until: float
    move_on_at: float = 0.85
    learning_rate: float = 1.5e-3
    tokens_per_step: int = 4096


ASKED = {"coreference": 5, "direct": 3, "two-hop": 3, "comparison": 2, "unanswerable": 2}
#: With more of what takes longest to learn.
HARD = {"coreference": 4, "direct": 2, "two-hop": 5, "comparison": 3, "unanswerable": 3}
_ONE = ((1, 1),)
_TWO = ((1, 2), (1, 2))
_ASKED_IN_BRIEF = ASKED | {"direct": 2}
_LONG = (64, 100, 128, 200, 256, 400, 512)
STAGES: tuple[Stage, ...] = (
    Stage("few-repeats", partial(repeats, largest=128), 0.15, 0.9, 2e-3),
    Stage("repeats", repeats, 0.2, 0.9, 2e-3),
    Stage("name-repeats", name_repeats, 0.22, 0.9, 2e-3),
    Stage("recall", recall, 0.26, 0.95, 2e-3),
    Stage("ladder", ladder, 0.3, 0.9, 2e-3),
    Stage("one-fact", Brief((3, 6), _ONE, {"direct": 6}, (1, 2)), 0.33, 0.9),
    Stage("back-references", Brief((2, 5), _TWO, {"coreference": 9, "direct": 3}, (3, 6)), 0.4),
    Stage("kinds", Brief((3, 6), ((1, 3),), _ASKED_IN_BRIEF, (2, 4), 0.7, 0.4), 0.44),
    Stage("prompts", PromptContexts((180, 600), (45, 64), ASKED), 0.565, 1.0),
    Stage("links", PromptContexts((180, 600), (45, 64), HARD, 0.85), 0.8, 1.0, 1e-3),
    Stage("long-prompts", PromptContexts((400, 2200), _LONG, HARD, 0.8), 1.0, 1.0, 1e-3),
)
#: Layers before and from stage `DEEP_FROM` on: half the layers learn to look up in half the time.
SHALLOW, DEEP = 6, 12
DEEP_FROM = "kinds"
