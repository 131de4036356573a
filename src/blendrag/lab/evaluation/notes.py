"""What a reader should know before believing the rows: sentences about the questions asked and the answers.

Owns when a dataset says less than its figures look like, and when no policy beats reuse. Does not know how
it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.lab.evaluation.bootstrap import paired_lead
from blendrag.lab.evaluation.cases import Dataset
from blendrag.lab.evaluation.reached import LEAST_LEAD
from blendrag.lab.evaluation.rows import ALL, Row
from blendrag.lab.evaluation.ways import BASELINES, REUSE

#: Fewer questions leave intervals too wide to tell ways apart by.
FEW_QUESTIONS = 30


def lone_chunks(dataset: Dataset) -> str:
    """A sentence if prompts hold one chunk alone, whose KV lacks no other's; else empty."""
    total = len(dataset.cases)
    alone = sum(len(case.chunks) == 1 for case in dataset.cases)
    if not alone:
        return ""
    return (
        f"prompts of one chunk alone: {alone} of {total}; such a chunk has no other to attend to, so that "
        "little or nothing deviates from full prefill, whatever is recomputed, and quality looks perfect; "
        "take prompts of several (smaller --chunk-tokens, more --chunks, longer contexts)"
    )


def few_questions(dataset: Dataset) -> str:
    """A sentence if there are so few that most differences may be chance; else empty."""
    n = len(dataset.cases)
    if n >= FEW_QUESTIONS:
        return ""
    asked = "1 question leaves" if n == 1 else f"{n} questions leave"
    return (
        f"{asked} wide intervals, within which ways differ by chance; ask {FEW_QUESTIONS} or more "
        "(--contexts)"
    )


def reuse_suffices(rows: Sequence[Row]) -> str:
    """A sentence if no policy scores above reuse by more than the 95% interval of their paired difference,
    or if that cannot be told; else empty."""
    whole = [row for row in rows if row.kind == ALL]
    reuse = {row.encode_prefix: row for row in whole if row.policy == REUSE}
    tried = [row for row in whole if row.policy not in BASELINES and row.encode_prefix in reuse]
    if not tried or any(_is_above(row, reuse[row.encode_prefix]) for row in tried):
        return ""
    best = max(tried, key=lambda row: row.score)
    score = reuse[best.encode_prefix].score
    return (
        f"recomputing nothing scored as well: reuse {score:.3f}, the best policy ({best.policy}) "
        f"{best.score:.3f}, which {best.n} questions cannot tell apart; {_closest(tried)}"
    )


def _closest(tried: Sequence[Row]) -> str:
    """Whether any is closer to full prefill than reuse by more than the interval."""
    closer = [row for row in tried if (row.recovered_low or 0.0) > 0.0]
    if not closer:
        return "nor is any policy closer to full prefill by KL per token"
    nearest = max(closer, key=lambda row: row.recovered or 0.0)
    return f"by KL per token {nearest.policy} is closer to full prefill ({nearest.recovered:.2f} recovered)"


def _is_above(row: Row, reuse: Row) -> bool:
    lead = paired_lead(row.by_context, reuse.by_context)
    return lead is not None and lead.low > LEAST_LEAD
