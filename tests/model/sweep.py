"""Try every LM of the installed transformers, tiny and random: blended, in mode full only, or broken?

Prints a line per model type and writes the page. A crash, an answer in mode full that differs from
``generate``, and one in mode prefix that differs from mode full are failures. Configs are shrunk by the names
of their fields, with two layers of each kind that the default has; a type that fails in transformers itself
is not tried.

    make sweep MODELS="qwen3 gemma4_text"
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import tiny
from blendrag.config import settings
from blendrag.engine import BlendEngine, Options
from blendrag.errors import BlendragError, UnsupportedModelError
from blendrag.fusor.gate import verify
from blendrag.model.structure import DecoderStack
from blendrag.model.windows import LAYER_TYPES
from blendrag.wording import condensed

State = Literal["blended", "prefix", "full only", "not tried", "WRONG"]

#: Those that read images or hear are asked for text.
CLASSES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
PROMPT = "What did the company do? It built ships."
NEW_TOKENS = 8
LIMIT_S = 90
MAX_PARAMETERS = 60_000_000
#: Values of fields by their names, in any config that has them.
SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_words"), 640),
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "n_embd", "d_model", "n_inner", "ffn_dim", "embed_dim",
            "emb_dim", "word_embed_proj_dim", "ffn_hidden_size", "lru_width", "conv_dim", "index_topk",
            "image_size", "out_hidden_size", "vision_output_dim", "projector_input_dim",
            "projector_output_dim", "projection_dim", "decoder_ffn_dim", "encoder_ffn_dim",
            "expert_ffn_hidden_size", "intermediate_size_mlp", "hidden_size_global",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "n_layers", "n_heads",
            "num_layers", "num_heads", "num_experts", "num_local_experts", "n_routed_experts",
            "moe_num_experts", "mamba_num_heads", "n_mamba_heads", "linear_num_value_heads",
            "linear_num_heads", "laurel_rank", "depth",
            "decoder_layers", "encoder_layers", "decoder_attention_heads", "encoder_attention_heads",
            "num_decoder_layers", "num_encoder_layers", "num_decoder_attention_heads",
            "num_encoder_attention_heads", "mamba_dt_rank", "time_step_rank",
        ),
        4,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"), 4096
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "index_n_heads",
            # half of the layers are of one kind, half of the other
            "max_window_layers", "first_k_dense_replace", "num_dense_layers", "sliding_window_pattern",
            "global_attn_every_n_layers", "decoder_sparse_step", "no_rope_layer_interval",
            "moe_layer_start_index", "interleave_moe_layer_step", "moe_topk", "moe_k", "layer_group_size",
            "num_experts_per_token",
        ),
        2,
    ),
    "moe_layer_end_index": 3,
    "use_sliding_window": True,
    **dict.fromkeys(
        (
            "head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "mamba_head_dim",
            "mamba_d_head", "ssm_state_size", "mamba_d_state", "linear_key_head_dim",
            "linear_value_head_dim", "linear_head_dim", "index_head_dim", "patch_size", "state_size",
            "chunk_size", "attention_head_size",
        ),
        16,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "adapter_size"), 32
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "n_groups", "mamba_ngroups",
         "n_shared_experts", "num_shared_experts", "pad_token_id", "eos_token_id"),
        1,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), tiny.WINDOW),
    "bos_token_id": 0, "num_kv_shared_layers": 2, "mamba_n_heads": 8, "rotary_dim": 8, "mamba_d_ssm": 128,
}  # fmt: skip
#: Any token that no prompt has.
IMAGE_TOKEN = 639
ROPE = {"rope_type": "default", "rope_theta": 1e4}
#: Further values, so that the layers that make a type special are there.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 640, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_top_k": 2},
    },
    "dots3_note_text": {"per_layer_config": {}},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    # else logits are so small that the gate sees no wrong ones
    **{kind: {"logits_mup_width_multiplier": 1.0} for kind in ("inkling_text", "inkling2_text")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"head_dim": 32},
    **{
        f"{kind}_text": {"rope_parameters": {**ROPE, "mrope_section": sections}, "head_dim": 16}
        for sections, kinds in (
            ([1, 1, 2], "glm4v_moe"),
            (
                [2, 3, 3],
                "glm4v glm_ocr qwen2_vl qwen2_5_vl qwen3_vl qwen2_5_omni",
            ),
        )
        for kind in kinds.split()
    },
    **{  # transformers' own cache has their sliding window, and their masks have none
        f"{kind}_text": {
            "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]},
            "sliding_window": None,
        }
        for kind in ("qwen3_vl_moe", "qwen3_omni_moe")
    },
    **{
        f"{kind}_thinker": {
            f"{mark}_token_id": IMAGE_TOKEN for mark in ("vision_start", "audio_start")
        }
        for kind in ("qwen2_5_omni", "qwen3_omni_moe")
    },
    "chameleon": {
        "vocabulary_map": {
            "<image>": 600,
            **{f"IMGIMG{c}BA1Z": 601 + i for i, c in enumerate("ABCDE")},
        }
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "mllama_text_model": {"cross_attention_layers": [1, 3]},
    "prophetnet": {"max_position_embeddings": 512},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
}
_ALONE = "it does not answer alone: it drafts tokens for another model"
_ENCODER = "an encoder reads the prompt, and the model does not continue it"
_IMAGE = "it answers only if it gets an image"
_THINKER = "transformers has no forward of it as a whole; its thinker is a type of its own"
_TIMM = "its vision part needs the package timm"
_SOUND = "its tokens are sound, several at a time"
#: Why types are not tried.
UNTRIED = {
    **dict.fromkeys(
        ("evolla", "florence2", "pix2struct", "t5gemma2", "udop", "vision-encoder-decoder"),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "blip",
            "blip-2",
            "idefics",
            "instructblip",
            "instructblipvideo",
            "kosmos-2",
            "pi0",
            "pp_formulanet",
        ),
        _IMAGE,
    ),
    **dict.fromkeys(("fast_vlm", "perception_lm"), _TIMM),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), _THINKER),
    "gemma3n": "its vision part needs the package timm; gemma3n_text is its text part",
    "gemma4_assistant": _ALONE,
    "gemma4_unified_assistant": _ALONE,
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
}
#: Fields that do not suit some classes: left out one group after another until a forward works.
DROPPED = (
    (), ("head_dim",), ("sliding_window",), ("head_dim", "sliding_window"), ("num_key_value_heads",),
    ("num_key_value_heads", "head_dim"), ("num_experts_per_tok",),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a model type."""

    kind: str
    state: State
    why: str = ""
    """Why it is not blended; of blended ones, the parts of their layers."""
    why_not_in_bf16: str = ""
    """Why a type that is blended in float32 is not in bfloat16."""


