"""The gate's verdicts in the user's cache directory."""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path

import pytest
import torch

from blendrag.fusor import gate, verdicts
from blendrag.fusor.gate import Verification
from blendrag.model import measurements

CPU = torch.device("cpu")
NAMESPACE = "a" * 64
VERDICT = Verification("refused", "keys differ", ("rotary", "rotary"), max_logit_diff=0.5)


def database(cache: Path) -> Path:
    return cache / "verdicts" / "cache.db"


def test_a_verdict_holds_for_its_model_device_libraries_and_gate(empty_cache, monkeypatch):
    assert verdicts.recall(NAMESPACE, CPU) is None
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    assert verdicts.recall(NAMESPACE, CPU) == VERDICT
    assert verdicts.recall("f" * 64, CPU) is None
    assert verdicts.recall(NAMESPACE, torch.device("meta")) is None
    for changed, value in ((torch, "9.9"), (measurements.transformers, "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(changed, "__version__", value)
            assert verdicts.recall(NAMESPACE, CPU) is None
    monkeypatch.setattr(verdicts, "GATE_VERSION", gate.GATE_VERSION + 1)
    assert verdicts.recall(NAMESPACE, CPU) is None


def test_looking_for_a_verdict_writes_nothing(empty_cache):
    assert verdicts.recall(NAMESPACE, CPU) is None
    assert not empty_cache.exists()
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    written = database(empty_cache).stat().st_mtime_ns
    assert verdicts.recall(NAMESPACE, CPU) == VERDICT
    assert [*database(empty_cache).parent.iterdir()] == [database(empty_cache)]
    assert database(empty_cache).stat().st_mtime_ns == written


def test_verdicts_are_readable_by_their_owner_only(empty_cache):
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    assert {path.stat().st_mode & 0o077 for path in database(empty_cache).parent.iterdir()} == {0}


@pytest.mark.parametrize(
    ("mode", "value"), [(4, pickle.dumps("x")), (2, b"x"), (3, None), (1, 1.5)]
)
def test_an_entry_that_is_not_a_json_verdict_is_ignored(empty_cache, mode, value):
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    with sqlite3.connect(database(empty_cache)) as db:
        changed = db.execute("UPDATE Cache SET mode = ?, value = ?", (mode, value))
        assert changed.rowcount == 1
    assert verdicts.recall(NAMESPACE, CPU) is None
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    assert verdicts.recall(NAMESPACE, CPU) == VERDICT


def test_an_incomplete_verdict_is_ignored(empty_cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Verification, "as_dict", lambda self: {"verdict": "blendable"})
        verdicts.remember(NAMESPACE, CPU, VERDICT)
    assert verdicts.recall(NAMESPACE, CPU) is None


@pytest.mark.parametrize("is_damaged", [True, False], ids=("damaged", "cannot be made"))
def test_an_unusable_database_holds_no_verdicts_and_is_reported_once(
    empty_cache, is_damaged, caplog
):
    if is_damaged:
        database(empty_cache).parent.mkdir(parents=True)
        database(empty_cache).write_bytes(b"not a database" * 100)
    else:
        empty_cache.write_text("a file")
    verdicts.remember(NAMESPACE, CPU, VERDICT)
    assert verdicts.recall(NAMESPACE, CPU) is None
    measurements.remember("rows", 4)
    assert measurements.recall("rows", int) is None
    [message] = caplog.messages
    assert message.startswith(f"{empty_cache} cannot be written (")
    assert "BLENDRAG_CACHE" in message
