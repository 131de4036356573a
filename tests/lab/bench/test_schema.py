"""Time to first token over stored modules."""

from __future__ import annotations

from lab.bench.small import measured


def test_modules_are_loaded_and_the_question_is_computed():
    figures = measured(
        "schema", "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "64", "--question-tokens", "16",
        "--rounds", "1", "--dtype", "float32",
    )  # fmt: skip
    assert figures["ms"].keys() == figures["speedup"].keys() == {"full", "blend", "schema"}
    assert figures["computed_tokens"] <= 16 < 100 < figures["prompt_tokens"] <= 144
    reused = figures["prompt_tokens"] - figures["computed_tokens"]
    assert (
        figures["kv_bytes"] == reused * 4 * 2 * 2 * 16 * 4
    )  # layers, K and V, heads, width, bytes
    full, placed = (figures["ms"][way]["median"] for way in ("full", "schema"))
    assert figures["speedup"]["schema"] == full / placed
