"""Seeded documents about invented people, companies, towns, products and events.

A document has one to four paragraphs; each is a chunk. The first names its entity in every sentence and
gives its role and alias once. The others refer back by pronoun, role or alias only, so that their facts
can be told apart only by attention to the first. Documents link to one another by name.

What documents can say is in TOML files. Names and pairs of opener and statement are dealt to the splits, so
that none is in two of them. All splits share the words: a held-out name is a pair of words that never
occurred together in training.
"""

import itertools
import random
import re
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

# -- names, attributes and phrases ----------------------------------------------------------------

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Attribute:
    """One thing to say about an entity; `to` is the kind of entity that a link leads to."""

    key: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    comparisons: tuple[str, ...] = ()
    to: str = ""
    path: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of entity: its introductions, roles, filler sentences and attributes."""

    name: str
    introductions: tuple[str, ...]
    roles: tuple[str, ...]
    fillers: tuple[str, ...]
    attributes: tuple[Attribute, ...]

    @property
    def plain(self) -> tuple[Attribute, ...]:
        """Attributes that are not links."""
        return tuple(a for a in self.attributes if not a.to)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _attribute(record: Mapping[str, Any]) -> Attribute:
    values: str = record.get("values", "")
    if values.startswith("$"):
        values = _SHARED[values[1:]]
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    return Attribute(**{**record, **lists, "values": tuple(values.split())})


_RECORDS = _read("facts.toml")
_SHARED: dict[str, str] = _RECORDS.pop("shared")
_PHRASES: dict[str, list[str]] = _RECORDS.pop("phrases")
ALIASES: tuple[str, ...] = tuple(_SHARED["aliases"].split())
OPENERS: tuple[str, ...] = tuple(_PHRASES["openers"])
TIMES: tuple[str, ...] = tuple(_PHRASES["times"])
KINDS: dict[str, Kind] = {
    name: Kind(
        name,
        tuple(record["introductions"]),
        tuple(record["roles"].split()),
        tuple(record["fillers"]),
        tuple(_attribute(attribute) for attribute in record["attributes"]),
    )
    for name, record in _RECORDS.items()
}
#: Words of names by pool; each is one token of the demo tokenizer, as a small model binds those first.
WORDS: dict[str, tuple[str, ...]] = {
    pool: tuple(words.split()) for pool, words in _read("names.toml").items()
}


def openers(statement: str, split: Split) -> tuple[str, ...]:
    """The openers that `split` may put before `statement`: four of six for training, one for
    validation, one for the test. They differ by statement, so every word is known and the pair is new.
    """
    turn = zlib.crc32(statement.encode())
    of = {"train": (0, 1, 2, 3), "validation": (4,), "test": (5,)}[split]
    return tuple(OPENERS[(turn + i) % len(OPENERS)] for i in of)


def split_of(name: str) -> Split:
    """The split of `name` ("first second"): 7 of 10 train, 1 validates, 2 test."""
    bucket = zlib.crc32(name.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


def gender_of(name: str) -> str:
    """`female` or `male`, by the given name of a person."""
    return "female" if name.split(" ", 1)[0] in WORDS["female"] else "male"


class NameDealer:
    """Deals names of one split; words repeat only when a pool is nearly empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self.split: Split = split
        self._used: dict[str, set[str]] = {}

    def name(self, kind: str) -> str:
        """A name for an entity of `kind`."""
        if kind == "person":
            return self._pair(self._rng.choice(("female", "male")), "surnames")
        return self._pair(f"{kind}_first", f"{kind}_second")

    def _pair(self, first: str, second: str) -> str:
        for tries in itertools.count():
            if tries and tries % 50 == 0:  # the words left make no name of this split
                self._used.clear()
            words = self._fresh(first), self._fresh(second)
            if split_of(" ".join(words)) == self.split:
                break
        for pool, word in zip((first, second), words, strict=True):
            self._used.setdefault(pool, set()).add(word)
        return " ".join(words)

    def _fresh(self, pool: str) -> str:
        words, used = WORDS[pool], self._used.get(pool, set())
        left = [word for word in words if word not in used]
        if len(left) * 10 < len(words):
            used.clear()
            left = list(words)
        return self._rng.choice(left)


