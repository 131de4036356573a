"""Policy ``query``: what the question looks at is seen rightly, chosen, paid for and counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE
from blendrag.fusor import Fusor, attention, scout
from blendrag.fusor.selection import LayerView
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.model import ModelAdapter
from fusor.two_chunks import CANDIDATES, CHUNKS, FRESH, IDS, LAYERS, N, exact_spans

pytestmark = pytest.mark.usefixtures("ends_early")
QUESTION = CHUNKS[-1][1]  # where it begins


class Recording(QueryPolicy):
    """query that remembers what it was told."""

    question: torch.Tensor

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        self.question = super().worth(view, budget)
        return self.question


@torch.inference_mode()
def attention_paid(model: Any) -> torch.Tensor:
    """The slow reference: what stock eager attention says the question pays to each candidate, in the layers
    that the policy asks."""
    model.set_attn_implementation("eager")
    weights = model(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    asked = QueryPolicy().attention_layers(len(weights))
    paid = sum(weights[layer][0, :, QUESTION:].float().sum((0, 1)) for layer in asked)
    assert isinstance(paid, torch.Tensor)
    return torch.cat([paid[a:b] for a, b in CHUNKS])


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt_neox", "cohere2", "qwen2"]
)
def test_over_exact_kv_the_scout_sees_what_eager_attention_pays(name: str) -> None:
    model = tiny.family(name, initializer_range=0.3)  # attention that differs between tokens
    policy = Recording()
    tiny.fuse(Fusor(tiny.adapter(model)), IDS, exact_spans(tiny.adapter(model)), policy, 0.3)
    expected = attention_paid(model)
    assert tiny.difference(policy.question, expected) < 1e-2 * float(expected.std())


def test_a_last_chunk_that_is_computed_asks_nothing() -> None:
    model = tiny.family("llama", initializer_range=0.3)
    adapter, policy = tiny.adapter(model), Recording()
    spans = exact_spans(adapter)[:-1]
    asked = replace(tiny.request(IDS, spans, policy, 0.3), question_start=QUESTION)
    Fusor(adapter).prefill(IDS, asked)
    expected = attention_paid(model)[: sum(span.tokens for span in spans)]
    assert tiny.difference(policy.question, expected) < 1e-2 * float(expected.std())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_exact_loaded_kv_equals_stock(name: str) -> None:
    adapter = tiny.adapter(tiny.family(name))
    expected = tiny.stock(adapter.model, IDS)[0, -1]
    for made in (Fusor(adapter), Fusor(adapter, fast_attention=False)):
        logits, _, _ = tiny.fuse(made, IDS, exact_spans(adapter), "query", 0.3)
        assert tiny.difference(logits[0, 0], expected) < 1e-4


@pytest.mark.parametrize("masks", [True, False])
def test_ratio_one_equals_full_prefill_even_over_useless_kv(
    adapter: ModelAdapter, masks: bool
) -> None:
    fusor = Fusor(adapter, force_masks=masks)
    logits, cache, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), "query", 1.0, all_rows=True)
    assert tiny.difference(logits[0], tiny.stock(adapter.model, IDS)[0]) < 1e-4
    assert cache.get_seq_length() == N


def test_attention_in_blocks_of_rows_is_the_same(
    adapter: ModelAdapter, fusor: Fusor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, blocks = Recording(), Recording()
    tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), whole, 0.3)
    monkeypatch.setattr(scout, "BLOCK_WEIGHTS", 4 * N * 7)  # 7 rows of four heads
    tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), blocks, 0.3)
    assert tiny.difference(whole.question, blocks.question) < 1e-5


@pytest.mark.parametrize("schedule", ["constant", "linear", "9,3,1"])
def test_most_looked_at_tokens_are_chosen_in_nested_sets(
    adapter: ModelAdapter, fusor: Fusor, schedule: str
) -> None:
    policy = Recording()
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), policy, 0.2, schedule)
    everywhere = torch.cat([torch.arange(a, b) for a, b in CHUNKS])
    ranked = everywhere[policy.question.argsort(descending=True)].tolist()
    counts = fusion.counts()
    for layer in range(LAYERS):
        n = counts.candidate_rows[layer]
        assert sorted(ranked[:n]) == fusion.recomputed[layer].tolist()
    assert counts.candidate_rows[0] == counts.candidate_rows[1]
    assert abs(counts.ratio - 0.2) <= 0.5 / ((LAYERS - 1) * CANDIDATES)


def test_layer_zero_is_not_computed_for_all_and_the_scout_is_counted(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    loaded, seen = exact_spans(adapter, 1.0), list[int]()
    hooks = [
        layer.mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
        for layer in adapter.stack.layers
    ]
    _, _, fusion = tiny.fuse(fusor, IDS, loaded, "query", 0.2, "constant", all_rows=True)
    for hook in hooks:
        hook.remove()
    counts = fusion.counts()
    scouted = QueryPolicy().attention_layers(LAYERS).stop
    assert 0 < scouted < LAYERS
    assert seen[:scouted] == [FRESH] * scouted
    assert seen[scouted:] == [FRESH + n for n in counts.candidate_rows]
    assert counts.rows == tuple(
        FRESH + n + FRESH * (layer < scouted) for layer, n in enumerate(counts.candidate_rows)
    )
    assert counts.charged_ratio == pytest.approx(counts.ratio, abs=1 / CANDIDATES)


def test_it_mends_what_the_question_looks_at_most(adapter: ModelAdapter, fusor: Fusor) -> None:
    """One token's KV is useless: mended by query exactly if the question looks at it."""
    policy = Recording()
    tiny.fuse(fusor, IDS, exact_spans(adapter), policy, 0.1)
    stock = tiny.stock(adapter.model, IDS)[0, -1]
    everywhere = torch.cat([torch.arange(a, b) for a, b in CHUNKS])
    ranked = everywhere[policy.question.argsort(descending=True)].tolist()

    def wrong(position: int) -> float:
        disturbed = exact_spans(adapter)
        for span in disturbed:
            if span.start <= position < span.end:
                for layer in span.reader.kv.layers:  # type: ignore[attr-defined]
                    layer[1, :, position - span.start] += 3.0
        logits, _, fusion = tiny.fuse(fusor, IDS, disturbed, Recording(), 0.1, "constant")
        assert (position in fusion.recomputed[0].tolist()) == (position == ranked[0])
        return tiny.difference(logits[0, 0], stock)

    assert wrong(ranked[0]) < 1e-4
    assert wrong(ranked[-1]) > 1e-4


