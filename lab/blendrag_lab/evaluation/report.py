"""The rows on a terminal, and notes that a reader should know before believing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blendrag_lab.evaluation.datasets import Dataset
from blendrag_lab.evaluation.rows import ALL, ArenaRow
from blendrag_lab.evaluation.ways import BASELINES, FULL, NONE, REUSE
from blendrag_lab.tables import Column, ResultTable, interval, number, table

LEGEND = (
    "PGR: 0 answers as without context, 1 as full prefill does, with the 95% interval of a paired "
    "bootstrap over contexts; – where full prefill gains nothing. charged: share of chunk tokens "
    "computed over all layers; above r if a policy computes the entry layer for all of them to "
    "choose. KL: of the first token, KL/tok: per token of full prefill's answer with its standard error, "
    "in nats. recovered: 1 - KL/tok over reuse's, with its 95% interval. agrees: share of that answer's "
    "tokens that the way prefers too. kept: share of the questions that full prefill answers right which "
    "the way answers right, too; gained: of the others. prefix on/off: chunks encoded after the corpus's "
    "prefix or without one. TTFT: median, KV read from disk."
)
#: Columns of a table besides the names of the ways; more do not fit into 80 characters.
COLUMNS = 4


def tables(rows: Sequence[ArenaRow]) -> list[ResultTable]:
    """One line per way: what all its answers were worth and cost, and the score by kind of question.
    Tables of :data:`COLUMNS` columns; each names the ways."""
    whole = [row for row in rows if row.kind == ALL]
    by_kind = {(row.way, row.kind): row for row in rows}

    def score(kind: str) -> Column:
        return kind, lambda row: number(by_kind[row.way, kind].score, ".3f")

    columns: list[Column] = [
        ("charged", lambda row: f"{row.charged_ratio:.3f}"),
        ("score", lambda row: number(row.score, ".3f")),
        ("PGR", lambda row: interval(row.pgr, row.pgr_low, row.pgr_high)),
        ("TTFT ms", lambda row: f"{row.ttft_ms:.0f}"),
        ("KL", lambda row: number(row.kl, ".2g")),
        ("KL/tok", _token_kl),
        ("recovered", lambda row: interval(row.recovered, row.recovered_low, row.recovered_high)),
        ("agrees", lambda row: number(row.agreement, ".2f")),
        *_on_right_answers(whole),
        *(score(kind) for kind in dict.fromkeys(row.kind for row in rows if row.kind != ALL)),
    ]
    first, schedules = rows[0], {row.schedule for row in rows if row.schedule}
    title = (
        f"{first.dataset}: {first.n} questions, up to {first.n_chunks} chunks of at most "
        f"{first.chunk_tokens} tokens; score: {first.metric.replace('_', ' ')}"
    )
    if first.right is not None:
        title += f"; full prefill answers {first.right} right"
    if len(schedules) == 1:
        title += f"; schedule {schedules.pop()}"
    names = _names_of(whole)
    made = [
        table([*names, *columns[start : start + COLUMNS]], whole)
        for start in range(0, len(columns), COLUMNS)
    ]
    made[0] = replace(made[0], title=title)
    made[-1] = replace(made[-1], notes=[LEGEND])
    return made


def _on_right_answers(rows: Sequence[ArenaRow]) -> list[Column]:
    """Columns about the questions that full prefill answers right, if there are any."""
    if not rows[0].right:
        return []
    columns: list[Column] = [
        ("kept", lambda row: number(row.kept, ".2f")),
        ("gained", lambda row: number(row.gained, ".2f")),
        ("agrees, right", lambda row: number(row.right_agreement, ".2f")),
    ]
    return columns


def _token_kl(row: ArenaRow) -> str:
    error = "" if row.token_kl_error is None else f" ± {row.token_kl_error:.2g}"
    return number(row.token_kl, ".2g") + error


def _names_of(rows: Sequence[ArenaRow]) -> list[Column]:
    """Columns that name a way: policy and ratio, schedule and prefix if they vary."""

    def varies(value: Callable[[ArenaRow], object]) -> bool:
        return len({value(row) for row in rows} - {None, ""}) > 1

    columns: list[Column] = [("policy", lambda row: row.policy)]
    if varies(lambda row: row.schedule):
        columns.append(("schedule", lambda row: row.schedule))
    if varies(lambda row: row.encode_prefix):
        prefix = {None: "", True: "on", False: "off"}
        columns.append(("prefix", lambda row: prefix[row.encode_prefix]))
    columns.append(("r", lambda row: "" if row.policy in (NONE, FULL) else f"{row.ratio:.3g}"))
    return columns


def notes(dataset: Dataset, rows: Sequence[ArenaRow]) -> list[str]:
    """Sentences about prompts of one chunk and about policies that are no better than reuse."""
    found = [reuse_note(rows)]
    if alone := sum(len(case.chunks) == 1 for case in dataset.cases):  # no other chunk to attend to
        found.append(
            f"prompts of one chunk alone: {alone} of {len(dataset.cases)}; almost nothing deviates from "
            "full prefill there; use several chunks (smaller --chunk-tokens, more --chunks, longer contexts)"
        )
    return [note for note in found if note]


def reuse_note(rows: Sequence[ArenaRow]) -> str:
    """A sentence if no policy scores above reuse by more than the interval; else empty."""
    whole = [row for row in rows if row.kind == ALL]
    reuse = {row.encode_prefix: row for row in whole if row.policy == REUSE}
    scored = [row for row in whole if row.score is not None]
    tried = [row for row in scored if row.policy not in BASELINES and row.encode_prefix in reuse]
    if not tried or any(row.is_above(reuse[row.encode_prefix]) for row in tried):
        return ""
    best = max(tried, key=lambda row: row.score or 0.0)
    closer = [row for row in tried if (row.recovered_low or 0.0) > 0.0]
    nearest = max(closer, key=lambda row: row.recovered or 0.0, default=None)
    by_kl = "nor is any policy closer to full prefill by KL per token"
    if nearest is not None:
        by_kl = (
            f"by KL per token {nearest.policy} is closer to full prefill ({nearest.recovered:.2f} "
            "recovered)"
        )
    return (
        f"recomputing nothing scored as well: reuse {reuse[best.encode_prefix].score:.3f}, the best policy "
        f"({best.policy}) {best.score:.3f}, which {best.n} questions cannot tell apart; {by_kl}"
    )
