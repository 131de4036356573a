"""Models and stores that the tests of commands share."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import lazy_model
from blendrag.engine.stream import AnswerStream
from cli.commands import ingest_args, invoke, save_model, write_documents
from embedding_once import each_text_is_embedded_once


@pytest.fixture(scope="module", autouse=True)
def _each_text_is_embedded_once() -> Iterator[None]:
    with each_text_is_embedded_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_loaded_once() -> Iterator[None]:
    """As if another engine of this process held each of them. A directory that changed is another model."""
    load, held = lazy_model.loaded_once, dict[Hashable, Any]()

    def load_and_hold(key: Hashable, made: Callable[[], Any]) -> Any:
        held[key] = load(key, made)
        return held[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_model, "loaded_once", load_and_hold)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer, too."""
    return save_model(tmp_path_factory.mktemp("other-llama"), tiny.llama(seed=1), "windmill")


@pytest.fixture(scope="session")
def refused_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt2 learns its positions, so its KV cannot be moved."""
    return save_model(tmp_path_factory.mktemp("tiny-gpt2"), tiny.family("gpt2"))


@pytest.fixture(scope="session")
def ingested(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three documents of three chunks, made by the command. For reading only."""
    root = tmp_path_factory.mktemp("ingested")
    docs = write_documents(root / "docs")
    result = invoke(*ingest_args(docs, model_dir, root / "store"))
    assert result.exit_code == 0, result.stderr
    return root / "store"


@pytest.fixture
def store(ingested: Path, tmp_path: Path) -> Path:
    """A copy of that store, for changing. Its documents are in ``ingested.parent / "docs"``."""
    return Path(shutil.copytree(ingested, tmp_path / "store"))


@pytest.fixture
def ctrl_c_while_decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in this process at the third token of the first answer, which nothing else ends."""
    put, tokens = AnswerStream.put, itertools.count(1)

    def press(stream: AnswerStream, ids: torch.Tensor) -> None:
        put(stream, ids)
        if next(tokens) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            while not stream.done:
                time.sleep(0.005)

    monkeypatch.setattr(AnswerStream, "put", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "docs")


@pytest.fixture
def ingest(model_dir: Path, docs: Path, tmp_path: Path) -> list[str]:
    """Arguments that ingest ``docs`` into the store at ``tmp_path``."""
    return ingest_args(docs, model_dir, tmp_path / "store")
