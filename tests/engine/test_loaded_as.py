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
    ("changes", "cause"),
    [
        (AGAIN, "its weights have changed"),
        ({"compute_dtype": "bfloat16", **AGAIN}, "dtype bfloat16, not float32"),
        ({"adapters": "x", **AGAIN}, "adapter x, not none"),
        ({"weight_quantization": "int8", **AGAIN}, "quantisation int8, not none"),
        ({"geometry": "{1}"}, "its config has changed"),
        ({"writer": "3" * 64}, f"writer {'3' * 12}, not none"),
        (
            {"writer": "3" * 64, "encode_after": 2, "compute_dtype": "bfloat16", **AGAIN},
            f"dtype bfloat16, not float32; writer {'3' * 12}, not none; encode_after 2, not 0",
        ),
        ({"encode_after": 2, **AGAIN}, "encode_after 2, not 0; its weights have changed"),
    ],
)
def test_a_difference_is_named_by_what_caused_it(changes: dict[str, Any], cause: str) -> None:
    now = replace(THEN, **changes)
    assert now.namespace != THEN.namespace
    assert difference(THEN, now) == cause


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