def test_a_model_of_one_layer_and_a_prompt_without_chunks() -> None:
    adapter = tiny.adapter(tiny.llama(num_hidden_layers=1))
    expected = tiny.stock(adapter.model, IDS)[0, -1]
    for loaded in (exact_spans(adapter), []):
        logits, _, fusion = tiny.fuse(Fusor(adapter), IDS, loaded, "query", 0.2)
        assert tiny.difference(logits[0, 0], expected) < 1e-4
    assert fusion.counts().rows == (N,)  # nothing to ask about: no scout


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose attention goes its own way, whatever implementation their config names."""
    for module in (attention, scout):
        monkeypatch.setattr(module, "implementation", lambda stack, name: nullcontext())


@pytest.mark.usefixtures("deaf")
def test_where_attention_cannot_be_seen_deviation_decides(adapter: ModelAdapter) -> None:
    fusor = Fusor(adapter)
    assert not fusor.fast_attention  # nor is it taken for served
    logits, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter), "query", 0.3)
    assert fusion.policy.name == "hkvd"
    assert fusion.counts().candidate_rows[0] == CANDIDATES
    assert tiny.difference(logits[0, 0], tiny.stock(adapter.model, IDS)[0, -1]) < 1e-4


@pytest.mark.usefixtures("deaf")
def test_the_metrics_name_the_policy_that_decided(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s", policy="query") as engine:
        engine.ingest([tiny.document(0)])
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
        assert engine.generate(prompt).metrics.policy == "hkvd"


def test_the_metrics_name_the_policy_asked_for(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        prompt = "\n\n".join([*tiny.chunk_texts(engine, 0), "What did the company build?"])
        metrics = engine.generate(prompt).metrics
        assert (metrics.policy, metrics.schedule) == (DEFAULT_POLICY, UNCALIBRATED_SCHEDULE)


@pytest.mark.parametrize("after", [0, 2, LAYERS, LAYERS + 1])
def test_abandoned_in_the_scout_or_later_it_leaves_nothing_behind(
    adapter: ModelAdapter, fusor: Fusor, after: int
) -> None:
    calls = iter(range(100))

    def check() -> None:
        if next(calls) == after:
            raise InterruptedError

    own = adapter.stack.config._attn_implementation
    before = tiny.stock(adapter.model, IDS)
    request = tiny.request(IDS, exact_spans(adapter), "query", 0.2)
    with pytest.raises(InterruptedError):
        fusor.prefill(IDS, request, check=check)
    assert adapter.stack.config._attn_implementation == own
    assert not adapter.stack.base._forward_pre_hooks
    assert torch.equal(tiny.stock(adapter.model, IDS), before)


class Squares(TorchDispatchMode):
    """How many tensors ``[…, N, N]`` operators returned."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.count += isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (N, N)
        return out


@pytest.mark.parametrize("name", ["mistral", "qwen2", "cohere2"])
def test_no_mask_of_the_whole_prompt_is_made_for_sliding_windows(name: str) -> None:
    """At 32,000 tokens it would be one of a gigabyte."""
    adapter = tiny.adapter(tiny.family(name))
    fusor, spans = Fusor(adapter), exact_spans(adapter)
    with Squares() as squares:
        tiny.fuse(fusor, IDS, spans, "query", 0.3)
    assert not squares.count


def test_an_error_in_another_thread_than_the_fusion_was_begun_in_is_the_one_raised(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    def check() -> None:
        raise InterruptedError

    @torch.inference_mode()
    def forward() -> None:
        adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)

    request = tiny.request(IDS, exact_spans(adapter), "query", 0.2)
    cache = fusor.new_cache(N, 0)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(InterruptedError),
        fusor.fuse(cache, request, check),
    ):
        pool.submit(forward).result()
    assert not adapter.stack.base._forward_pre_hooks
