"""A tiny random Llama with a tokenizer, and an engine over five documents of six paragraphs."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blendrag.engine import BlendEngine

TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "What does document 3 say about the town of Place32?"


def paragraph(i: int, j: int) -> str:
    return (
        f"Paragraph {j} of document {i} talks about topic number {i * 7 + j} in the town of "
        f"Place{i}{j}, which is quite lovely."
    )


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [paragraph(i, j) for i in range(5) for j in range(6)] + [QUESTION]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|bos|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=TEMPLATE,
    )


def engine(words: PreTrainedTokenizerFast, root: Path) -> BlendEngine:
    """An engine with the documents ingested; the caller closes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    docs = root / "docs"
    docs.mkdir()
    for i in range(5):
        (docs / f"d{i}.txt").write_text("\n\n".join(paragraph(i, j) for j in range(6)))
    made = BlendEngine(
        LlamaForCausalLM(config).eval(),
        root / "store",
        tokenizer=words,
        chunk_tokens=64,
        embedder="minilm-offline",
        max_new_tokens=8,
        top_k=4,
    )
    made.ingest([docs])
    return made
