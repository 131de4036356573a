"""MiniLM without sentence-transformers: the same vectors, for the models that it can compute only.

sentence-transformers is imported where it is compared: every worker reads this file.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.corpus.embedder import Embedder, packaged_minilm
from blendrag.corpus.embedder_files import ModelFiles
from blendrag.corpus.mean_embedder import MeanEmbedder

TEXTS = [
    "Which sport does Anna Bell enjoy?",
    "",
    "  She skates on the frozen lake, every morning of the winter.\n" * 20,
    "Ein Satz mit Umlauten: Größe, Übung. 滑冰。",
    "\tA short one ",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = packaged_minilm()
    assert found is not None
    return found


def test_vectors_are_those_of_sentence_transformers_bit_by_bit(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    ours, theirs = (
        MeanEmbedder(str(folder), 256, True),
        SentenceTransformer(str(folder), device="cpu"),
    )
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 384
    assert ours.max_seq_length == theirs.max_seq_length
    for texts in (TEXTS[:1], TEXTS):
        for name in ("encode_document", "encode_query"):
            how = {"batch_size": len(texts), "normalize_embeddings": True, "convert_to_numpy": True}
            ours_now = getattr(ours, name)(texts, **how)
            assert np.array_equal(ours_now, getattr(theirs, name)(texts, **how))
            assert ours_now.dtype == np.float32


def test_a_question_is_embedded_without_sentence_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing it takes seconds, most of them for packages that it imports."""
    for name in [*sys.modules, "sentence_transformers", "sklearn", "pandas"]:
        if name.partition(".")[0] in ("sentence_transformers", "sklearn", "pandas"):
            monkeypatch.setitem(sys.modules, name, None)  # its import is an error
    assert Embedder("minilm-offline").embed_query("Who?").shape == (384,)


def test_a_gpu_is_used_by_sentence_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert isinstance(Embedder(str(folder))._loaded(), SentenceTransformer)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("sentence_bert_config.json", {"query_length": 32}),
        ("sentence_bert_config.json", {"max_seq_length": None}),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}),
        (
            "1_Pooling/config.json",
            {"pooling_mode": ["mean", "cls"], "pooling_mode_mean_tokens": False},
        ),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}),
        ("config.json", {"architectures": ["MPNetModel"]}),
        ("config.json", {"dtype": "bfloat16"}),
    ],
)
def test_other_models_are_left_to_sentence_transformers(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.txt"))
    assert ModelFiles(str(copy), True, False).length_of_mean() == 256
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | changes))
    assert ModelFiles(str(copy), True, False).length_of_mean() is None
