"""A store that cannot be written answers all the same, and is left as it is."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.store.identity import chunk_key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s"


def ingest(checkpoint: str, root: Path) -> None:
    """Two documents, one chunk of which has lost its KV; the gate's result is lost, too."""
    with tiny.engine(checkpoint, root, tokenizer=None) as engine:
        engine.ingest([tiny.document(i) for i in range(2)])
        used, namespace = engine.resources, engine.adapter.identity.namespace
        victim = used.text_ids(tiny.chunk_texts(engine, 1)[0])
        assert used.store.delete(namespace, chunk_key(namespace, used.prefix_ids, victim))
    shutil.rmtree(root / "verified")


def mount_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be written, not by root either."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("blendrag.store.records.Records.keep", refuse)


def files(root: Path) -> dict[str, bytes]:
    """All but what a reader of SQLite needs to share locks in."""
    gc.collect()  # closes leftover SQLite connections, which writes
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in found if not p.name.endswith(("-wal", "-shm"))}


def prompt(engine: BlendEngine) -> str:
    texts = [text for number in range(2) for text in tiny.chunk_texts(engine, number)]
    return "\n\n".join(texts) + "\n\nWhat did the company build?"


def test_a_store_on_a_read_only_mount_answers_and_says_so_once(
    checkpoint: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ingest(checkpoint, root)
    before = files(root)
    mount_read_only(monkeypatch)
    with tiny.engine(checkpoint, root, tokenizer=None) as engine:
        for _ in range(2):
            answer = engine.generate(prompt(engine))
            assert answer.metrics.reused_tokens > 0
            assert "computed" in [chunk.outcome for chunk in answer.metrics.chunks]
            engine.drain()
    assert files(root) == before
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]


def test_a_read_only_store_that_does_not_fit_is_not_used_and_not_marked(
    checkpoint: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(checkpoint, root)
    before = files(root)
    mount_read_only(monkeypatch)
    with tiny.engine(checkpoint, root, tokenizer=None) as engine:
        engine.adapter.stack.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
        answer = engine.generate(prompt(engine), Options(mode="reuse"))
        assert answer.metrics.reused_tokens == 0
        assert any("ingest again" in note for note in answer.metrics.notes)
    assert files(root) == before


def test_an_engine_opened_read_only_writes_nothing(checkpoint: str, root: Path) -> None:
    ingest(checkpoint, root)
    before = files(root)
    with tiny.engine(checkpoint, root, tokenizer=None, read_only=True) as engine:
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        assert engine.retrieve("What did the company of Place0 build?", 1)
        engine.drain()
    assert files(root) == before
