"""One answer as a page: what became of each prompt token, why, and when each layer did what.

:meth:`Explanation.page` is a complete HTML file without scripts or references to a network; in a notebook the
explanation shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

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


class _State(NamedTuple):
    """Of a token: how it is drawn and what its tooltip says."""

    style: str
    says: str


class Explanation:
    """Of one answer that was asked for with ``Options(explain=True)``."""

    def __init__(self, answer: Answer, trace: Trace) -> None:
        self.answer = answer
        self.trace = trace

    def page(self, title: str = "blendrag: one answer") -> str:
        """A complete HTML document."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title></head>\n<body>{self._repr_html_()}</body></html>\n"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        parts = [
            f"<style>{_CSS}</style>",
            _section(
                "Answer", f'<p class="answer">{escape(self.answer.text)}</p>{self._figures()}'
            ),
            _section("Sources", self._sources()) if self.answer.sources else "",
            _section("Chunks of the prompt", self._chunk_table()) if self.trace.chunks else "",
            _section("Layer by layer", self._timeline()) if self.trace.spans else "",
            _section("Prompt", f"{_LEGEND}<p class='prompt'>{''.join(self._tokens())}</p>"),
        ]
        return f'<div class="blendrag">{"".join(parts)}</div>'

    # -- the parts ------------------------------------------------------------------------------

    def _figures(self) -> str:
        m = self.answer.metrics
        figures = {
            "first token": f"{1e3 * m.ttft_s:,.0f} ms",
            "loading": f"{1e3 * m.load_s:,.0f} ms",
            "prompt": f"{m.prompt_tokens:,} tokens",
            "reused": f"{m.reused_tokens:,}",
            "of them recomputed": f"{m.recomputed_tokens:,} (r = {m.ratio:.2f})",
            "computed": f"{m.fresh_tokens:,}",
            "mode": f"{m.mode} {m.policy}".strip(),
        }
        cells = "".join(f"<div><b>{value}</b>{name}</div>" for name, value in figures.items())
        said = "".join(f"<li>{escape(note)}</li>" for note in (m.decision, *m.notes) if note)
        return f'<div class="figures">{cells}</div>' + (f"<ul>{said}</ul>" if said else "")

    def _sources(self) -> str:
        rows = (
            (_name(source.source), source.title, f"{source.distance:.3f}", _shortened(source.text))
            for source in self.answer.sources
        )
        return _table(("source", "title", "distance", "text"), rows)

    def _chunk_table(self) -> str:
        chunks = zip(self.answer.metrics.chunks, self.trace.chunks, strict=True)
        rows = (
            (
                str(number),
                _name(chunk.source) or chunk.chunk_id[:12],
                f"{start:,} to {end:,}",
                chunk.outcome,
                f"{chunk.recomputed_tokens:,} of {chunk.tokens:,}",
                chunk.tier,
                chunk.reason,
            )
            for number, (chunk, (start, end)) in enumerate(chunks, start=1)
        )
        return _table(("", "source", "tokens", "outcome", "recomputed", "tier", "why"), rows)

    def _tokens(self) -> Iterator[str]:
        """The prompt as spans of tokens in the same state."""
        begins = {start for start, _ in self.trace.chunks}
        states = enumerate(zip(self.trace.texts, self._states(), strict=True))
        for (state, _), run in groupby(states, key=lambda each: (each[1][1], each[0] in begins)):
            tokens = list(run)
            if tokens[0][0] in begins:
                number = [start for start, _ in self.trace.chunks].index(tokens[0][0]) + 1
                yield f'<b class="number">{number}</b>'
            text = "".join(text for _, (text, _) in tokens)
            yield f'<span style="{state.style}" title="{state.says}">{escape(text)}</span>'

    def _states(self) -> list[_State]:
        states = [_State(f"background:{_FRESH}55", "computed")] * len(self.trace.texts)
        for start, end in self.trace.reused:
            for at in range(start, end):
                share = self.trace.recomputed[at]
                if share:
                    layers = round(share * (self.trace.layers - 1)) + 1
                    opacity = round(90 + 150 * share)
                    says = f"recomputed in {layers} of {self.trace.layers} layers, else reused"
                    states[at] = _State(f"background:{_RECOMPUTED}{opacity:02x}", says)
                else:
                    states[at] = _State(f"background:{_REUSED}44", "reused")
        return states

    def _timeline(self) -> str:
        """One row per layer, time from left to right."""
        spans = self.trace.spans
        total_s = max(span.ended_s for span in spans)
        rows = max(span.layer for span in spans) + 1
        height = rows * _ROW + 22
        drawn = [f'<svg viewBox="0 0 {_WIDTH + 40} {height}" role="img">']
        for span in spans:
            x, width = (_WIDTH * s / total_s for s in (span.began_s, span.seconds))
            top, deep = (0, 0.4) if span.what in (LOAD, REPOSITION) else (0.42, 0.5)
            in_scout = " in the scout pass" if span.pass_name else ""
            says = f"layer {span.layer + 1}: {span.what}{in_scout}, {1e3 * span.seconds:.2f} ms"
            drawn.append(
                f'<rect x="{40 + x:.1f}" y="{(span.layer + top) * _ROW:.1f}" width="{max(width, 0.4):.2f}" '
                f'height="{deep * _ROW:.1f}" fill="{_KINDS[span.what]}" '
                f'opacity="{0.55 if span.pass_name else 1}"><title>{says}</title></rect>'
            )
        for layer in {0, rows - 1}:
            y = (layer + 0.75) * _ROW
            drawn.append(f'<text x="34" y="{y:.1f}" text-anchor="end">{layer + 1}</text>')
        for share in (0.0, 0.5, 1.0):
            anchor = "end" if share == 1.0 else "middle" if share else "start"
            drawn.append(
                f'<text x="{40 + share * _WIDTH}" y="{height - 6}" text-anchor="{anchor}">'
                f"{1e3 * share * total_s:,.0f} ms</text>"
            )
        legend = "".join(
            f'<span><i style="background:{colour}"></i>{what}</span>'
            for what, colour in _KINDS.items()
            if any(span.what == what for span in spans)
        )
        return f'<p class="legend">{legend}<span>paler: scout pass</span></p>{"".join(drawn)}</svg>'


