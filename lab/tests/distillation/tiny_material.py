"""A tiny model and documents to train a writer on; milliseconds to build."""

from __future__ import annotations

from typing import Any

import torch

import tiny
from blendrag.engine.rendering import prefix_token_ids
from blendrag.model import ModelAdapter
from blendrag_lab.distillation.adapt import TrainingCorpus
from blendrag_lab.distillation.forwards import Forwards
from blendrag_lab.distillation.material import Asked, Group
from blendrag_lab.distillation.prompts import ChunkPrompt, TrainingPassage, chunk_prompt
from blendrag_lab.distillation.trainer import Recipe
from blendrag_lab.distillation.writer import TrainedWriter

TOWNS = [
    "Altmar",
    "Bexley",
    "Corvin",
    "Dunmore",
    "Elstow",
    "Fenwick",
    "Garth",
    "Hadley",
    "Ilford",
    "Jarrow",
]
ANSWER_TOKENS = 5


def passage(number: int, part: int = 0) -> TrainingPassage:
    town = TOWNS[number % len(TOWNS)]
    return TrainingPassage(
        f"The mill of {town} was built in {1800 + 7 * number + part} near the river, and its owner number "
        f"{part} moved the works to the harbour.",
        f"{town}.txt",
    )


def prompt(adapter: ModelAdapter, *questions: str) -> ChunkPrompt:
    asked = questions or ("Who owned the mill of Bexley?", "When was it built near the river bank?")
    made = chunk_prompt(adapter.tokens, [passage(n) for n in (3, 1, 5)], asked)
    assert made is not None
    assert len(made.chunks) == 3
    assert len(made.tails) == len(asked)
    return made


def corpus(adapter: ModelAdapter, groups: int = 8) -> TrainingCorpus:
    made = tuple(
        Group(
            tuple(passage(n, part) for part in range(3)),
            (Asked(f"Who owned the mill of {TOWNS[n]}?"),),
        )
        for n in range(groups)
    )
    return TrainingCorpus(made, prefix_token_ids(adapter.tokens), 64, 3)


def recipe(**changes: Any) -> Recipe:
    given = {
        "steps": 4, "batch": 1, "questions": 2, "rank": 4, "answer_tokens": ANSWER_TOKENS,
        "learning_rate": 5e-3, "held_out": 3, "measure_every": 2,
    }  # fmt: skip
    return Recipe(**{**given, **changes})


def forwards(adapter: ModelAdapter, writer: TrainedWriter) -> Forwards:
    prefix = prefix_token_ids(adapter.tokens)
    return Forwards(adapter, prefix, writer.stock, ANSWER_TOKENS)


def randomised(writer: TrainedWriter) -> None:
    """Weights that change what is encoded, which those of a new LoRA do not."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in writer.parameters.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def small(name: str = "llama", **changes: Any) -> ModelAdapter:
    """A model whose answers do not end by themselves."""
    given = {"num_hidden_layers": 2, "eos_token_id": 639, "initializer_range": 0.2, **changes}
    if name == "gemma3_text":
        given["layer_types"] = ["sliding_attention", "full_attention"]
    return tiny.adapter(tiny.family(name, **given))
