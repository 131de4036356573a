"""Engines that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny
from blendrag.engine import BlendEngine, exact_prefixes


@pytest.fixture(autouse=True)
def blended_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that wait together are blended one by one, whatever they have in common."""
    monkeypatch.setattr(exact_prefixes, "MARGIN", float("inf"))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """Over documents 0 to 3, with the lead of :func:`tiny.prompt` stored; tests must not change its corpus.

    Its chunks are encoded after BOS alone.
    It has no memory tier, so a chunk is always read from disk and reports are equal in any test order.
    """
    root = tmp_path_factory.mktemp("engine") / "store"
    with tiny.engine(tiny.llama(), root, ram_bytes=0, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(i) for i in range(4)]).whole()
        for _ in range(2):  # a leading part is stored when it is seen again
            made.generate(tiny.prompt(made, 3))
            made.drain()
        yield made
