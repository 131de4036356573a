"""Try every causal LM of the installed transformers, tiny and random: blended, in mode full only, or broken?

Prints a line per model type and writes the page. A crash, or an answer in mode full that differs from
``generate``, is a failure. Configs are shrunk by the names of their fields; a type whose class they do not
suit, and one that fails in transformers itself, is not tried.

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
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import tiny
from blendrag.config import settings
from blendrag.engine import BlendEngine, Options
from blendrag.errors import BlendragError

State = Literal["blended", "full only", "not tried", "WRONG"]

PROMPT = "What did the company do? It built ships."
NEW_TOKENS = 8
LIMIT_S = 90
MAX_PARAMETERS = 60_000_000
#: Values of fields by their names, in any config that has them.
SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 640),
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "n_embd", "d_model", "n_inner", "ffn_dim", "embed_dim",
            "word_embed_proj_dim", "ffn_hidden_size", "lru_width", "conv_dim", "index_topk",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "n_layers", "n_heads",
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "mamba_num_heads",
            "linear_num_value_heads", "laurel_rank",
        ),
        4,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 4096),
    **dict.fromkeys(
        ("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "index_n_heads"), 2
    ),
    **dict.fromkeys(
        (
            "head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "mamba_head_dim",
            "mamba_d_head", "ssm_state_size", "mamba_d_state", "linear_key_head_dim",
            "linear_value_head_dim", "index_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups",
         "n_shared_experts", "num_shared_experts", "pad_token_id", "eos_token_id"),
        1,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size"), tiny.WINDOW),
    **dict.fromkeys(("bos_token_id", "num_kv_shared_layers"), 0),
    "mamba_n_heads": 8, "rotary_dim": 8, "mamba_d_ssm": 128,
}  # fmt: skip
_SHARING = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}  # fmt: skip
#: Further values, so that the layers that make a type special are there.
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**_SHARING, "intermediate_size": 64, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": _SHARING,
    "gemma4_unified_text": _SHARING,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}  # fmt: skip
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
    """Why it is not blended; of blended ones, the kinds of their layers."""


class _TooLong(BaseException):
    pass


def outcome_of(kind: str) -> Outcome:
    """Build the smallest model of that type and ask an engine what it can do with it."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT_S)
    try:
        return _judged(kind, *_built(kind))
    except _TooLong:
        return Outcome(kind, "not tried", f"took more than {LIMIT_S} s")
    except _Unsuited as exc:
        return Outcome(kind, "not tried", str(exc))
    finally:
        signal.alarm(0)


def _late(*_: object) -> None:
    raise _TooLong


class _Unsuited(Exception):
    """The small config does not suit the class, or transformers cannot run it."""


def _built(kind: str) -> tuple[Any, str]:
    """A model, and what it says with ``generate``."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = CONFIG_MAPPING[kind]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    try:
        fields = set(config().to_dict())
    except Exception:  # some configs cannot be made without arguments
        fields = set(inspect.signature(config.__init__).parameters)
    said = "no config"
    for dropped in DROPPED:
        try:
            small = {k: v for k, v in SMALL.items() if k in fields and k not in dropped}
            if "kv_lora_rank" in fields:  # MLA has as many keys as queries
                small["num_key_value_heads"] = SMALL["num_attention_heads"]
            small |= SPECIAL.get(kind, {})
            made = config(**small)
            with torch.device("meta"):
                count = sum(weight.numel() for weight in cls(made).parameters())
            if count > MAX_PARAMETERS:
                raise ValueError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = cls(made).float().eval()
            return model, _stock_answer(model)
        except Exception as exc:  # whatever configs and classes raise
            said = f"{type(exc).__name__}: {exc}"
    raise _Unsuited(said)


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
    given: dict[str, Any] = {"tokenizer": tiny.tokenizer(), "embedder": "minilm-offline"}
    try:
        with (
            tempfile.TemporaryDirectory() as store,
            BlendEngine(model, store, dtype="float32", **given) as engine,
        ):
            full = engine.generate(PROMPT, Options(mode="full", max_new_tokens=NEW_TOKENS))
            if _shown(full.text) != expected:
                return Outcome(
                    kind, "WRONG", f"{full.text!r} in mode full, {expected!r} by generate"
                )
            try:
                found = engine.verify()
            except BlendragError as exc:
                return Outcome(kind, "full only", str(exc))
            if not found.blendable:
                return Outcome(kind, "full only", found.reason)
            layers = Counter(found.layers)
            return Outcome(kind, "blended", ", ".join(f"{n} {name}" for name, n in layers.items()))
    except Exception as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        return Outcome(kind, "WRONG", f"{type(exc).__name__}: {exc} ({last.name}:{last.lineno})")


def page(found: Sequence[Outcome]) -> str:
    """The page in Markdown."""
    states = Counter(one.state for one in found)
    day = datetime.datetime.now(datetime.UTC).date()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}".partition("+")[
        0
    ]
    untried = ", ".join(one.kind for one in found if one.state == "not tried")
    lines = [
        "# Model families",
        "",
        "Every causal LM of transformers that a small config suits, with random weights in float32 on a CPU:",
        "is it blended, which [the probe and the gate decide](architecture.md#which-models), or does it",
        "answer in mode `full` only? `make sweep` writes this page.",
        "",
        f"{versions}, {day}: {states['blended']} model types are blended, {states['full only']} answer in",
        f"mode `full` only, {states['not tried']} could not be tried.",
        "",
        "## Blended",
        "",
        "| layers | model types |",
        "|---|---|",
        *(_row(why, kinds) for why, kinds in _by_reason(found, "blended")),
        "",
        "Layers that share the KV of another are not counted. Windows, experts and other parts are as the",
        "small config makes them.",
        "",
        "## Mode `full` only",
        "",
        "| why | model types |",
        "|---|---|",
        *(_row(why, kinds) for why, kinds in _by_reason(found, "full only")),
        "",
        "## Not tried",
        "",
        "The small config does not suit their classes, or they do not run with it in transformers itself:",
        f"{untried}.",
        "",
    ]
    return "\n".join(lines)


def _by_reason(found: Sequence[Outcome], state: State) -> Iterator[tuple[str, list[str]]]:
    some = sorted((one for one in found if one.state == state), key=_reason)
    groups = [(why, [one.kind for one in each]) for why, each in groupby(some, key=_reason)]
    return iter(sorted(groups, key=lambda group: -len(group[1])))


#: Names of classes in a refusal.
_CLASS = re.compile(r"\b[A-Z]\w*(?:For\w+|Model|Decoder)\b|(?<=layer 0 of )\w+")


def _reason(one: Outcome) -> str:
    """Without the names of its classes."""
    without = re.sub(r" \([A-Z]\w+\)", "", one.why.removesuffix("; use mode full"))
    return _CLASS.sub("the model", without)


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
        for kind in asked.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            found.append(outcome_of(kind))
            print(
                kind, found[-1].state, " ".join(found[-1].why.split())[:200], sep="\t", flush=True
            )
    if asked.page and not asked.kinds:
        asked.page.write_text(page(found))
    wrong = [one.kind for one in found if one.state == "WRONG"]
    print(Counter(one.state for one in found), "wrong:", ", ".join(wrong) or "none")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