class _TooLong(BaseException):
    pass


def outcome_of(kind: str) -> Outcome:
    """Build the smallest model of that type and ask an engine what it can do with it."""
    if kind in UNTRIED:
        return Outcome(kind, "not tried", UNTRIED[kind])
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT_S)
    try:
        return _judged(kind, *_built(kind))
    except _TooLong:
        return Outcome(kind, "not tried", f"took more than {LIMIT_S} s")
    except _Unsuited as exc:
        return Outcome(kind, "not tried", f"transformers itself fails: {condensed(str(exc))}")
    finally:
        signal.alarm(0)


def _late(*_: object) -> None:
    raise _TooLong


class _Unsuited(Exception):
    """The small config does not suit the class, or transformers cannot run it."""


def _built(kind: str) -> tuple[Any, str]:
    """A model, and what it says with ``generate``."""
    names = CLASSES[kind]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config = cls.config_class
    said = ""
    for dropped in DROPPED:
        try:
            made = config(**_small(config, dropped) | SPECIAL.get(config.model_type, {}))
            with torch.device("meta"):
                count = sum(weight.numel() for weight in cls(made).parameters())
            if count > MAX_PARAMETERS:
                raise ValueError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = cls(made).float().eval()
            return model, _stock_answer(model)
        except Exception as exc:  # whatever configs and classes raise
            said = said or f"{type(exc).__name__}: {exc}"
    raise _Unsuited(said)