# -- documents ------------------------------------------------------------------------------------


Measure = Callable[[str], int]
"""Size of a text, in the unit of `Shape.size`."""


@dataclass(frozen=True)
class Fact:
    """One stated fact: its attribute, its value as written, and the paragraph that states it."""

    attribute: Attribute
    value: str
    paragraph: int


@dataclass(frozen=True)
class GeneratedDocument:
    """A document. Only its first paragraph has the name."""

    doc_id: str
    name: str
    kind: str
    alias: str
    role: str
    paragraphs: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)

    def fact(self, key: str) -> Fact | None:
        return next((f for f in self.facts if f.attribute.key == key), None)


@dataclass(frozen=True)
class Shape:
    """How much a document says: facts per paragraph, and the largest size of a paragraph with filler.

    With these defaults each paragraph fits in 64 of the demo tokenizer's tokens and two together do not.
    """

    facts: tuple[int, ...] = (2, 3)
    size: int = 220
    measure: Measure = len
    introduction: bool = True
    names_only: bool = False  # no roles, no aliases: back-references are pronouns
    openers: bool = True


@dataclass
class Deck:
    """Deals names for links, and each attribute's values in random order, so that distractors differ."""

    rng: random.Random
    dealer: NameDealer
    entities: dict[str, list[str]] = field(default_factory=dict)
    """Names with documents, by kind: targets of links."""
    link_share: float = 0.7
    _left: dict[str, list[str]] = field(default_factory=dict)

    def value(self, attribute: Attribute) -> str:
        if attribute.to:
            known = self.entities.get(attribute.to)
            if known and self.rng.random() < self.link_share:
                return self._deal(f"{attribute.key} {attribute.to}", known)
            return self.dealer.name(attribute.to)
        return self._deal(attribute.key, attribute.values)

    def alias(self) -> str:
        return self._deal("alias", ALIASES)

    def role(self, kind: Kind) -> str:
        """One of three roles per corpus, so that "the baker" alone does not identify a person."""
        roles = self._left.setdefault(f"{kind.name} role", self.rng.sample(kind.roles, 3))
        return self.rng.choice(roles)

    def _deal(self, key: str, values: Sequence[str]) -> str:
        if not self._left.get(key):
            self._left[key] = self.rng.sample(values, len(values))
        return self._left[key].pop()


@dataclass(frozen=True)
class _Reference:
    """The word forms by which a sentence refers to the entity."""

    subject: str
    possessive: str
    object: str

    def fill(self, template: str, **values: str) -> str:
        subject, possessive = self.subject, self.possessive
        text = template.format(
            S=subject[:1].upper() + subject[1:],
            P=possessive[:1].upper() + possessive[1:],
            s=subject,
            p=possessive,
            o=self.object,
            **values,
        )
        # `a owl` and `Foods's` become `an owl` and `Foods'`.
        return re.sub(r"s's\b", "s'", re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text))


