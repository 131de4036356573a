"""A tiny random Llama with a tokenizer of its own, and an engine over five documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

HERE = Path(__file__).resolve().parent
#: The suite beside this file, and the scripted model of blendrag's own tests.
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests")]

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def engine(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlendEngine]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    root: Path = tmp_path_factory.mktemp("blendrag")
    docs = root / "docs"
    docs.mkdir()
    for i in range(5):
        (docs / f"d{i}.txt").write_text("\n\n".join(paragraph(i, j) for j in range(6)))
    with BlendEngine(
        model,
        root / "store",
        tokenizer=tokenizer,
        chunk_tokens=64,
        embedder="minilm-offline",
        max_new_tokens=8,
        top_k=4,
    ) as engine:
        engine.ingest([docs])
        yield engine


class Seen(BaseEventHandler):
    """What LlamaIndex's instrumentation is told about LLM calls."""

    prompts: list[list[ChatMessage]] = Field(default_factory=list)
    raws: list[dict[str, Any]] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.prompts.append(event.messages)
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.raws.append(event.response.raw)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of each answer so far, in order."""
        return [raw["blendrag"] for raw in self.raws]


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler = Seen()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, similarity_top_k=4)
