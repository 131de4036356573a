"""Hybrid models answer batches and streams over stored chunks, as others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from langchain_blendrag import BlendLLM, ChatBlend

SHAPE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_a_batch_and_a_stream_give_what_each_prompt_gets_alone(tmp_path: Path, seen: Any) -> None:
    model = tiny.family("qwen3_5", initializer_range=0.2, **SHAPE)
    with tiny.engine(model, tmp_path, prefix_text=tiny.BOS) as engine:
        engine.ingest([tiny.document(0, paragraphs=3)]).whole()
        prompts = [tiny.prompt(engine, 0, ask=f"What happened in {year}?") for year in (1, 2)]
        for llm in (BlendLLM(engine=engine), ChatBlend(engine=engine)):
            alone = [getattr(said := llm.invoke(each), "content", said) for each in prompts]
            together = llm.batch(prompts, {"callbacks": [seen]})
            assert [getattr(said, "content", said) for said in together] == alone
            pieces = [getattr(piece, "content", piece) for piece in llm.stream(prompts[0])]
            assert "".join(pieces) == alone[0]
    outcomes = {chunk["outcome"] for metrics in seen.metrics for chunk in metrics["chunks"]}
    assert outcomes == {"blended"}
