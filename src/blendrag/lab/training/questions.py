"""What can be asked about documents, with answers: kinds of question by what answering them takes.

Owns: a function per kind in `KINDS_OF_QUESTION`. Does not know: prompts, tokens, which
chunks a context holds: a question lists the paragraphs that answer it.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from blendrag.demo import Paragraph, Question
from blendrag.lab.training.facts import KINDS
from blendrag.lab.training.generator import Document, Fact

UNKNOWN = "unknown"


def _needs(document: Document, fact: Fact) -> tuple[Paragraph, ...]:
    """A later paragraph, and all before it up to the one that has the name."""
    return tuple((document.doc_id, i) for i in range(fact.paragraph + 1))


def _one_fact(rng: random.Random, documents: Sequence[Document], later: bool) -> Iterator[Question]:
    for document in documents:
        for fact in document.facts:
            if (fact.paragraph > 0) == later:
                text = rng.choice(fact.attribute.questions).format(n=document.name)
                kind = "coreference" if later else "direct"
                yield Question(text, fact.value, kind, document.doc_id, _needs(document, fact))


def direct(rng: random.Random, documents: Sequence[Document]) -> Iterator[Question]:
    return _one_fact(rng, documents, later=False)


def coreference(rng: random.Random, documents: Sequence[Document]) -> Iterator[Question]:
    return _one_fact(rng, documents, later=True)


def two_hop(rng: random.Random, documents: Sequence[Document]) -> Iterator[Question]:
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


def comparison(rng: random.Random, documents: Sequence[Document]) -> Iterator[Question]:
    """Which of two entities of one kind was first."""
    dated = [
        (document, fact)
        for document in documents
        for fact in document.facts
        if fact.attribute.comparisons
    ]
    for i, (one, its) in enumerate(dated):
        for other, others in dated[i + 1 :]:
            if one.kind != other.kind or its.value == others.value:
                continue
            asked = rng.sample((one, other), 2)
            text = rng.choice(its.attribute.comparisons)
            yield Question(
                text.format(n=asked[0].name, m=asked[1].name),
                (one if int(its.value) < int(others.value) else other).name,
                "comparison",
                one.doc_id,
                _needs(one, its) + _needs(other, others),
            )


def unanswerable(rng: random.Random, documents: Sequence[Document]) -> Iterator[Question]:
    """What the document about an entity does not say and that about another one does."""
    for document in documents:
        said = {fact.attribute.key for fact in document.facts}
        for attribute in KINDS[document.kind].attributes:
            elsewhere = any(
                fact.attribute.key == attribute.key and other.kind == document.kind
                for other in documents
                for fact in other.facts
            )
            if elsewhere and attribute.key not in said:
                text = rng.choice(attribute.questions).format(n=document.name)
                yield Question(text, UNKNOWN, "unanswerable", document.doc_id)


KINDS_OF_QUESTION: dict[str, Callable[[random.Random, Sequence[Document]], Iterator[Question]]] = {
    "direct": direct,
    "coreference": coreference,
    "two-hop": two_hop,
    "comparison": comparison,
    "unanswerable": unanswerable,
}


def ask(
    rng: random.Random, documents: Sequence[Document], per_kind: int | dict[str, int]
) -> list[Question]:
    """At most so many questions of each kind about `documents`, in random order."""
    asked: list[Question] = []
    for kind, make in KINDS_OF_QUESTION.items():
        n = per_kind if isinstance(per_kind, int) else per_kind.get(kind, 0)
        if n:
            made = list(make(rng, documents))
            asked += rng.sample(made, min(n, len(made)))
    rng.shuffle(asked)
    return asked
