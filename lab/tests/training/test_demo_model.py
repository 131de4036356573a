"""The shipped model, its tokenizer and corpus."""

import json
import random
import subprocess
import sys
from collections import Counter

from blendrag.demo import demo_corpus_path, demo_model_path, demo_questions
from lab.training.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from lab.training.write_corpus import N_QUESTIONS, write


def test_the_weights_are_small_bf16_and_of_a_stock_class():
    assert (demo_model_path() / "model.safetensors").stat().st_size <= 16 * 10**6
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert config["max_position_embeddings"] >= 4096
    assert config["num_hidden_layers"] >= 12


def test_the_demo_corpus_is_the_generated_one_and_holds_its_answers():
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


def test_importing_the_demo_loads_no_torch():
    code = "import sys, blendrag.demo as d; d.demo_questions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_any_text_comes_back_unchanged(tokenizer):
    rng = random.Random(0)
    texts = ["", " ", "\n\n a\t\r\n", "naïve 東京 🦉 \x00\x7f", "def f(x):\n    return x  # ☃"]
    for _ in range(50):
        codes = (rng.randrange(rng.choice((256, 0xD800))) for _ in range(80))
        texts.append("".join(map(chr, codes)))
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens_are_single_and_known_by_role(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert ids == [tokenizer.convert_tokens_to_ids(token)]
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|bos|>", "<|end|>", "<|pad|>")
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def test_the_chat_template_writes_every_role(tokenizer):
    said = [("system", "s"), ("user", "u"), ("assistant", " a"), ("user", "v")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>s<|end|><|user|>u<|end|>"
        "<|assistant|> a<|end|><|user|>v<|end|><|assistant|>"
    )
