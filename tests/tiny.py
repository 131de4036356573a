"""Tiny models from a config, a byte-level tokenizer with a chat template, and KV in memory.

Everything is random but seeded: no download, no training, milliseconds to build.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import transformers
from greenlet import getcurrent
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from blendrag.corpus.embedder import Embedder
from blendrag.corpus.embedding_turns import EmbeddingTurns
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import CorruptKVError, InvalidInputError
from blendrag.fusor import BlendRequest, Fusion, Fusor
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Blending, SelectionPolicy
from blendrag.model import ModelAdapter
from blendrag.model.continuation import Continuation, KVSource, State
from blendrag.serving.coroutine import Coroutine
from blendrag.serving.pending import Pending
from blendrag.store.identity import chunk_keys as all_keys
from blendrag.store.identity import learned_namespace
from blendrag.store.kv import ChunkKV
from blendrag.text.readers import Document

T = TypeVar("T")

WINDOW = 24
#: A prefix that no prompt of an engine begins with directly before a chunk, so that no chunk is exact.
BOS = "<|bos|>"
COMMON: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDES = {"sliding_window": WINDOW}
#: MLA: the cache holds a latent vector as K and the rotated part of the key as V.
LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
#: Gemma's inputs per layer, and two layers that attend to KV of the two before them.
PER_LAYER_INPUTS = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 640,
    **SLIDES,
}  # fmt: skip
#: Llama 4: two layers with chunked attention and two that see everything and have no positions.
RUNS = {
    "head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2, "attention_chunk_size": WINDOW,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32,
}  # fmt: skip
QWEN_IMAGES = {
    "image_token_id": 600, "video_token_id": 601, "vision_start_token_id": 602, "vision_end_token_id": 603,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6}

#: Families that must pass the gate: model and config class, and config fields besides COMMON.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SLIDES),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 16, **EXPERTS}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SLIDES),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16, **SLIDES}),
    "gemma3_text": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {"head_dim": 16, **SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", SLIDES),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layer_interval": 2}),
    "glm": ("GlmForCausalLM", "GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {"head_dim": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.5}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", SLIDES),
    "cohere": ("CohereForCausalLM", "CohereConfig", {}),
    "cohere2": (
        "Cohere2ForCausalLM", "Cohere2Config",
        {**SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **SLIDES},
    ),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**SLIDES, "sliding_window_pattern": 2}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {}),
    "afmoe": (
        "AfmoeForCausalLM", "AfmoeConfig",
        {**EXPERTS, "head_dim": 16, "num_dense_layers": 1, "global_attn_every_n_layers": 2, **SLIDES},
    ),
    "falcon": (
        "FalconForCausalLM", "FalconConfig",
        {"ffn_hidden_size": 64, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"initializer_range": 0.05}),
    "mpt": ("MptForCausalLM", "MptConfig", {}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM", "DeepseekV2Config", {**LATENTS, **ROUTED, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENTS, **ROUTED}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**LATENTS, **ROUTED}),
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENTS),
    "youtu": ("YoutuForCausalLM", "YoutuConfig", LATENTS),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
        {"head_dim": 16, "v_head_dim": 8, **ROUTED, **SLIDES},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM", "Gemma3nTextConfig",
        {
            "head_dim": 16, "laurel_rank": 4, "intermediate_size": 48,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5, **PER_LAYER_INPUTS,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {"head_dim": 16, "global_head_dim": 32, **PER_LAYER_INPUTS},
    ),
    "llama4_text": ("Llama4ForCausalLM", "Llama4TextConfig", RUNS),
    # they read images, too; changes are those of their text part
    "gemma3": (
        "Gemma3ForConditionalGeneration", "Gemma3Config",
        {
            "text_config": {
                "head_dim": 16, **SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2
            },
            "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 600,
            "boi_token_index": 601, "eoi_token_index": 602,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration", "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION},
            "image_token_index": 600,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
        {
            "text_config": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
            "vision_config": {**QWEN_VISION, "patch_size": 14}, **QWEN_IMAGES,
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration", "Llama4Config",
        {
            "text_config": RUNS,
            "vision_config": {
                **VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
            },
            "image_token_index": 600, "boi_token_index": 601, "eoi_token_index": 602,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig",
        {
            "text_config": {
                "head_dim": 16,
                "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
            },
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}, **QWEN_IMAGES,
        },
    ),
}  # fmt: skip
#: Families of FAMILIES that are loaded with the part that reads images.
READ_IMAGES = ("gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl")

#: Families whose layers are like those of another one.
ALIKE = {
    "olmo2", "olmo3", "granite", "glm", "glm4", "phi", "seed_oss", "ernie4_5", "cohere",
    "nemotron", "gemma3", "qwen2_5_vl", "deepseek_v3", "glm4_moe_lite", "youtu", "llama4",
}  # fmt: skip

#: Families whose KV cannot be reused.
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bart": (
        "BartForCausalLM", "BartConfig",
        {
            "d_model": 32, "decoder_layers": 4, "encoder_layers": 4, "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False,
        },
    ),
}  # fmt: skip

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 32}
#: Families with layers that keep a running state, among layers of attention or beside them.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {"head_dim": 16, **DELTA}),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {"head_dim": 16, **DELTA, **SHARED_EXPERTS},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {"head_dim": 16, **DELTA, **SHARED_EXPERTS},
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig",
        {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "lfm3": (
        "Lfm3ForCausalLM", "Lfm3Config",
        {
            "head_dim": 16, **SLIDES,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {
            "num_hidden_layers": 6, "layers_block_type": ["mamba", "attention", "mlp"] * 2, "head_dim": 8,
            "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {
            **MAMBA2, "num_local_experts": 4, "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope",
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", DELTA),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        {
            "lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"],
            "head_dim": 8, "num_key_value_heads": 1, "w_init_variance_scale": 1.0,
        },
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "jamba": (
        "JambaForCausalLM", "JambaConfig",
        {
            "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2,
            "attn_layer_offset": 1, "use_mamba_kernels": False,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM", "MiniMaxConfig",
        {
            "head_dim": 8, "num_local_experts": 4, "block_size": 16,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
    ),
    "inkling": (
        "InklingForCausalLM", "InklingTextConfig",
        {
            "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
            "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 32, "conv_kernel_size": 4,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2, "moe_intermediate_size": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "logits_mup_width_multiplier": 1.0,
        },
    ),
    "zaya": (
        "ZayaForCausalLM", "ZayaConfig",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
    ),
}  # fmt: skip
#: Those of them that get tokens behind a state one by one.
IN_STEPS = ("recurrent_gemma", "jamba")


def build(classes: tuple[str, str, dict[str, Any]], seed: int = 0, **changes: Any) -> Any:
    """A seeded random model of that class; skips where transformers has none."""
    torch.manual_seed(seed)
    name, config, extra = classes
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    given = {**COMMON, **extra, **changes}
    if "text_config" in extra:
        given = {**extra, "text_config": {**COMMON, **extra["text_config"], **changes}}
    made = getattr(transformers, config)(**given)
    return getattr(transformers, name)(made).eval()


def family(name: str, seed: int = 0, **changes: Any) -> Any:
    """A seeded random model of a family in FAMILIES, REFUSED or HYBRIDS."""
    classes = FAMILIES.get(name) or REFUSED.get(name) or HYBRIDS[name]
    return build(classes, seed, **changes)


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama whose weights are large enough that context matters to its logits."""
    return family("llama", seed, **{"initializer_range": 0.2, **changes})