def _section(title: str, body: str) -> str:
    return f"<h3>{title}</h3>{body}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{name}</th>" for name in head)
    rest = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{first}</tr>{rest}</table>"


def _name(source: str) -> str:
    """The file's name, or a source that is no path as it is."""
    return source.rstrip("/").rpartition("/")[2]


def _shortened(text: str, characters: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[:characters].rpartition(' ')[0]} …"


# Colours of Okabe and Ito (2008), as in all figures.
_REUSED, _RECOMPUTED, _FRESH = "#56B4E9", "#E69F00", "#009E73"
_KINDS = {
    LOAD: "#56B4E9",
    REPOSITION: "#0072B2",
    WAIT: "#bbbbbb",
    SELECT: "#CC79A7",
    COMPUTE: "#E69F00",
}
_WIDTH, _ROW = 900, 11
_LEGEND = (
    f'<p class="legend"><span><i style="background:{_REUSED}44"></i>reused</span>'
    f'<span><i style="background:{_RECOMPUTED}"></i>recomputed; the darker, the more layers</span>'
    f'<span><i style="background:{_FRESH}55"></i>computed</span></p>'
)
_CSS = """
.blendrag { font: 14px/1.5 system-ui, sans-serif; max-width: 960px; margin: 0 auto; padding: 1em;
  color: #222; background: #fff }
.blendrag h3 { font-size: 1em; margin: 1.6em 0 .5em }
.blendrag .answer { font-size: 1.25em; margin: .3em 0; white-space: pre-wrap }
.blendrag .figures { display: flex; flex-wrap: wrap; gap: .4em 2em; color: #666 }
.blendrag .figures b { display: block; color: #222 }
.blendrag table { border-collapse: collapse; width: 100% }
.blendrag th { text-align: left; font-weight: 600; color: #666 }
.blendrag th, .blendrag td { padding: .2em 1em .2em 0; border-bottom: 1px solid #e3e3e3; vertical-align: top }
.blendrag .legend span { margin-right: 1.5em; color: #666 }
.blendrag .legend i { display: inline-block; width: 1em; height: 1em; margin-right: .4em }
.blendrag .prompt { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7 }
.blendrag .number { background: #222; color: #fff; padding: 0 .45em; border-radius: 3px; margin-right: .2em }
.blendrag svg { width: 100%; font: 10px system-ui, sans-serif; fill: #666 }
"""
