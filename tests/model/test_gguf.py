"""Models in GGUF files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch

import tiny
from blendrag.config import absolute_model, settings
from blendrag.engine import Options
from blendrag.errors import ModelLoadError
from blendrag.model import load_adapter
from blendrag.model.gguf_files import is_gguf, unpacked_directory


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    changed = settings().model_copy(update={"cache": tmp_path / "cache"})
    monkeypatch.setattr("blendrag.model.gguf_files.settings", lambda: changed)
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


@pytest.fixture
def file(written: Path, tmp_path: Path, cache: Path) -> Path:
    return Path(shutil.copy2(written, tmp_path / "tiny.gguf"))


def write_gguf(path: Path, architecture: str, without: str = "nothing") -> Path:
    """The tiny Llama and its tokenizer, in float32, without the tensors of that name."""
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    known = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    unused = [f"<unused{i}>" for i in range(config.vocab_size - len(known))]
    writer.add_token_list(known + unused)
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        base, _, kind = name.rpartition(".")
        of_gguf = names.get_name(base)
        assert of_gguf is not None, name
        values = tensor.numpy()
        if base.endswith(
            ("q_proj", "k_proj")
        ):  # GGUF interleaves the halves that are rotated together
            heads = config.num_key_value_heads if "k_proj" in base else config.num_attention_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if of_gguf == without:
            continue
        writer.add_tensor(f"{of_gguf}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_is_unpacked_once_to_the_same_model(file, cache):
    adapter = load_adapter(str(file), "float32")
    expected = tiny.llama().to(torch.bfloat16).float().state_dict()
    for name, tensor in adapter.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    made = folder.stat().st_mtime_ns
    assert unpacked_directory(str(file)) == folder
    assert folder.stat().st_mtime_ns == made
    assert adapter.tokens.tokenizer("the town").input_ids == tiny.tokenizer()("the town").input_ids


def test_an_engine_blends_it(file, tmp_path):
    with tiny.engine(str(file), tmp_path / "s", tokenizer=None) as engine:
        engine.ingest([tiny.document(i) for i in range(2)])
        answer = engine.generate(tiny.prompt(engine, 0, 1), Options(max_new_tokens=2))
    assert answer.metrics.reused_tokens > 0


def test_a_changed_file_replaces_what_was_unpacked(file, cache):
    first = unpacked_directory(str(file))
    os.utime(file, ns=(1, 1))
    second = unpacked_directory(str(file))
    assert second != first
    assert [path for path in cache.iterdir() if path.is_dir()] == [second]


def test_what_a_killed_process_left_is_removed(written, tmp_path, cache, monkeypatch):
    """Also if the name of the file looks like a pattern."""
    file = Path(shutil.copy2(written, tmp_path / "tiny[1].gguf"))
    with monkeypatch.context() as patch:
        left = lambda **named: nullcontext(tempfile.mkdtemp(**named))  # noqa: E731
        patch.setattr(tempfile, "TemporaryDirectory", left)
        patch.setattr("blendrag.model.gguf_files._dequantise", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            unpacked_directory(str(file))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    folder = unpacked_directory(str(file))
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_its_name_is_absolute(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert absolute_model("tiny.gguf") == str(file)
    assert is_gguf("owner/models:tiny.gguf")
    assert absolute_model("owner/models:tiny.gguf") == "owner/models:tiny.gguf"


def failing(name: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_adapter(str(name))
    said = str(caught.value)
    assert tiny.one_sentence(said)
    return said


def test_a_truncated_file_says_to_download_it_again(file, cache):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "tiny.gguf is not a complete GGUF file" in failing(file)
    file.write_bytes(b"no GGUF at all")
    assert "download it again" in failing(file)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_an_unknown_architecture_is_refused(tmp_path, cache):
    other = write_gguf(tmp_path / "other.gguf", "unheard")
    assert "unheard" in failing(other)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_weights_that_are_not_in_the_file_are_not_made_up(tmp_path, cache):
    """As in one part of a split model."""
    part = write_gguf(tmp_path / "part.gguf", "llama", without="blk.2.attn_k")
    assert "lacks 1 weights, such as model.layers.2.self_attn.k_proj.weight" in failing(part)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_a_missing_file_is_named(tmp_path, cache):
    assert "there is no file" in failing(tmp_path / "missing.gguf")


def test_too_little_room_is_noticed_before_unpacking(file, cache, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    assert "make room or name another directory in BLENDRAG_CACHE" in failing(file)
    assert not any(path.is_dir() for path in cache.iterdir())
