"""Random writers, saved by peft as the trainer does, and what peft computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

import tiny
from blendrag.model import ModelAdapter
from blendrag.model.writer import mark_as_writer
from blendrag.store.kv import ChunkKV

#: The linear layers of a Llama.
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_lora(model: Any, seed: int = 0, **config: Any) -> Any:
    """A copy of ``model`` with a random LoRA whose B is not zero."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": LLAMA, "init_lora_weights": False}
    torch.manual_seed(seed)
    made = get_peft_model(deepcopy(model), LoraConfig(**given | config))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if ".lora_" in name:
                weight.normal_(std=0.1)
    return made.eval()


def saved(made: Any, folder: Path, model_id: str = "") -> Path:
    """The LoRA of :func:`with_lora` as a writer."""
    made.save_pretrained(str(folder))
    mark_as_writer(folder, model_id)
    return folder


def writer(model: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    """The directory of a random writer for ``model``."""
    return saved(with_lora(model, seed, **config), folder)


@lru_cache(maxsize=1)
def _adapter(made: Any) -> ModelAdapter:
    return tiny.adapter(made)


@torch.no_grad()
def by_peft(made: Any, prefix: Sequence[int], ids: Sequence[int]) -> ChunkKV:
    """KV of ``ids`` by peft's own forward, behind a ``prefix`` that was computed without the LoRA."""
    adapter, skip = _adapter(made), len(prefix)
    cache = DynamicCache()
    if prefix:
        with made.disable_adapter():
            cache = adapter.prefill_at(prefix)
    adapter.stack.base(
        input_ids=torch.tensor([list(ids)]),
        position_ids=torch.arange(skip, skip + len(ids))[None],
        past_key_values=cache,
        use_cache=True,
    )
    layers = [
        shape.joined(layer.keys[0, :, skip:], layer.values[0, :, skip:])
        for shape, layer in zip(adapter.layout.layers, cache.layers, strict=True)
    ]
    return ChunkKV(adapter.layout, len(ids), layers)