def beam(layer_types: list[str], **changes: Any) -> Any:
    """A BEAM, whose layers of full attention scale queries by their positions."""
    extra = {**EXPERTS, **SLIDES, "head_dim": 16, "n_group": 1, "topk_group": 1}
    classes = ("BeamForCausalLM", "BeamConfig", extra)
    return build(classes, layer_types=layer_types, **changes)


def large_biases(size: float = 300.0, values: float = 0.0, **changes: Any) -> Any:
    """A Qwen2 whose first layer adds ``size`` to the key channels that rotate least, as trained ones do, and
    ``values`` to all value channels; a token contributes about 1."""
    given = {
        "initializer_range": 0.2, "head_dim": 32, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    model = family("qwen2", **{**given, **changes})
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        # heads, halves that rotate together, frequencies
        keys = attention.k_proj.bias.view(2, 2, -1)
        keys[..., -1] = torch.tensor([[size, -size], [-size, size / 2]])
        attention.v_proj.bias.fill_(values)
    return model


TEXT = """
The quick brown fox jumps over the lazy dog near the river bank, where it was built in the year
1874 by the company that later moved its works to the harbour. They kept the old name, and the
sister of the founder wrote about the town. Question: what did the company do? Answer: it built
ships. Paragraph number one of document two talks about topic three in the town of Place.
user system assistant Answer the question from the context.
"""

CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] "
    "+ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start|>assistant\n' }}{% endif %}"
)


