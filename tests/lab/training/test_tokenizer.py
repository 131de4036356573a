"""The tokenizer: any text there and back, special tokens, the chat template."""

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blendrag.demo import demo_model_path
from blendrag.lab.training.names import NameDealer
from blendrag.lab.training.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


def test_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    texts = ["", " ", "\n\n a\t\r\n", "naïve 東京 🦉 \x00\x7f", "def f(x):\n    return x  # ☃"]
    texts += [
        "".join(chr(rng.choice((rng.randrange(256), rng.randrange(0xD800)))) for _ in range(80))
        for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens_are_single_and_known_by_role(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=False) == [
            tokenizer.convert_tokens_to_ids(token)
        ]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|bos|>",
        "<|end|>",
        "<|pad|>",
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def test_the_chat_template_writes_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": " a"},
        {"role": "user", "content": "v"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>s<|end|><|user|>u<|end|>"
        "<|assistant|> a<|end|><|user|>v<|end|><|assistant|>"
    )


def test_names_are_two_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    dealer = NameDealer(random.Random(1), "test")
    kinds = ("person", "organisation", "place", "product", "event")
    names = [dealer.name(kind) for kind in kinds for _ in range(40)]
    for name in names:
        assert len(tokenizer.encode(" " + name, add_special_tokens=False)) == 2
