"""Hybrid models answer over stored chunks, as others do."""

from __future__ import annotations

from pathlib import Path

import tiny
from llama_index.llms.blendrag import BlendLLM

SHAPE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_whole_answers_and_streams_are_alike(tmp_path: Path) -> None:
    model = tiny.family("qwen3_5", initializer_range=0.2, **SHAPE)
    with tiny.engine(model, tmp_path, prefix_text=tiny.BOS) as engine:
        engine.ingest([tiny.document(0, paragraphs=3)]).whole()
        llm, prompt = BlendLLM(engine=engine), tiny.prompt(engine, 0)
        answer = llm.complete(prompt)
        *_, last = llm.stream_complete(prompt)
        assert last.text == answer.text == engine.generate(prompt).text
        assert {chunk["outcome"] for chunk in answer.raw["blendrag"]["chunks"]} == {"blended"}
