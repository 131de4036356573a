"""What the demo model is shown, stage by stage, and when it moves on.

Owns: `STAGES` and how a stage of documents makes one packed sample (`samples.py`); those before it are
`drills.py`. Does not know: the model, the optimiser. Trained on questions directly, a small model learns
the type of the answer and then sits at chance among the candidates; repeats, recall and ever longer
documents lead it past that.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blendrag.lab.training.contexts import draw_kinds, sizes, write_context
from blendrag.lab.training.drills import ALL, Repeats, ladder, name_repeats, recall
from blendrag.lab.training.facts import KINDS
from blendrag.lab.training.generator import Document, Shape, documents
from blendrag.lab.training.prompts import FORMS, NATIVE, Entry
from blendrag.lab.training.questions import Question, ask
from blendrag.lab.training.samples import Sample, Writer

QUESTIONS_PER_CONTEXT = 12


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
class Brief:
    """Documents in a few plain sentences: no aliases, no openers, no fillers, the native form.

    `facts` bounds how many each paragraph states; `asked`: questions of each kind; `linked`: share
    of the contexts whose documents link to one another.
    """

    documents: tuple[int, int]
    facts: tuple[tuple[int, int], ...]
    asked: dict[str, int]
    keys: tuple[int, int] = (2, 5)
    introduction: float = 0.5
    linked: float = 0.0
    dated: float = 0.0

    def __call__(self, rng: random.Random, writer: Writer) -> Sample:
        kinds = draw_kinds(rng, rng.randint(*self.documents), rng.random() < self.linked)
        keys = {
            kind: rng.sample([a.key for a in KINDS[kind].attributes], rng.randint(*self.keys))
            for kind in sorted(set(kinds))
        }
        shapes = [
            Shape(
                tuple(rng.randint(*bounds) for bounds in self.facts),
                0,
                introduction=rng.random() < self.introduction,
                names_only=True,
                openers=False,
            )
            for _ in kinds
        ]
        dated = rng.random() < self.dated
        written = documents(rng, "train", kinds, shapes, keys, 0.9, dated)
        entries = [Entry(p, f"{d.doc_id}.txt") for d in written for p in d.paragraphs]
        return writer.sample(NATIVE, entries, ask(rng, written, self.asked)[:QUESTIONS_PER_CONTEXT])


ASKED = {"coreference": 5, "direct": 3, "two-hop": 3, "comparison": 2, "unanswerable": 2}
# What takes longest to learn.
HARD = {"coreference": 4, "direct": 2, "two-hop": 5, "comparison": 3, "unanswerable": 3}


@dataclass(frozen=True)
class Prompts:
    """Contexts as they are measured, in the prompt forms, at positions with gaps.

    `tokens` of a context at most, in chunks of one of `sizes` tokens; `orphans`: share of the
    documents that lack paragraphs, as retrieved; `asked`: questions of each kind.
    """

    tokens: tuple[int, int]
    sizes: tuple[int, ...]
    asked: dict[str, int]
    linked: float = 0.6
    orphans: float = 0.2

    def __call__(self, rng: random.Random, writer: Writer) -> Sample:
        size = rng.choice(self.sizes)
        chunks = sizes(rng, max(2, rng.randint(*self.tokens) // size))
        kinds = draw_kinds(rng, len(chunks), linked=rng.random() < self.linked)
        asked = {kind: 3 * n for kind, n in self.asked.items()}
        context = write_context(
            rng, "train", kinds, chunks, size, lambda text: len(writer.encode(text)), asked
        )
        entries, present = _retrieved(rng, context.documents, self.orphans)
        questions = _balanced(
            self.asked, (q for q in context.questions if present.issuperset(q.needs))
        )
        form = rng.choice(FORMS) if rng.random() < 0.5 else NATIVE
        return writer.sample(form, entries, questions, rng if rng.random() < 0.3 else None)


def _retrieved(
    rng: random.Random, written: Sequence[Document], orphans: float
) -> tuple[list[Entry], set[tuple[str, int]]]:
    """Chunks in document order; of a share of `orphans` not all paragraphs, as retrieved."""
    entries: list[Entry] = []
    present: set[tuple[str, int]] = set()
    for document in written:
        kept = list(range(len(document.paragraphs)))
        if len(kept) > 1 and rng.random() < orphans:
            kept = sorted(rng.sample(kept, rng.randint(1, len(kept) - 1)))
        entries += [Entry(document.paragraphs[i], f"{document.doc_id}.txt") for i in kept]
        present.update((document.doc_id, i) for i in kept)
    return entries, present


def _balanced(asked: dict[str, int], questions: Iterable[Question]) -> list[Question]:
    """As many of each kind as `asked` says."""
    left = dict(asked)
    chosen = []
    for question in questions:
        if left[question.kind]:
            left[question.kind] -= 1
            chosen.append(question)
    return chosen


_ONE = ((1, 1),)
_TWO = ((1, 2), (1, 2))
STAGES: tuple[Stage, ...] = (
    Stage("few-repeats", Repeats((64, 128), (4, 16)), 0.15, 0.9, learning_rate=2e-3),
    Stage("repeats", Repeats((64, ALL), (4, 16)), 0.2, 0.9, learning_rate=2e-3),
    Stage("name-repeats", name_repeats, 0.22, 0.9, learning_rate=2e-3),
    Stage("recall", recall, 0.26, 0.95, learning_rate=2e-3),
    Stage("ladder", ladder, 0.3, 0.9, learning_rate=2e-3),
    Stage("one-fact", Brief((3, 6), _ONE, {"direct": 6}, (1, 2)), 0.33, 0.9),
    Stage("back-references", Brief((2, 5), _TWO, {"coreference": 9, "direct": 3}, (3, 6)), 0.4),
    Stage(
        "kinds",
        Brief((3, 6), ((1, 3),), ASKED | {"direct": 2}, (2, 4), linked=0.7, dated=0.4),
        0.44,
        0.85,
    ),
    Stage("prompts", Prompts((180, 600), (45, 64), ASKED), 0.565, 1.0),
    Stage("links", Prompts((180, 600), (45, 64), HARD, 0.85), 0.8, 1.0, learning_rate=1e-3),
    Stage(
        "long-prompts",
        Prompts((400, 2200), (64, 100, 128, 200, 256, 400, 512), HARD, 0.8),
        1.0,
        1.0,
        learning_rate=1e-3,
    ),
)
# Depth comes when there is something for it to do: half the layers learn to look up in half the time.
SHALLOW, DEEP = 6, 12
DEEP_FROM = "kinds"
