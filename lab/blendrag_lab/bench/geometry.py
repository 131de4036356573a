"""Models to time: known geometries with random weights, or any model that loads.

Time to first token depends on shapes and dtypes, not on the weights, so a geometry can be timed without its
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
import typer

from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter, load_adapter
from blendrag.model.loading import automatic_dtype, load_tokens, resolve_device
from blendrag.store.tensor_bytes import DTYPES
from blendrag_lab.bench import options

#: Fields of a Qwen2 config, and their values by geometry.
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
GEOMETRIES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True, 32768),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True, 32768),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, False, 131072),
    "deep": (64, 128, 32, 8, 2, 3072, True, 32768),
    "tiny": (64, 160, 4, 4, 2, 3072, True, 32768),
}
#: The same of Qwen3.5, where three of four layers are linear, then: width of a head, key heads, value heads
#: and the widths of both in linear layers.
HYBRID_FIELDS = (
    *FIELDS, "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
HYBRIDS = {
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, 248320, True, 262144, 256, 16, 16, 128, 128),
    "tiny-hybrid": (64, 160, 4, 4, 2, 3072, True, 32768, 16, 2, 4, 8, 16),
}


@dataclass(frozen=True)
class TimedModel:
    geometry: options.Geometry = None
    model: Annotated[str | None, typer.Option(help="Hub id, directory, or demo.")] = None
    dtype: options.Dtype = None
    device: options.Device = None

    @cached_property
    def adapter(self) -> ModelAdapter:
        """Load the model. A geometry uses the demo model's tokenizer, because any ids will do."""
        dtype, device = self.dtype or "auto", self.device or "auto"
        if self.model is not None and self.geometry is None:
            return load_adapter(self.model, dtype, device)
        if self.model is not None or self.geometry is None:
            raise InvalidInputError("give either --geometry or --model")
        if dtype != "auto" and dtype not in DTYPES:
            raise InvalidInputError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        target = resolve_device(device)
        kind = automatic_dtype(torch.bfloat16, target) if dtype == "auto" else DTYPES[dtype]
        loaded = random_model(self.geometry, kind, target)
        return ModelAdapter(loaded, load_tokens("demo").tokenizer, model_id=self.geometry)


def config_of(geometry: str) -> dict[str, Any]:
    """Config values of a geometry; raises :class:`InvalidInputError` for an unknown name, and for a hybrid,
    whose layers differ from one another."""
    if geometry in HYBRIDS:
        raise InvalidInputError(
            f"geometry {geometry!r} has linear layers, which this bench does not measure; choose one of "
            f"{', '.join(GEOMETRIES)}"
        )
    if geometry not in GEOMETRIES:
        known = ", ".join((*GEOMETRIES, *HYBRIDS))
        raise InvalidInputError(f"geometry {geometry!r} is not one of {known}")
    return dict(zip(FIELDS, GEOMETRIES[geometry], strict=True))


@torch.inference_mode(False)  # as in load_adapter
def random_model(geometry: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A Qwen2 or Qwen3.5 model of that geometry with random weights and sdpa attention."""
    from transformers import AutoModelForCausalLM

    config = hybrid_config(geometry) if geometry in HYBRIDS else qwen2_config(geometry)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def qwen2_config(geometry: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        **config_of(geometry),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="sdpa",
    )


def hybrid_config(geometry: str) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        **dict(zip(HYBRID_FIELDS, HYBRIDS[geometry], strict=True)),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        attn_implementation="sdpa",
    )
