"""Time to first token over stored modules."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from blendrag_lab.bench.schema import SchemaResult, schema_table
from lab.tests.bench.small import measured


@cache
def figures() -> dict[str, Any]:
    return measured(
        "schema", "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "64", "--question-tokens", "16",
        "--rounds", "1", "--dtype", "float32",
    )  # fmt: skip


def test_modules_are_loaded_and_the_question_is_computed():
    modules, *_ = prompts = figures()["prompts"]
    assert [prompt["name"] for prompt in prompts] == [
        "2 modules", "code generation", "personalisation", "trip plan"
    ]  # fmt: skip
    assert 100 < modules["prompt_tokens"] <= 144
    for prompt in prompts:
        assert prompt["ms"].keys() == prompt["speedup"].keys() == {"full", "blend", "schema"}
        assert prompt["computed_tokens"] <= 32 < prompt["prompt_tokens"] / 2
        reused = prompt["prompt_tokens"] - prompt["computed_tokens"]
        # layers, K and V, heads, width, bytes
        assert prompt["kv_bytes"] == reused * 4 * 2 * 2 * 16 * 4
        full, placed = (prompt["ms"][way]["median"] for way in ("full", "schema"))
        assert prompt["speedup"]["schema"] == full / placed


def test_a_token_takes_two_numbers_for_each_layer_head_and_width():
    found = figures()["token_bytes"]
    assert found["qwen2.5-0.5b"]["native"] == 2 * 24 * 2 * 64 * 2
    assert found["llama-8b"]["native"] == 2 * 32 * 8 * 128 * 2
    assert all(0.5 < sizes["int8"] / sizes["native"] < 0.6 for sizes in found.values())


def test_the_page_shows_prompts_and_sizes():
    shown = schema_table(TypeAdapter(SchemaResult).validate_python(figures())).markdown()
    assert "| trip plan |" in shown
    assert "| llama-8b | 131,072 |" in shown
