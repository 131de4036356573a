"""Real models pass the gate, and answer the same with stored KV as without it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.rendering import render
from blendrag.engine.request import Answer
from blendrag.model import ModelAdapter

NEW_TOKENS = 6
DOCUMENTS = [tiny.document(number, paragraphs=6) for number in range(5)]
FULL = Options(mode="full", max_new_tokens=NEW_TOKENS, logprobs=20)
EVERYTHING = Options(mode="blend", ratio=1.0, max_new_tokens=NEW_TOKENS, logprobs=0)
#: Two tokens whose log-probabilities differ by less (in nats) are tied, because of rounding.
TIE = {"bfloat16": 0.75, "float32": 1e-3}


@pytest.fixture(scope="module")
def engine(
    real_adapter: ModelAdapter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlendEngine]:
    """The model with a store of a few documents."""
    root = tmp_path_factory.mktemp("real") / "s"
    with tiny.engine(real_adapter, root, tokenizer=None, chunk_tokens=64) as made:
        verdict = made.verify()
        assert verdict.blendable, verdict.reason
        made.ingest(DOCUMENTS).whole()
        yield made


def prompts(engine: BlendEngine) -> list[str]:
    """Twenty prompts, each with two chunks of the corpus."""
    found = []
    for i in range(20):
        texts = [tiny.chunk_texts(engine, (i + step) % 5)[i % 2] for step in (0, 2)]
        found.append(
            "\n\n".join([*texts, f"How many ships did the company of Place{7 * i} build?"])
        )
    return found


@pytest.fixture(scope="module")
def answers(engine: BlendEngine) -> dict[str, Answer]:
    """The answer to each prompt in mode ``full``."""
    return {prompt: engine.generate(prompt, FULL) for prompt in prompts(engine)}


def test_mode_full_answers_as_generate_does(engine, answers):
    """``generate`` gets the rendered prompt, tokenised as one text, as from a user of transformers."""
    model, tokens = engine.adapter.model, engine.adapter.tokens
    for prompt, answer in answers.items():
        assert engine.segments(prompt, FULL).chunks
        rendered = render(prompt, tokens, FULL).text
        ids = torch.tensor([tokens.tokenizer.encode(rendered, add_special_tokens=False)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokens.tokenizer.eos_token_id,
            )
        expected = tokens.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.text == expected


def test_recomputing_everything_answers_as_mode_full_does(engine, answers):
    """Up to a tie, because a blended prefill sums in another order than a stock one."""
    for prompt, full in answers.items():
        blended = engine.generate(prompt, EVERYTHING)
        assert blended.metrics.ratio == 1.0
        outcomes = {chunk.outcome for chunk in blended.metrics.chunks}
        assert "blended" in outcomes
        assert outcomes <= {"blended", "exact"}  # without a template the first chunk follows BOS
        assert blended.logprobs is not None
        assert full.logprobs is not None
        own, theirs = [t.id for t in blended.logprobs], [t.id for t in full.logprobs]
        if own != theirs:
            tie = next(i for i, (a, b) in enumerate(zip_longest(own, theirs)) if a != b)
            assert tie < min(len(own), len(theirs)), "one answer is a prefix of the other"
            chosen = full.logprobs[tie]
            gap = chosen.logprob - dict(chosen.top)[blended.logprobs[tie].token]
            assert gap <= TIE[engine.adapter.layout.dtype]
