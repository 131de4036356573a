"""The arena's result: a row per way and kind of question.

Owns how outcomes of single questions become means, medians and PGR with its interval. Rows are what
``blendrag eval --json`` prints and what plots and pages are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from blendrag.lab.evaluation.bootstrap import UNDEFINED, Gain, PairedBootstrap
from blendrag.lab.evaluation.cases import Dataset
from blendrag.lab.evaluation.journal import Outcome
from blendrag.lab.evaluation.ways import FULL, NONE, REUSE, Way
from blendrag.store.kv import NATIVE_ENCODING

ALL = "all"
#: Reuse must diverge by more than this from full prefill, in nats, for a share of it to mean anything.
SMALLEST_KL = 1e-4


@dataclass(frozen=True)
class Row:
    """How one way answered the questions of one kind; shares in [0, 1], KL in nats."""

    dataset: str
    seed: int
    policy: str
    schedule: str
    """As asked for; empty where the policy knows none."""
    encode_prefix: bool | None
    ratio: float
    """As asked for; as measured where the policy knows no ratio."""
    charged_ratio: float
    kind: str
    """Of question; ``all``: every kind."""
    n: int
    score: float
    """Mean of the dataset's ``metric``."""
    pgr: float | None
    """``None`` where full prefill gains nothing over no context."""
    pgr_low: float | None
    pgr_high: float | None
    kl: float | None
    """Mean over the questions, of the first token, from full prefill."""
    ttft_ms: float
    """Median over the questions."""
    metric: str
    accuracy: float
    f1: float
    rouge_l: float | None
    agreement: float | None
    """Share of answer tokens as full prefill gave them, up to the first difference."""
    same_answer: float | None
    """Share of answers that are full prefill's, token by token."""
    n_chunks: int
    chunk_tokens: int
    kv_encoding: str = NATIVE_ENCODING
    """How the store kept the KV that was loaded; idealised prefix caching keeps it native."""
    schedule_run: str = ""
    """The one that really ran, where that is another."""
    chosen_by: str = ""
    """The policy that really chose, where the model did not allow the one asked for."""
    token_kl: float | None = None
    """Mean KL per token from full prefill, over full prefill's own answer (teacher-forced), in nats."""
    recovered: float | None = None
    """1 − ``token_kl`` / that of reuse: 0 is as far from full prefill as reuse, 1 is full prefill. ``None``
    where reuse was not asked, or is not apart from full prefill."""
    recovered_low: float | None = None
    recovered_high: float | None = None
    by_context: tuple[tuple[int, float], ...] = ()
    """Questions and their summed score, of each context: rows of other runs over the same questions can
    be compared with this one in pairs (:func:`~blendrag.lab.evaluation.bootstrap.paired_lead`)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready dictionary."""
        return asdict(self)


def make_rows(
    dataset: Dataset,
    outcomes: dict[Way, Sequence[Outcome]],
    seed: int,
    kv_encoding: str = NATIVE_ENCODING,
) -> list[Row]:
    """Rows of every way, kind by kind, ``all`` first; outcomes stand in the order of the cases."""
    rows: dict[tuple[Way, str], Row] = {}
    kinds = (ALL, *dataset.kinds)
    for kind in kinds:
        at = [i for i, case in enumerate(dataset.cases) if kind in (ALL, case.kind)]
        contexts = [dataset.cases[i].context_id for i in at]

        def of(way: Way, at: list[int] = at) -> list[Outcome]:
            return [outcomes[way][i] for i in at]

        def scores(way: Way, at: list[int] = at) -> list[float]:
            return [getattr(outcomes[way][i], dataset.metric) for i in at]

        paired = PairedBootstrap(scores(Way(FULL)), scores(Way(NONE)), contexts, seed)
        for way in outcomes:
            gain, by_context = paired.gain(scores(way)), paired.by_context(scores(way))
            row = _row(dataset, way, kind, seed, of(way), gain, by_context)
            reuse = Way(REUSE, encode_prefix=way.encode_prefix)
            kept = _recovered(of(way), of(reuse) if reuse in outcomes else (), contexts, seed)
            rows[way, kind] = replace(
                row,
                kv_encoding=kv_encoding,
                recovered=kept.pgr,
                recovered_low=kept.low,
                recovered_high=kept.high,
            )
    return [rows[way, kind] for way in outcomes for kind in kinds]


def _row(
    dataset: Dataset,
    way: Way,
    kind: str,
    seed: int,
    outcomes: Sequence[Outcome],
    gain: Gain,
    by_context: tuple[tuple[int, float], ...],
) -> Row:
    measured = fmean(o.ratio for o in outcomes)
    agreements = _known([o.agreement for o in outcomes])
    return Row(
        dataset=dataset.name,
        seed=seed,
        policy=way.policy,
        schedule=way.schedule,
        encode_prefix=way.encode_prefix,
        ratio=measured if way.ratio is None else way.ratio,
        charged_ratio=fmean(o.charged_ratio for o in outcomes),
        kind=kind,
        n=len(outcomes),
        score=fmean(getattr(o, dataset.metric) for o in outcomes),
        pgr=gain.pgr,
        pgr_low=gain.low,
        pgr_high=gain.high,
        kl=_mean(_known([o.kl for o in outcomes])),
        ttft_ms=median(o.ttft_ms for o in outcomes),
        metric=dataset.metric,
        accuracy=fmean(o.accuracy for o in outcomes),
        f1=fmean(o.f1 for o in outcomes),
        rouge_l=_mean(_known([o.rouge_l for o in outcomes])),
        token_kl=_mean(_known([o.token_kl for o in outcomes])),
        agreement=_mean(agreements),
        same_answer=_mean([float(a == 1.0) for a in agreements]),
        n_chunks=dataset.n_chunks,
        chunk_tokens=dataset.chunk_tokens,
        schedule_run=_others([o.schedule for o in outcomes], way.schedule) if way.schedule else "",
        chosen_by=_others([o.policy for o in outcomes], way.policy),
        by_context=by_context,
    )


def _recovered(
    outcomes: Sequence[Outcome], reuse: Sequence[Outcome], contexts: Sequence[str], seed: int
) -> Gain:
    """What a way wins back of reuse's divergence from full prefill: PGR of the negative divergence, reuse
    in the place of no context."""
    own = _known([o.token_kl for o in outcomes])
    lost = _known([o.token_kl for o in reuse])
    if not len(own) == len(lost) == len(contexts):
        return UNDEFINED
    paired = PairedBootstrap([0.0] * len(own), [-kl for kl in lost], contexts, seed)
    return paired.gain([-kl for kl in own], SMALLEST_KL)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _others(run: Sequence[str], asked: str) -> str:
    """What really ran, as far as it is not what was asked for."""
    return "; ".join(sorted(set(run) - {"", asked}))