def _small(config: Any, dropped: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a config class, with two layers or more of each kind that its default has."""
    try:
        default = config().to_dict()
    except Exception:  # some configs cannot be made without arguments
        default = dict.fromkeys(inspect.signature(config.__init__).parameters)
    small = {k: v for k, v in SMALL.items() if k in default and k not in dropped}
    small |= {
        k: IMAGE_TOKEN for k, v in default.items()
        if k.endswith(("_token_id", "_token_index")) and isinstance(v, int) and k not in small
    }  # fmt: skip
    if "kv_lora_rank" in default:  # MLA has as many keys as queries
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    mixed = {
        name: list(dict.fromkeys(value))
        for name, value in default.items()
        if isinstance(value, list) and len(value) == default.get("num_hidden_layers")
        and (1 < len(set(value)) < 4) and all(isinstance(one, str) or one in (0, 1) for one in value)
    }  # fmt: skip
    layers = max(
        4, *(2 * len(kinds) for kinds in mixed.values()), 6 * ("num_kv_shared_layers" in small)
    )
    if layers > 4:
        small["num_hidden_layers"] = layers
    for number, (name, kinds) in enumerate(sorted(mixed.items())):  # every combination of two
        small[name] = [kinds[i // (number + 1) % len(kinds)] for i in range(layers)]
    for name, part in (config.sub_configs or {}).items():
        if isinstance(default.get(name), dict):
            part = CONFIG_MAPPING[default[name]["model_type"]] if part is AutoConfig else part
            fields = _small(
                part, dropped if "text" in name else ("head_dim", "num_key_value_heads")
            )
            special = SPECIAL.get(part.model_type, {})
            small[name] = {**fields, "model_type": part.model_type, **special}
    return small


def _stock_answer(model: Any) -> str:
    tokenizer = tiny.tokenizer()
    asked = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=1,
        )  # fmt: skip
    return _shown(tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True))


def _shown(text: str) -> str:
    return text.rstrip("\ufffd").strip()


def _judged(kind: str, model: Any, expected: str) -> Outcome:
    try:
        with (
            tempfile.TemporaryDirectory() as store,
            tiny.engine(model, store, dtype="float32", max_new_tokens=NEW_TOKENS) as engine,
        ):
            full = _shown(engine.generate(PROMPT, Options(mode="full")).text)
            if full != expected:
                return Outcome(kind, "WRONG", f"{full!r} in mode full, {expected!r} by generate")
            found = engine.verify()
            if not found.blendable and not tiny.one_sentence(found.reason):
                return Outcome(kind, "WRONG", f"not one sentence: {found.reason!r}")
            wrong = _wrong_answers(engine, found.blendable)
            if wrong:
                return Outcome(kind, "WRONG", wrong)
            if not found.blendable:
                goes_on = engine.adapter.continuation is not None
                return Outcome(kind, "prefix" if goes_on else "full only", found.reason)
            parts = _parts(engine.adapter.stack, found.layers)
        in_bf16 = verify(tiny.adapter(model.to(torch.bfloat16)))
        return Outcome(kind, "blended", parts, "" if in_bf16.blendable else in_bf16.reason)
    except Exception as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        return Outcome(kind, "WRONG", f"{type(exc).__name__}: {exc} ({last.name}:{last.lineno})")


def _wrong_answers(engine: BlendEngine, is_blendable: bool) -> str:
    """What a question about a document gets in each mode, if that is wrong: an error, a refusal that is no
    sentence or of a model that is blended, or in an exact mode another answer than in mode full."""
    answers = {}
    for mode in ("full", "prefix", "blend"):
        try:
            if mode == "full":
                with suppress(UnsupportedModelError):  # the texts are stored, for mode full
                    engine.ingest([tiny.document(0, paragraphs=3)])
            answers[mode] = engine.generate("What did the company do?", Options(mode=mode)).text
        except BlendragError as exc:
            if is_blendable or mode == "full" or not tiny.one_sentence(str(exc)):
                return f"mode {mode}: {exc}"
    if answers.get("prefix", answers["full"]) != answers["full"]:
        return f"{answers['prefix']!r} in mode prefix, {answers['full']!r} in mode full"
    return ""


def _parts(stack: DecoderStack, keys: Sequence[str]) -> str:
    """The parts that the layers of a blended model are made of, as cells of the page's table."""
    experts = [
        any(
            "Expert" in type(part).__name__ or name == "experts"
            for name, part in layer.named_modules()
        )
        for layer in stack.layers
    ]
    window = getattr(stack.config, "sliding_window", None)
    default = "sliding" if window else "full"
    types = getattr(stack.config, "layer_types", None) or [default]
    attention = [" and ".join(sorted({kind.removesuffix("_attention") for kind in types}))]
    is_hybrid = not {*types} <= {*LAYER_TYPES}
    shares = ["some layers share KV"] * (len(keys) < len(stack.layers) and not is_hybrid)
    cells = (
        " and ".join(sorted(set(keys), reverse=True)),
        ", ".join(attention + shares),
        _mix("dense", "experts", experts),
    )
    return " | ".join(cells)


def _mix(no: str, yes: str, values: Sequence[bool]) -> str:
    return " and ".join([no] * (not all(values)) + [yes] * any(values))


def page(found: Sequence[Outcome]) -> str:
    """The page in Markdown."""
    states = Counter(one.state for one in found)
    day = datetime.datetime.now(datetime.UTC).date()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}".partition("+")[
        0
    ]
    rounded = ", ".join(one.kind for one in found if one.why_not_in_bf16)
    lines = [
        "# Model families",
        "",
        "Every LM of transformers, also those with parts that see or hear, with random weights in float32 on",
        "a CPU: is it blended, which [the probe and the gate decide](architecture.md#which-models)? Configs",
        "are small and have two layers or more of each kind that the default has. All these models answer in",
        "mode `full` as transformers does; where KV cannot be reused, other modes say why in one sentence.",
        "Layers whose keys are a decay, a matrix or a convolution keep a running state: chunks of these",
        "[hybrid models](hybrids.md) are reused whole. `make sweep` writes this page.",
        "",
        f"{versions}, {day}: {states['blended']} model types are blended, {states['prefix']} more",
        "reuse system prompts and conversations exactly (mode `prefix`),",
        f"{states['full only']} answer in mode `full` only, and {states['not tried']} could not be tried.",
        "",
        "## Blended",
        "",
        "| keys | attention | feed-forward | model types |",
        "|---|---|---|---|",
        *(f"| {why} | {', '.join(kinds)} |" for why, kinds in _by_reason(found, "blended")),
        "",
        f"In bfloat16 all of them are blended{f' but {rounded}' if rounded else ', too'}.",
        "",
        "## Mode `prefix`",
        "",
        "| why not blended | model types |",
        "|---|---|",
        *(_row(why, kinds) for why, kinds in _by_reason(found, "prefix")),
        "",
        "## Mode `full` only",
        "",
        "| why | model types |",
        "|---|---|",
        *(_row(why, kinds) for why, kinds in _by_reason(found, "full only")),
        "",
        "## Not tried",
        "",
        "| why | model types |",
        "|---|---|",
        *(_row(why, kinds) for why, kinds in _by_reason(found, "not tried")),
        "",
    ]
    return "\n".join(lines)


