"""Results: the outcome of each question in a journal, and the rows made of them.

A row is the result of one way on one kind of question. Rows are what ``blendrag eval --json`` prints and
what plots and docs/quality.md are made of.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.store.kv import NATIVE_ENCODING
from blendrag_lab.evaluation.datasets import Dataset
from blendrag_lab.evaluation.scoring import (
    RIGHT,
    ByContext,
    Kept,
    answers_kept,
    loss_recovered,
    paired_lead,
    performance_gap_recovered,
    sum_by_context,
)
from blendrag_lab.evaluation.ways import FULL, NONE, PLACED, REUSE, Way

#: The kind of a row over all questions.
ALL = "all"
#: Measures of a question whose mean is in a row. A further one is a field of :class:`Outcome` and of
#: :class:`ArenaRow`, and is computed in ``Arena._judge``.
MEASURES = ("charged_ratio", "accuracy", "f1", "rouge_l", "kl", "token_kl", "agreement")
#: Reuse must diverge by more than this from full prefill, in nats, for a share of it to mean anything.
SMALLEST_KL = 1e-4
#: How every line of a journal begins.
BEGINNING = '{"case_key": '


@dataclass(frozen=True)
class Outcome:
    """The answer of one way to one question; measures as in :class:`ArenaRow`."""

    case_key: str
    """Digest of all that decides the outcome besides the way: question, model, wording, code."""
    way_key: str
    answer: str
    accuracy: float | None
    f1: float | None
    rouge_l: float | None
    kl: float | None
    agreement: float | None
    ratio: float
    charged_ratio: float
    ttft_ms: float
    policy: str = ""
    """The policy and the schedule that ran."""
    schedule: str = ""
    token_kl: float | None = None
    model: str = ""
    dataset: str = ""
    kind: str = ""


class Journal(dict[tuple[str, str], Outcome]):
    """Outcomes by case key and way key, in memory and, with a path, in a file of JSON lines.

    An interrupted run continues from the file. A file may hold several runs, and a run with more ways or
    contexts asks only what is new. Lines are appended when a question has been answered in every way; the
    question of an incomplete line is asked again.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Reads ``path`` if it exists; raises :class:`InvalidInputError` for any other file."""
        super().__init__()
        self.path = path
        if path is not None and path.exists():
            self._read(path)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one question; they are in the file when this returns."""
        self.update({(outcome.case_key, outcome.way_key): outcome for outcome in outcomes})
        if self.path is not None:
            with _mapped_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)

    def _read(self, path: Path) -> None:
        with _mapped_errors(path):
            content = path.read_bytes()
            *lines, rest = content.decode("utf-8", errors="replace").split("\n")
            if not rest.startswith(BEGINNING[: len(rest)]):  # no incomplete line, but another file
                lines.append(rest)
            for line in lines:
                try:
                    outcome = Outcome(**json.loads(line))
                except (ValueError, TypeError) as exc:
                    raise InvalidInputError(
                        f"{path} holds {line[:40]!r}, expected the lines of an earlier evaluation; "
                        "give --out another file"
                    ) from exc
                self[outcome.case_key, outcome.way_key] = outcome
            if rest:  # complete lines are not rewritten
                os.truncate(path, content.rfind(b"\n") + 1)


@contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise InvalidInputError(
            f"{path} cannot be used ({exc.strerror or exc}); give --out another file"
        ) from exc


@dataclass(frozen=True)
class ArenaRow:
    """The result of one way on the questions of one kind; docs/evaluation.md describes the fields."""

    dataset: str
    seed: int
    policy: str
    schedule: str
    encode_prefix: bool | None
    ratio: float
    charged_ratio: float
    kind: str
    n: int
    score: float | None
    """``None`` for ways that only full prefill's answer was compared with."""
    pgr: float | None
    pgr_low: float | None
    pgr_high: float | None
    kl: float | None
    ttft_ms: float
    metric: str
    accuracy: float | None
    f1: float | None
    rouge_l: float | None
    agreement: float | None
    same_answer: float | None
    n_chunks: int
    chunk_tokens: int
    kv_encoding: str = NATIVE_ENCODING
    schedule_run: str = ""
    chosen_by: str = ""
    token_kl: float | None = None
    token_kl_error: float | None = None
    recovered: float | None = None
    recovered_low: float | None = None
    recovered_high: float | None = None
    right: int | None = None
    kept: float | None = None
    gained: float | None = None
    right_agreement: float | None = None
    by_context: ByContext = ()

    @property
    def has_budget(self) -> bool:
        """A ratio and a schedule steer the policy."""
        return self.schedule != ""

    @property
    def way(self) -> tuple[object, ...]:
        """Identifies the way, also across kinds: a measured ratio differs by kind."""
        ratio = self.ratio if self.has_budget else None
        size = (self.n_chunks, self.chunk_tokens)
        return (self.policy, self.schedule, ratio, self.encode_prefix, *size)

    def is_above(self, other: ArenaRow) -> bool:
        """Scores higher by more than the interval of the paired difference."""
        return paired_lead(self.by_context, other.by_context).is_above_zero


