"""What holds the KV of the running requests of one model, by the kind of the model.

:class:`~blendrag.serving.chunk_pool.ChunkPool` is for models of attention alone,
:class:`~blendrag.serving.hybrid_rows.HybridPool` for those that have running states, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from blendrag.model.adapter import ModelAdapter

T = TypeVar("T")
#: What one running request holds.
KV = TypeVar("KV")


class KVPool(ABC, Generic[KV]):
    """The running requests of one model. Used on one thread."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self.adapter = adapter
        self._prepared: tuple[list[KV], Any] | None = None

    @abstractmethod
    def share(self, requests: Sequence[KV]) -> None:
        """Let ``requests`` keep what they have in common once."""

    @abstractmethod
    def reserve(self, request: KV, room: int) -> None:
        """Make room for ``room`` more tokens."""

    @abstractmethod
    def put_aside(self, request: KV) -> None:
        """Move the request's own KV to where it takes no memory of the others."""

    @abstractmethod
    def take_back(self, request: KV, room: int) -> None:
        """Undo :meth:`put_aside`, with room for ``room`` more tokens."""

    @abstractmethod
    def leave(self, request: KV) -> None:
        """The request has ended."""

    def prepared(self, requests: Sequence[KV], prepare: Callable[[], T]) -> T:
        """What ``prepare`` made for the steps of ``requests``, the same until they or their KV change."""
        if self._prepared is None or self._prepared[0] != requests:
            self._prepared = None  # frees the other one first
            self._prepared = [*requests], prepare()
        made: T = self._prepared[1]
        return made
