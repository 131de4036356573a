"""The sweep over model types, on two of them."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.engine import BlendEngine
from model.sweep import Outcome, outcome_of, page


def test_a_type_is_blended_answers_in_mode_full_only_or_cannot_be_tried() -> None:
    assert outcome_of("llama") == Outcome("llama", "blended", "4 rotary")
    refused = outcome_of("gpt2")
    assert (refused.state, "change with position" in refused.why) == ("full only", True)
    assert outcome_of("whisper").state == "not tried"


def test_an_error_and_another_answer_than_transformers_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.sweep._stock_answer", lambda model: "something else")
    assert outcome_of("llama").state == "WRONG"

    def failing(*_: Any, **__: Any) -> None:
        raise KeyError("layer")

    monkeypatch.setattr(BlendEngine, "generate", failing)
    assert "KeyError" in outcome_of("llama").why


def test_the_page_groups_types_by_their_reason() -> None:
    why = "layer 0 of {} ({}) is not an attention layer; use mode full"
    found = [
        Outcome("bert", "full only", why.format("BertLMHeadModel", "BertLayer")),
        Outcome("mpt", "full only", why.format("MptForCausalLM", "MptBlock")),
        Outcome("llama", "blended", "4 rotary"),
    ]
    assert "| layer 0 of the model is not an attention layer | bert, mpt |" in page(found)
    assert "1 model types are blended, 2 answer" in page(found)
