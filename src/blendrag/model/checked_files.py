"""Files of a model and of a LoRA adapter, looked at before transformers or peft read them.

These libraries refuse damaged files, but believe what well-formed ones say: ten million layers are built one
by one, an index names weights anywhere on the disk, a rank is allocated whatever the weights are, and a
config may name code on the hub (``attn_implementation``), which only ``trust_remote_code`` allows.
"""

from __future__ import annotations

import json
import re
import re._parser as sre  # type: ignore[import-not-found]
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from blendrag.errors import ModelLoadError
from blendrag.store import regular_files

#: Largest size of each file, in MiB; real ones are a tenth of it.
SIZES_MIB = {
    "config.json": 4,
    "generation_config.json": 1,
    "tokenizer_config.json": 32,
    "tokenizer.json": 256,
    "special_tokens_map.json": 4,
    "added_tokens.json": 4,
    "chat_template.jinja": 1,
    "model.safetensors.index.json": 64,
    "pytorch_model.bin.index.json": 64,
    "adapter_config.json": 1,
}
#: Most of what a config counts and what is built one by one, by a word of the field's name.
_COUNTS = {"layer": 1000, "layers": 1000, "experts": 20_000, "heads": 10_000, "labels": 10_000}
#: Most tokens that are added to a vocabulary.
MAX_ADDED_TOKENS = 100_000
#: Most sequences that a generation config decodes at once.
MAX_SEQUENCES = 64