def _by_reason(found: Sequence[Outcome], state: State) -> Iterator[tuple[str, list[str]]]:
    some = sorted((one for one in found if one.state == state), key=_reason)
    groups = [(why, [one.kind for one in each]) for why, each in groupby(some, key=_reason)]
    return iter(sorted(groups, key=lambda group: -len(group[1])))


#: Names of classes in a refusal, and which of several layers or layer types it names.
_CLASS = re.compile(r"\b\w+(?:For\w+|Model|Decoder|LMHead\w*)\b")


def _reason(one: Outcome) -> str:
    """Without what differs from type to type."""
    if one.why.startswith("transformers itself fails"):
        return "the small config does not suit the class, or transformers itself fails"
    why = re.sub(r" \(\w+\)", "", one.why.partition("; use mode full")[0])
    return re.sub(r"layer \d+ of the model", "a layer of the model", _CLASS.sub("the model", why))


def _row(why: str, kinds: list[str]) -> str:
    return f"| {why.replace('|', chr(92) + '|')} | {', '.join(kinds)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="all, if none is named")
    parser.add_argument("--page", type=Path, help="where to write the page, if all are tried")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found = []
    with tempfile.TemporaryDirectory() as cache:  # no verdicts of earlier runs
        os.environ["BLENDRAG_CACHE"] = cache
        settings.cache_clear()
        for kind in asked.kinds or sorted(CLASSES):
            found.append(outcome_of(kind))
            print(
                kind,
                found[-1].state,
                " ".join(found[-1].why.split())[:200],
                found[-1].why_not_in_bf16,
                sep="\t",
                flush=True,
            )
    if asked.page and not asked.kinds:
        asked.page.write_text(page(found))
    wrong = [one.kind for one in found if one.state == "WRONG"]
    print(Counter(one.state for one in found), "wrong:", ", ".join(wrong) or "none")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
