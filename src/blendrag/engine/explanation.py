"""One answer as a page: what became of each prompt token, why, and when each layer did what.

:meth:`Explanation.page` is a complete HTML file without scripts or references to a network; in a notebook the
explanation shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from blendrag.metrics import COMPUTE, LOAD, REPOSITION, SELECT, WAIT, Span, Timeline

if TYPE_CHECKING:
    from blendrag.engine.request import Answer
    from blendrag.fusor import Fusion
    from blendrag.planning.plan import Plan


@dataclass(frozen=True)
class Trace:
    """What happened to the prompt's tokens; kept with the answer if ``Options(explain=True)``."""

    texts: tuple[str, ...]
    """Of the prompt's tokens; half a character shows as the replacement character."""
    chunks: tuple[tuple[int, int], ...]
    """Token spans, one for each of the metrics' chunk reports."""
    reused: tuple[tuple[int, int], ...]
    """Token spans whose KV was loaded."""
    recomputed: tuple[float, ...]
    """Per token, the share of the layers after the first that computed it although its KV was loaded."""
    layers: int
    spans: tuple[Span, ...]
    """Empty if nothing was loaded or the prompt was prefilled in a batch."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        fusion: Fusion | None,
        timeline: Timeline,
        decode: Callable[[list[int]], str],
    ) -> Trace:
        """Call after the forward. ``decode`` turns token ids into text."""
        counts = [0] * len(plan.prompt.ids)
        layers = fusion.recomputed[1:] if fusion is not None else []
        for _, run in groupby(layers, key=id):  # unchanged sets are one tensor
            chosen, *others = run
            for position in chosen.tolist():
                counts[position] += 1 + len(others)
        return cls(
            texts=tuple(decode([token]) for token in plan.prompt.ids),
            chunks=tuple((chunk.segment.position, chunk.segment.end) for chunk in plan.chunks),
            reused=tuple((span.start, span.end) for span in plan.spans),
            recomputed=tuple(count / max(len(layers), 1) for count in counts),
            layers=len(layers) + 1 if layers else 0,
            spans=tuple(timeline.all_spans()),
        )


class _Run(NamedTuple):
    """Neighbouring tokens in the same state."""

    text: str
    share: float | None
    """As :attr:`Trace.recomputed`; ``None`` if their KV was not loaded."""
    state: str
    chunk: int
    """Number of the chunk that begins here, else 0."""


class Explanation:
    """Of one answer that was asked for with ``Options(explain=True)``."""

    def __init__(self, answer: Answer, trace: Trace) -> None:
        self.answer = answer
        self.trace = trace

    def page(self, title: str = "blendrag: one answer") -> str:
        """A complete HTML document."""
        return self._rendered(title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self._rendered(None)

    def _rendered(self, title: str | None) -> str:
        return _template().render(
            title=title,
            answer=self.answer,
            m=self.answer.metrics,
            trace=self.trace,
            runs=self._runs(),
            colours=_COLOURS,
            upper=(LOAD, REPOSITION),
        )

    def _runs(self) -> Iterator[_Run]:
        trace = self.trace
        begins = {start: number for number, (start, _) in enumerate(trace.chunks, start=1)}
        shares: list[float | None] = [None] * len(trace.texts)
        for start, end in trace.reused:
            shares[start:end] = trace.recomputed[start:end]

        def key(at: int) -> tuple[float | None, int]:
            return shares[at], begins.get(at, 0)

        for (share, chunk), run in groupby(range(len(trace.texts)), key):
            state = "reused" if share is not None else "computed"
            if share:
                layers = round(share * (trace.layers - 1)) + 1
                state = f"recomputed in {layers} of {trace.layers} layers, else reused"
            yield _Run("".join(trace.texts[at] for at in run), share, state, chunk)


#: Of the boxes of the timeline.
_COLOURS = {
    LOAD: "#56B4E9",
    REPOSITION: "#0072B2",
    WAIT: "#bbbbbb",
    SELECT: "#CC79A7",
    COMPUTE: "#E69F00",
}


@cache
def _template() -> Template:
    made = Environment(
        loader=PackageLoader("blendrag.engine", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["file_name"] = lambda source: source.rstrip("/").rpartition("/")[2]
    return made.get_template("explanation.html.j2")
