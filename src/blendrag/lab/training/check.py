"""How well a demo model answers: `python -m blendrag.lab.training.check DIR` prints the table of its card.

Measures full prefill and `reuse` by question kind with a slow reference: one forward pass each over a dense
mask. In `reuse` a chunk's tokens see <|bos|> and their own chunk, at their true positions; everything else
sees everything before it.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from blendrag.errors import BlendragError
from blendrag.lab.training.questions import contexts
from blendrag.lab.training.samples import FORMS, NATIVE, Form, Sample, Writer, entries
from blendrag.lab.training.train import collate
from blendrag.model import load_adapter

Mode = Literal["full", "reuse"]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    n_contexts: int = 30,
    n_chunks: int = 6,
    chunk_tokens: int = 64,
    n_questions: int = 3,
    form: Form = NATIVE,
) -> dict[tuple[Mode, str], list[bool]]:
    """By mode and question kind, whether greedy decoding gives the whole answer, <|end|> included, of at
    most `n_questions` of each kind and context."""
    writer = Writer(tokenizer)
    right: dict[tuple[Mode, str], list[bool]] = defaultdict(list)
    made = contexts(tokenizer, seed, "test", n_contexts, n_chunks, chunk_tokens, n_questions)
    for context in made:
        sample = writer.sample(form, entries(context.documents), context.questions)
        for mode in get_args(Mode):
            for asked, correct in zip(sample.questions, answered(model, sample, mode), strict=True):
                right[mode, asked.kind].append(correct)
    return dict(sorted(right.items()))


@torch.inference_mode()
def answered(model: PreTrainedModel, sample: Sample, mode: Mode) -> list[bool]:
    """Whether greedy decoding gives the answer of each question, all in one forward pass.

    The expected answer is fed in. That decides the same: as long as all its tokens are the most likely
    ones, feeding and decoding do not differ.
    """
    batch = collate([sample], 0, model.dtype, model.device)
    mask = visible(sample, mode)  # [T, T]
    least = torch.finfo(model.dtype).min
    additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill_(~mask, least)
    logits = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=additive[None, None].to(model.device),
        use_cache=False,
    ).logits[0, batch.rows]  # [N, V]
    right = logits.argmax(-1) == batch.targets  # [N]
    return [bool(of.all()) for of in right.tensor_split(batch.first[1:].cpu())]


def visible(sample: Sample, mode: Mode) -> Tensor:
    """Which token sees which `[T, T]`: causal; questions blind to one another; in `reuse` chunks blind
    to all but <|bos|>."""
    # The part of each token: its chunk, -1 elsewhere in the context, -2, -3, … in the questions.
    asked = [-2 - i for i, question in enumerate(sample.questions) for _ in question.tokens]
    part = torch.tensor(sample.chunks + asked)
    mask = torch.ones(len(part), len(part), dtype=torch.bool).tril()
    same = part[:, None] == part[None, :]
    mask &= (part[None, :] >= -1) | same
    if mode == "reuse":
        bos = torch.arange(len(part)) == 0
        mask &= (part[:, None] < 0) | same | bos
    return mask


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per form, size, mode and kind. Exits with status 2 and one sentence on an error."""
    parser = argparse.ArgumentParser(description="Accuracy of a demo model by question kind.")
    add = parser.add_argument
    add("model", help="its directory, or demo")
    add("--seed", type=int, default=1)
    add("--contexts", type=_count, default=60)
    add("--chunks", type=_count, default=6)
    add("--chunk-tokens", type=_count, nargs="+", default=[64, 128, 512])
    forms = {form.name: form for form in FORMS}
    add("--forms", nargs="+", default=[NATIVE.name], choices=list(forms))
    args = parser.parse_args(arguments)
    logging.disable_progress_bar()  # transformers shows one while it loads weights
    try:
        adapter = load_adapter(args.model, "float32", "cpu")
    except BlendragError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    model, tokenizer, n = adapter.model, adapter.tokens.tokenizer, args.chunks
    for form, size in itertools.product(args.forms, args.chunk_tokens):
        found = evaluate(model, tokenizer, args.seed, args.contexts, n, size, form=forms[form])
        for (mode, kind), right in found.items():
            about = f"{form}, {n} chunks of {size}, {mode}, {kind}"
            print(f"{about}: {sum(right) / len(right):.3f} (n={len(right)})", flush=True)


if __name__ == "__main__":
    main()
