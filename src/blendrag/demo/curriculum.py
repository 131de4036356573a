"""What the demo model is shown, stage by stage, and when it moves on.

Owns: `STAGES` and how a stage makes one packed sample: a context, and questions that each see the
context and themselves but not one another. Does not know: the model, the optimiser. Trained on
questions directly, a small model learns the type of the answer and then sits at chance among the
candidates; repeats, recall and ever longer documents lead it past that.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from blendrag.demo.facts import KINDS, Attribute
from blendrag.demo.generator import (
    Deck,
    Document,
    Question,
    Shape,
    ask_about,
    named,
    write_document,
)
from blendrag.demo.names import NameDealer, Split
from blendrag.demo.prompts import FORMS, NATIVE, Entry, Form, Template, template
from blendrag.demo.tokenizer import VOCAB_SIZE

# Positions skipped before a chunk in samples with gaps: contexts longer than any trained on stay
# familiar.
MAX_GAP = 400
QUESTIONS_PER_CONTEXT = 12
# A pool of all tokens but the special ones and two.
ALL = VOCAB_SIZE - 8


@dataclass(frozen=True)
class Asked:
    """One question segment; the loss is on the tokens from `answer_at` on. `kind` labels it in
    evaluations.
    """

    tokens: list[int]
    answer_at: int
    kind: str = ""


@dataclass
class Sample:
    """A context with its positions, the chunk each token is in (-1: none), and the questions
    that start after it.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    questions: list[Asked] = field(default_factory=list)

    @property
    def question_position(self) -> int:
        return self.positions[-1] + 1

    def restart(self, tokens: list[int]) -> None:
        """Drops the context for one that begins with `tokens`; keeps the questions."""
        self.tokens, self.positions, self.chunks = [], [], []
        self.append(tokens)

    def append(self, tokens: list[int], chunk: int = -1, gap: int = 0) -> None:
        start = gap + (self.question_position if self.positions else 0)
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.chunks += [chunk] * len(tokens)


