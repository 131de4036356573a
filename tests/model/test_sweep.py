"""The sweep over model types, on those that many people run and that tiny.FAMILIES leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendrag.engine import BlendEngine
from model.sweep import Outcome, outcome_of, page

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
#: Types that are blended, and the parts that their layers are made of.
BLENDED = {
    "qwen3_5_text": "rotary and matrix | full and linear | dense",
    "exaone_moe": "rotary and position-free | full and sliding | dense and experts",
    "internvl": "rotary | full and sliding | dense",
    "mixtral": "rotary | sliding | experts",
    "modernbert-decoder": "rotary | full and sliding | dense",
}
#: Types that are not, and why.
NOT_BLENDED = {
    "bert": ("full only", "positions are added to the embeddings"),
    "deepseek_v32": ("prefix", "tokens that they choose"),
    "qwen4_exp_text": ("prefix", "more than K and V for each token"),
}


@pytest.mark.parametrize("kind", BLENDED)
def test_a_type_with_two_layers_of_each_kind_is_blended(kind: str) -> None:
    assert outcome_of(kind) == Outcome(kind, "blended", BLENDED[kind])
    assert f" {kind}" in PAGE.read_text().partition("## Mode `prefix`")[0].replace(",", " ")


@pytest.mark.parametrize("kind", NOT_BLENDED)
def test_a_type_that_is_not_blended_says_why_and_answers_in_the_other_modes(kind: str) -> None:
    state, why = NOT_BLENDED[kind]
    outcome = outcome_of(kind)
    assert (outcome.state, why in outcome.why) == (state, True)


def test_a_type_that_does_not_answer_by_itself_is_not_tried() -> None:
    assert outcome_of("gemma4_assistant").state == "not tried"
    assert "transformers itself" in outcome_of("prophetnet").why


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
    why = "layer {} of {} ({}) keeps no KV that blending can find; use mode full"
    found = [
        Outcome("rwkv", "full only", why.format(0, "RwkvForCausalLM", "RwkvBlock")),
        Outcome("xlnet", "full only", why.format(1, "XLNetLMHeadModel", "XLNetLayer")),
        Outcome("llama", "blended", "rotary | full | dense"),
    ]
    assert "| a layer of the model keeps no KV that blending can find | rwkv, xlnet |" in page(
        found
    )
    assert "| rotary | full | dense | llama |" in page(found)
    assert "1 model types are blended, 0 more" in page(found)
