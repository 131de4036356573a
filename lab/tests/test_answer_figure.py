"""The figure of README.md: what it measures, and that it is drawn."""

from __future__ import annotations

from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.workload import Workload
from blendrag_lab.plots import write_png
from lab.pages.answer_figure import answer_figure, measure


def test_one_answer_is_measured_and_drawn(tmp_path):
    workload = Workload(chunks=2, chunk_tokens=64, question_tokens=16, ratio=0.25, rounds=1)
    answer = measure(TimedModel("tiny", device="cpu").adapter, workload)
    assert answer.full_s > 0
    assert answer.blend_s >= max(span.ended_s for span in answer.spans if span.pass_name == "")
    assert len(answer.recomputed) == 4
    assert all(len(layer) == 0.25 * 128 for layer in answer.recomputed[1:])
    write_png(answer_figure(answer), tmp_path / "answer.png")
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")
