"""One answer as a page: what became of each prompt token, why, and when each layer did what.

:meth:`Explanation.page` is a complete HTML file without scripts or references to a network; in a notebook the
explanation shows itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from blendrag.corpus.retriever import RetrievedChunk
from blendrag.metrics import COMPUTE, LOAD, REPOSITION, SELECT, WAIT, RequestMetrics, Span, Timeline

if TYPE_CHECKING:
    from blendrag.fusor import Fusion
    from blendrag.planning.plan import Plan


REUSED, RECOMPUTED, COMPUTED = "reused", "recomputed", "computed"


@dataclass(frozen=True)
class TokenRange:
    """Neighbouring tokens of the prompt that were treated alike."""

    start: int
    """Position of the first in the prompt."""
    texts: tuple[str, ...]
    """The text of each token."""
    state: str
    """``reused`` (loaded), ``recomputed`` (loaded, then computed in some layers) or ``computed``."""
    layers: int
    """How many layers computed recomputed tokens; 0 for others."""
    chunk: int
    """Number of their chunk among the metrics' chunk reports, from 1; 0 outside chunks."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class Trace:
    """What happened to the prompt's tokens; kept with the answer if ``Options(explain=True)``."""

    texts: tuple[str, ...]
    """What each token of the prompt adds to its text; empty for the first bytes of a character."""
    chunks: tuple[tuple[int, int], ...]
    """Token spans, one for each of the metrics' chunk reports."""
    reused: tuple[tuple[int, int], ...]
    """Token spans whose KV was loaded."""
    recomputed: tuple[float, ...]
    """Per token, the share of the layers after the first that computed it although its KV was loaded."""
    layers: int
    spans: tuple[Span, ...]
    """Empty if nothing was loaded, the prompt was prefilled in a batch, or the model is a hybrid."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        fusion: Fusion | None,
        timeline: Timeline,
        texts: Sequence[str],
        layers: int,
        computed: Sequence[int] = (),
    ) -> Trace:
        """Call after the forward. ``texts``: the text of each prompt token. ``layers``: of the model.
        ``computed``: how many tokens every layer computed of each loaded span that is not exact, from its
        first one on, if there is no fusion."""
        tokens = len(plan.prompt.ids)
        if fusion is None:
            shares, layers = [0.0] * tokens, layers if any(computed) else 0
            spans = [span for span in plan.spans if not span.exact]
            for span, n in zip(spans, computed, strict=False):
                shares[span.start : span.start + n] = [1.0] * n
        else:
            counts, chosen_in = [0] * tokens, fusion.recomputed[1:]
            for _, run in groupby(chosen_in, key=id):  # unchanged sets are one tensor
                chosen, *others = run
                for position in chosen.tolist():
                    counts[position] += 1 + len(others)
            shares = [count / max(len(chosen_in), 1) for count in counts]
            layers = len(chosen_in) + 1 if chosen_in else 0
        return cls(
            texts=tuple(texts),
            chunks=tuple((chunk.segment.position, chunk.segment.end) for chunk in plan.chunks),
            reused=tuple((span.start, span.end) for span in plan.spans),
            recomputed=tuple(shares),
            layers=layers,
            spans=tuple(timeline.all_spans()),
        )

    def ranges(self) -> Iterator[TokenRange]:
        """All tokens of the prompt, in order."""
        states = [(COMPUTED, 0)] * len(self.texts)
        for start, end in self.reused:
            states[start:end] = [self._state(share) for share in self.recomputed[start:end]]
        numbers = [0] * len(self.texts)
        for number, (start, end) in enumerate(self.chunks, start=1):
            numbers[start:end] = [number] * (end - start)
        treated = list(zip(states, numbers, strict=True))
        for ((state, layers), chunk), run in groupby(range(len(treated)), treated.__getitem__):
            start, *others = run
            texts = self.texts[start : start + 1 + len(others)]
            yield TokenRange(start, texts, state, layers, chunk)

    def _state(self, share: float) -> tuple[str, int]:
        """State and layers of a loaded token."""
        if not share:
            return REUSED, 0
        return RECOMPUTED, round(share * (self.layers - 1)) + 1


@dataclass(frozen=True)
class Explanation:
    """What became of each prompt token of one answer, asked for with ``Options(explain=True)``."""

    text: str
    """The answer."""
    sources: tuple[RetrievedChunk, ...]
    metrics: RequestMetrics
    trace: Trace

    def page(self, title: str | None = "blendrag: one answer") -> str:
        """A complete HTML document; without a ``title`` its body alone."""
        return _template().render(
            title=title,
            text=self.text,
            sources=self.sources,
            m=self.metrics,
            trace=self.trace,
            colours=_COLOURS,
            upper=(LOAD, REPOSITION),
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.page(title=None)


#: Colours of the boxes of the timeline.
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
