"""How far a blended prompt's KV and attention are from a full prefill's: CacheBlend §4.1, figures 6 to 8.

``python -m blendrag_lab.evaluation.deviation`` measures generated prompts and prints one JSON object.

- KV deviation Δ_kv: how far the K and V of a chunk token are from those that a full prefill computes.
- Attention deviation Δ_attn: the L2 norm of the difference of the forward attention matrices, whose rows are
  the tokens after the context (the question) and whose columns are the chunk tokens.

Both are relative to the size of what full prefill computes in that layer: the paper's absolute differences
cannot be averaged over layers and prompts. KV is compared from layer 1 on: K and V of layer 0 do not depend
on other chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import Progress

from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import console, print_json
from blendrag.config import DEMO_MODEL, absolute_model
from blendrag.engine import Options
from blendrag.engine.rendering import render
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.loader import HeldKV, LoadedSpan
from blendrag.fusor.scout import Observed, Scout, scouting
from blendrag.fusor.selection import Blending
from blendrag.model import ModelAdapter, load_adapter
from blendrag.model.bounded_templates import FIXED_MOMENT, bounded
from blendrag.model.tokens import Tokens
from blendrag.store.kv import ChunkKV
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.prompt import SegmentedPrompt, segment_prompt
from blendrag_lab.evaluation.asking import quoting, wording_for
from blendrag_lab.evaluation.datasets import Case, synthetic_dataset

#: The curve whose tokens are chosen with knowledge of the full prefill (figure 6).
ORACLE = "oracle"
#: Shares of tokens at which the distribution of Δ_kv is kept.
SHARES = tuple(i / 100 for i in range(101))
#: Upper end of a 95% interval, as a share of the distribution below it.
UPPER = 0.975


@dataclass(frozen=True)
class PromptDeviation:
    """Distances of one blended prompt from its full prefill; ``n`` chunk tokens, ``L`` layers."""

    kv: np.ndarray
    """``[L, n]``: Δ_kv relative to the mean length of K and V in that layer."""
    attention: np.ndarray
    """``[L, n]``: the part of each chunk token in Δ_attn, over heads and rows."""

    @property
    def attention_by_layer(self) -> np.ndarray:
        """``[L]``: Δ_attn(A_i, A_i^full), the norm over all tokens."""
        return np.asarray(np.sqrt(np.square(self.attention).sum(axis=1)))


@dataclass(frozen=True)
class MeasuredPrefill:
    """Per layer, K and V of the chunk tokens and A_i after one prefill."""

    kv: Sequence[torch.Tensor]
    """Each ``[2, Hkv, n, D]``, keys at their prompt positions."""
    attention: Sequence[torch.Tensor]
    """Each ``[H, Q, n]`` float32."""


class StoredPrompt:
    """A prompt whose chunks were encoded apart, compared with a full prefill of the same tokens.

    Every prefill computes attention weights explicitly, so that they can be kept and equal KV gives equal
    numbers. Holds all KV of the prompt in memory. Does not modify the model; takes its lock.
    """

    def __init__(
        self, adapter: ModelAdapter, plan: SegmentedPrompt, prefix_ids: Sequence[int]
    ) -> None:
        """Encodes the chunks of ``plan`` after ``prefix_ids``. A chunk directly after them is exact and
        left out. Raises :class:`InvalidInputError` if there is no other."""
        self.adapter = adapter
        self._fusor = Fusor(adapter, fast_attention=False, force_masks=True)
        self._ids = torch.tensor([plan.ids], device=adapter.device)  # [1, N]
        prefix = tuple(prefix_ids)
        self._spans = []
        for chunk in plan.chunks:
            with adapter.lock:
                kv = HeldKV(adapter.encode(prefix, chunk.ids))
            exact = plan.ids[: chunk.position] == prefix
            self._spans.append(LoadedSpan(chunk.position, chunk.end, kv, len(prefix), exact))
        blended = [torch.arange(s.start, s.end) for s in self._spans if not s.exact]
        if not blended:
            raise InvalidInputError(
                f"a prompt of {len(plan.ids)} tokens has no chunk after other text, so nothing deviates; "
                "give one with chunks after other text"
            )
        self.tokens = torch.cat(blended)
        """``[n]``: prompt positions of the chunk tokens that may deviate."""

    @cached_property
    def full(self) -> MeasuredPrefill:
        """The full prefill that everything is compared with."""
        return self._prefill((), "full", ratio=1.0)

    @cached_property
    def reused(self) -> MeasuredPrefill:
        """KV as stored and re-positioned, nothing recomputed."""
        return self._prefill(self._spans, "reuse")

    def deviation(
        self, policy: str, schedule: str = "constant", ratio: float = 0.0
    ) -> PromptDeviation:
        """The deviation of a blend by ``policy``, or by :data:`ORACLE`; ratio and schedule as in
        :class:`~blendrag.engine.Options`."""
        if policy == ORACLE:
            return self._from_full(self._mended(ratio))
        if policy == "reuse":
            return self._from_full(self.reused)
        return self._from_full(self._prefill(self._spans, policy, schedule, ratio))

    def _mended(self, ratio: float) -> MeasuredPrefill:
        """In every layer the KV of the ``ratio`` tokens that deviate most is exact. Policies cannot do
        that: it takes a full prefill to know them."""
        count = round(ratio * self.tokens.numel())
        mended = []
        for stored, exact in zip(self.reused.kv, self.full.kv, strict=True):
            layer = stored.clone()  # [2, Hkv, n, D]
            worst = torch.from_numpy(_kv_deviation(stored, exact)).topk(count).indices
            layer[:, :, worst] = exact[:, :, worst]
            mended.append(layer)
        spans, at = [], 0
        for span in self._spans:
            if not span.exact:
                parts = [layer[:, :, at : at + span.tokens].contiguous() for layer in mended]
                kv = HeldKV(ChunkKV(self.adapter.layout, span.tokens, parts))
                at += span.tokens
                span = LoadedSpan(span.start, span.end, kv, span.start, exact=False)
            spans.append(span)
        return self._prefill(spans, "reuse")

    def _prefill(
        self,
        spans: Sequence[LoadedSpan],
        policy: str,
        schedule: str = "constant",
        ratio: float = 0.0,
    ) -> MeasuredPrefill:
        n = self._ids.shape[1]
        columns = self.tokens.to(self.adapter.device)
        seen = ForwardAttention(n - max(s.end for s in self._spans), columns)
        request = BlendRequest(n, tuple(spans), Blending.of(policy, schedule, ratio))
        # An index keeps all rows in the last layer's attention; a number would cut them to the last row.
        last = torch.tensor([-1], device=self.adapter.device)
        with self.adapter.lock, scouting(self.adapter.stack, lambda: [Observed(seen)]):
            _, cache, _ = self._fusor.prefill(self._ids, request, logits_to_keep=last)
        kv = [buffer[:, :, columns].cpu() for buffer in cache.buffers(n)]
        return MeasuredPrefill(kv, seen.matrices())

    def _from_full(self, blended: MeasuredPrefill) -> PromptDeviation:
        pairs = zip(blended.kv, self.full.kv, strict=True)
        seen = zip(blended.attention, self.full.attention, strict=True)
        return PromptDeviation(
            np.stack([_kv_deviation(new, exact) for new, exact in pairs]),
            np.stack([_attention_deviation(new, exact) for new, exact in seen]),
        )


class ForwardAttention(Scout):
    """Keeps the forward attention matrix of every layer, which a scout would add up."""

    def __init__(self, asking: int, columns: torch.Tensor) -> None:
        super().__init__(asking)
        self._columns = columns
        self._blocks: list[list[torch.Tensor]] = []

    def add(self, weights: torch.Tensor) -> None:
        """``weights`` ``[H, s, N]`` are of some rows that ask."""
        if len(self._blocks) == self.layers:
            self._blocks.append([])
        self._blocks[-1].append(weights[..., self._columns].cpu())

    def matrices(self) -> list[torch.Tensor]:
        """A_i of each layer, ``[H, Q, n]``; raises :class:`UnsupportedModelError` if none was seen."""
        if not self._blocks:
            raise UnsupportedModelError(
                "this model does not compute attention through transformers' interface, so its weights "
                "cannot be seen; measure another one"
            )
        return [torch.cat(blocks, dim=1) for blocks in self._blocks]


def _kv_deviation(new: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    """Δ_kv ``[n]`` of ``[2, Hkv, n, D]``: distances of K and of V, each divided by its mean length. The
    order of tokens is that of :attr:`~blendrag.fusor.selection.LayerView.deviation`, which policies see."""
    squares = (new.float() - exact.float()).square().sum(dim=(1, 3))  # [2, n]
    lengths = exact.float().square().sum(dim=(1, 3)).mean(dim=1, keepdim=True)  # [2, 1]
    deviation: np.ndarray = (squares / lengths.clamp_min(1e-12)).sum(dim=0).sqrt().numpy()
    return deviation


def _attention_deviation(new: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    """Norm of each column of the difference of two ``[H, Q, n]``, divided by the norm of A^full ``[n]``."""
    columns = (new - exact).square().sum(dim=(0, 1)).sqrt()  # [n]
    deviation: np.ndarray = (columns / exact.norm().clamp_min(1e-12)).numpy()
    return deviation


@dataclass(frozen=True)
class DeviationPoint:
    """One policy, schedule and ratio: the mean of Δ_attn over layers and prompts, with its 95% interval."""

    policy: str
    schedule: str
    ratio: float
    attention: float
    attention_low: float
    attention_high: float


@dataclass(frozen=True)
class LayerDistribution:
    """Δ_kv of stored KV in one layer: quantiles at :data:`SHARES` over the tokens of all prompts."""

    layer: int
    quantiles: Sequence[float]


@dataclass(frozen=True)
class LayerCorrelation:
    """Spearman's rank correlation of the tokens' Δ_kv in ``layer`` and the next; mean over prompts."""

    layer: int
    rho: float
    low: float
    high: float


@dataclass(frozen=True)
class DeviationReport:
    model: str
    prompts: int
    tokens: int
    """Chunk tokens of all prompts."""
    points: Sequence[DeviationPoint]
    distribution: Sequence[LayerDistribution]
    correlation: Sequence[LayerCorrelation]


def measure(
    prompts: Iterable[StoredPrompt],
    policies: Sequence[str],
    schedules: Sequence[str],
    ratios: Sequence[float],
) -> DeviationReport:
    """Blend every prompt by every policy, schedule and ratio, and by the oracle at every ratio.

    Takes prompts one at a time, so that an iterator needs the memory of one. Raises
    :class:`InvalidInputError` if there is no prompt.
    """
    ways = [(p, s, r) for p in policies for s in schedules for r in ratios]
    ways += [(ORACLE, "", r) for r in ratios]
    found: list[list[PromptDeviation]] = [[] for _ in ways]
    stored: list[PromptDeviation] = []
    model = ""
    for prompt in prompts:
        model = prompt.adapter.model_id
        stored.append(prompt.deviation("reuse"))
        for way, into in zip(ways, found, strict=True):
            into.append(prompt.deviation(*way))
    if not stored:
        raise InvalidInputError("no prompt to measure deviations on; give at least one context")
    kv = np.concatenate([one.kv for one in stored], axis=1)  # [L, n of all prompts]
    return DeviationReport(
        model=model,
        prompts=len(stored),
        tokens=kv.shape[1],
        points=tuple(
            DeviationPoint(
                *way, *_mean_interval([float(one.attention_by_layer.mean()) for one in of])
            )
            for way, of in zip(ways, found, strict=True)
        ),
        distribution=tuple(
            LayerDistribution(layer, tuple(np.quantile(kv[layer], SHARES).tolist()))
            for layer in range(1, len(kv))
        ),
        correlation=correlation(stored),
    )


def correlation(stored: Sequence[PromptDeviation]) -> tuple[LayerCorrelation, ...]:
    """Figure 8, of layers 1 and 2, 2 and 3, …"""
    from scipy import stats  # imported where it is used: it takes long

    found = []
    for layer in range(1, len(stored[0].kv) - 1):
        rhos = [float(stats.spearmanr(*one.kv[layer : layer + 2]).statistic) for one in stored]
        found.append(LayerCorrelation(layer, *_mean_interval(rhos)))
    return tuple(found)


def _mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval (Student's, as prompts are few); of one value the interval is the value."""
    from scipy import stats

    mean, n = float(np.mean(values)), len(values)
    reach = float(stats.t.ppf(UPPER, n - 1) * stats.sem(values)) if n > 1 else 0.0
    return mean, mean - reach, mean + reach


