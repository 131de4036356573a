"""KV and attention deviation of blended prompts from full prefill."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import tiny
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag.text.prompt import Segment, SegmentedPrompt
from blendrag_lab.evaluation import deviation
from blendrag_lab.evaluation.deviation import (
    ORACLE,
    DeviationReport,
    PromptDeviation,
    StoredPrompt,
    correlation,
    measure,
)
from cli.commands import invoke_program

PREFIX = (0,)
RATIOS = (0.0, 0.1, 0.3, 1.0)


def plan(seed: int, chunks: int = 4, tokens: int = 32) -> SegmentedPrompt:
    """Head, chunks with separators between, a question; random ids."""
    lengths: list[tuple[int, str | None]] = [(4, None)]
    for number in range(chunks):
        lengths += [(tokens, str(number)), (2, None)]
    lengths.append((12, None))
    ids = tiny.random_ids(sum(length for length, _ in lengths), seed)[0].tolist()
    segments, at = [], 0
    for length, chunk in lengths:
        part = tuple(ids[at : at + length])
        segments.append(Segment("", part, at, chunk, part if chunk else ()))
        at += length
    return SegmentedPrompt(tuple(segments))


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def prompts(adapter: ModelAdapter) -> list[StoredPrompt]:
    return [StoredPrompt(adapter, plan(seed), PREFIX) for seed in range(3)]


@pytest.fixture(scope="module")
def report(prompts: list[StoredPrompt]) -> DeviationReport:
    return measure(iter(prompts), ["hkvd", "reuse"], ["constant", "geometric"], RATIOS)


def test_deviations_are_measured_against_a_stock_prefill(adapter, prompts):
    prompt = prompts[0]
    ids = torch.tensor([plan(0).ids])
    with torch.no_grad():
        cache = adapter.prefill_at(plan(0).ids)
        eager = tiny.llama(attn_implementation="eager")
        weights = eager(input_ids=ids, output_attentions=True).attentions
    for layer, kv in zip(cache.layers, prompt.full.kv, strict=True):
        stock = torch.stack((layer.keys[0], layer.values[0]))[:, :, prompt.tokens]
        assert tiny.difference(stock, kv) < 1e-4
    for own, kept in zip(weights, prompt.full.attention, strict=True):
        asking = kept.shape[1]
        assert asking == ids.shape[1] - (prompt.tokens.max() + 1)  # also in the last layer
        assert tiny.difference(own[0, :, -asking:, prompt.tokens], kept) < 1e-5


def test_reuse_deviates_in_every_layer_but_the_first_and_recomputed_tokens_less(prompts):
    reused, blended = (prompts[0].deviation(policy, ratio=0.3) for policy in ("reuse", "hkvd"))
    assert reused.kv[0].max() < 1e-4
    assert reused.kv.mean(axis=1)[1:].min() > 0.01
    assert reused.attention_by_layer[1:].min() > 0.01
    assert np.all(blended.kv[1] < 1e-4 * reused.kv[1])  # the peek at layer 1 is exact
    assert np.mean(blended.kv[2] < 0.9 * reused.kv[2]) >= 0.25


def test_nothing_deviates_at_ratio_one(prompts):
    windowed = StoredPrompt(tiny.adapter(tiny.family("gemma2")), plan(1), PREFIX)
    for prompt, policy in ((prompts[0], "hkvd"), (prompts[0], "full"), (windowed, "query")):
        everything = prompt.deviation(policy, "constant", 1.0)
        assert everything.kv.max() < 1e-4
        assert everything.attention_by_layer.max() < 1e-4


def test_deviation_falls_with_the_ratio(report):
    for policy, schedule in (("hkvd", "constant"), ("hkvd", "geometric"), (ORACLE, "")):
        curve = [p for p in report.points if (p.policy, p.schedule) == (policy, schedule)]
        assert [p.ratio for p in curve] == list(RATIOS)
        assert all(a.attention > b.attention for a, b in pairwise(curve))
        assert curve[-1].attention < 1e-4
    reused = next(p for p in report.points if p.policy == "reuse")
    oracle = next(p for p in report.points if p.policy == ORACLE)
    assert oracle.attention == pytest.approx(reused.attention, rel=1e-4)


def test_correlation_is_spearmans_with_students_intervals():
    rising = np.array([0.1, 0.4, 0.5, 0.9])
    kv = np.stack([np.zeros(4), rising, rising**3, -rising])
    first, second = correlation([PromptDeviation(kv, kv)])
    assert (first.layer, first.rho, first.low, first.high) == (1, 1.0, 1.0, 1.0)
    assert (second.layer, second.rho) == (2, -1.0)
    orders = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.3], [0.4, 0.3, 0.2, 0.1]]  # ρ 1, 0.8, -1
    layers = [np.stack([np.zeros(4), np.sort(order), np.array(order)]) for order in orders]
    (found,) = correlation([PromptDeviation(kv, kv) for kv in layers])
    assert found.rho == pytest.approx(0.8 / 3)
    # 4.3027 standard errors of three values
    reach = 4.3027 * np.std([1, 0.8, -1], ddof=1) / 3**0.5
    assert found.high - found.rho == pytest.approx(reach, 1e-3)


def test_the_distribution_is_over_the_tokens_of_all_prompts(prompts, report):
    kv = np.concatenate([p.deviation("reuse").kv[2] for p in prompts])
    layer = next(d for d in report.distribution if d.layer == 2)
    found = (layer.quantiles[0], layer.quantiles[50], layer.quantiles[-1])
    assert found == pytest.approx((kv.min(), np.median(kv), kv.max()))
    assert (report.tokens, report.prompts) == (kv.size, 3)


def test_a_prompt_without_chunks_is_refused_in_one_sentence(adapter):
    with pytest.raises(InvalidInputError) as refused:
        StoredPrompt(adapter, plan(0, chunks=0), PREFIX)
    assert tiny.one_sentence(str(refused.value))
    with pytest.raises(InvalidInputError) as empty:
        measure([], ["hkvd"], ["constant"], [0.1])
    assert tiny.one_sentence(str(empty.value))


def test_the_command_prints_a_report_or_one_sentence():
    ended = invoke_program(deviation.main, "--contexts", "1", "--ratio", "0", "--ratio", "0.3")
    points = json.loads(ended.stdout)["points"]
    nothing, some = [point["attention"] for point in points if point["policy"] == "hkvd"]
    assert some < nothing
    wrong = ("--policies", "nonsense", "--ratio", "0.1", "--contexts", "1")
    ended = invoke_program(deviation.main, *wrong)
    assert ended.exit_code == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("error: policy 'nonsense'")
