"""Seeded documents and questions about people that nobody has ever heard of.

Owns: how a document is put together and which questions it answers. Does not know: tokens, prompts,
models. A document has two paragraphs. The first names its entity in every sentence; the second
refers back only by pronoun ("she", "his"), in every sentence, so that its facts can be told apart
only by what stands before it. Names come from one split (`names.py`); all else is the
same for every split. A new question kind is one more function in `_QUESTION_KINDS`.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blendrag.demo.facts import KINDS, Attribute, Kind
from blendrag.demo.names import NameDealer, Split


@dataclass(frozen=True)
class Fact:
    """One stated fact: its attribute, its value as written, and the paragraph (0 or 1) that
    states it.
    """

    attribute: Attribute
    value: str
    paragraph: int


@dataclass(frozen=True)
class Document:
    """A document; `text` is its paragraphs joined by one blank line. The name is in the first
    paragraph only.
    """

    doc_id: str
    name: str
    kind: str
    paragraphs: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def title(self) -> str:
        return self.name

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Question:
    """A plain-language question with its one short answer. `kind`: `direct` or `coreference`."""

    text: str
    answer: str
    kind: str
    document_id: str


@dataclass(frozen=True)
class Corpus:
    """Documents about distinct entities of one split, and every question they answer."""

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Shape:
    """How much a document says: facts and filler sentences in each paragraph, none of both: no such
    paragraph.

    A paragraph under `min_characters` gets more filler: with these defaults either paragraph alone
    fits in 64 of the demo tokenizer's tokens and both together do not, so that a splitter of that
    capacity cuts between them.
    """

    facts: tuple[int, int] = (2, 3)
    fillers: tuple[int, int] = (0, 0)
    min_characters: int = 150
    introduction: bool = True


@dataclass
class Deck:
    """Deals each attribute's values in random order, none twice before all were dealt, so that
    distractors differ.
    """

    rng: random.Random
    dealer: NameDealer
    _left: dict[str, list[str]] = field(default_factory=dict)

    def value(self, attribute: Attribute) -> str:
        if not self._left.get(attribute.key):
            self._left[attribute.key] = self.rng.sample(attribute.values, len(attribute.values))
        return self._left[attribute.key].pop()

    def role(self, kind: Kind) -> str:
        """Few roles per corpus: "the baker" alone must not tell one person's paragraph from
        another's.
        """
        roles = self._left.setdefault(f"{kind.name}.role", self.rng.sample(kind.roles, 3))
        return self.rng.choice(roles)


@dataclass(frozen=True)
class _Reference:
    """The word forms by which sentences of one paragraph point at the entity."""

    subject: str
    possessive: str
    object: str

    def fill(self, template: str, **values: str) -> str:
        text = template.format(
            S=_capital(self.subject),
            P=_capital(self.possessive),
            s=self.subject,
            p=self.possessive,
            o=self.object,
            **values,
        )
        return _spelt(text)


def generate_corpus(
    seed: int,
    split: Split,
    n_documents: int,
    kinds: Sequence[str] | None = None,
    shape: Shape | None = None,
) -> Corpus:
    """`n_documents` about distinct entities of `split`, and their questions; equal arguments give
    equal corpora.

    `kinds` names the kinds of entity to draw from (default: all). Raises ValueError for an unknown
    split or kind.
    """
    rng = random.Random(f"{seed}/{split}/{n_documents}")
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kind {min(unknown)!r}: expected some of {', '.join(KINDS)}")
    dealer = NameDealer(rng, split)
    deck = Deck(rng, dealer)
    chosen = [KINDS[kind] for kind in kinds or KINDS]
    documents = tuple(
        write_document(rng, dealer, deck, chosen[i % len(chosen)], shape or Shape())
        for i in range(n_documents)
    )
    questions = tuple(q for document in documents for q in ask_about(rng, document))
    return Corpus(documents, questions)


def write_document(
    rng: random.Random,
    dealer: NameDealer,
    deck: Deck,
    kind: Kind,
    shape: Shape,
    keys: Sequence[str] | None = None,
) -> Document:
    """One document about a freshly named entity of `kind`; `keys` restricts the attributes it
    may speak of.
    """
    # 1) who it is about, and what can be said
    gender = rng.choice(("female", "male"))
    name = named(dealer, rng, gender)
    role = deck.role(kind)
    pool = [a for a in kind.attributes if keys is None or a.key in keys]
    drawn = rng.sample(pool, min(sum(shape.facts), len(pool)))
    facts = tuple(Fact(a, deck.value(a), int(i >= shape.facts[0])) for i, a in enumerate(drawn))

    filling = rng.sample(kind.fillers, len(kind.fillers))

    # 2) the sentences of each paragraph; the introduction and the name come first
    paragraphs = []
    for index, references in enumerate((_naming(name), _back(gender, kind))):
        said = [
            (rng.choice(f.attribute.statements), f.value) for f in facts if f.paragraph == index
        ]
        said += [(filling.pop(), "") for _ in range(shape.fillers[index])]
        while (
            said
            and filling
            and sum(len(t) + len(v) for t, v in said) < shape.min_characters - 40 * (1 - index)
        ):
            said.append((filling.pop(), ""))
        rng.shuffle(said)
        if index == 0 and shape.introduction:
            said.insert(0, (rng.choice(kind.introductions), ""))
        sentences = [
            references(rng, i).fill(template, v=value, r=role)
            for i, (template, value) in enumerate(said)
        ]
        if sentences:
            paragraphs.append(" ".join(sentences))

    # 3) the role is a fact of the naming paragraph too
    if shape.introduction and kind.role_questions:
        asked = Attribute("role", kind.roles, kind.introductions, kind.role_questions)
        facts += (Fact(asked, role.split(" ", 1)[1], 0),)
    return Document(slug(name), name, kind.name, tuple(paragraphs), facts)


def named(dealer: NameDealer, rng: random.Random, gender: str = "") -> str:
    """A fresh name, of either gender unless that is given."""
    return dealer.person(gender or rng.choice(("female", "male")))


def ask_about(rng: random.Random, document: Document) -> tuple[Question, ...]:
    """Every question of every kind that `document` answers."""
    return tuple(question for kind in _QUESTION_KINDS.values() for question in kind(rng, document))


def slug(name: str) -> str:
    """File and document name of an entity: `Ada Birkdale` becomes `ada-birkdale`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _one_fact(kind: str, paragraph: int) -> Callable[[random.Random, Document], list[Question]]:
    def ask(rng: random.Random, document: Document) -> list[Question]:
        return [
            Question(
                _spelt(rng.choice(f.attribute.questions).format(n=document.name)),
                f.value,
                kind,
                document.doc_id,
            )
            for f in document.facts
            if f.paragraph == paragraph
        ]

    return ask


_QUESTION_KINDS: dict[str, Callable[[random.Random, Document], list[Question]]] = {
    "direct": _one_fact("direct", 0),
    "coreference": _one_fact("coreference", 1),
}

_Referrer = Callable[[random.Random, int], _Reference]


def _naming(name: str) -> _Referrer:
    """The name in every sentence: what is stated here can be found by it alone."""
    named = _Reference(name, f"{name}'s", name)
    return lambda rng, index: named


def _back(gender: str, kind: Kind) -> _Referrer:
    """Never the name: a pronoun in every sentence."""
    pronoun = _pronoun(gender, kind)
    return lambda rng, index: pronoun


def _pronoun(gender: str, kind: Kind) -> _Reference:
    if kind.name != "person":
        return _Reference("it", "its", "it")
    return _Reference("she", "her", "her") if gender == "female" else _Reference("he", "his", "him")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spelt(text: str) -> str:
    """`a owl` and `Foods's` put right."""
    return re.sub(r"s's\b", "s'", re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text))