class Writer:
    """Turns documents and questions into samples, tokenised segment by segment as the product
    does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._templates: dict[str, Template] = {
            form.name: template(tokenizer, form) for form in FORMS
        }
        self.bos: int = tokenizer.bos_token_id
        self.end: int = tokenizer.eos_token_id
        self.n_special = len(tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)

    def random_tokens(self, rng: random.Random, n: int, pool: int) -> list[int]:
        """`n` of the first `pool` tokens that are not special."""
        return [rng.randrange(self.n_special, self.n_special + pool) for _ in range(n)]

    def question(self, form: Form, text: str) -> list[int]:
        """The tokens after the last chunk, up to the answer."""
        return self.encode(self._templates[form.name].question(text))

    def sample(
        self,
        form: Form,
        entries: list[Entry],
        questions: list[Question],
        rng: random.Random | None = None,
    ) -> Sample:
        """Positions skip ahead at random before each chunk where `rng` is given."""
        layout, sample = self._templates[form.name], Sample()
        for i, (text, is_chunk) in enumerate(layout.context_segments(entries)):
            gap = rng.randrange(MAX_GAP) if rng and i and rng.random() < 0.5 else 0
            sample.append(self.encode(text), i if is_chunk else -1, gap)
        for question in questions:
            asked = self.encode(layout.question(question.text))
            # The answer keeps the space before it: after a space a word has the token that it has
            # in the documents.
            answer = [*self.encode(" " + question.answer), self.end]
            sample.questions.append(Asked(asked + answer, len(asked), question.kind))
        return sample


@dataclass(frozen=True)
class Stage:
    """A stage lasts until its accuracy is `move_on_at`, and at most until `until` of the whole
    run is over.
    """

    name: str
    make: Callable[[random.Random, Writer], Sample]
    until: float
    move_on_at: float = 0.85  # by then the next stage teaches the same, and more
    learning_rate: float = 1.5e-3
    tokens_per_step: int = 4096


@dataclass(frozen=True)
class Repeats:
    """Random tokens three times over, the second and third time supervised: induction forms.

    It forms within minutes where the tokens are drawn from few. So every sample has a pool of its
    own, the first of the vocabulary, between `pools`: few of them form it, and it grows to the rest.
    """

    pools: tuple[int, int]
    lengths: tuple[int, int]

    def __call__(self, rng: random.Random, writer: Writer) -> Sample:
        fewest, most = self.pools
        pool = round(fewest * (most / fewest) ** rng.random())
        once = writer.random_tokens(rng, rng.randint(*self.lengths), pool)
        sample = Sample()
        sample.append([writer.bos])
        # The first token of the repeat cannot be known: how long the sequence is, is random.
        sample.questions.append(Asked(once * 3, len(once) + 1))
        return sample


def name_repeats(rng: random.Random, writer: Writer) -> Sample:
    """Names and values three times over: induction is carried to the tokens that matter."""
    if rng.random() < 0.1:
        return Repeats((64, ALL), (6, 24))(rng, writer)
    once = [
        t
        for pair in _pairs(rng, writer, rng.randint(2, 5), _attribute(rng))
        for tokens in pair
        for t in tokens
    ]
    sample = Sample()
    sample.append([writer.bos])
    sample.questions.append(Asked(once * 3, len(once) + 1))
    return sample


def recall(rng: random.Random, writer: Writer) -> Sample:
    """A list of names, each with a value, in no sentence yet; all asked in another order.

    Words stand between name and value, none to eight: with none it is the repeat already known.
    """
    attribute = _attribute(rng)
    words = writer.encode(" ".join((*attribute.statements, *attribute.questions)))
    said, asked = (rng.choice((0, 0, 1, 2, 4, 8)) for _ in range(2))
    pairs = _pairs(rng, writer, rng.randint(3, 8), attribute)
    stop = writer.encode(".")
    sample = Sample()
    sample.append([writer.bos])
    for name, value in pairs:
        sample.append([*name, *rng.choices(words, k=rng.randint(0, said)), *value, *stop])
    for name, value in rng.sample(pairs, len(pairs)):
        head = [*name, *rng.choices(words, k=rng.randint(0, asked))]
        sample.questions.append(Asked([*head, *value], len(head)))
    return sample


def ladder(rng: random.Random, writer: Writer) -> Sample:
    """From the list to the document and from the bare name to the question, one fact each.

    Every rung shares something with the one below it, so that binding over a distance grows out of
    recall: a list, a list with words between name and value, sentences; asked by name and colon, by
    name in the place of the question, by the question itself.
    """
    dealer = NameDealer(rng, "train")
    deck = Deck(rng, dealer)
    kind = rng.choice(list(KINDS.values()))
    attribute = rng.choice(kind.attributes)
    shape = Shape((1, 0), (0, 0), 0, introduction=False)
    documents = [
        write_document(rng, dealer, deck, kind, shape, [attribute.key])
        for _ in range(rng.randint(3, 6))
    ]
    said, asked = rng.choice((0, 1, 1, 1, 2, 2)), rng.choice((0, 1, 2, 2))
    colon, stop = writer.encode(":"), writer.encode(".")
    words = writer.encode(" ".join(attribute.questions).replace("{n}", ""))
    questions = [q for d in documents for q in ask_about(rng, d) if q.answer == d.facts[0].value]
    entries = [Entry(d.paragraphs[0]) for d in documents]
    sample = writer.sample(NATIVE, entries, questions)
    if said < 2:
        sample.restart([writer.bos])
        for d in documents:
            # Distances mostly small: over a long one alone, binding was never learned.
            distance = rng.randint(0, rng.randint(0, 8))
            gap = rng.choices(words, k=distance) if said else colon
            name, value = writer.encode(f" {d.name}"), writer.encode(f" {d.facts[0].value}")
            sample.append([*name, *gap, *value, *stop])
    if asked < 2:
        sample.questions = [
            Asked([*head, *writer.encode(f" {q.answer}"), writer.end], len(head))
            for d, q in zip(documents, questions, strict=True)
            for head in (
                writer.encode(f" {d.name}:")
                if asked == 0
                else writer.question(NATIVE, f"{d.name}?"),
            )
        ]
    return sample


def _attribute(rng: random.Random) -> Attribute:
    return rng.choice([attribute for kind in KINDS.values() for attribute in kind.attributes])


def _pairs(
    rng: random.Random, writer: Writer, n: int, attribute: Attribute
) -> list[tuple[list[int], list[int]]]:
    """`n` names and as many different values of the attribute, as tokens."""
    dealer = NameDealer(rng, "train")
    deck = Deck(rng, dealer)
    texts = [(named(dealer, rng), deck.value(attribute)) for _ in range(n)]
    return [(writer.encode(f" {name}"), writer.encode(f" {value}")) for name, value in texts]


@dataclass(frozen=True)
class DocumentsStage:
    """A context about `documents` entities; `keys` bounds how many attributes there are to tell
    apart.

    `real`: in the prompt forms, at positions with gaps; `orphans`: share of the documents of which
    only one paragraph is there.
    """

    documents: tuple[int, int]
    facts: tuple[tuple[int, int], tuple[int, int]]
    fillers: int = 0
    keys: tuple[int, int] = (2, 5)
    introduction: float = 0.0
    real: bool = False
    orphans: float = 0.0

    def __call__(self, rng: random.Random, writer: Writer, split: Split = "train") -> Sample:
        documents = self.write(rng, split)
        entries, questions = arrange(rng, documents, self.orphans)
        form = NATIVE
        if self.real and rng.random() < 0.5:
            form = rng.choice(FORMS)
        gaps = rng if self.real and rng.random() < 0.3 else None
        return writer.sample(form, entries, questions, gaps)

    def write(self, rng: random.Random, split: Split) -> list[Document]:
        dealer = NameDealer(rng, split)
        deck = Deck(rng, dealer)
        kinds = list(KINDS.values())
        if rng.random() < 0.8:  # of one kind: nothing but the name tells the candidates apart
            kinds = [rng.choice(kinds)]
        keys = {
            k.name: [a.key for a in rng.sample(k.attributes, rng.randint(*self.keys))]
            for k in kinds
        }
        shape = Shape()
        documents = []
        for _ in range(rng.randint(*self.documents)):
            if not self.real:
                facts = (rng.randint(*self.facts[0]), rng.randint(*self.facts[1]))
                first, second = (rng.randint(0, self.fillers) if n else 0 for n in facts)
                shape = Shape(facts, (first, second), 0, rng.random() < self.introduction)
            kind = rng.choice(kinds)
            documents.append(
                write_document(
                    rng, dealer, deck, kind, shape, None if self.real else keys[kind.name]
                )
            )
        return documents


def arrange(
    rng: random.Random, documents: list[Document], orphans: float
) -> tuple[list[Entry], list[Question]]:
    """Chunks in random document order, a document's in its own; of a share of `orphans` only one
    paragraph, as retrieved.

    A second paragraph continues the first directly before it. Only what the chunks left can answer
    is asked.
    """
    entries: list[Entry] = []
    questions: list[Question] = []
    for document in rng.sample(documents, len(documents)):
        present = list(range(len(document.paragraphs)))
        if len(present) == 2 and rng.random() < orphans:
            present = [rng.randrange(2)]
        entries += [Entry(document.paragraphs[i], f"{document.doc_id}.txt") for i in present]
        kinds = {(0,): ("direct",), (1,): (), (0, 1): ("direct", "coreference")}[tuple(present)]
        questions += [q for q in ask_about(rng, document) if q.kind in kinds]
    rng.shuffle(questions)
    questions.sort(
        key=lambda q: q.kind == "direct" and rng.random() < 0.6
    )  # coreference is what takes long to learn
    return entries, questions[:QUESTIONS_PER_CONTEXT]


STAGES: tuple[Stage, ...] = (
    Stage("few-repeats", Repeats((64, 128), (4, 16)), 0.25, 0.9, learning_rate=2e-3),
    Stage("repeats", Repeats((64, ALL), (4, 16)), 0.3, 0.9, learning_rate=2e-3),
    Stage("name-repeats", name_repeats, 0.35, 0.9, learning_rate=2e-3),
    Stage("recall", recall, 0.45, 0.95, learning_rate=2e-3),
    Stage("ladder", ladder, 0.5, 0.9, learning_rate=2e-3),
    Stage(
        "one-fact",
        DocumentsStage((3, 6), ((1, 1), (0, 0)), keys=(1, 2), introduction=0.5),
        0.55,
        0.9,
    ),
    Stage("back-references", DocumentsStage((2, 5), ((1, 2), (1, 2)), 0, (3, 6), 0.5), 0.7),
    Stage(
        "prompts",
        DocumentsStage((2, 12), ((2, 2), (3, 3)), real=True, orphans=0.25),
        1.0,
        move_on_at=1.0,
    ),
)
