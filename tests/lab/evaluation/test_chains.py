"""MapReduce and MapRerank: LangChain's chains over the arena's engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import ContextOverflowError
from blendrag.lab.evaluation.chains import PASSAGE_TOKENS, SCORE_TOKENS, ask_chain
from blendrag.lab.evaluation.rows import Row
from blendrag.lab.evaluation.ways import make_ways
from lab.evaluation import lab

pytest.importorskip("langchain_classic")
pytest.importorskip("langchain_blendrag")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(lab.adapter(), tmp_path / "store") as made:
        yield made


def scripted(monkeypatch: pytest.MonkeyPatch, replies: list[str]) -> list[Any]:
    """The engine measures as ever but says ``replies``; what it was asked."""
    asked: list[Any] = []
    real = BlendEngine.batch

    def speak(
        self: BlendEngine, prompts: list[Any], options: Options | None = None, **kwargs: Any
    ) -> list[Answer]:
        said = []
        for prompt, answer in zip(prompts, real(self, prompts, options, **kwargs), strict=True):
            text = replies[len(asked)]
            asked.append((prompt, options))
            said.append(Answer(text, (text,), "stop", answer.metrics))
        return said

    monkeypatch.setattr(BlendEngine, "batch", speak)
    return asked


def test_map_reduce_reads_every_chunk_alone_and_then_what_it_said(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, ["one", "two", "three", "ships"])
    (case,) = lab.cases(1, 1)
    reply = ask_chain(engine, "map-reduce", case, 3)
    assert reply.text == "ships"
    assert len(asked) == 4
    for chunk, (prompt, options) in zip(case.chunks, asked, strict=False):
        assert chunk in prompt
        assert (options.mode, options.max_new_tokens) == ("full", PASSAGE_TOKENS)
    assert asked[-1][1].max_new_tokens == 3
    assert all(part in asked[-1][0] for part in ("one", "two", "three"))
    assert (reply.charged_ratio, reply.logits) == (1.0, None)
    assert reply.ttft_s > 0


def test_map_rerank_takes_the_answer_with_the_best_score(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, ["a\nScore: 10", "ships\nScore: 90", "b\nScore: 20"])
    assert ask_chain(engine, "map-rerank", lab.cases(1, 1)[0], 3).text == "ships"
    assert {options.max_new_tokens for _, options in asked} == {3 + SCORE_TOKENS}


def test_a_model_that_gives_no_score_has_answered_nothing(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, ["a", "b", "c"])
    assert ask_chain(engine, "map-rerank", lab.cases(1, 1)[0], 3).text == ""


def test_a_prompt_too_long_for_the_model_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    short = tiny.adapter(tiny.llama(max_position_embeddings=64))
    with BlendEngine(short, tmp_path) as engine, pytest.raises(ContextOverflowError):
        ask_chain(engine, "map-reduce", lab.cases(1, 1)[0], 3)


def test_chains_stand_in_the_same_table() -> None:
    rows: list[Row] = lab.arena(make_ways(["map-reduce"], [], [], []), lab.cases(1, 1)).run()
    chain = next(row for row in rows if row.policy == "map-reduce")
    assert (chain.kl, chain.agreement, chain.encode_prefix) == (None, None, None)
