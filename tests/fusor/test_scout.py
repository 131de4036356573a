"""The scout pass: the question's attention is observed exactly, paid for, counted, and used by ``query``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from blendrag.config import DEFAULT_SCHEDULE
from blendrag.fusor import Fusor, attention, scout
from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import Scout
from blendrag.fusor.selection import LayerView
from blendrag.fusor.selection.blend import BlendPolicy
from blendrag.fusor.selection.query import QueryPolicy
from fusor.two_chunks import (
    CANDIDATES,
    CHUNKS,
    EVERYWHERE,
    FRESH,
    IDS,
    LAYERS,
    N,
    exact_spans,
    rows_through,
)

pytestmark = pytest.mark.usefixtures("ends_early")
QUESTION = CHUNKS[-1][1]  # where it begins


class Recording(QueryPolicy):
    """query that remembers the attention that it saw."""

    attention: torch.Tensor

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        self.attention = super().scores(view, budget)
        return self.attention


class RecordingBlend(BlendPolicy):
    attention: torch.Tensor

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.attention is not None
        self.attention = view.attention
        return super().scores(view, budget)


@torch.inference_mode()
def stock_attention(model: Any, layers: range, sqrt: bool = False) -> torch.Tensor:
    """The slow reference: stock eager attention from the question to each candidate, over ``layers``."""
    model.set_attn_implementation("eager")
    weights = model(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    paid = torch.stack([weights[layer][0, :, QUESTION:].float() for layer in layers])
    return (paid.sqrt() if sqrt else paid).sum((0, 1, 2))[EVERYWHERE]


def assert_observed(policy: Recording | RecordingBlend, expected: torch.Tensor) -> None:
    observed = policy.attention
    assert tiny.difference(observed, expected[: len(observed)]) < 1e-2 * float(expected.std())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt_neox", "cohere2", "afmoe"])
def test_over_exact_kv_the_scout_observes_eager_attention(name):
    adapter = tiny.adapter(tiny.family(name, initializer_range=0.3))  # tokens differ in attention
    policy, roots = Recording(), RecordingBlend()
    fusor = Fusor(adapter)
    for each in (policy, roots):
        tiny.fuse(fusor, IDS, exact_spans(adapter), each, 0.3)
    # the last chunk computed: its tokens are not part of the question
    cut, spans = Recording(), exact_spans(adapter)[:-1]
    asked = replace(tiny.request(IDS, spans, cut, 0.3), question_start=QUESTION)
    fusor.prefill(IDS, asked)
    layers = policy.attention_layers(LAYERS)
    expected = stock_attention(adapter.model, layers)
    assert_observed(policy, expected)
    assert_observed(cut, expected)
    assert_observed(roots, stock_attention(adapter.model, range(LAYERS // 4, LAYERS), sqrt=True))


def test_attention_in_blocks_of_rows_is_the_same(fusor, monkeypatch):
    whole, blocks = Recording(), Recording()
    tiny.fuse(fusor, IDS, exact_spans(fusor.adapter, 1.0), whole, 0.3)
    monkeypatch.setattr(scout, "BLOCK_WEIGHTS", 4 * N * 7)  # 7 rows of four heads
    tiny.fuse(fusor, IDS, exact_spans(fusor.adapter, 1.0), blocks, 0.3)
    assert tiny.difference(whole.attention, blocks.attention) < 1e-5


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sqrt", [False, True])
@torch.inference_mode()
def test_products_observe_what_attention_written_out_does(dtype, off, sqrt):
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, heads, n, 16), generator=drawn).to(dtype)
        for heads, n in ((6, 30), (2, 80), (2, 80))
    )
    rows = Rows(torch.tensor([*range(3, 13), *range(60, 80)]), 80)
    by_products, written = Scout(20, sqrt=sqrt, rows=rows), Scout(20, sqrt=sqrt, rows=rows)
    got = scout._by_products(by_products, query, key, value, None)
    expected = scout._written_out(written, query, key, value, None, None, None, None, None)
    assert by_products.attention is not None
    assert written.attention is not None
    assert tiny.difference(got, expected) < off
    assert tiny.difference(by_products.attention, written.attention) < off * float(
        written.attention.max()
    )


@torch.inference_mode()
def test_a_layer_that_is_not_summed_attends_as_a_blended_forward(fusor, monkeypatch):
    every, last = Recording(), Recording()
    last.depth = every.depth = (50, 100)
    tiny.fuse(fusor, IDS, exact_spans(fusor.adapter, 1.0), last, 0.3)
    written = []
    monkeypatch.setattr(
        scout, "attend", lambda *args: written.append(args) or attention.attend(*args)
    )
    monkeypatch.setattr(scout, "_hides", lambda window, tokens: True)  # the reference
    tiny.fuse(fusor, IDS, exact_spans(fusor.adapter, 1.0), every, 0.3)
    assert len(written) == LAYERS // 2
    assert tiny.difference(last.attention, every.attention) < 1e-5


def test_the_tokens_attended_most_are_chosen_in_nested_sets(fusor):
    policy = Recording()
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(fusor.adapter, 3.0), policy, 0.2, "9,3,1")
    ranked = EVERYWHERE[policy.attention.argsort(descending=True)].tolist()
    counts = fusion.counts()
    for chosen, n in zip(fusion.recomputed, counts.candidate_rows, strict=True):
        assert sorted(ranked[:n]) == chosen.tolist()
    assert counts.candidate_rows[0] == counts.candidate_rows[1]
    assert abs(counts.ratio - 0.2) <= 0.5 / ((LAYERS - 1) * CANDIDATES)


def test_the_scout_is_counted_and_layer_zero_is_not_computed_for_all(fusor):
    spans = exact_spans(fusor.adapter, 1.0)
    with rows_through([layer.mlp for layer in fusor.adapter.stack.layers]) as seen:
        _, _, fusion = tiny.fuse(fusor, IDS, spans, "query", 0.2, "constant", all_rows=True)
    counts = fusion.counts()
    scouted = QueryPolicy().attention_layers(LAYERS).stop
    assert 0 < scouted < LAYERS
    assert seen == [
        [FRESH] * (layer < scouted) + [FRESH + n] for layer, n in enumerate(counts.candidate_rows)
    ]
    assert counts.rows == tuple(sum(rows) for rows in seen)
    assert counts.charged_ratio == pytest.approx(counts.ratio, abs=1 / CANDIDATES)


def test_query_repairs_what_the_question_attends_to_most(fusor):
    """One token's KV is useless: repaired by query exactly if the question attends to it."""
    policy = Recording()
    tiny.fuse(fusor, IDS, exact_spans(fusor.adapter), policy, 0.1)
    stock = tiny.stock(fusor.adapter.model, IDS)[0, -1]
    ranked = EVERYWHERE[policy.attention.argsort(descending=True)].tolist()
    for position, is_repaired in ((ranked[0], True), (ranked[-1], False)):
        disturbed = exact_spans(fusor.adapter)
        for span in disturbed:
            if span.start <= position < span.end:
                for layer in span.reader.kv.layers:  # type: ignore[attr-defined]
                    layer[1, :, position - span.start] += 3.0
        logits, _, fusion = tiny.fuse(fusor, IDS, disturbed, "query", 0.1, "constant")
        assert (position in fusion.recomputed[0].tolist()) == is_repaired
        assert (tiny.difference(logits[0, 0], stock) < 1e-4) == is_repaired


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that ignore the attention implementation of their config."""
    for module in (attention, scout):
        monkeypatch.setattr(module, "implementation", lambda stack, name: nullcontext())


@pytest.mark.parametrize("policy", ["query", "query+shift"])
@pytest.mark.usefixtures("deaf")
def test_if_attention_cannot_be_observed_the_fallback_decides(adapter, policy):
    fusor = Fusor(adapter)
    assert not fusor.fast_attention
    logits, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter), policy, 0.3)
    assert fusion.policy.name == "hkvd"
    assert fusion.counts().candidate_rows[0] == CANDIDATES
    assert tiny.difference(logits[0, 0], tiny.stock(adapter.model, IDS)[0, -1]) < 1e-4


@pytest.mark.usefixtures("deaf")
def test_the_metrics_name_the_policy_that_decided(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
        metrics = engine.generate(prompt).metrics
    assert (metrics.policy, metrics.schedule) == ("hkvd", DEFAULT_SCHEDULE)


class Squares(TorchDispatchMode):
    """Counts tensors ``[…, N, N]`` that operators returned."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.count += isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (N, N)
        return out


@pytest.mark.parametrize("name", ["mistral", "cohere2"])
def test_no_mask_of_the_whole_prompt_is_made_for_sliding_windows(name):
    """At 32,000 tokens it would take a gigabyte."""
    adapter = tiny.adapter(tiny.family(name))
    fusor, spans = Fusor(adapter), exact_spans(adapter)
    with Squares() as squares:
        tiny.fuse(fusor, IDS, spans, "query", 0.3)
    assert not squares.count


@pytest.mark.usefixtures("ends_early")
def test_only_a_mask_that_is_missing_ends_the_scout_of_attention_that_cannot_be_seen(monkeypatch):
    adapter = tiny.adapter(tiny.family("mpt"))
    fusor, spans = Fusor(adapter), exact_spans(adapter)
    _, _, fusion = tiny.fuse(fusor, IDS, spans, "query", 0.3)
    assert str(fusion.policy) == "hkvd"
    layer, calls = adapter.stack.layers[0], []
    forward = layer.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs) if len(calls) > 1 else layer.not_there

    monkeypatch.setattr(layer, "forward", broken)
    with pytest.raises(AttributeError, match="not_there"):
        tiny.fuse(fusor, IDS, exact_spans(adapter), "query", 0.3)
