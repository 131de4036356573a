"""Questions about generated documents, by what answering them takes, and contexts to answer them from.

A context is chunks in prompt order: the paragraphs of whole documents, each filled up to the size of a
chunk. It is about one kind of entity, where only the name tells candidates apart, or about a few kinds
that link to one another.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from transformers import PreTrainedTokenizerBase

from blendrag.demo import Paragraph, Question
from blendrag_lab.synthetic.generator import (
    KINDS,
    Fact,
    GeneratedDocument,
    Measure,
    Shape,
    Split,
    documents,
)

UNKNOWN = "unknown"
#: Kinds whose documents link from the first to the second.
LINKED = [(kind.name, a.to) for kind in KINDS.values() for a in kind.attributes if a.to]
Documents = Sequence[GeneratedDocument]


def _needs(document: GeneratedDocument, fact: Fact) -> tuple[Paragraph, ...]:
    """The paragraph of `fact` and all before it, up to the one that has the name."""
    return tuple((document.doc_id, i) for i in range(fact.paragraph + 1))


def _one_fact(rng: random.Random, documents: Documents, later: bool) -> Iterator[Question]:
    """A fact of the paragraph that has the name, or of a later one."""
    kind = "coreference" if later else "direct"
    for document in documents:
        for fact in document.facts:
            if (fact.paragraph > 0) == later:
                text = rng.choice(fact.attribute.questions).format(n=document.name)
                yield Question(text, fact.value, kind, document.doc_id, _needs(document, fact))


def _two_hop(rng: random.Random, documents: Documents) -> Iterator[Question]:
    """Along a link of one document to a fact of another."""
    by_name = {document.name: document for document in documents}
    for document in documents:
        for link in document.facts:
            target = by_name.get(link.value)
            if target is None or not link.attribute.to:
                continue
            path = link.attribute.path.format(n=document.name)
            for fact in target.facts:
                if fact.value != document.name:
                    text = rng.choice(fact.attribute.questions).format(n=path)
                    needs = _needs(document, link) + _needs(target, fact)
                    yield Question(text, fact.value, "two-hop", document.doc_id, needs)


def _comparison(rng: random.Random, documents: Documents) -> Iterator[Question]:
    """Which of two entities of one kind was first."""
    dated = [(d, fact) for d in documents for fact in d.facts if fact.attribute.comparisons]
    for (one, its), (other, others) in combinations(dated, 2):
        if one.kind != other.kind or its.value == others.value:
            continue
        asked = rng.sample((one, other), 2)
        text = rng.choice(its.attribute.comparisons).format(n=asked[0].name, m=asked[1].name)
        first = one if int(its.value) < int(others.value) else other
        needs = _needs(one, its) + _needs(other, others)
        yield Question(text, first.name, "comparison", one.doc_id, needs)


def _unanswerable(rng: random.Random, documents: Documents) -> Iterator[Question]:
    """A fact that another document of the kind states and this one does not."""
    for document in documents:
        alike = [other for other in documents if other.kind == document.kind]
        stated = {fact.attribute.key for other in alike for fact in other.facts}
        own = {fact.attribute.key for fact in document.facts}
        for attribute in KINDS[document.kind].attributes:
            if attribute.key in stated - own:
                text = rng.choice(attribute.questions).format(n=document.name)
                yield Question(text, UNKNOWN, "unanswerable", document.doc_id)


KINDS_OF_QUESTION: dict[str, Callable[[random.Random, Documents], Iterator[Question]]] = {
    "direct": partial(_one_fact, later=False),
    "coreference": partial(_one_fact, later=True),
    "two-hop": _two_hop,
    "comparison": _comparison,
    "unanswerable": _unanswerable,
}


def ask(
    rng: random.Random, documents: Documents, per_kind: int | Mapping[str, int]
) -> list[Question]:
    """At most `per_kind` questions of each kind about `documents`, in random order."""
    asked: list[Question] = []
    for kind, make in KINDS_OF_QUESTION.items():
        if n := per_kind if isinstance(per_kind, int) else per_kind.get(kind, 0):
            made = list(make(rng, documents))
            asked += rng.sample(made, min(n, len(made)))
    rng.shuffle(asked)
    return asked


@dataclass(frozen=True)
class Context:
    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    documents: tuple[GeneratedDocument, ...]


def measure_of(tokenizer: PreTrainedTokenizerBase) -> Measure:
    """Size of a text in tokens, without special ones."""
    encode = tokenizer.backend_tokenizer.encode
    return lambda text: len(encode(text, add_special_tokens=False).ids)


def sizes(rng: random.Random, n_chunks: int) -> list[int]:
    """Chunks per document: two to four that add up to `n_chunks`; one if there is only one."""
    made: list[int] = []
    while (left := n_chunks - sum(made)) > 0:
        made.append(left if left < 4 else rng.choice([n for n in (2, 3, 4) if left - n != 1]))
    return rng.sample(made, len(made))


def draw_kinds(rng: random.Random, n: int, linked: bool) -> list[str]:
    """Kinds of `n` documents: all of one kind, or the two of a link, its target at least twice if
    there is room, so that the link decides between them."""
    if not linked or n < 2:
        return [rng.choice(list(KINDS))] * n
    source, target = rng.choice(LINKED)
    kinds = [source, target, target][:n]
    kinds += rng.choices((source, target), k=n - len(kinds))
    rng.shuffle(kinds)
    return kinds


def draw_keys(
    rng: random.Random, kinds: Sequence[str], bounds: tuple[int, int]
) -> dict[str, list[str]]:
    """Attributes that documents of each kind may state: a number within `bounds`."""
    return {
        kind: rng.sample([a.key for a in KINDS[kind].attributes], rng.randint(*bounds))
        for kind in sorted(set(kinds))
    }


def write_context(
    rng: random.Random,
    split: Split,
    n_chunks: int,
    linked: float,
    chunk_size: int,
    measure: Measure,
    per_kind: int | Mapping[str, int],
) -> Context:
    """A context of `n_chunks` chunks. `linked`: the probability that its documents link to one another."""
    chunks = sizes(rng, n_chunks)
    is_linked = rng.random() < linked if 0 < linked < 1 else linked == 1
    kinds = draw_kinds(rng, len(chunks), is_linked)
    keys = draw_keys(rng, kinds, (6, 8))
    shapes = []
    for n in chunks:
        per_paragraph = {1: (3, 4), 2: (2, 3), 3: (2, 2), 4: (1, 2)}[n]
        facts = tuple(rng.choice(per_paragraph) for _ in range(n))
        shapes.append(Shape(facts, chunk_size, measure))
    written = documents(rng, split, kinds, shapes, keys, 0.9, dated=rng.random() < 0.4)
    texts = tuple(paragraph for document in written for paragraph in document.paragraphs)
    return Context(texts, tuple(ask(rng, written, per_kind)), written)


def contexts(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    split: Split,
    n_contexts: int,
    n_chunks: int = 6,
    chunk_tokens: int = 64,
    questions: int = 2,
) -> Iterator[Context]:
    """Seeded contexts of `n_chunks` chunks of up to `chunk_tokens` tokens (more only if the facts alone
    take more); `questions` of each kind at most. Every second context is about linked documents."""
    measure = measure_of(tokenizer)
    for i in range(n_contexts):
        rng = random.Random(f"context/{seed}/{split}/{n_chunks}/{chunk_tokens}/{i}")
        yield write_context(rng, split, n_chunks, i % 2, chunk_tokens, measure, questions)
