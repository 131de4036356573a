"""Models in GGUF files."""

from __future__ import annotations

import json
import os
import shutil
import struct
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
from blendrag.config import absolute_model
from blendrag.engine import Options
from blendrag.errors import ModelLoadError
from blendrag.model import decode_weights as packing
from blendrag.model import load_adapter
from blendrag.model.gguf_files import is_gguf, unpacked_directory


@pytest.fixture
def cache(empty_cache: Path) -> Path:
    return empty_cache / "gguf"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


@pytest.fixture
def file(written: Path, tmp_path: Path, cache: Path) -> Path:
    return Path(shutil.copy2(written, tmp_path / "tiny.gguf"))


def write_gguf(
    path: Path, architecture: str, without: str = "nothing", blocks: str = "F32", **changes: int
) -> Path:
    """The tiny Llama and its tokenizer, its matrices in such blocks, without the tensors of that name."""
    kind = gguf.GGMLQuantizationType[blocks]
    model, tokenizer = tiny.llama(**changes), tiny.tokenizer()
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
        base, _, of = name.rpartition(".")
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
        if values.ndim == 2:
            writer.add_tensor(f"{of_gguf}.{of}", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{of_gguf}.{of}", values)
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


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("blocks", "kind"), [("Q4_0", "int4"), ("Q5_0", "blocks"), ("Q8_0", "blocks")]
)
def test_a_quantised_file_decodes_with_its_own_numbers(tmp_path, monkeypatch, blocks, kind):
    """Also with copies that were kept on disk."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(packing, "most_rows", lambda layers: packing.FastRows(4, True))
    file = write_gguf(tmp_path / "tiny.gguf", "llama", blocks=blocks, intermediate_size=64)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    of_file = tensors["blk.1.ffn_down.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(of_file.data, of_file.tensor_type))
    asked = Options(max_new_tokens=3)
    answers = []
    for i in range(2):
        with (
            tiny.engine(
                str(file),
                tmp_path / f"s{i}",
                tokenizer=None,
                dtype="bfloat16",
                decode_weights="int8",
            ) as engine,
            tiny.counted(packing, "pack") as packed,
        ):
            answers.append(engine.generate("what did the company do?", asked))
            weights = engine.kv_namespace.model.decode_weights.now()
        assert len(packed) == 1 - i
        kinds = {at: layer.kind.name for at, layer in weights.layers.items()}
        assert kinds.pop("lm_head") == "int4"
        assert {*kinds.values()} == {kind}
        layer = weights.layers["model.layers.1.mlp.down_proj"]
        found = layer.multiply(torch.eye(expected.shape[1], dtype=torch.bfloat16)).float().T
        assert (found - expected).norm() < 0.0035 * expected.norm()
    assert answers[0].metrics.decode_weights == "int8"
    assert answers[0].text == answers[1].text


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


def header(*fields: bytes, tensors: tuple[bytes, ...] = (), data: int = 0) -> bytes:
    counts = struct.pack("<IQQ", 3, len(tensors), len(fields))
    made = b"GGUF" + counts + b"".join(fields) + b"".join(tensors)
    return made + bytes(-len(made) % 32 + data)


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def count(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def array(kind: int, entries: int, held: bytes = b"") -> bytes:
    return text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, kind, entries) + held


def tensor(name: str, start: int, *shape: int, kind: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, start)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(array(0, 2**34)), "its lists have more than 4,194,304 entries"),
        (header(array(0, 2**63)), "its lists have more than"),
        (header(array(8, 4_000_000)), "it ends in its header"),
        (header(array(0, 4_000_000)), "it ends in its header"),
        (header(array(9, 1, array(9, 1))), "a value of the unknown type 9"),
        (header(text("a") + struct.pack("<IQ", 8, 2**60)), "it ends in its header"),
        (header(struct.pack("<Q", 2**60)), "it has a name of 1,152,921,504,606,846,976 bytes"),
        (header(count("llama.block_count", 2**30)), "llama.block_count is 1,073,741,824"),
        (header(count("llama.expert_count", 2**30)), "llama.expert_count is 1,073,741,824"),
        (header(count("general.alignment", 0)), "its alignment is 0"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
            "it claims 1,152,921,504,606,846,976 tensors",
        ),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "it has version 9"),
        (header(tensors=(tensor("a", 0, 2**31, 2**31),)), "tensor a ends at byte"),
        (header(tensors=(tensor("a", 2**63, 1),), data=9), "tensor a ends at byte"),
        (header(tensors=(tensor("a", 0, *[2] * 99),)), "tensor a has 99 dimensions"),
        (header(tensors=(tensor("a", 0, 8), tensor("b", 16, 8)), data=64), "tensor b overlaps"),
        (header(tensors=(tensor("a", 0, 8, kind=999),), data=64), "of the unknown type 999"),
    ],
)
def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path, cache, content, reason):
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    assert reason in failing(file)


def test_a_header_of_a_larger_model_than_the_file_is_refused(tmp_path, cache):
    """Before transformers makes up what is missing."""
    with mock.patch("gguf.GGUFWriter.add_feed_forward_length", larger_feed_forward):
        file = write_gguf(tmp_path / "large.gguf", "llama", without="blk.2.ffn_up")
    assert "describes a model of" in failing(file)


def larger_feed_forward(writer: gguf.GGUFWriter, length: int) -> None:
    writer.add_uint32("llama.feed_forward_length", 2**30)


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


def test_a_cache_directory_that_cannot_be_written_is_named(file, cache):
    cache.parent.write_text("a file")
    said = failing(file)
    assert f"cannot be unpacked in {cache}" in said
    assert "name another directory in BLENDRAG_CACHE" in said


def test_too_little_room_is_noticed_before_unpacking(file, cache, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    assert "make room or name another directory in BLENDRAG_CACHE" in failing(file)
    assert not any(path.is_dir() for path in cache.iterdir())