@lru_cache(maxsize=1)
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|bos|>", "<|end|>", "<|start|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return backend.to_str()


def tokenizer() -> Any:
    """A byte-level BPE tokenizer with a chat template."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=["<|start|>"],
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def adapter(model: Any) -> ModelAdapter:
    return ModelAdapter(model, tokenizer())


_shared: dict[str, tuple[ModelAdapter, str]] = {}


def shared(name: str) -> ModelAdapter:
    """A family with its tokenizer, probed once for many engines; a new one if its weights changed."""
    made, namespace = _shared.get(name, (None, ""))
    if made is None or made.identity.namespace != namespace:
        made = adapter(family(name, initializer_range=0.2))
        _shared[name] = made, made.identity.namespace
    return made


def shared_llama() -> ModelAdapter:
    """:func:`llama`, as :func:`shared`."""
    return shared("llama")


def random_ids(n: int, seed: int = 0, low: int = 3, high: int = 590) -> torch.Tensor:
    """``[1, n]`` token ids."""
    return torch.randint(low, high, (1, n), generator=torch.Generator().manual_seed(seed))


class Held:
    """A reader over KV in memory that records the layers read and raises ``error`` in layer ``fails_at``."""

    tier = "memory"

    def __init__(
        self,
        kv: ChunkKV,
        key: str = "0" * 64,
        fails_at: int | None = None,
        error: type[Exception] = CorruptKVError,
    ) -> None:
        self.kv, self.key, self.tokens = kv, key, kv.tokens
        self.fails_at, self.error = fails_at, error
        self.read: list[int] = []
        self.closed = False

    @torch.inference_mode()
    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        if layer == self.fails_at:
            raise self.error("cannot be read")
        if self.kv.layers[layer].shape != out.shape:
            raise CorruptKVError("another shape than asked for")
        self.read.append(layer)
        out.copy_(self.kv.layers[layer])

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@torch.no_grad()
def kv_between(made: ModelAdapter, ids: Sequence[int], start: int, end: int) -> ChunkKV:
    """Exact KV of ``ids[start:end]`` after ``ids[:start]``, at positions start…"""
    cache = made.prefill_at(list(ids)[:end])
    layers = [
        shape.joined(layer.keys[0, :, start:], layer.values[0, :, start:])
        for shape, layer in zip(made.layout.layers, cache.layers, strict=True)
    ]
    return ChunkKV(made.layout, end - start, layers)


def noisy(kv: ChunkKV, size: float = 3.0, seed: int = 5) -> ChunkKV:
    """The same shapes, useless values."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        (x.float() + size * x.float().std() * torch.randn(x.shape, generator=generator)).to(x.dtype)
        for x in kv.layers
    ]
    return ChunkKV(kv.layout, kv.tokens, layers)


def span(
    made: ModelAdapter,
    ids: torch.Tensor,
    start: int,
    end: int,
    *,
    stored_at: int | None = None,
    noise: float = 0.0,
    exact: bool = False,
) -> LoadedSpan:
    """Exact KV of ``ids[start:end]``, its keys rotated as if computed at ``stored_at``."""
    kv = kv_between(made, ids[0].tolist(), start, end)
    stored_at = start if stored_at is None else stored_at
    if stored_at != start:
        tables = made.repositioner.tables(torch.full((end - start,), stored_at - start))
        for i, layer in enumerate(kv.layers):
            both = made.layout.layers[i].split(layer)
            made.repositioner.rotate_(both[made.repositioner.part(i)], i, tables)
    return LoadedSpan(start, end, Held(noisy(kv, noise) if noise else kv), stored_at, exact)


def fuse(
    fusor: Fusor,
    ids: torch.Tensor,
    spans: Sequence[LoadedSpan],
    policy: str | SelectionPolicy = "hkvd",
    ratio: float = 0.2,
    schedule: str = "geometric",
    all_rows: bool = False,
) -> tuple[torch.Tensor, BlendCache, Fusion]:
    """One blended prefill of ``ids`` over ``spans``."""
    asked = request(ids, spans, policy, ratio, schedule)
    return fusor.prefill(ids, asked, 0, 0 if all_rows else 1)


