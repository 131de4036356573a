"""Engines that the tests of this folder share.

torch is imported in the fixtures: the process that deals tests to workers reads this file, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.serving.chunk_pool import ChunkPool, RequestKV
    from blendrag.serving.shared_attention import RunningKV


@pytest.fixture(autouse=True)
def blended_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that wait together are blended one by one, whatever they have in common."""
    from blendrag.engine import exact_prefixes

    monkeypatch.setattr(exact_prefixes, "MARGIN", float("inf"))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each joint step had. Prefills do not pause, and one begins before each step."""
    from blendrag.serving import scheduler

    sizes: list[int] = []
    stock = scheduler.decoded_together

    def counted(steps: Sequence[Any], pool: Any) -> list[Any]:
        if len(steps) > 1:
            sizes.append(len(steps))
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "decoded_together", counted)
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", float("inf"))
    monkeypatch.setattr(scheduler, "ANSWERS_SHARE", 0.0)
    return sizes


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """Over documents 0 to 3, with the lead of :func:`tiny.prompt` stored; tests must not change its corpus.

    Its chunks are encoded after BOS alone.
    It has no memory tier, so a chunk is always read from disk and reports are equal in any test order.
    """
    import tiny

    root = tmp_path_factory.mktemp("engine") / "store"
    with tiny.engine(tiny.llama(), root, ram_bytes=0, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(i) for i in range(4)]).whole()
        for _ in range(2):  # a leading part is stored when it is seen again
            made.generate(tiny.prompt(made, 3))
            made.drain()
        yield made


@pytest.fixture
def slow_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill counts as slow: a busy machine reads from no remote in the time that a tiny model takes."""
    from blendrag.engine import planner

    monkeypatch.setattr(planner, "prefill_token_s", lambda adapter: 1.0)


class Move(NamedTuple):
    """A request whose KV moved from its cache to a pool, to share chunks there."""

    pool: ChunkPool
    running: RunningKV
    tokens: int
    """Tokens that its cache held before."""
    own: int
    """Tokens that it keeps to itself."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    """Every such move, in order."""
    from blendrag.serving.chunk_pool import ChunkPool

    moves: list[Move] = []
    share = ChunkPool.share

    def watched(pool: ChunkPool, requests: Sequence[RequestKV]) -> None:
        alone = [(one, one.cache.get_seq_length()) for one in requests if one.running is None]
        share(pool, requests)
        for one, tokens in alone:
            if one.running is not None:
                assert not one.cache.get_seq_length()
                moves.append(Move(pool, one.running, tokens, len(one.running.positions)))

    monkeypatch.setattr(ChunkPool, "share", watched)
    return moves
