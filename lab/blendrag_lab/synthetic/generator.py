"""Seeded documents about invented people, companies, towns, products and events.

The first paragraph names its entity in every sentence; the others refer back by pronoun, role or alias only,
so that their facts can be told apart only by attention to the first. What documents can say is in TOML
files. The card of the demo model (``blendrag/demo/model/README.md``) describes the data.
"""

import itertools
import random
import re
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, TypeAdapter

from blendrag.errors import InvalidInputError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_RECORDS = _read("facts.toml")
_SHARED: dict[str, str] = _RECORDS.pop("shared")
_PHRASES: dict[str, list[str]] = _RECORDS.pop("phrases")
ALIASES: tuple[str, ...] = tuple(_SHARED["aliases"].split())
OPENERS: tuple[str, ...] = tuple(_PHRASES["openers"])

#: Separated by spaces in the files; `$name` is a shared list.
_Words = Annotated[
    tuple[str, ...], BeforeValidator(lambda text: _SHARED.get(text.lstrip("$"), text).split())
]


@dataclass(frozen=True)
class Attribute:
    """One thing to say about an entity; `to` is the kind of entity that a link leads to."""

    key: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: _Words = ()
    comparisons: tuple[str, ...] = ()
    to: str = ""
    path: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of entity: its introductions, roles, filler sentences and attributes."""

    name: str
    introductions: tuple[str, ...]
    roles: _Words
    fillers: tuple[str, ...]
    attributes: tuple[Attribute, ...]

    @property
    def plain(self) -> tuple[Attribute, ...]:
        """Attributes that are not links."""
        return tuple(a for a in self.attributes if not a.to)


KINDS: dict[str, Kind] = {
    name: TypeAdapter(Kind).validate_python({**record, "name": name})
    for name, record in _RECORDS.items()
}
#: Words of names by pool; each is one token of the demo tokenizer, as a small model binds those first.
WORDS = TypeAdapter(dict[str, _Words]).validate_python(_read("names.toml"))


def openers(statement: str, split: Split) -> tuple[str, ...]:
    """The openers that `split` may put before `statement`: four of six for training, one for
    validation, one for the test. They differ by statement, so every word is known and the pair is new."""
    turn = zlib.crc32(statement.encode())
    of = {"train": (0, 1, 2, 3), "validation": (4,), "test": (5,)}[split]
    return tuple(OPENERS[(turn + i) % len(OPENERS)] for i in of)


def split_of(name: str) -> Split:
    """The split of `name` ("first second"): 7 of 10 train, 1 validates, 2 test."""
    bucket = zlib.crc32(name.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


class Dealer:
    """Deals the names of one split, values of attributes, aliases and roles, in random order. Nothing
    repeats until a pool is (nearly) empty, so that distractors differ."""

    def __init__(self, rng: random.Random, split: Split, link_share: float = 0.7) -> None:
        if split not in SPLITS:
            raise InvalidInputError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        self.split = split
        self.entities: Mapping[str, Sequence[str]] = {}
        """Names with documents, by kind: a share `link_share` of links leads to them."""
        self.rng = rng
        self._link_share = link_share
        self._used: dict[str, set[str]] = {}
        self._left: dict[str, list[str]] = {}

    def name(self, kind: str) -> str:
        pools = (f"{kind}_first", f"{kind}_second")
        if kind == "person":
            pools = (self.rng.choice(("female", "male")), "surnames")
        for tries in itertools.count():
            if tries and tries % 50 == 0:  # the words left make no name of this split
                self._used.clear()
            words = [self._fresh(pool) for pool in pools]
            name = " ".join(words)
            if split_of(name) == self.split:
                break
        for pool, word in zip(pools, words, strict=True):
            self._used.setdefault(pool, set()).add(word)
        return name

    def _fresh(self, pool: str) -> str:
        words, used = WORDS[pool], self._used.get(pool, set())
        left = [word for word in words if word not in used]
        if len(left) * 10 < len(words):
            used.clear()
            left = list(words)
        return self.rng.choice(left)

    def value(self, attribute: Attribute) -> str:
        if not attribute.to:
            return self._deal(attribute.key, attribute.values)
        known = self.entities.get(attribute.to)
        if known and self.rng.random() < self._link_share:
            return self._deal(f"{attribute.key} {attribute.to}", known)
        return self.name(attribute.to)

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

    name: str
    kind: str
    alias: str
    role: str
    paragraphs: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def doc_id(self) -> str:
        """File name without its end: `ada-birkdale` of `Ada Birkdale`."""
        return self.name.lower().replace(" ", "-")

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Shape:
    """How much a document says: facts per paragraph, and the largest size of a paragraph with filler.

    With these defaults each paragraph fits in 64 of the demo tokenizer's tokens and two together do not.
    """

    facts: tuple[int, ...] = (2, 3)
    size: int = 220
    measure: Measure = len
    introduction: bool = True
    plain: bool = False
    """No openers, roles and aliases: back-references are pronouns."""


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


def documents(
    rng: random.Random,
    split: Split,
    kinds: Sequence[str],
    shapes: Sequence[Shape],
    keys: Mapping[str, Sequence[str]] | None = None,
    link_share: float = 0.7,
    dated: bool = False,
) -> tuple[GeneratedDocument, ...]:
    """One document for each of `kinds`, with the shape at the same index, about distinct entities of
    `split`. Links lead to one another where they can. `keys` restricts the attributes of a kind;
    `dated`: each document states a year."""
    dealer = Dealer(rng, split, link_share)
    names = [dealer.name(kind) for kind in kinds]
    entities: dict[str, list[str]] = {}
    for kind, name in zip(kinds, names, strict=True):
        entities.setdefault(kind, []).append(name)
    dealer.entities = entities
    attributes, first = {}, {}
    for kind in entities:
        leading = [a.key for a in KINDS[kind].attributes if a.to in entities]
        first[kind] = ["year"] * dated + rng.sample(leading, min(1, len(leading)))
        attributes[kind] = [
            a for a in KINDS[kind].attributes if not keys or a.key in (*keys[kind], *first[kind])
        ]
    return tuple(
        _write(dealer, KINDS[kind], name, shape, attributes[kind], first[kind])
        for kind, name, shape in zip(kinds, names, shapes, strict=True)
    )


def _write(
    dealer: Dealer,
    kind: Kind,
    name: str,
    shape: Shape,
    attributes: Sequence[Attribute],
    first: Sequence[str],
) -> GeneratedDocument:
    """A document about `name`. Attributes with a key in `first` come first, as far as there is room."""
    rng, n_facts = dealer.rng, sum(shape.facts)
    role, alias = dealer.role(kind), dealer.alias()
    drawn = sorted(rng.sample(attributes, len(attributes)), key=lambda a: a.key not in first)
    drawn = rng.sample(drawn[:n_facts], min(n_facts, len(attributes)))
    # The last paragraphs, not the first, go short where there is less to say.
    slots = [i for i, n in enumerate(shape.facts) for _ in range(n)]
    facts = tuple(Fact(a, dealer.value(a), i) for a, i in zip(drawn, slots, strict=False))
    naming = _Reference(name, f"{name}'s", name)
    back = _references_back(name, kind, "" if shape.plain else role, alias)
    filling = [(time, f) for time in _PHRASES["times"] for f in kind.fillers]
    rng.shuffle(filling)
    paragraphs = []
    for index in range(len(shape.facts)):
        refer = (lambda: naming) if index == 0 else (lambda: rng.choice(back))
        said = [
            _state(rng, fact, refer(), None if shape.plain else dealer.split)
            for fact in facts
            if fact.paragraph == index
        ]
        head = ""
        if index == 0 and shape.introduction:
            introduction = rng.choice(kind.introductions)
            if shape.plain:
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
        if text := " ".join([head, *said]).strip():
            paragraphs.append(text)
    return GeneratedDocument(name, kind.name, alias, role, tuple(paragraphs), facts)


def _state(rng: random.Random, fact: Fact, reference: _Reference, split: Split | None) -> str:
    """A fact as a sentence, after an opener that `split` may use there, if there is a split."""
    statement = rng.choice(fact.attribute.statements)
    if split is not None and (opener := rng.choice(openers(statement, split))):
        lower = statement.replace("{S}", "{s}", 1).replace("{P}", "{p}", 1)
        statement = f"{opener} {lower}"
    return reference.fill(statement, v=fact.value)


def _references_back(name: str, kind: Kind, role: str, alias: str) -> list[_Reference]:
    """Never the name: half of them pronouns, the others role and alias, if there is a role."""
    pronoun = _Reference("it", "its", "it")
    if kind.name == "person":
        is_female = name.split(" ", 1)[0] in WORDS["female"]
        pronoun = _Reference("she", "her", "her") if is_female else _Reference("he", "his", "him")
    if not role:
        return [pronoun]
    other = [_Reference(word, f"{word}'s", word) for word in (f"the {role}", alias)]
    return [pronoun, pronoun, *other]
