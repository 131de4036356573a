"""What an answer is worth: against the accepted answers, and against what full prefill says.

Owns exact match and F1 on *words* with SQuAD's normalisation (not on tokenizer tokens, a trap of
published code), Rouge-L by ``rouge-score``, the divergence of first tokens and greedy agreement. All
of them pure functions. Does not know who answered.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch

from blendrag.errors import InvalidInputError, UnsupportedModelError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """SQuAD's: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """1 if the normalised answer equals one of the accepted ones, else 0."""
    given = normalised(answer)
    return float(any(given == normalised(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Best F1 over the accepted answers, on normalised words."""
    words = normalised(answer).split()
    return max((_f1(words, normalised(text).split()) for text in accepted), default=0.0)


def _f1(answer: Sequence[str], expected: Sequence[str]) -> float:
    if not answer or not expected:  # SQuAD 2.0: nothing is right only where nothing is expected
        return float(list(answer) == list(expected))
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))


def rouge_l(answer: str, accepted: Iterable[str]) -> float:
    """Best Rouge-L F-measure over the accepted answers, stemmed.

    Raises :class:`InvalidInputError` without the package ``rouge-score``.
    """
    scorer = require_rouge()
    return max((scorer.score(text, answer)["rougeL"].fmeasure for text in accepted), default=0.0)


@lru_cache(maxsize=1)
def require_rouge() -> Any:
    """The scorer; raises :class:`InvalidInputError` without the package ``rouge-score``."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as exc:
        raise InvalidInputError(
            'Rouge-L needs the package rouge-score; pip install "blendrag[lab]"'
        ) from exc
    return RougeScorer(["rougeL"], use_stemmer=True)


def token_kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """Mean of :func:`first_token_kl` over the rows of two ``[T, V]``."""
    pairs = zip(full, other, strict=True)
    return sum(first_token_kl(*pair) for pair in pairs) / len(full)


def first_token_kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full ‖ other) in nats of two rows of logits ``[V]``; infinite where ``other`` rules out what
    ``full`` allows. Raises :class:`UnsupportedModelError` for logits that are not numbers."""
    expected = torch.log_softmax(full.double(), dim=-1)  # [V]
    given = torch.log_softmax(other.double(), dim=-1)  # [V]
    terms = expected.exp() * (expected - given)  # [V]
    nothing = expected.isneginf()  # 0 · (−∞ + ∞) counts nothing
    divergence = float(terms.masked_fill(nothing, 0.0).sum())
    if math.isnan(divergence):
        raise UnsupportedModelError(
            "the logits of an answer are not numbers, expected finite ones; load the "
            "model with --dtype float32"
        )
    return max(0.0, divergence)


def agreement(full: Sequence[int], other: Sequence[int]) -> float:
    """Share of the longer answer's tokens that both have up to the first difference."""
    longest = max(len(full), len(other))
    if not longest:
        return 1.0
    pairs = zip(full, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / longest
