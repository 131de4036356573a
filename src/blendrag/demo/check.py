"""How well a demo model answers, by question kind: full prefill, and `reuse` of chunks encoded in
isolation.

Owns: a slow reference for both, one forward pass each over a dense mask: in `reuse` a chunk's
tokens see <|bos|> and their own chunk, at their true positions, and everything else sees everything
before it. That is what storing KV behind <|bos|> and moving it into place computes. `python -m
blendrag.demo.check DIR` prints the table of the model card.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blendrag.demo.curriculum import Sample, Writer
from blendrag.demo.facts import KINDS
from blendrag.demo.generator import Document, Question, generate_corpus
from blendrag.demo.names import Split
from blendrag.demo.prompts import FORMS, NATIVE, Entry, Form

Mode = Literal["full", "reuse"]
MODES: tuple[Mode, ...] = ("full", "reuse")


@dataclass(frozen=True)
class Score:
    """Share of questions of one kind whose whole answer, <|end|> included, comes out by greedy
    decoding.
    """

    mode: Mode
    kind: str
    accuracy: float
    n: int


@dataclass(frozen=True)
class Case:
    """One context of documents about entities of one kind, and its questions."""

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]

    @property
    def entries(self) -> list[Entry]:
        return [Entry(p, f"{d.doc_id}.txt") for d in self.documents for p in d.paragraphs]


def cases(
    seed: int, split: Split, n_contexts: int, n_documents: int = 3, n_questions: int = 12
) -> Iterator[Case]:
    """Contexts of 2 × `n_documents` chunks in random document order; kinds of entity take turns."""
    kinds = list(KINDS)
    for i in range(n_contexts):
        rng = random.Random(f"check/{seed}/{i}")
        corpus = generate_corpus(
            seed * 100_000 + i, split, n_documents, kinds=[kinds[i % len(kinds)]]
        )
        documents = tuple(rng.sample(corpus.documents, n_documents))
        yield Case(
            documents, tuple(rng.sample(corpus.questions, min(n_questions, len(corpus.questions))))
        )


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    split: Split = "test",
    n_contexts: int = 30,
    n_documents: int = 3,
    n_questions: int = 12,
    form: Form = NATIVE,
    modes: tuple[Mode, ...] = MODES,
) -> tuple[Score, ...]:
    """Exact match by mode and question kind. Does not modify the model."""
    writer = Writer(tokenizer)
    right: dict[tuple[Mode, str], list[bool]] = defaultdict(list)
    for case in cases(seed, split, n_contexts, n_documents, n_questions):
        sample = writer.sample(form, case.entries, list(case.questions))
        for mode in modes:
            for asked, correct in zip(sample.questions, answered(model, sample, mode), strict=True):
                right[mode, asked.kind].append(correct)
    return tuple(
        Score(mode, kind, sum(r) / len(r), len(r)) for (mode, kind), r in sorted(right.items())
    )


@torch.inference_mode()
def answered(model: PreTrainedModel, sample: Sample, mode: Mode) -> list[bool]:
    """For each question of the sample: does greedy decoding give its answer? All questions in one
    forward pass.

    The answer is fed in while it is checked, which decides the same: as long as all its tokens are
    the most likely ones, feeding and decoding do not differ.
    """
    tokens = torch.tensor([sample.tokens + [t for q in sample.questions for t in q.tokens]])
    positions = list(sample.positions)
    for asked in sample.questions:
        positions += range(sample.question_position, sample.question_position + len(asked.tokens))
    mask = visible(sample, mode)  # [T, T]
    dtype = model.dtype
    additive = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    logits = model(
        input_ids=tokens,
        position_ids=torch.tensor([positions]),
        attention_mask=additive[None, None],
        use_cache=False,
    ).logits[0]
    correct, at = [], len(sample.tokens)
    for asked in sample.questions:
        predicted = (
            logits[at + asked.answer_at - 1 : at + len(asked.tokens) - 1].argmax(-1).tolist()
        )
        correct.append(predicted == asked.tokens[asked.answer_at :])
        at += len(asked.tokens)
    return correct


def visible(sample: Sample, mode: Mode) -> Tensor:
    """Which token sees which: causal; questions blind to one another; in `reuse` chunks blind to
    all but <|bos|>. [T, T]
    """
    # The part each token is in: chunks of the context, -1 for the rest of it, and -2, -3, … for the
    # questions.
    parts = list(sample.chunks)
    for i, asked in enumerate(sample.questions):
        parts += [-2 - i] * len(asked.tokens)
    part = torch.tensor(parts)
    causal = torch.ones(len(parts), len(parts), dtype=torch.bool).tril()
    same = part[:, None] == part[None, :]
    mask = causal & ((part[None, :] >= -1) | same)
    if mode == "reuse":
        stored = part[:, None] >= 0
        bos = torch.arange(len(parts))[None, :] == 0
        mask &= ~stored | same | bos
    return mask


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a demo model by question kind.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", default="test")
    parser.add_argument("--contexts", type=int, default=60)
    parser.add_argument("--documents", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--forms", nargs="+", default=[NATIVE.name])
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for form in (form for form in FORMS if form.name in args.forms):
        for n_documents in args.documents:
            scores = evaluate(
                model, tokenizer, args.seed, args.split, args.contexts, n_documents, form=form
            )
            for score in scores:
                sys.stdout.write(
                    f"{form.name}, {2 * n_documents} chunks, {score.mode}, {score.kind}: "
                    f"{score.accuracy:.3f} (n={score.n})\n"
                )


if __name__ == "__main__":
    main()
