"""How well a demo model answers, by question kind: full prefill, and `reuse` of chunks encoded in
isolation.

Owns: a slow reference for both, one forward pass each over a dense mask: in `reuse` a chunk's
tokens see <|bos|> and their own chunk, at their true positions, and everything else sees everything
before it. That is what storing KV behind <|bos|> and moving it into place computes. `python -m
blendrag.lab.training.check DIR` prints the table of the model card.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from blendrag.errors import BlendragError
from blendrag.lab.training.contexts import Context, contexts
from blendrag.lab.training.facts import Split
from blendrag.lab.training.prompts import FORMS, NATIVE, Entry, Form
from blendrag.lab.training.samples import Sample, Writer
from blendrag.model import ModelAdapter, load_adapter

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


def entries(context: Context) -> list[Entry]:
    """The chunks of `context` with the file each is from."""
    return [Entry(p, f"{d.doc_id}.txt") for d in context.documents for p in d.paragraphs]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    split: Split = "test",
    n_contexts: int = 30,
    n_chunks: int = 6,
    chunk_tokens: int = 64,
    n_questions: int = 3,
    form: Form = NATIVE,
    modes: tuple[Mode, ...] = MODES,
) -> tuple[Score, ...]:
    """Exact match by mode and question kind, at most `n_questions` of each kind and context. Does
    not modify the model.
    """
    writer = Writer(tokenizer)
    right: dict[tuple[Mode, str], list[bool]] = defaultdict(list)
    made = contexts(tokenizer, seed, split, n_contexts, n_chunks, chunk_tokens, n_questions)
    for context in made:
        sample = writer.sample(form, entries(context), list(context.questions))
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m blendrag.lab.training.check",
        description="Accuracy of a demo model by question kind.",
    )
    made.add_argument("model", help="its directory, or demo")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--split", default="test", choices=get_args(Split))
    made.add_argument("--contexts", type=_count, default=60)
    made.add_argument("--chunks", type=_count, default=6)
    made.add_argument("--chunk-tokens", type=_count, nargs="+", default=[64, 128, 512])
    forms = [form.name for form in FORMS]
    made.add_argument("--forms", nargs="+", default=[NATIVE.name], choices=forms)
    made.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    return made


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per form, size, mode and kind; exit status 2 and one sentence for what cannot be
    checked.
    """
    args = parser().parse_args(arguments)
    logging.disable_progress_bar()  # transformers draws one for loading weights
    try:
        adapter = load_adapter(args.model, "float32", "cpu")
        for form in (form for form in FORMS if form.name in args.forms):
            for chunk_tokens in args.chunk_tokens:
                _print(adapter, args, form, chunk_tokens)
    except BlendragError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _print(adapter: ModelAdapter, args: argparse.Namespace, form: Form, chunk_tokens: int) -> None:
    scores = evaluate(
        adapter.model,
        adapter.tokens.tokenizer,
        args.seed,
        args.split,
        args.contexts,
        args.chunks,
        chunk_tokens,
        form=form,
        modes=tuple(args.modes),
    )
    for score in scores:
        sys.stdout.write(
            f"{form.name}, {args.chunks} chunks of {chunk_tokens}, {score.mode}, "
            f"{score.kind}: {score.accuracy:.3f} (n={score.n})\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
