"""The bench of JSON schemas: both kinds of answers have the same length, and joint steps are joint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blendrag.engine import Answer, BlendEngine, Options
from blendrag_lab.bench import grammar
from cli.commands import invoke
from lab.tests.bench.small import joint_steps, measured

SMALL = ("grammar", "--model", "demo", "--tokens", "8", "--rounds", "1", "--at-once")


def test_answers_with_and_without_a_schema_are_timed_alone_and_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = joint_steps(monkeypatch)
    asked: list[Options] = []
    token_ms = grammar._token_ms

    def noted(engine: object, options: Options, number: int) -> float:
        asked.append(options)
        return token_ms(engine, options, number)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar, "_token_ms", noted)
    alone, together = measured(*SMALL, "3,1")["rows"]
    assert [row["at_once"] for row in (alone, together)] == [1, 3]
    assert max(sizes) == 3
    assert sum(options.response_format is not None for options in asked) == len(asked) / 2
    assert all(row["over_free"] > 0 for row in (alone, together))


def test_answers_that_end_early_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = BlendEngine.batch

    def shorter(engine: BlendEngine, prompts: list[str], options: Options) -> list[Answer]:
        return stock(engine, prompts, replace(options, max_new_tokens=4, generate_kwargs={}))

    monkeypatch.setattr(BlendEngine, "batch", shorter)
    found = invoke("bench", *SMALL, "1")
    assert found.exit_code != 0
    assert "an answer ended before its 8 tokens" in found.stderr