def plan_of(tokens: Tokens, case: Case) -> SegmentedPrompt:
    """The arena's prompt of ``case``, cut at its chunks."""
    prompt = wording_for(tokens.tokenizer, "accuracy").prompt(case.chunks, case.question)
    rendered = render(quoting(prompt, case.chunks), tokens, Options())
    texts = {chunk_id_of(canonical(text)): canonical(text) for text in case.chunks}
    chunks = rendered.chunks or ()
    return segment_prompt(
        rendered.text, chunks, tokens, lambda key: tuple(tokens.encode_text(texts[key]))
    )


@reporting
def main(
    ratio: Annotated[list[float], typer.Option(help="Repeatable.")],
    model: str = DEMO_MODEL,
    seed: int = 1,
    contexts: int = 8,
    chunks: int = 6,
    chunk_tokens: int = 64,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "hkvd",
    schedules: Annotated[str, typer.Option(help="Comma-separated families.")] = "constant",
) -> int:
    """Print the KV and attention deviation of generated prompts as JSON."""
    begin(verbose=False, if_interrupted="nothing was measured")
    adapter = load_adapter(absolute_model(model), "auto", "auto")
    tokens, prefix_ids = adapter.tokens, _prefix_ids(adapter.tokens)
    dataset = synthetic_dataset(tokens, seed, "test", contexts, chunks, chunk_tokens, n_questions=1)
    with Progress(console=console(err=True), transient=True) as progress:
        cases = progress.track(dataset.cases, description="prompts")
        prompts = (StoredPrompt(adapter, plan_of(tokens, case), prefix_ids) for case in cases)
        report = measure(prompts, policies.split(","), schedules.split(","), ratio)
    print_json(asdict(report))
    return DONE


def _prefix_ids(tokens: Tokens) -> tuple[int, ...]:
    """The prefix that chunks are encoded after: BOS, else the chat template's first token."""
    if tokens.bos_id is not None:
        return (tokens.bos_id,)
    with bounded(FIXED_MOMENT):
        first = tokens.render([{"role": "user", "content": "a"}]) if tokens.has_template else "\n"
    return tuple(tokens.encode_template(first)[:1])


if __name__ == "__main__":
    typer.run(main)