def check_model_files(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise :class:`ModelLoadError`, in a sentence that names the file, for what must not be loaded."""
    for name, content in _contents(folder, SIZES_MIB.keys() - {"adapter_config.json"}):
        if name.endswith(".index.json"):
            _check_index(folder / name, content)
        elif name == "config.json":
            _check_config(folder / name, content, trust_remote_code)
        elif name == "generation_config.json":
            for field in ("num_beams", "num_return_sequences"):
                _check_most(folder / name, field, content.get(field), MAX_SEQUENCES)
        elif name == "tokenizer_config.json":
            _check_tokenizer_config(folder / name, content)
    _check_added_tokens(folder / "tokenizer.json")


def check_adapter_files(folder: Path) -> None:
    """Raise :class:`ModelLoadError` for a LoRA adapter whose config is no match for its weights."""
    file = folder / "adapter_config.json"
    for _, content in _contents(folder, {file.name}):
        patterns = [content.get(name) for name in ("target_modules", "exclude_modules")]
        for name in ("rank_pattern", "alpha_pattern"):
            patterns += content.get(name) or {}
        for pattern in patterns:
            if isinstance(pattern, str) and _repeats_repeats(pattern):
                raise ModelLoadError(
                    f"{file} holds the pattern {pattern!r:.80}, a repetition of repetitions, which may never "
                    "end; list the names of the modules"
                )
        largest = _largest_size(folder / "adapter_model.safetensors")
        ranks = {"r": content.get("r"), **(content.get("rank_pattern") or {})}
        for name in ("num_virtual_tokens", "token_dim", "encoder_hidden_size"):
            ranks[name] = content.get(name)
        for name, value in ranks.items():
            _check_most(
                file, name, value, largest, " (the largest size of a tensor of the adapter)"
            )


def _contents(folder: Path, names: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects among the files ``names`` that exist."""
    for name in sorted(names):
        file = folder / name
        if not file.exists():
            continue
        try:
            # those that are not JSON objects are only as large as they may be
            data = regular_files.read_bytes(file, SIZES_MIB[name] * regular_files.MIB, follow=True)
            if name in ("tokenizer.json", "chat_template.jinja"):
                continue
            content = json.loads(data)
        except (OSError, ValueError, RecursionError) as exc:
            raise ModelLoadError(
                f"{file} cannot be read: {str(exc)[:120]}; download the model again"
            ) from exc
        if not isinstance(content, dict):
            raise ModelLoadError(
                f"{file} is a {type(content).__name__}, expected a JSON object; download the model again"
            )
        yield name, content


def _check_config(file: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    waiting: list[Any] = [config]
    while waiting:
        content = waiting.pop()
        if isinstance(content, list):
            waiting += content
            continue
        for field, value in content.items() if isinstance(content, dict) else ():
            if isinstance(value, dict | list):
                waiting.append(value)
            words = field.split("_")
            # Gemma's vocab_size_per_layer_input counts tokens
            for word in words if "size" not in words else ():
                if word in _COUNTS:
                    _check_most(file, field, value, _COUNTS[word])
            if field.endswith("_implementation") and not trust_remote_code and "/" in str(value):
                raise ModelLoadError(
                    f"{file} sets {field} to {str(value)!r:.80}, code that is not the model's own; remove "
                    "it, or, if you trust that code, set trust_remote_code"
                )
    _check_layers(file, config)


def _check_layers(file: Path, config: Mapping[str, Any]) -> None:
    """Without this, layers that the weights lack are made up, however much memory that takes."""
    layers = config.get("num_hidden_layers")
    found = {int(each[1]) for name in _weights_of(file.parent) for each in _NUMBER.finditer(name)}
    if isinstance(layers, int) and found and layers > max(found) + 1:
        raise ModelLoadError(
            f"{file} sets num_hidden_layers to {layers}, but the weights have {max(found) + 1} layers; "
            "download the model again"
        )


_NUMBER = re.compile(r"(?<=\.)(\d{1,9})(?=\.)")


def _weights_of(folder: Path) -> list[str]:
    """Names of the weights, if they are in safetensors."""
    for _, content in _contents(folder, {"model.safetensors.index.json"}):
        weights = content.get("weight_map")
        return list(weights) if isinstance(weights, dict) else []
    return list(_shapes(folder / "model.safetensors"))


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a file, by name; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        raise ModelLoadError(
            f"{file} is damaged: {str(exc)[:120]}; download the model again"
        ) from exc


def _largest_size(file: Path) -> int:
    """The largest size of a tensor in ``file``; 10,000 if there is none."""
    sizes = [size for shape in _shapes(file).values() for size in shape]
    return max(sizes, default=10_000)


def _check_index(file: Path, index: Mapping[str, Any]) -> None:
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        raise ModelLoadError(f"{file} has no weight_map; download the model again")
    ending = (".safetensors",) if "safetensors" in file.name else (".bin",)
    for shard in set(map(str, shards.values())):
        if set(shard) & set("/\\") or not shard.endswith(ending):
            raise ModelLoadError(
                f"{file} names the weights {shard!r:.100}, expected a file *{ending[0]} beside it; download "
                "the model again"
            )
        if not (file.parent / shard).exists():
            raise ModelLoadError(
                f"{file} names the weights {shard!r:.100}, which are missing; download the model again"
            )


def _check_tokenizer_config(file: Path, config: Mapping[str, Any]) -> None:
    longest = config.get("model_max_length")
    if not isinstance(longest, int | float | None):
        raise ModelLoadError(
            f"{file} sets model_max_length to {longest!r:.60}, expected a number; remove it"
        )
    for field in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"):
        _check_added(file, len(config.get(field) or ()))


def _check_added_tokens(file: Path) -> None:
    if file.is_file():  # every added token has this field; parsing takes longer than counting
        _check_added(file, file.read_bytes().count(b'"single_word"'))


def _check_added(file: Path, count: int) -> None:
    if count > MAX_ADDED_TOKENS:
        raise ModelLoadError(
            f"{file} adds {count} tokens, expected at most {MAX_ADDED_TOKENS}; use another model"
        )


def _check_most(file: Path, field: str, value: Any, most: int, why: str = "") -> None:
    if isinstance(value, int) and value > most:
        raise ModelLoadError(
            f"{file} sets {field:.60} to {value:.3g}, expected at most {most}{why}; download the model again"
        )


def _repeats_repeats(pattern: str) -> bool:
    """Whether an unbounded repetition contains another, so that a match may take exponential time."""
    try:
        parsed = sre.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False  # peft says what is wrong with it
    waiting: list[tuple[Any, bool]] = [(parsed, False)]
    while waiting:
        part, inside = waiting.pop()
        if isinstance(part, sre.SubPattern):
            waiting += [(each, inside) for each in part.data]
        elif isinstance(part, tuple) and part and part[0] in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            endless = part[1][1] == sre.MAXREPEAT
            if endless and inside:
                return True
            waiting.append((part[1][2], inside or endless))
        elif isinstance(part, tuple | list):
            waiting += [(each, inside) for each in part]
    return False
