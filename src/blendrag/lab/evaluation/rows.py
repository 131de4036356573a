"""Results: the outcome of each question in a journal, and the rows made of them.

A row is the result of one way on one kind of question. Rows are what ``blendrag eval --json`` prints and
what plots and docs/quality.md are made of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.datasets import Dataset
from blendrag.lab.evaluation.scoring import (
    ByContext,
    Estimate,
    paired_lead,
    performance_gap_recovered,
    sum_by_context,
)
from blendrag.lab.evaluation.ways import FULL, NONE, REUSE, Way
from blendrag.store.kv import NATIVE_ENCODING

#: The kind of a row over all questions.
ALL = "all"
#: Reuse must diverge by more than this from full prefill, in nats, for a share of it to mean anything.
SMALLEST_KL = 1e-4
#: How every line of a journal begins.
BEGINNING = '{"case_key": '

# -- the journal ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The answer of one way to one question; measures as in :class:`ArenaRow`."""

    case_key: str
    """Digest of all that decides the outcome besides the way: question, model, wording, code."""
    way_key: str
    answer: str
    accuracy: float
    f1: float
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


class Journal:
    """Outcomes by case and way, in memory and, with a path, in a file of JSON lines.

    An interrupted run continues from the file. A file may hold several runs, and a run with more ways or
    contexts asks only what is new. Lines are appended when a question has been answered in every way; the
    question of an incomplete line is asked again.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Reads ``path`` if it exists; raises :class:`InvalidInputError` for any other file."""
        self.path = path
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        if path is not None and path.exists():
            self._read(path)

    def get(self, case_key: str, way_key: str) -> Outcome | None:
        return self._outcomes.get((case_key, way_key))

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one question; they are in the file when this returns."""
        for outcome in outcomes:
            self._outcomes[outcome.case_key, outcome.way_key] = outcome
        if self.path is None:
            return
        lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
        with _mapped_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(lines)

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
            self._outcomes[outcome.case_key, outcome.way_key] = outcome
        if rest:  # complete lines are not rewritten
            with _mapped_errors(path):
                os.truncate(path, content.rfind(b"\n") + 1)


@contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise InvalidInputError(
            f"{path} cannot be used ({exc.strerror or exc}); give --out another file"
        ) from exc


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArenaRow:
    """The result of one way on the questions of one kind; shares in [0, 1], KL in nats."""

    dataset: str
    seed: int
    policy: str
    schedule: str
    """As asked for; empty if the policy has none."""
    encode_prefix: bool | None
    ratio: float
    """As asked for; as measured if the policy has none."""
    charged_ratio: float
    kind: str
    """Of question; ``all``: every kind."""
    n: int
    score: float
    """Mean of the dataset's ``metric``."""
    pgr: float | None
    """``None`` if full prefill gains nothing over no context."""
    pgr_low: float | None
    pgr_high: float | None
    kl: float | None
    """Mean KL of the first token from full prefill."""
    ttft_ms: float
    """Median over the questions."""
    metric: str
    accuracy: float
    f1: float
    rouge_l: float | None
    agreement: float | None
    """Mean share of answer tokens equal to full prefill's before the first difference."""
    same_answer: float | None
    """Share of answers equal to full prefill's, token by token."""
    n_chunks: int
    chunk_tokens: int
    kv_encoding: str = NATIVE_ENCODING
    schedule_run: str = ""
    """The schedule that ran, if it is not the one asked for."""
    chosen_by: str = ""
    """The policy that chose, if it is not the one asked for."""
    token_kl: float | None = None
    """Mean KL per token from full prefill, over full prefill's answer (teacher-forced)."""
    recovered: float | None = None
    """1 − ``token_kl`` / that of reuse: 0 is as far from full prefill as reuse, 1 is full prefill.
    ``None`` if reuse was not asked, or does not differ from full prefill."""
    recovered_low: float | None = None
    recovered_high: float | None = None
    by_context: ByContext = ()
    """Number of questions and their summed score for each context: for paired differences of rows."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def has_budget(self) -> bool:
        """A ratio and a schedule steer the policy."""
        return self.schedule != ""

    @property
    def way(self) -> tuple[object, ...]:
        """Identifies the way, also across kinds: a measured ratio differs by kind."""
        ratio = self.ratio if self.has_budget else None
        return (self.policy, self.schedule, ratio, self.encode_prefix, *self.size)

    @property
    def size(self) -> tuple[int, int]:
        """Of the prompt: chunks, and tokens of a chunk."""
        return self.n_chunks, self.chunk_tokens


def certain_lead(other: ArenaRow, own: ArenaRow) -> bool:
    """Whether ``other`` scores above ``own`` by more than the interval of their paired difference."""
    return paired_lead(other.by_context, own.by_context).is_above_zero


def make_rows(
    dataset: Dataset,
    outcomes: Mapping[Way, Sequence[Outcome]],
    seed: int,
    kv_encoding: str = NATIVE_ENCODING,
) -> list[ArenaRow]:
    """Rows of every way, kind by kind, ``all`` first. Outcomes are in the order of the cases."""
    rows: dict[tuple[Way, str], ArenaRow] = {}
    kinds = (ALL, *dataset.kinds)
    for kind in kinds:
        at = [i for i, case in enumerate(dataset.cases) if kind in (ALL, case.kind)]
        contexts = [dataset.cases[i].context_id for i in at]
        found = {way: [of[i] for i in at] for way, of in outcomes.items()}
        scores = {
            way: sum_by_context([getattr(o, dataset.metric) for o in of], contexts)
            for way, of in found.items()
        }
        divergence = {way: _divergence(of, contexts) for way, of in found.items()}
        for way, of in found.items():
            pgr = performance_gap_recovered(scores[way], scores[Way(FULL)], scores[Way(NONE)], seed)
            recovered = Estimate(None)
            own, lost = divergence[way], divergence.get(Way(REUSE, encode_prefix=way.encode_prefix))
            if own and lost:
                exact = [(n, 0.0) for n, _ in own]
                recovered = performance_gap_recovered(own, exact, lost, seed, SMALLEST_KL)
            agreements = _known([o.agreement for o in of])
            rows[way, kind] = ArenaRow(
                dataset=dataset.name,
                seed=seed,
                policy=way.policy,
                schedule=way.schedule,
                encode_prefix=way.encode_prefix,
                ratio=fmean(o.ratio for o in of) if way.ratio is None else way.ratio,
                charged_ratio=fmean(o.charged_ratio for o in of),
                kind=kind,
                n=len(of),
                score=fmean(getattr(o, dataset.metric) for o in of),
                pgr=pgr.value,
                pgr_low=pgr.low,
                pgr_high=pgr.high,
                kl=_mean(_known([o.kl for o in of])),
                ttft_ms=median(o.ttft_ms for o in of),
                metric=dataset.metric,
                accuracy=fmean(o.accuracy for o in of),
                f1=fmean(o.f1 for o in of),
                rouge_l=_mean(_known([o.rouge_l for o in of])),
                agreement=_mean(agreements),
                same_answer=_mean([float(a == 1.0) for a in agreements]),
                n_chunks=dataset.n_chunks,
                chunk_tokens=dataset.chunk_tokens,
                kv_encoding=kv_encoding,
                schedule_run=_others([o.schedule for o in of], way.schedule)
                if way.schedule
                else "",
                chosen_by=_others([o.policy for o in of], way.policy),
                token_kl=_mean(_known([o.token_kl for o in of])),
                recovered=recovered.value,
                recovered_low=recovered.low,
                recovered_high=recovered.high,
                by_context=scores[way],
            )
    return [rows[way, kind] for way in outcomes for kind in kinds]


def _divergence(outcomes: Sequence[Outcome], contexts: Sequence[str]) -> ByContext:
    """Negative KL per token from full prefill; empty if a question has none."""
    known = _known([o.token_kl for o in outcomes])
    if len(known) < len(outcomes):
        return ()
    return sum_by_context([-kl for kl in known], contexts)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _others(run: Sequence[str], asked: str) -> str:
    """What ran, if it is not what was asked for."""
    return "; ".join(sorted(set(run) - {"", asked}))
