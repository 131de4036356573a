"""Vectors cover the whole chunk, after its title, by a model that is found offline."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny
from blendrag.corpus.embedder import (
    BATCH_WINDOWS,
    MAX_QUESTION_WINDOWS,
    MINILM,
    PIECE_CHARS,
    Embedder,
    batches,
    grouped,
    packaged_minilm,
    pieces,
    same_embedder,
)
from blendrag.corpus.embedder_files import ModelFiles
from blendrag.errors import InvalidInputError, ModelLoadError, RequestCancelled

FILLER = (
    "The keeper wrote about the weather, the gulls and the state of the stairs in the log book. "
    "On most days there was little to report, and the lamp was trimmed, lit and put out again. "
)
PASSWORD = "Where is the password of the Zanzibar vault written?"


def long_chunk(fact: str = "") -> str:
    """About 512 tokens, the fact last."""
    return ("".join(f"Entry {i}, on wool prices: {FILLER}" for i in range(10)) + fact).strip()


def test_vectors_are_unit_length_float32(embedder: Embedder) -> None:
    vectors = embedder.embed(["one", "two words", long_chunk(), ""])
    assert vectors.shape == (4, embedder.dim) == (4, 384)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.embed([]).shape == (0, 384)
    assert embedder.embed_query("one").shape == (384,)


@pytest.mark.slow
def test_a_fact_in_the_tail_of_a_chunk_counts(embedder: Embedder) -> None:
    fact = "The password of the Zanzibar vault is written inside the violin of Doctor Ferreira."
    chunks = [long_chunk(), long_chunk(fact)]
    model = embedder._loaded()
    tokens = len(model.tokenizer(chunks[1], truncation=False, verbose=False)["input_ids"])
    assert 480 <= tokens <= 560, "as long as a chunk gets"
    without, with_fact = embedder.embed(chunks) @ embedder.embed_query(PASSWORD)
    assert with_fact > without + 0.05
    truncated = model.encode_document(chunks)
    assert np.allclose(truncated[0], truncated[1], atol=1e-5), "the model alone cuts the fact off"


def test_windows_cover_the_chunk_and_fit_the_model(embedder: Embedder) -> None:
    model = embedder._loaded()
    title = "A title that says what this is about"
    for text in (long_chunk(), "x" * 3000, "灯塔的看守人每天傍晚点亮油灯。" * 80, "short"):
        windows = [window.text for window in embedder._windows(text, title)]
        bodies = [window.removeprefix(f"{title}\n") for window in windows]
        assert text.startswith(bodies[0])
        assert text.endswith(bodies[-1])
        at = 0
        for body in bodies:
            assert 0 <= text.find(body) <= at, "no gap between windows"
            at = max(at, text.find(body) + len(body))
        for window in windows:
            ids = model.tokenizer(window, truncation=False, verbose=False)["input_ids"]
            assert len(ids) <= model.max_seq_length


def test_an_overlong_question_is_embedded_by_its_ends(embedder: Embedder) -> None:
    near, far = embedder.embed([PASSWORD, "The price of wool went up in March."])
    whole = long_chunk()  # not overlong: all of it counts
    with tiny.counted(embedder._loaded(), "encode_query") as calls:
        text = f"{FILLER * 45} {PASSWORD}"
        vector = embedder.embed_query(text)
        encoded = [window for (batch,) in calls for window in batch]
        calls.clear()
        assert len(encoded) == MAX_QUESTION_WINDOWS < len(embedder._windows(text, ""))
        assert text.startswith(encoded[0])
        assert text.endswith(encoded[-1])
        assert vector @ near > vector @ far
        embedder.embed_query(whole)
    assert calls == [([window.text for window in embedder._windows(whole, "")],)]


def test_a_title_tells_chunks_apart_that_only_say_she(embedder: Embedder) -> None:
    text = "She moved there as a child and later became its mayor."
    vectors = embedder.embed([text, text], titles=["Anna Kowalska", "Maria Silva"])
    question = embedder.embed_query("Of what did Maria Silva become mayor?")
    assert vectors[1] @ question > vectors[0] @ question
    assert np.allclose(embedder.embed([text]), embedder.embed([text], titles=[""]), atol=1e-6)


def test_a_very_long_title_leaves_room_for_the_text(embedder: Embedder) -> None:
    (window,) = embedder._windows(FILLER, "word " * 1000)
    assert window.text.endswith(FILLER)
    with pytest.raises(InvalidInputError, match="one for each"):
        embedder.embed(["a", "b"], titles=["only one"])


def test_the_default_model_is_found_in_its_package_without_the_hub(embedder: Embedder) -> None:
    text = ["the same model under two names"]
    assert np.allclose(Embedder(MINILM).embed(text), embedder.embed(text), atol=1e-6)
    assert same_embedder(MINILM, "minilm-offline")
    assert not same_embedder(MINILM, "other/model")


def test_what_is_not_in_the_cache_is_not_looked_for_by_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = list[str]()

    def stand_in(self: Embedder, name: str, **options: Any) -> Any:
        opened.append(name)
        words: Any = tiny.tokenizer()
        return SimpleNamespace(
            tokenizer=words, max_seq_length=256, get_embedding_dimension=lambda: 1
        )

    monkeypatch.setattr(Embedder, "_open", stand_in)
    for exist in (False, True):
        monkeypatch.setattr(ModelFiles, "exist", exist)
        assert Embedder("all-MiniLM-L6-v2").dim == 1
    assert opened == [str(packaged_minilm()), "all-MiniLM-L6-v2"]


def test_threads_use_the_model_one_at_a_time(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = threading.Lock()

    def encode(texts: list[str], **options: Any) -> np.ndarray:
        assert running.acquire(blocking=False), "two callers at once"
        time.sleep(0.01)
        running.release()
        return np.ones((len(texts), 384), np.float32)

    for name in ("encode_document", "encode_query"):
        monkeypatch.setattr(embedder._loaded(), name, encode)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(embedder.embed_query, "one") for _ in range(4)]
        calls += [pool.submit(embedder.embed, ["one", "two"]) for _ in range(4)]
        assert {call.result().shape for call in calls} == {(384,), (2, 384)}


def test_an_unknown_model_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="local directory"):
        Embedder("nobody/no-such-embedder").embed(["x"])
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Embedder(str(tmp_path)).embed(["x"])


@pytest.mark.slow
def test_importing_the_corpus_and_text_rooms_loads_no_heavy_library() -> None:
    script = (
        "import sys; import blendrag.text.chunking, blendrag.text.readers, blendrag.text.recognition\n"
        "import blendrag.corpus.retriever; blendrag.corpus.retriever.Embedder('x')\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers'} & set(sys.modules)\n"
        "heavy |= {'bs4', 'charset_normalizer', 'pathspec', 'lxml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_long_call_is_computed_in_batches_and_ends_after_the_one_that_runs() -> None:
    held = tiny.HeldEmbedder()
    asked: list[int] = []

    def check() -> None:
        asked.append(len(held.batches))
        if len(held.batches) == 2:
            raise RequestCancelled("gone")

    held.allow(10)
    with pytest.raises(RequestCancelled):
        held.embed([long_chunk()] * 40, check=check)
    assert len(held.batches) == 2
    assert 0 in asked, "it can be abandoned before the first batch"


def test_the_caller_learns_the_tokens_before_anything_is_computed() -> None:
    held, told = tiny.HeldEmbedder(), []

    def refuse(tokens: int) -> None:
        told.append(tokens)
        raise InvalidInputError("too many")

    texts = [long_chunk(), "one two three"]
    with pytest.raises(InvalidInputError):
        held.embed(texts, counted=refuse)
    words: Any = tiny.tokenizer()
    assert told == [sum(len(words(text, add_special_tokens=False)["input_ids"]) for text in texts)]
    assert held.batches == []


def test_a_long_text_is_tokenised_in_pieces_that_cover_it() -> None:
    text = "word " * 20_000 + "x" * 100_000
    parts = list(pieces([text, "", "short"]))
    assert "".join(text[start:end] for number, start, end in parts if number == 0) == text
    assert max(end - start for _, start, end in parts) <= PIECE_CHARS
    assert parts[-1] == (2, 0, 5)
    assert [part for group in grouped(parts) for part in group] == parts


def test_batches_hold_windows_of_like_length_and_bounded_size() -> None:
    tokens = [250, 3, 250, 4, 250, 250, 250, *[5] * 200]
    found = list(batches(tokens, 1024))
    assert sorted(number for batch in found for number in batch) == list(range(len(tokens)))
    for batch in found:
        assert max(tokens[number] for number in batch) * len(batch) <= 1024
        assert len(batch) <= BATCH_WINDOWS
    assert list(batches([5000], 1024)) == [[0]]


@pytest.mark.slow
def test_batches_change_no_vector(embedder: Embedder) -> None:
    texts = ["one", long_chunk(), "two words", *(f"{i} {FILLER * (1 + i)}" for i in range(3))]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.allclose(together, alone, atol=1e-5)


def test_of_a_huge_question_only_the_ends_are_tokenised(embedder: Embedder) -> None:
    with tiny.counted(embedder, "_tokens_of") as calls:
        embedder.embed_query("ship " * 200_000)
    assert sum(len(text) for (text,) in calls) < 100_000
