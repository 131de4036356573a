"""Engines that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, kv_validity
from blendrag.fusor.gate import Verification, verify
from blendrag.model import ModelAdapter


@pytest.fixture(autouse=True, scope="session")
def _gate_runs_once_per_model() -> Iterator[None]:
    """In every store the gate would run again; its own tests are in ``tests/fusor``."""
    known: dict[str, Verification] = {}

    def once(adapter: ModelAdapter, *args: Any) -> Verification:
        if adapter.refusal is not None:
            return verify(adapter)
        namespace = adapter.identity.namespace
        if namespace not in known:
            known[namespace] = verify(adapter, *args)
        return known[namespace]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_validity, "verify", once)
        yield


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """Over documents 0 to 3, with the lead of :func:`tiny.prompt` stored; tests must not change its corpus.

    It has no memory tier, so a chunk is always read from disk and reports are equal in any test order.
    """
    root = tmp_path_factory.mktemp("engine") / "store"
    with tiny.engine(tiny.llama(), root, ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(4)]).whole()
        for _ in range(2):  # a leading part is stored when it is seen again
            made.generate(tiny.prompt(made, 3))
            made.drain()
        yield made
