"""Metrics against values worked by hand."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.lab.evaluation import metrics


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Eiffel Tower!", "eiffel tower"), ("a theatre, an apple", "theatre apple"),
     ("U.S.A.", "usa"), ("", "")],
)  # fmt: skip
def test_normalisation_is_squads(text: str, expected: str) -> None:
    assert metrics.normalised(text) == expected


def test_an_answer_matches_any_of_the_accepted_ones_but_no_part_of_one() -> None:
    assert metrics.exact_match("the Porto.", ["Lisbon", "porto"]) == 1.0
    assert metrics.exact_match("Porto city", ["porto"]) == 0.0
    assert metrics.exact_match("", ["porto"]) == 0.0


def test_f1_counts_words_and_takes_the_best_accepted_answer() -> None:
    # two of two given words are among three expected ones: 2 · 2 / (2 + 3)
    assert metrics.f1("Exeter College", ["Exeter College Oxford"]) == pytest.approx(0.8)
    assert metrics.f1("Exeter College", ["no", "exeter, college"]) == 1.0
    assert metrics.f1("red red", ["red blue"]) == pytest.approx(0.5)  # a word counts once a time
    assert metrics.f1("something", ["other"]) == 0.0
    assert metrics.f1("", ["other"]) == 0.0


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    # "cat sat" of three words each
    assert metrics.rouge_l("the cat sat", ["a cat sat"]) == pytest.approx(2 / 3)
    assert metrics.rouge_l("nothing", ["a cat sat", "nothing"]) == 1.0


def test_rouge_l_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.require_rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(InvalidInputError, match=r"blendrag\[eval\]"):
        metrics.rouge_l("x", ["x"])
    metrics.require_rouge.cache_clear()


def test_the_divergence_of_first_tokens_is_of_full_prefill_from_the_other() -> None:
    full = torch.tensor([0.75, 0.25]).log()
    other = torch.tensor([0.5, 0.5]).log() + 3.0  # logits are known up to a constant
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert metrics.first_token_kl(full, other) == pytest.approx(expected)
    assert metrics.first_token_kl(full, full) == 0.0


def test_a_token_that_neither_allows_adds_nothing_to_the_divergence() -> None:
    full = torch.tensor([1.0, 0.0, -math.inf])
    assert metrics.first_token_kl(full, full) == 0.0
    assert metrics.first_token_kl(full, torch.tensor([1.0, 0.0, 5.0])) > 0.0


def test_ruling_out_what_full_prefill_allows_diverges_without_end() -> None:
    ruled_out = torch.tensor([1.0, -math.inf])
    assert metrics.first_token_kl(torch.tensor([1.0, 0.0]), ruled_out) == math.inf


def test_logits_that_are_not_numbers_are_no_agreement() -> None:
    numbers, broken = torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.nan])
    for full, other in ((numbers, broken), (broken, numbers), (broken, broken)):
        with pytest.raises(UnsupportedModelError, match="not numbers"):
            metrics.first_token_kl(full, other)


def test_agreement_ends_at_the_first_difference() -> None:
    assert metrics.agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert metrics.agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert metrics.agreement([1, 2], [1, 2]) == 1.0
    assert metrics.agreement([1], [2]) == 0.0
    assert metrics.agreement([], []) == 1.0
