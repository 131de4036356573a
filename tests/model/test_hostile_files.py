"""Files of a model or an adapter that ask for too much, or for what is not theirs, are one sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers

import tiny
from blendrag.corpus.recorded_model import recorded_model
from blendrag.engine import BlendEngine, Options
from blendrag.errors import BlendragError, InvalidInputError, ModelLoadError
from blendrag.model.checked_files import check_model_files
from blendrag.model.loading import load_adapter, load_context_tokens, load_tokens
from blendrag.model.tokens import Tokens
from test_remote_code import change

Spoil = Callable[[Path], object]
"""Changes the files of a model's directory."""


def config(**fields: Any) -> Spoil:
    return lambda folder: change(folder / "config.json", **fields)


def generation(**fields: Any) -> Spoil:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(fields))


def tokenizer_config(**fields: Any) -> Spoil:
    return lambda folder: change(folder / "tokenizer_config.json", **fields)


def tokenizer(spoil: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoiled(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        spoil(content)
        file.write_text(json.dumps(content))

    return spoiled


def text(name: str, written: str) -> Spoil:
    return lambda folder: (folder / name).write_text(written)


def fifo(name: str) -> Spoil:
    def spoiled(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoiled


def sharded(shard: str) -> Spoil:
    """An index that says that all weights are in ``shard``; a copy of them lies outside of the directory."""

    def spoiled(folder: Path) -> None:
        weights = folder / "model.safetensors"
        index = {"weight_map": dict.fromkeys(load_file(weights), shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.move(weights, folder.parent / "outside.safetensors")

    return spoiled


def header(spoil: Callable[[dict[str, Any]], object]) -> Spoil:
    """A changed header of the weights; ``spoil`` may return the bytes of another."""

    def spoiled(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        content = json.loads(data[8 : 8 + size])
        made = spoil(content)
        written = made if isinstance(made, bytes) else json.dumps(content).encode()
        file.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + size :])

    return spoiled


def length(size: int) -> Spoil:
    def spoiled(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(struct.pack("<Q", size) + file.read_bytes()[8:])

    return spoiled


def each(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Other fields of every tensor in a header."""
    return lambda found: [v.update(fields) for k, v in found.items() if k != "__metadata__"]


DEEP = "[" * 100_000
WEIGHTS, INDEX = r"model\.safetensors is damaged: .*", r"model\.safetensors\.index\.json "
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "more layers than weights": (config(num_hidden_layers=5), r"config\.json .*weights have 4"),
    "very many layers": (config(num_hidden_layers=1001), r"config\.json sets num_hidden_layers"),
    "layers of a part": (config(vision_config={"num_layers": 10**7}), r"config\.json sets num_layers"),
    "labels": (config(num_labels=20_000), r"config\.json sets num_labels"),
    "a wide model": (config(hidden_size=10**9), "other shapes than config.json says"),
    "a vocabulary": (config(vocab_size=10**9), "other shapes than config.json says"),
    "code for attention": (config(attn_implementation="evil/kernel"), "set trust_remote_code"),
    "code for experts": (config(_experts_implementation="evil/kernel"), "set trust_remote_code"),
    "a large config": (config(x="y" * 2**22), r"config\.json cannot be read: .*larger than 4 MiB"),
    "a deep config": (text("config.json", DEEP), r"config\.json cannot be read: .*recursion"),
    "a config that waits": (fifo("config.json"), r"config\.json cannot be read: .*regular"),
    "a tokenizer that waits": (fifo("tokenizer.json"), r"tokenizer\.json cannot be read"),
    "an index": (sharded("../outside.safetensors"), INDEX + "names the weights '../outside"),
    "an index of a path": (sharded("/etc/passwd"), INDEX + "names the weights '/etc/passwd'"),
    "an index of a pickle": (sharded("evil.bin"), INDEX + r"names the weights 'evil\.bin'"),
    "an index of nothing": (sharded("a.safetensors"), INDEX + r"names .* which are missing"),
    "an index of itself": (text("model.safetensors.index.json", "{}"), INDEX + "has no weight_map"),
    "a deep index": (text("model.safetensors.index.json", DEEP), INDEX + "cannot be read"),
    "a header of 2^63": (length(2**63 - 1), WEIGHTS),
    "a header beyond the file": (length(10**8), WEIGHTS),
    "a deep header": (header(lambda found: b'{"a":' + b"[" * 100_000), WEIGHTS),
    "overlapping tensors": (header(each(data_offsets=[0, 4096])), WEIGHTS),
    "negative offsets": (header(each(data_offsets=[-4, 8])), WEIGHTS),
    "another dtype": (header(each(dtype="F16")), WEIGHTS),
    "a shape of 2^60": (header(each(shape=[2**30, 2**30])), WEIGHTS),
    "beams": (generation(num_beams=10**6), r"generation_config\.json sets num_beams"),
    "sequences": (generation(num_return_sequences=10**6), r"generation_config\.json sets num_ret"),
    "a length in words": (tokenizer_config(model_max_length="x"), "sets model_max_length to 'x'"),
    "extra tokens": (
        tokenizer_config(extra_special_tokens=["x"] * 100_001), r"tokenizer_config\.json adds 100001",
    ),
    "added tokens": (
        tokenizer(lambda t: t["added_tokens"].extend([{"single_word": False}] * 100_001)),
        r"tokenizer\.json adds 100004 tokens",
    ),
    "a token's id": (
        tokenizer(lambda t: t["model"]["vocab"].update(zzz=10**7)), "token of id 10000000, expected",
    ),
    "a text that doubles": (
        tokenizer(lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40})),
        "normalizer of the tokenizer makes texts",
    ),
    # transformers 5.17 copies the tokenizer, which fails before its ids are looked at
    "the largest id": (
        tokenizer(lambda t: t["model"]["vocab"].update(zzz=2**32 - 1)), "token of id|out of vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_model_that_asks_for_too_much_is_refused(
    spoil: Spoil, words: str, checkpoint: str
) -> None:
    load_context_tokens.cache_clear()
    spoil(Path(checkpoint))
    with tiny.refuses(words, ModelLoadError):
        load_adapter(checkpoint)


@pytest.mark.parametrize("load", [load_tokens, load_context_tokens])
def test_without_the_weights_too(load: Callable[[str], object], checkpoint: str) -> None:
    load_context_tokens.cache_clear()
    config(num_hidden_layers=1001)(Path(checkpoint))
    with tiny.refuses(r"config\.json sets num_hidden_layers", ModelLoadError):
        load(checkpoint)


def test_files_are_checked_once_until_one_of_them_changes(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(
        "blendrag.model.loading.check_model_files", lambda folder, _: checked.append(folder)
    )
    load_tokens(checkpoint)
    load_adapter(checkpoint)
    assert checked == [Path(checkpoint)]
    file = Path(checkpoint, "config.json")
    was, text = file.stat(), file.read_text(encoding="utf-8")
    file.write_text(text.replace("1", "2"), encoding="utf-8")
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    load_tokens(checkpoint)
    assert len(checked) == 2


def test_a_vocabulary_for_each_layer_is_no_count_of_layers(checkpoint: str) -> None:
    """Gemma 3n and 4 have it."""
    config(vocab_size_per_layer_input=262_144)(Path(checkpoint))
    check_model_files(Path(checkpoint))


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_without_advice_to_run_it(
    zipped: bool, checkpoint: str, tmp_path: Path
) -> None:
    marker = tmp_path / "was run"
    for folder, whole, part in (
        (Path(checkpoint), "model.safetensors", "pytorch_model.bin"),
        (adapter(tmp_path), "adapter_model.safetensors", "adapter_model.bin"),
    ):
        (folder / whole).rename(tmp_path / whole)
        torch.save(Evil(marker), folder / part, _use_new_zipfile_serialization=zipped)
        with tiny.refuses("a pickle that may run code; convert", ModelLoadError):
            load_adapter(checkpoint, lora=str(folder) if "adapter" in part else None)
        (tmp_path / whole).rename(folder / whole)
    assert not marker.exists()


def adapter(where: Path) -> Path:
    lora = where / "lora"
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny.llama(), settings).save_pretrained(lora)
    return lora


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 10**9}, "sets r to 1e.09, expected at most 32"),
        ({"rank_pattern": {"q_proj": 10**9}}, "sets q_proj to"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**9}, "sets num_virtual_tokens to"),
        ({"target_modules": "((((.*)*)*)*)*z"}, "holds the pattern .* a repetition of repetitions"),
        ({"exclude_modules": "(a+)+$"}, "holds the pattern"),
        ({"rank_pattern": {r"(\.\d+)+": 4}}, "holds the pattern"),
        ({"x": "y" * 2**20}, r"adapter_config\.json cannot be read: .*larger than 1 MiB"),
    ],
)
def test_an_adapter_that_asks_for_too_much_is_refused(
    fields: dict[str, Any], words: str, checkpoint: str, tmp_path: Path
) -> None:
    lora = adapter(tmp_path)
    change(lora / "adapter_config.json", **fields)
    with tiny.refuses(words, ModelLoadError):
        load_adapter(checkpoint, lora=str(lora))


def test_an_adapter_names_neither_code_nor_another_model(checkpoint: str, tmp_path: Path) -> None:
    lora = adapter(tmp_path)
    change(
        lora / "adapter_config.json",
        base_model_name_or_path="http://127.0.0.1:9/else",
        auto_mapping={"base_model_class": "system", "parent_library": "os"},
        target_modules=r".*\.(q|v)_proj",
    )
    assert load_adapter(checkpoint, lora=str(lora)).identity.adapters


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_ids": [[10**12]]},
        {"forced_eos_token_id": 10**12},
        {"eos_token_id": ["a"]},
        {"stop_strings": ["a"]},
        {"repetition_penalty": -1.0},
    ],
)
def test_a_generation_config_that_transformers_refuses_is_named(
    fields: dict[str, Any], checkpoint: str, tmp_path: Path
) -> None:
    generation(**fields)(Path(checkpoint))
    with (
        BlendEngine(checkpoint, tmp_path / "s", device="cpu") as engine,
        tiny.refuses(
            "refuses the generation config of .*; correct its generation_config.json", BlendragError
        ),
    ):
        engine.generate("hello", Options(mode="full", max_new_tokens=2))


@pytest.mark.parametrize("fields", [{"eos_token_id": 10**12}, {"max_length": 10**15}])
def test_a_generation_config_does_not_lengthen_answers(
    fields: dict[str, Any], checkpoint: str, tmp_path: Path
) -> None:
    generation(**fields, custom_generate="evil")(Path(checkpoint))
    folder = Path(checkpoint, "custom_generate")
    folder.mkdir()
    (folder / "generate.py").write_text(f"import os; os.mkdir({str(tmp_path / 'was run')!r})")
    with BlendEngine(checkpoint, tmp_path / "s", device="cpu") as engine:
        answer = engine.generate("hello", Options(mode="full", max_new_tokens=2))
    assert answer.metrics.new_tokens == 2
    assert not (tmp_path / "was run").exists()


def test_a_store_does_not_choose_an_adapter(checkpoint: str, tmp_path: Path) -> None:
    assert recorded_model(checkpoint, tmp_path / "s") == checkpoint
    for file in adapter(tmp_path).iterdir():
        shutil.copy(file, checkpoint)
    with tiny.refuses("an adapter of another model"):
        recorded_model(checkpoint, tmp_path / "s")


def test_a_text_on_which_a_tokenizer_gives_up_is_refused() -> None:
    made = tiny.tokenizer()
    backend = made.backend_tokenizer
    # as Llama 3's does for ten million spaces
    parts = [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), pre_tokenizers.ByteLevel()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokens = Tokens(made)
    for encode in (tokens.encode_text, tokens.encode_prompt):
        assert encode("xy")
        with tiny.refuses("the tokenizer gives up on a text of 40 characters", InvalidInputError):
            encode("x" * 40)
