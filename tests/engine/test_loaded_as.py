"""Notes on KV that is not used name what differs from the model that computed it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import loaded_as
from blendrag.engine.kv_validity import KVValidity
from blendrag.engine.loaded_as import difference, recorded, records_of
from blendrag.engine.planner import UNTRUSTED
from blendrag.store.identity import ModelIdentity

THEN = ModelIdentity(
    "m", "abc", "weights", "", "none", "float32", "sdpa", "{}", "tokenizer", "float32"
)
AGAIN = {"tensors_fingerprint": "others"}
"""Other weights, which an adapter or a dtype brings, too."""


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        (AGAIN, "its weights have changed", "ingest again"),
        ({"compute_dtype": "bfloat16", "stored_dtype": "bfloat16", **AGAIN},
         "bfloat16", "leave out dtype or give float32, or ingest again with this one"),
        ({"adapters": "x", **AGAIN}, "with an adapter", "leave out lora, or ingest again"),
        ({"weight_quantization": "int8", **AGAIN}, "quantisation int8, not none",
         "load it as then, or ingest again"),
        ({"attention": "eager"}, "attention eager, not sdpa",
         "give attn_implementation sdpa, or ingest again"),
        ({"geometry": "{1}"}, "its config has changed", "ingest again"),
        ({"tokenizer_fingerprint": "x"}, "its tokenizer or chat template has changed", "ingest again"),
        ({"model_id": "n"}, "under another name", "name it m, or ingest again"),
        ({"revision": "def", **AGAIN}, "revision def, not abc", "load that one, or ingest again"),
        ({"writer": "x"}, "with a writer", "give writer none, or ingest again"),
        ({"encoding": "int8"}, "KV encoding int8, not native", "ingest again"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_words_and_remedy(
    changes: dict[str, Any], cause: str, remedy: str
) -> None:
    now = replace(THEN, **changes)
    assert now.namespace != THEN.namespace
    assert difference(THEN, now) == (cause, remedy)


def test_an_adapter_that_the_ingest_had_is_asked_for() -> None:
    then, same = replace(THEN, adapters="x"), "give the same lora, or ingest again"
    assert difference(then, THEN) == ("without its adapter", same)
    assert difference(then, replace(THEN, adapters="y")) == ("with another adapter", same)


def test_a_writer_that_the_ingest_had_is_asked_for() -> None:
    then, same = replace(THEN, writer="x"), "give the same writer, or ingest again"
    assert difference(then, THEN) == ("without its writer", same)
    assert difference(then, replace(THEN, writer="y")) == ("with another writer", same)


def test_without_a_writer_a_namespace_is_that_of_versions_that_had_none() -> None:
    assert THEN.namespace == "2a77bcc986dd5e4b1f557c7c1ffc8eab3482946d0d09963ff371d2b39c87478a"


def test_kv_that_a_newer_library_no_longer_computes_names_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        engine.ingest([tiny.document(0)]).whole()
        namespace = engine.kv_namespace.validity.namespace
        then = recorded(tmp_path, namespace)
        assert then is not None
        records_of(tmp_path, namespace).keep(replace(then, transformers="4.0"))
    monkeypatch.setattr("blendrag.engine.kv_validity._alike", lambda *_: False)
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        answer = engine.ask("What was built?", top_k=1)
    assert answer.metrics.reused_tokens == 0
    newest = loaded_as.transformers.__version__
    assert (
        "this machine computes different KV than the ingest "
        f"(transformers {newest}, not 4.0); ingest again to renew it"
    ) in answer.metrics.notes


def test_a_damaged_probe_is_not_blamed_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        engine.ingest([tiny.document(0)]).whole()
    monkeypatch.setattr(KVValidity, "_wrong_with_probe", lambda *_: "its probe entry is damaged")
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        notes = engine.ask("What was built?", top_k=1).metrics.notes
    assert list(notes) == [UNTRUSTED.text, "its probe entry is damaged; ingest again to renew it"]
