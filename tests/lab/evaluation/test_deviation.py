"""KV and attention deviation of blended prompts against full prefill."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import tiny
from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation import deviations
from blendrag.lab.evaluation.cases import Case
from blendrag.lab.evaluation.deviation import Deviation, StoredPrompt
from blendrag.lab.evaluation.deviation_report import ORACLE, correlation, measure
from blendrag.lab.evaluation.wording import wording_for
from blendrag.model import ModelAdapter
from blendrag.model.tokens import Tokens
from blendrag.text.prompt import PromptPlan, Segment

PREFIX = (0,)
RATIOS = (0.0, 0.1, 0.3, 0.6, 1.0)


def plan(seed: int, chunks: int = 4, tokens: int = 32) -> PromptPlan:
    """Head, chunks with separators between, a question; random ids."""
    lengths = [(4, None)]
    for number in range(chunks):
        lengths += [(tokens, str(number)), (2, None)]
    lengths.append((12, None))
    ids = tiny.random_ids(sum(length for length, _ in lengths), seed)[0].tolist()
    segments, at = [], 0
    for length, chunk in lengths:
        part = tuple(ids[at : at + length])
        segments.append(Segment("", part, at, chunk, part if chunk else ()))
        at += length
    return PromptPlan(tuple(segments))


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def prompts(adapter: ModelAdapter) -> list[StoredPrompt]:
    return [StoredPrompt(adapter, plan(seed), PREFIX) for seed in range(3)]


def test_what_everything_is_measured_against_is_a_stock_prefill(adapter, prompts) -> None:
    prompt = prompts[0]
    with torch.no_grad():
        cache = adapter.prefill_at(plan(0).ids)
    for layer, kv in zip(cache.layers, prompt.full.kv, strict=True):
        stock = torch.stack((layer.keys[0], layer.values[0]))[:, :, prompt.tokens]
        assert tiny.difference(stock, kv) < 1e-4


def test_forward_attention_equals_the_models_own_eager_weights(adapter, prompts) -> None:
    ids = torch.tensor([plan(0).ids])
    eager = tiny.llama(attn_implementation="eager")
    with torch.no_grad():
        weights = eager(input_ids=ids, output_attentions=True).attentions
    for own, kept in zip(weights, prompts[0].full.attention, strict=True):
        asking = kept.shape[1]
        assert asking == ids.shape[1] - (prompts[0].tokens.max() + 1)  # the last layer's, too
        assert tiny.difference(own[0, :, -asking:, prompts[0].tokens], kept) < 1e-5


def test_reuse_deviates_in_every_layer_but_the_first(prompts) -> None:
    deviation = prompts[0].deviation("reuse")
    assert deviation.kv[0].max() < 1e-4
    assert deviation.kv_by_layer[1:].min() > 0.01
    assert deviation.attention_by_layer[1:].min() > 0.01
    assert deviation.ratio == deviation.charged_ratio == 0.0


@pytest.mark.parametrize("policy", ["hkvd", "query", "full"])
def test_ratio_one_deviates_in_nothing(prompts, policy: str) -> None:
    deviation = prompts[0].deviation(policy, "constant", 1.0)
    assert deviation.kv.max() < 1e-4
    assert deviation.attention_by_layer.max() < 1e-4
    assert deviation.ratio == 1.0


def test_tokens_that_were_recomputed_deviate_less(prompts) -> None:
    prompt = prompts[0]
    reused, blended = prompt.deviation("reuse").kv, prompt.deviation("hkvd", "constant", 0.3).kv
    mended = blended[1] < 1e-4 * reused[1]
    assert mended.mean() == 1.0  # the peek at layer 1 is exact for all tokens, and kept
    assert np.mean(blended[2] < 0.9 * reused[2]) >= 0.25


def test_stored_kv_that_is_exact_deviates_in_nothing(adapter) -> None:
    first = plan(3, chunks=2)
    head, *rest = first.segments
    straight = PromptPlan((Segment("", PREFIX, 0), *(_moved(s, len(PREFIX) - 4) for s in rest)))
    prompt = StoredPrompt(adapter, straight, PREFIX)
    assert len(head.ids) == 4
    assert prompt.tokens.numel() == len(first.chunks[1].ids)  # the first chunk is no subject


def _moved(segment: Segment, by: int) -> Segment:
    return Segment("", segment.ids, segment.position + by, segment.chunk_id, segment.stored_ids)


def test_attention_deviation_falls_with_the_ratio_for_hkvd(prompts) -> None:
    report = measure(prompts, ["hkvd"], ["constant", "geometric"], RATIOS)
    for schedule in ("constant", "geometric"):
        curve = [p for p in report.points if p.schedule == schedule and p.policy == "hkvd"]
        assert [p.ratio for p in curve] == list(RATIOS)
        assert all(a.attention > b.attention for a, b in pairwise(curve))
        assert all(a.kv > b.kv for a, b in pairwise(curve))
        assert curve[-1].attention < 1e-4


def test_the_oracle_begins_at_reuse_and_ends_at_full_prefill(prompts) -> None:
    report = measure(prompts, ["reuse"], ["constant"], RATIOS)
    oracle = [p for p in report.points if p.policy == ORACLE]
    reused = next(p for p in report.points if p.policy == "reuse")
    assert oracle[0].attention == pytest.approx(reused.attention, rel=1e-4)
    assert all(a.attention > b.attention for a, b in pairwise(oracle))
    assert oracle[-1].attention < 1e-4


def test_a_model_with_windows_can_be_measured() -> None:
    made = tiny.adapter(tiny.family("gemma2"))
    prompt = StoredPrompt(made, plan(1), PREFIX)
    assert prompt.deviation("query", "constant", 1.0).kv.max() < 1e-4
    assert prompt.deviation("reuse").kv_by_layer[1:].min() > 0.01


def test_correlation_of_equal_orders_is_one_and_of_opposite_orders_minus_one() -> None:
    rising = np.array([0.1, 0.4, 0.5, 0.9])
    kv = np.stack([np.zeros(4), rising, rising**3, -rising])
    first, second = correlation([Deviation(kv, kv, 0.0, 0.0)])
    assert (first.layer, first.rho, first.low, first.high) == (1, 1.0, 1.0, 1.0)
    assert (second.layer, second.rho) == (2, -1.0)


def test_intervals_over_few_prompts_are_students() -> None:
    orders = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.3], [0.4, 0.3, 0.2, 0.1]]  # ρ 1, 0.8, -1
    first = np.array([0.1, 0.2, 0.3, 0.4])
    layers = [np.stack([np.zeros(4), first, np.array(order)]) for order in orders]
    (found,) = correlation([Deviation(kv, kv, 0.0, 0.0) for kv in layers])
    assert found.rho == pytest.approx(0.8 / 3)
    # 4.3027 standard errors of three values
    assert found.high - found.rho == pytest.approx(
        4.3027 * np.std([1, 0.8, -1], ddof=1) / 3**0.5, 1e-3
    )


def test_the_distribution_is_that_of_all_prompts_tokens(prompts) -> None:
    report = measure(iter(prompts), ["reuse"], ["constant"], [0.0])
    kv = np.concatenate([p.deviation("reuse").kv[2] for p in prompts])
    layer = next(d for d in report.distribution if d.layer == 2)
    assert layer.quantiles[0] == pytest.approx(kv.min())
    assert layer.quantiles[50] == pytest.approx(np.median(kv))
    assert layer.quantiles[-1] == pytest.approx(kv.max())
    assert report.tokens == kv.size


def test_the_report_survives_json(prompts) -> None:
    report = measure(prompts[:1], ["hkvd"], ["constant"], [0.1])
    assert report.prompts == 1
    read = json.loads(json.dumps(report.as_dict()))
    assert read["points"][0]["policy"] == "hkvd"
    assert len(read["points"][0]["kv_by_layer"]) == 4


def test_a_prompt_without_chunks_is_refused_in_one_sentence(adapter) -> None:
    with pytest.raises(InvalidInputError) as refused:
        StoredPrompt(adapter, plan(0, chunks=0), PREFIX)
    assert tiny.one_sentence(str(refused.value))
    with pytest.raises(InvalidInputError) as empty:
        measure([], ["hkvd"], ["constant"], [0.1])
    assert tiny.one_sentence(str(empty.value))


def test_attention_deviation_of_the_demo_model_falls_with_the_ratio_for_hkvd() -> None:
    asked = ["--contexts", "4", "--dtype", "float32", "--policies", "hkvd"]
    asked += [part for ratio in RATIOS for part in ("--ratio", str(ratio))]
    report = deviations.run(deviations.parser().parse_args(asked))
    curve = [p for p in report.points if p.policy == "hkvd"]
    assert all(a.attention > b.attention for a, b in pairwise(curve))
    assert all(a.kv > b.kv for a, b in pairwise(curve))
    assert curve[-1].attention < 1e-3
    assert min(one.rho for one in report.correlation) > 0.2  # what gradual filtering rests on


def test_a_case_becomes_a_prompt_that_is_cut_at_its_chunks() -> None:
    made = tiny.tokenizer()
    chunks = tuple(tiny.sentence(number) for number in range(3))
    case = Case("c", "c", "direct", "What did the company do?", ("ships",), chunks)
    plan = deviations.plan_of(Tokens(made), wording_for(made, "accuracy"), case)
    assert [segment.text for segment in plan.chunks] == list(chunks)
    assert case.question in plan.segments[-1].text


def test_what_cannot_be_measured_is_said_in_one_sentence(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        deviations.main(["--policies", "nonsense", "--ratio", "0.1", "--contexts", "1"])
    assert left.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: policy 'nonsense'")