def write_document(
    rng: random.Random,
    deck: Deck,
    kind: Kind,
    name: str,
    shape: Shape,
    keys: Sequence[str] | None = None,
    always: Sequence[str] = (),
) -> GeneratedDocument:
    """One document about `name`. `keys` restricts its attributes; those of `always` come first, as far
    as there is room.
    """
    role, alias = deck.role(kind), deck.alias()
    facts = _draw_facts(rng, deck, kind, shape, keys, always)
    naming = _Reference(name, f"{name}'s", name)
    back = _references_back(name, kind, "" if shape.names_only else role, alias)
    filling = [(time, f) for time in TIMES for f in kind.fillers]
    rng.shuffle(filling)
    paragraphs = []
    for index in range(len(shape.facts)):
        refer = (lambda: naming) if index == 0 else (lambda: rng.choice(back))
        written = [f for f in facts if f.paragraph == index]
        said = [_state(rng, f, refer(), deck.dealer.split, shape.openers) for f in written]
        head = ""
        if index == 0 and shape.introduction:
            introduction = rng.choice(kind.introductions)
            if shape.names_only:
                introduction = introduction.replace(", called {a},", "")
            head = naming.fill(introduction, r=role, a=alias)
        room = shape.size - shape.measure(" ".join([head, *said]))
        while filling:
            time, filler = filling.pop()
            sentence = refer().fill(f"{time} {filler}.")
            room -= shape.measure(" " + sentence)
            if room < 0:
                break
            said.append(sentence)
        rng.shuffle(said)
        text = " ".join([head, *said] if head else said)
        if text:
            paragraphs.append(text)
    return GeneratedDocument(slug(name), name, kind.name, alias, role, tuple(paragraphs), facts)


def _draw_facts(
    rng: random.Random,
    deck: Deck,
    kind: Kind,
    shape: Shape,
    keys: Sequence[str] | None,
    always: Sequence[str],
) -> tuple[Fact, ...]:
    pool = [a for a in kind.attributes if keys is None or a.key in (*keys, *always)]
    drawn = sorted(rng.sample(pool, len(pool)), key=lambda a: a.key not in always)
    drawn = rng.sample(drawn[: sum(shape.facts)], min(sum(shape.facts), len(pool)))
    # The last paragraphs, not the first, go short where there is less to say.
    slots = [i for i, n in enumerate(shape.facts) for _ in range(n)]
    return tuple(Fact(a, deck.value(a), i) for a, i in zip(drawn, slots, strict=False))


def slug(name: str) -> str:
    """File and document name of an entity: `Ada Birkdale` becomes `ada-birkdale`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def documents(
    rng: random.Random,
    split: Split,
    kinds: Sequence[str],
    shapes: Sequence[Shape],
    keys: dict[str, list[str]] | None = None,
    link_share: float = 0.7,
    dated: bool = False,
) -> tuple[GeneratedDocument, ...]:
    """One document for each of `kinds`, with the shape at the same index, about distinct entities of
    `split`. Links lead to one another where they can. `dated`: each document states a year.
    """
    dealer = NameDealer(rng, split)
    named = [(kind, dealer.name(kind)) for kind in kinds]
    entities: dict[str, list[str]] = {}
    for kind, name in named:
        entities.setdefault(kind, []).append(name)
    deck = Deck(rng, dealer, entities, link_share)
    always = {kind: ["year"] if dated else [] for kind in entities}
    for kind, spoken in always.items():
        leading = [a.key for a in KINDS[kind].attributes if a.to in entities]
        spoken += rng.sample(leading, min(1, len(leading)))
    return tuple(
        write_document(
            rng, deck, KINDS[kind], name, shape, keys.get(kind) if keys else None, always[kind]
        )
        for (kind, name), shape in zip(named, shapes, strict=True)
    )


def _state(
    rng: random.Random, fact: Fact, reference: _Reference, split: Split, with_openers: bool
) -> str:
    """A fact as a sentence, after an opener that the split may use there."""
    statement = rng.choice(fact.attribute.statements)
    opener = rng.choice(openers(statement, split)) if with_openers else ""
    if opener:
        lower = statement.replace("{S}", "{s}", 1).replace("{P}", "{p}", 1)
        statement = f"{opener} {lower}"
    return reference.fill(statement, v=fact.value)


def _references_back(name: str, kind: Kind, role: str, alias: str) -> list[_Reference]:
    """Never the name: half of them pronouns, the others role and alias, if there is a role."""
    pronoun = _Reference("it", "its", "it")
    if kind.name == "person":
        female = gender_of(name) == "female"
        pronoun = _Reference("she", "her", "her") if female else _Reference("he", "his", "him")
    if not role:
        return [pronoun]
    other = [_Reference(word, f"{word}'s", word) for word in (f"the {role}", alias)]
    return [pronoun, pronoun, *other]
