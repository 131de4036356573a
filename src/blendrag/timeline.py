"""What one request did when: spans of time per layer, from the loader's thread and the model's.

Owns the spans and their arithmetic. Whoever works is handed a :class:`Timeline` or ``None``; without one
nothing is noted and no clock is read. Times are the host's: on a GPU those of a layer's computing say when
its kernels were queued.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

#: Reading, verifying and decoding a layer's chunks.
LOAD = "load"
#: Computing stood still until the layer's chunks were in place.
WAIT = "wait"
#: Moving stored keys to their positions in the prompt.
REPOSITION = "re-position"
#: Choosing the next layer's tokens; a peek's projections are computing.
SELECT = "select"
#: One decoder layer from its entry to its end, all of the above but loading inside.
LAYER = "layer"
#: A layer less what else was done or waited for in it.
COMPUTE = "compute"
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """Seconds from the timeline's start."""

    what: str
    layer: int
    began_s: float
    ended_s: float
    pass_name: str = ""
    """``"scout"`` in a scout pass, else empty."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class Timeline:
    """Notes spans from several threads, each in the order in which they end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._open: dict[int, float] = {}
        self.pass_name = ""

    def now(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def span(self, what: str, layer: int) -> Iterator[None]:
        """Note the time that the body takes, whether it raises or not."""
        began = self.now()
        try:
            yield
        finally:
            self._note(what, layer, began)

    def enter(self, layer: int) -> None:
        """A decoder layer is entered."""
        self._open[layer] = self.now()

    def leave(self, layer: int) -> None:
        """It is left; nothing is noted of one that was not entered."""
        began = self._open.pop(layer, None)
        if began is not None:
            self._note(LAYER, layer, began)

    def _note(self, what: str, layer: int, began: float) -> None:
        ended = self.now()
        with self._lock:
            self.spans.append(Span(what, layer, began, ended, self.pass_name * (what != LOAD)))

    def computing(self) -> list[Span]:
        """What is left of every layer once waiting, re-positioning and selecting are taken out."""
        within = [s for s in self.spans if s.what in (WAIT, REPOSITION, SELECT)]
        left: list[Span] = []
        for layer in (s for s in self.spans if s.what == LAYER):
            at = layer.began_s
            for inner in sorted(within, key=lambda s: s.began_s):
                if layer.began_s <= inner.began_s and inner.ended_s <= layer.ended_s:
                    left.append(Span(COMPUTE, layer.layer, at, inner.began_s, layer.pass_name))
                    at = inner.ended_s
            left.append(Span(COMPUTE, layer.layer, at, layer.ended_s, layer.pass_name))
        return left

    def all_spans(self) -> list[Span]:
        """Spans that do not overlap within a thread: loading, and what layers consist of."""
        parts = [s for s in self.spans if s.what != LAYER]
        return sorted([*parts, *self.computing()], key=lambda s: s.began_s)


def noted(timeline: Timeline | None, what: str, layer: int) -> AbstractContextManager[None]:
    """A span of ``timeline``, or nothing where there is none."""
    return _NOTHING if timeline is None else timeline.span(what, layer)