def make_rows(
    dataset: Dataset,
    outcomes: Mapping[Way, Sequence[Outcome]],
    seed: int,
    kv_encoding: str = NATIVE_ENCODING,
) -> list[ArenaRow]:
    """Rows of every way, kind by kind, ``all`` first. Outcomes are in the order of the cases."""

    def asked(way: Way, kind: str) -> list[tuple[str, Outcome]]:
        pairs = zip(dataset.cases, outcomes.get(way, ()), strict=False)
        return [(case.context_id, outcome) for case, outcome in pairs if kind in (ALL, case.kind)]

    def sums(way: Way, kind: str, name: str) -> ByContext:
        """The measure ``name`` by context; empty if an answer has none."""
        found = [(context, getattr(outcome, name)) for context, outcome in asked(way, kind)]
        return () if any(value is None for _, value in found) else sum_by_context(found)

    def by_rightness(way: Way, kind: str) -> dict[str, Any]:
        """What became of the questions that full prefill answers right; a summary is neither."""
        pairs = [
            (getattr(full, dataset.metric), getattr(own, dataset.metric), own.agreement)
            for (_, full), (_, own) in zip(asked(Way(FULL), kind), asked(way, kind), strict=True)
        ]
        if dataset.metric == "rouge_l" or any(best is None for best, *_ in pairs):
            return {}
        given = [(1, score) for _, score, _ in pairs if score is not None]
        found = answers_kept(
            given if len(given) == len(pairs) else (), [(1, best) for best, *_ in pairs]
        )
        near = [agreement for best, _, agreement in pairs if best >= RIGHT]
        return {**asdict(found), "right_agreement": _mean(near)}

    def row(way: Way, kind: str) -> ArenaRow:
        of = [outcome for _, outcome in asked(way, kind)]
        agreements = [outcome.agreement for outcome in of]
        scores, full, nothing = (
            sums(each, kind, dataset.metric) for each in (way, Way(FULL), Way(NONE))
        )
        reuse = Way(REUSE, encode_prefix=way.encode_prefix)
        if way.policy in PLACED:  # no chunk of theirs is encoded after a prefix
            reuse = next((each for each in outcomes if each.policy == REUSE), reuse)
        lost, lost_by_reuse = (sums(each, kind, "token_kl") for each in (way, reuse))
        pgr = performance_gap_recovered(scores, full, nothing, seed)
        recovered = loss_recovered(lost, lost_by_reuse, seed, SMALLEST_KL)
        means = {name: _mean([getattr(outcome, name) for outcome in of]) for name in MEASURES}
        fields: dict[str, Any] = {
            **means,
            "score": means[dataset.metric],
            "token_kl_error": _standard_error([outcome.token_kl for outcome in of]),
            "same_answer": _mean([None if share is None else share == 1.0 for share in agreements]),
            "ttft_ms": median(outcome.ttft_ms for outcome in of),
            "ratio": fmean(o.ratio for o in of) if way.ratio is None else way.ratio,
        }
        for name, found in (("pgr", pgr), ("recovered", recovered)):
            fields |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        return ArenaRow(
            dataset=dataset.name,
            seed=seed,
            policy=way.name,
            schedule=way.schedule,
            encode_prefix=way.encode_prefix,
            kind=kind,
            n=len(of),
            metric=dataset.metric,
            n_chunks=dataset.n_chunks,
            chunk_tokens=dataset.chunk_tokens,
            kv_encoding=kv_encoding,
            schedule_run=_others([o.schedule for o in of], way.schedule) if way.schedule else "",
            chosen_by=_others([o.policy for o in of], way.policy),
            by_context=scores,
            **fields,
            **by_rightness(way, kind),
        )

    return [row(way, kind) for way in outcomes for kind in (ALL, *dataset.kinds)]


def kept_by(row: ArenaRow, rows: Sequence[ArenaRow]) -> Kept | None:
    """What became of the questions that full prefill answers right, for a way's ``row`` over all kinds; of
    older results, which do not have it, as far as the sums of their contexts by kind tell."""
    if row.metric == "rouge_l":
        return None
    if row.right is not None:
        return Kept(row.right, row.kept, row.gained)
    size = (row.n_chunks, row.chunk_tokens)
    of = [each for each in rows if each.kind != ALL and (each.n_chunks, each.chunk_tokens) == size]
    full = [context for each in of if each.policy == FULL for context in each.by_context]
    own = [context for each in of if each.way == row.way for context in each.by_context]
    return answers_kept(own, full)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _standard_error(values: Sequence[float | None]) -> float | None:
    """The standard error of :func:`_mean`."""
    known = [value for value in values if value is not None]
    return stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None


def _others(run: Sequence[str], asked: str) -> str:
    """What ran, if it is not what was asked for."""
    return "; ".join(sorted(set(run) - {"", asked}))
