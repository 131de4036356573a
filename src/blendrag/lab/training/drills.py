"""What a model practises before it reads documents: to repeat, and to recall what stood beside a name.

Owns: a sample of each drill, from random tokens to one fact a document. Does not know: which comes when
(`curriculum.py`), the model.
"""

import random
from dataclasses import dataclass

from blendrag.lab.training.facts import KINDS, Attribute
from blendrag.lab.training.generator import Deck, Shape, documents
from blendrag.lab.training.names import NameDealer
from blendrag.lab.training.prompts import NATIVE, Entry
from blendrag.lab.training.questions import ask
from blendrag.lab.training.samples import Asked, Sample, Writer
from blendrag.lab.training.tokenizer import VOCAB_SIZE

# A pool of all tokens but the special ones and two.
ALL = VOCAB_SIZE - 8


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
        for pair in _pairs(rng, writer, rng.randint(2, 5), *_attribute(rng))
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
    kind, attribute = _attribute(rng)
    words = writer.encode(" ".join((*attribute.statements, *attribute.questions)))
    said, asked = (rng.choice((0, 0, 1, 2, 4, 8)) for _ in range(2))
    pairs = _pairs(rng, writer, rng.randint(3, 8), kind, attribute)
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
    kind = rng.choice(list(KINDS.values()))
    attribute = rng.choice(kind.attributes)
    shape = Shape((1,), 0, introduction=False, names_only=True, openers=False)
    n = rng.randint(3, 6)
    written = documents(rng, "train", [kind.name] * n, [shape] * n, {kind.name: [attribute.key]})
    said, asked = rng.choice((0, 1, 1, 1, 2, 2)), rng.choice((0, 1, 2, 2))
    colon, stop = writer.encode(":"), writer.encode(".")
    words = writer.encode(" ".join(attribute.questions).replace("{n}", ""))
    questions = ask(rng, written, {"direct": n})
    sample = writer.sample(NATIVE, [Entry(d.paragraphs[0]) for d in written], questions)
    if said < 2:
        sample.restart([writer.bos])
        for d in written:
            # Distances mostly small: over a long one alone, binding was never learned.
            distance = rng.randint(0, rng.randint(0, 8))
            gap = rng.choices(words, k=distance) if said else colon
            name, value = writer.encode(f" {d.name}"), writer.encode(f" {d.facts[0].value}")
            sample.append([*name, *gap, *value, *stop])
    if asked < 2:
        by_id = {d.doc_id: d.name for d in written}
        sample.questions = [
            Asked([*head, *writer.encode(f" {q.answer}"), writer.end], len(head))
            for q in questions
            for name in (by_id[q.document_id],)
            for head in (
                writer.encode(f" {name}:") if asked == 0 else writer.question(NATIVE, f"{name}?"),
            )
        ]
    return sample


def _attribute(rng: random.Random) -> tuple[str, Attribute]:
    kind = rng.choice(list(KINDS.values()))
    return kind.name, rng.choice(kind.attributes)


def _pairs(
    rng: random.Random, writer: Writer, n: int, kind: str, attribute: Attribute
) -> list[tuple[list[int], list[int]]]:
    """`n` names of a kind and as many different values of the attribute, as tokens."""
    dealer = NameDealer(rng, "train")
    deck = Deck(rng, dealer)
    texts = [(dealer.name(kind), deck.value(attribute)) for _ in range(n)]
    return [(writer.encode(f" {name}"), writer.encode(f" {value}")) for name, value in texts]
