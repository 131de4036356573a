"""The shipped model, its tokenizer and corpus, and ``python -m blendrag.lab.training.check``."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from blendrag.demo import demo_corpus_path, demo_model_path, demo_questions
from blendrag.lab.training.check import answered, evaluate, main, visible
from blendrag.lab.training.questions import contexts
from blendrag.lab.training.samples import FORMS, NATIVE, Sample, Writer, entries, template
from blendrag.lab.training.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from blendrag.lab.training.write_corpus import N_QUESTIONS, write


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def test_the_weights_are_small_bf16_and_of_a_stock_class() -> None:
    assert (demo_model_path() / "model.safetensors").stat().st_size <= 16 * 10**6
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert config["max_position_embeddings"] >= 4096
    assert config["num_hidden_layers"] >= 12


def test_full_prefill_answers_coreference_and_reuse_fails_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    right = evaluate(model, tokenizer, seed=20_261, n_contexts=12)
    accuracy = {way: sum(of) / len(of) for way, of in right.items()}
    assert accuracy["full", "direct"] >= 0.95
    assert accuracy["full", "coreference"] >= 0.9
    assert accuracy["full", "two-hop"] >= 0.85  # .95 of more questions than there are here
    assert accuracy["reuse", "coreference"] <= accuracy["full", "coreference"] - 0.25


def test_packed_questions_score_as_questions_generated_one_by_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (context,) = contexts(tokenizer, seed=3, split="test", n_contexts=1, questions=1)
    chunks = entries(context.documents)
    packed = answered(model, Writer(tokenizer).sample(NATIVE, chunks, context.questions), "full")
    layout = template(tokenizer, NATIVE)
    segments = [text for text, _ in layout.context_segments(chunks)]
    for question, right in zip(context.questions, packed, strict=True):
        texts = [*segments, layout.question(question.text)]
        ids = [t for text in texts for t in tokenizer.encode(text, add_special_tokens=False)]
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        assert (answer.strip() == question.answer) == right


def test_in_reuse_a_chunk_sees_only_bos_and_itself() -> None:
    sample = Sample()
    sample.append([0, 1])
    sample.append([2, 3], chunk=1)
    sample.append([4])
    sample.append([5, 6], chunk=2)
    full, reuse = visible(sample, "full"), visible(sample, "reuse")
    assert torch.equal(full, torch.ones(7, 7, dtype=torch.bool).tril())
    assert reuse[6].tolist() == [True, False, False, False, False, True, True]
    assert reuse[4].tolist() == [True] * 5 + [False] * 2  # the separator is computed


def test_the_demo_corpus_is_the_generated_one_and_holds_its_answers() -> None:
    texts = {
        p.stem: p.read_text(encoding="utf-8").strip() for p in demo_corpus_path().glob("*.txt")
    }
    generated = {d.doc_id: d for d in write(11)}
    assert texts == {doc_id: d.text for doc_id, d in generated.items()}
    questions = demo_questions()
    assert Counter(q.kind for q in questions) == N_QUESTIONS
    for question in questions:
        needed = [generated[doc_id].paragraphs[index] for doc_id, index in question.needs]
        assert any(question.answer in paragraph for paragraph in needed)


def test_importing_the_demo_loads_no_torch() -> None:
    code = "import sys, blendrag.demo as d; d.demo_questions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    texts = ["", " ", "\n\n a\t\r\n", "naïve 東京 🦉 \x00\x7f", "def f(x):\n    return x  # ☃"]
    for _ in range(50):
        codes = (rng.randrange(rng.choice((256, 0xD800))) for _ in range(80))
        texts.append("".join(map(chr, codes)))
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens_are_single_and_known_by_role(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert ids == [tokenizer.convert_tokens_to_ids(token)]
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|bos|>", "<|end|>", "<|pad|>")
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def test_the_chat_template_writes_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    said = [("system", "s"), ("user", "u"), ("assistant", " a"), ("user", "v")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>s<|end|><|user|>u<|end|>"
        "<|assistant|> a<|end|><|user|>v<|end|><|assistant|>"
    )


def test_check_prints_a_line_per_form_mode_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("demo", "--contexts", "1", "--chunks", "2", "--chunk-tokens", "64")
    main([*few, "--forms", "native", "plain"])
    lines = capsys.readouterr().out.splitlines()
    for form in ("native", "plain"):
        for mode in ("full", "reuse"):
            prefix = f"{form}, 2 chunks of 64, {mode}, "
            assert any(line.startswith(prefix) for line in lines)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((), ["error: ", "absent"]),
        (("--forms", "native", "foo"), ["'foo'", *(form.name for form in FORMS)]),
        (("--chunk-tokens", "64", "0"), ["'0' is not a number above 0"]),
    ],
)
def test_check_refuses_what_it_cannot_measure_in_one_sentence(
    wrong: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["absent", *wrong])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words)