def request(
    ids: torch.Tensor,
    spans: Sequence[LoadedSpan],
    policy: str | SelectionPolicy = "hkvd",
    ratio: float = 0.2,
    schedule: str = "geometric",
) -> BlendRequest:
    return BlendRequest(ids.shape[1], tuple(spans), Blending.of(policy, schedule, ratio))


@torch.inference_mode()
def stock(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[1, N, V]`` of the unmodified model."""
    return model(input_ids=ids, use_cache=True).logits


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def forget_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hybrid models go on from states of zeros."""
    stock = Continuation.restore

    def forgetting(self: Continuation, state: State, kv: KVSource) -> Any:
        cache: Any = stock(self, state, kv)
        for layer in cache.layers:
            for held in getattr(layer, "recurrent_states", {}).values():
                held.zero_()
        return cache

    monkeypatch.setattr(Continuation, "restore", forgetting)


def one_sentence(text: str) -> bool:
    """Short, on one line, and ended by what to do or where."""
    return bool(text) and "\n" not in text and len(text) < 400


@contextmanager
def refuses(match: str, error: type[Exception] = InvalidInputError) -> Iterator[None]:
    """The context raises ``error`` in one sentence that matches."""
    with pytest.raises(error, match=match) as raised:
        yield
    assert one_sentence(str(raised.value)), str(raised.value)


class WordEmbedder:
    """Deterministic bag-of-words vectors, so that core tests load no embedding model."""

    name = "minilm-offline"
    dim = 64

    def embed(
        self,
        texts: Sequence[str],
        titles: Sequence[str] | None = None,
        *,
        check: Callable[[], None] = lambda: None,
        counted: Callable[[int], None] = lambda tokens: None,
    ) -> np.ndarray:
        counted(sum(len(text.split()) for text in texts))
        return self.embed_queries(texts, check=check)

    def embed_queries(
        self, texts: Sequence[str], *, check: Callable[[], None] = lambda: None
    ) -> np.ndarray:
        rows = [self.embed_query(text, check=check) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, self.dim), np.float32)

    def embed_query(self, text: str, *, check: Callable[[], None] = lambda: None) -> np.ndarray:
        check()
        vector = np.zeros(self.dim, np.float32)
        for word in text.lower().split():
            word = word.strip(".,?!:;")
            vector[sum(ord(c) * (i + 1) for i, c in enumerate(word)) % self.dim] += 1.0
        return vector / max(float(np.linalg.norm(vector)), 1e-6)


class HeldEmbedder(Embedder):
    """Embeds a batch whenever the test allows one; vectors of one number per batch."""

    def __init__(self, turns: EmbeddingTurns | None = None) -> None:
        super().__init__("minilm-offline", turns=turns)
        self.batches: list[list[str]] = []
        """Those that have begun."""
        self._allowed = threading.Semaphore(0)

    def allow(self, batches: int = 1) -> None:
        self._allowed.release(batches)

    def _load(self) -> Any:
        words: Any = tokenizer()

        def encode(texts: list[str], **given: Any) -> np.ndarray:
            self.batches.append(texts)
            assert self._allowed.acquire(timeout=60), "no batch was allowed"
            return np.ones((len(texts), 1), np.float32)

        return SimpleNamespace(
            tokenizer=words,
            max_seq_length=256,
            encode_document=encode,
            encode_query=encode,
            get_embedding_dimension=lambda: 1,
        )


def engine(model: Any, root: Any, **changes: Any) -> BlendEngine:
    """An engine over small chunks whose embedder counts words; ``model`` needs no tokenizer.

    It learns nothing, so that no test depends on the prompts of another.
    """
    given = {"chunk_tokens": 128, "max_new_tokens": 6, "learn": False}
    if not isinstance(model, ModelAdapter):
        given["tokenizer"] = tokenizer()
    given |= changes
    made = BlendEngine(model, root, **given)
    made.kv_namespace.corpus.__dict__["embedder"] = WordEmbedder()
    return made


def sentence(i: int) -> str:
    """A sentence of about thirty tokens that no other number has."""
    return (
        f"Paragraph {i} tells that the company of Place{i * 7} built {i * 31} ships near the town."
    )


def document(number: int, paragraphs: int = 8) -> Document:
    text = "\n\n".join(sentence(100 * number + i) for i in range(paragraphs))
    return Document(source=f"doc{number}.txt", title=f"doc{number}", text=text)


