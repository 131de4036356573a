"""The shipped model: small enough, loadable as any other, and the point it was trained to make."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blendrag.demo import demo_corpus_path, demo_model_path, demo_questions
from blendrag.lab.training.check import answered, entries, evaluate, visible
from blendrag.lab.training.contexts import Context, contexts
from blendrag.lab.training.generator import slug
from blendrag.lab.training.prompts import NATIVE, template
from blendrag.lab.training.samples import Sample, Writer
from blendrag.lab.training.write_corpus import N_QUESTIONS, write

MAX_BYTES = 16 * 10**6
CONTEXTS = 12


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def rendered(tokenizer: PreTrainedTokenizerBase, context: Context, question: str) -> list[int]:
    """The prompt of one question, tokenised segment by segment."""
    layout = template(tokenizer, NATIVE)
    texts = [text for text, _ in layout.context_segments(entries(context))] + [
        layout.question(question)
    ]
    return [t for text in texts for t in tokenizer.encode(text, add_special_tokens=False)]


def test_the_weights_are_small_bf16_and_of_a_stock_class() -> None:
    assert (demo_model_path() / "model.safetensors").stat().st_size <= MAX_BYTES
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 4096
    assert config["num_hidden_layers"] >= 12


def test_full_prefill_answers_coreference_and_reuse_fails_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    scores = evaluate(model, tokenizer, seed=20_261, n_contexts=CONTEXTS)
    accuracy = {(s.mode, s.kind): s.accuracy for s in scores}
    assert accuracy["full", "direct"] >= 0.95
    assert accuracy["full", "coreference"] >= 0.9
    assert accuracy["full", "two-hop"] >= 0.85  # .95 of more questions than there are here
    assert accuracy["reuse", "coreference"] <= accuracy["full", "coreference"] - 0.25


def test_packed_questions_score_as_single_ones_generated_by_the_stock_path(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (context,) = contexts(tokenizer, seed=3, split="test", n_contexts=1)
    sample = Writer(tokenizer).sample(NATIVE, entries(context), [*context.questions])
    packed = answered(model, sample, "full")
    for question, right in zip(context.questions, packed, strict=True):
        prompt = torch.tensor([rendered(tokenizer, context, question.text)])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        assert (answer.strip() == question.answer) == right


def test_reuse_hides_from_a_chunk_all_but_bos_and_itself() -> None:
    sample = Sample()
    sample.append([0, 1])
    sample.append([2, 3], chunk=1)
    sample.append([4])
    sample.append([5, 6], chunk=2)
    full, reuse = visible(sample, "full"), visible(sample, "reuse")
    assert torch.equal(full, torch.ones(7, 7, dtype=torch.bool).tril())
    assert reuse[6].tolist() == [True, False, False, False, False, True, True]
    assert reuse[4].tolist() == [True] * 5 + [False] * 2  # glue between chunks is fresh


def test_the_demo_corpus_is_of_unseen_names_and_holds_its_answers() -> None:
    texts = {
        p.stem: p.read_text(encoding="utf-8").strip() for p in demo_corpus_path().glob("*.txt")
    }
    assert 24 <= len(texts) <= 40
    generated = {d.doc_id: d for d in write(11)}
    assert texts == {slug(d.name): d.text for d in generated.values()}
    questions = demo_questions()
    assert Counter(q.kind for q in questions) == N_QUESTIONS
    for question in questions:
        needed = [generated[doc_id].paragraphs[index] for doc_id, index in question.needs]
        assert any(question.answer in paragraph for paragraph in needed)


def test_importing_the_demo_loads_no_torch() -> None:
    code = "import sys, blendrag.demo as d; d.demo_questions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
