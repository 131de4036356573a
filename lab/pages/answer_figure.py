"""One answer as a figure, for README.md: which tokens were reused, recomputed and computed, and when.

``python -m lab.pages.answer_figure docs/answer.png`` measures one request and draws it. Needs matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer

from blendrag.cli.options import require_place
from blendrag.metrics import LOAD, WAIT, Span, Timeline
from blendrag.model import ModelAdapter
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.tiers import ON_DISK, tier_store
from blendrag_lab.bench.workload import PromptBench, Workload
from blendrag_lab.plots import COLOURS, GREY, STYLE, write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = COLOURS[5], COLOURS[4], COLOURS[2]
#: Tokens in one column of the map; divides chunks and question.
COLUMN_TOKENS = 8


@dataclass(frozen=True)
class MeasuredAnswer:
    """One request up to its first token, and a stock prefill of the same prompt."""

    about: str
    workload: Workload
    full_s: float
    blend_s: float
    spans: tuple[Span, ...]
    recomputed: tuple[tuple[int, ...], ...]
    """Positions of the recomputed chunk tokens, by layer."""


@torch.inference_mode()
def measure(adapter: ModelAdapter, workload: Workload) -> MeasuredAnswer:
    """The fastest of ``workload.rounds`` requests, and the fastest stock prefill between them."""
    full_ms, runs = [], []
    with tier_store(ON_DISK) as there:
        bench = PromptBench(adapter, workload, there)
        bench.blend()  # warm up
        for _ in range(workload.rounds):
            full_ms.append(bench.timer(bench.full)())
            timeline = Timeline()
            _, fusion = bench.blend(timeline)
            runs.append((timeline.now(), timeline, fusion))
    blend_s, timeline, fusion = min(runs, key=lambda run: run[0])
    return MeasuredAnswer(
        f"{adapter.model_id} geometry, {adapter.layout.dtype}, {adapter.device} "
        f"({torch.get_num_threads()} threads), policy {workload.policy} at r = {workload.ratio:g}",
        workload,
        min(full_ms) / 1e3,
        blend_s,
        tuple(timeline.all_spans()),
        tuple(tuple(layer.tolist()) for layer in fusion.recomputed),
    )


def answer_figure(answer: MeasuredAnswer) -> Figure:
    """Above, when: full prefill, and the loading and computing of a blended one. Below, which tokens."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        over_time, over_tokens = figure.subplots(2, 1, height_ratios=(1.0, 1.1))
        _draw_times(over_time, answer)
        _draw_tokens(over_tokens, answer)
        figure.suptitle(answer.about, fontsize=STYLE["axes.titlesize"])
    return figure


def _draw_times(axes: Axes, answer: MeasuredAnswer) -> None:
    tokens = answer.workload.chunks * answer.workload.chunk_tokens
    loaded_s = max(span.ended_s for span in answer.spans if span.what == LOAD)
    axes.barh(0, answer.full_s, 0.7, color=GREY)
    for span in answer.spans:
        if span.what != WAIT:
            lane = 1 if span.what == LOAD else 2
            colour = BLUE if span.what == LOAD else GREEN if span.pass_name else ORANGE
            axes.barh(lane, span.seconds, 0.7, left=span.began_s, color=colour)
    speedup = answer.full_s / answer.blend_s
    notes = (
        ("full prefill", answer.full_s, f"first token after {answer.full_s:.1f} s"),
        ("blend: load", loaded_s, f"stored KV of {tokens:,} tokens"),
        ("blend: compute", answer.blend_s,
         f"first token after {answer.blend_s:.1f} s, {speedup:.1f}× earlier"),
    )  # fmt: skip
    for lane, (_, at, text) in enumerate(notes):
        inside = at > answer.full_s / 2
        axes.annotate(
            text, (at, lane), (-6 if inside else 6, 0), textcoords="offset points",
            va="center", ha="right" if inside else "left", color="white" if inside else "black",
        )  # fmt: skip
    axes.set_yticks(range(len(notes)), [name for name, _, _ in notes])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="seconds", xlim=(0, answer.full_s))


def _draw_tokens(axes: Axes, answer: MeasuredAnswer) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    workload, layers = answer.workload, len(answer.recomputed)
    chunks_end = workload.chunks * workload.chunk_tokens
    share = torch.zeros(layers, chunks_end)
    for layer, positions in enumerate(answer.recomputed):
        share[layer, list(positions)] = 1.0
    share = share.view(layers, -1, COLUMN_TOKENS).mean(-1, keepdim=True)  # [L, columns, 1]
    blue, orange, green = (torch.tensor(to_rgb(colour)) for colour in (BLUE, ORANGE, GREEN))
    chunks = blue + share * (orange - blue)
    question = green.expand(layers, workload.question_tokens // COLUMN_TOKENS, 3)
    end = chunks_end + workload.question_tokens
    axes.imshow(
        torch.cat([chunks, question], dim=1).numpy(),
        aspect="auto", interpolation="nearest", extent=(0, end, layers, 0),
    )  # fmt: skip
    for number in range(1, workload.chunks + 1):
        axes.axvline(number * workload.chunk_tokens, color="white", linewidth=1.5)
    axes.grid(visible=False)
    axes.set(xlabel="tokens of the prompt: chunks, then the question", ylabel="layer")
    axes.set_yticks([0.5, layers - 0.5], ["1", str(layers)])
    colours = {"reused": BLUE, "recomputed": ORANGE, "computed (question)": GREEN}
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3,
    )  # fmt: skip


def main(path: Path) -> None:
    """Draw one answer to the PNG at PATH."""
    require_place("path", path, ".png")
    workload = Workload(chunks=6, chunk_tokens=512, rounds=3)
    write_png(answer_figure(measure(TimedModel("qwen2.5-0.5b").adapter, workload)), path)


if __name__ == "__main__":
    typer.run(main)