def chunk_texts(made: BlendEngine, number: int) -> list[str]:
    corpus = made.require_corpus()
    return [chunk.text for chunk in corpus.chunks_of(f"doc{number}.txt")]


#: Begins every :func:`prompt`.
LEAD = "Answer the question from the context.\n\n"


def prompt(made: BlendEngine, *numbers: int, ask: str = "What did the company do?") -> str:
    """All chunks of these documents and a question."""
    texts = [text for number in numbers for text in chunk_texts(made, number)]
    return LEAD + "\n\n".join(texts) + f"\n\nQuestion: {ask}"


def chunk_keys(made: BlendEngine, number: int) -> list[str]:
    """Keys of a document's chunks, in the namespace that the engine's store uses."""
    keys_of = partial(made.kv_namespace.keys_of, made.kv_namespace.validity.namespace)
    return [key for text in chunk_texts(made, number) for key in keys_of(text)]


def lose_kv(made: BlendEngine, *keys: str) -> None:
    """Delete stored KV; the corpus still knows the chunks."""
    for key in keys:
        assert made.store.delete(made.kv_namespace.validity.namespace, key)


def stored_kv(
    made: BlendEngine,
    ids: tuple[int, ...],
    prefix: tuple[int, ...] | None = None,
    scope: str | None = None,
    first: bool = False,
) -> ChunkKV | None:
    """The stored KV of ``ids`` after ``prefix``, by default the corpus's.

    ``scope``: of whose prompts they were learned, if they are not a document's. ``first``: what a prompt
    loads whose first chunk it is.
    """
    used, layout = made.kv_namespace, made.kv_namespace.layout
    namespace = used.validity.namespace
    namespace = namespace if scope is None else learned_namespace(namespace, scope)
    behind = used.corpus.prefix_ids if prefix is None else prefix
    key = all_keys(namespace, behind, ids, used.validity.recipe.is_exact)[-1 if first else 0]
    reader = used.store.open(namespace, key, layout, len(ids))
    if reader is None:
        return None
    layers = [
        torch.empty(layout.layer_shape(i, len(ids)), dtype=layout.layer_dtype(i))
        for i in range(len(layout.layers))
    ]
    for i, layer in enumerate(layers):
        reader.read_layer(i, layer)
    reader.close()
    return ChunkKV(layout, len(ids), layers)


def damage(made: BlendEngine, key: str) -> None:
    """Flip one bit in a late layer of a stored payload; earlier layers stay valid."""
    (file,) = (p for p in made.root.rglob(f"{key}*") if p.is_file())
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x40
    file.write_bytes(bytes(data))


def first_logits(made: BlendEngine, prompt: Any, options: Options) -> tuple[torch.Tensor, Answer]:
    """Logits ``[V]`` of the prompt's last token as the request computed them, and its answer."""
    ids = torch.tensor([made.segments(prompt, options).ids])
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = kwargs.get("input_ids")  # not the gate's prompt, nor one token of decoding
        if given is not None and torch.equal(given, ids):
            seen.append(out.logits[0, -1].clone())

    hook = made.adapter.model.register_forward_hook(look, with_kwargs=True)
    try:
        answer = made.generate(prompt, options)
    finally:
        hook.remove()
    return seen[0], answer


def is_background() -> bool:
    """Whether the caller, a hook for example, runs in what no request waits for. That may begin as soon as
    the last answer is there."""
    call = getcurrent()
    return isinstance(call, Coroutine) and call.pending.is_background


@contextmanager
def counted(target: Any, name: str, in_background: bool = True) -> Iterator[list[tuple]]:
    """Calls of ``target.name`` while the context lasts, by their arguments; without ``in_background``, those
    that a request waits for."""
    real, own = getattr(target, name), name in vars(target)
    calls: list[tuple] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        if in_background or not is_background():
            calls.append(args)
        return real(*args, **kwargs)

    setattr(target, name, spy)
    try:
        yield calls
    finally:
        if own:
            setattr(target, name, real)
        else:  # what is inherited shows again
            delattr(target, name)


def submitted(
    made: BlendEngine, call: Callable[[], T], count: int = 1
) -> tuple[Future[T], Sequence[Pending[Any]]]:
    """The result of ``call``, on a thread of its own, and the ``count`` requests that it submits. Use while
    the scheduler of ``made`` is held."""
    before = len(made.scheduler.waiting)
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    while len(made.scheduler.waiting) < before + count and not future.done():
        time.sleep(0.001)
    return future, made.scheduler.waiting[before:]
