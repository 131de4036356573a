"""Selective recompute: what is computed, what is loaded, what is counted, and that it is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import LayerView, Schedule, SelectionPolicy, make_policy
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.model import ModelAdapter
from fusor.two_chunks import CANDIDATES, CHUNKS, FRESH, IDS, LAYERS, N, exact_spans


class Recording(HKVDPolicy):
    """hkvd that remembers what it was asked and what it chose."""

    def __init__(self) -> None:
        self.chosen: dict[int, torch.Tensor] = {}
        self.deviations: dict[int, torch.Tensor] = {}

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        self.deviations[layer] = view.deviation
        self.chosen[layer] = super().select(layer, view, budget)
        return self.chosen[layer]


class Arbitrary(SelectionPolicy):
    """Any nested sets, whatever the deviation."""

    name = "arbitrary"

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        keep = min(budget, view.tokens.numel())
        order = torch.randperm(view.tokens.numel(), generator=self.generator)[:keep]
        return view.tokens[order.sort().values]


@pytest.fixture(scope="module")
def stock(adapter: ModelAdapter) -> torch.Tensor:
    return tiny.stock(adapter.model, IDS)[0]


@pytest.fixture(scope="module")
def stock_kv(adapter: ModelAdapter) -> list[torch.Tensor]:
    return list(tiny.kv_between(adapter, IDS[0].tolist(), 0, N).layers)


# -- r = 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("policy", ["full", "hkvd", "boundary(1000)"])
def test_ratio_one_equals_full_prefill_even_over_useless_kv(
    adapter: ModelAdapter, stock: torch.Tensor, policy: str, fast: bool, masks: bool
) -> None:
    fusor = Fusor(adapter, fast_attention=fast, force_masks=masks)
    spans = exact_spans(adapter, noise=3.0)
    logits, _, fusion = tiny.fuse(fusor, IDS, spans, policy, ratio=1.0, all_rows=True)
    assert tiny.difference(logits[0], stock) < 1e-4
    assert fusion.counts().ratio == 1.0
    assert fusion.counts().charged_ratio == 1.0


@pytest.mark.parametrize(
    "bounds", [[(0, 149)], [(0, 20)], [(100, 149)], [(0, 20), (20, 40), (41, 42)], [(3, 4)], []]
)
def test_ratio_one_equals_full_prefill_wherever_the_chunks_are(
    adapter: ModelAdapter, fusor: Fusor, stock: torch.Tensor, bounds: list[tuple[int, int]]
) -> None:
    spans = [tiny.span(adapter, IDS, a, b, stored_at=5, noise=3.0) for a, b in bounds]
    logits, _, _ = tiny.fuse(fusor, IDS, spans, "hkvd", ratio=1.0, all_rows=True)
    assert tiny.difference(logits[0], stock) < 1e-4


def test_ratio_one_leaves_a_stock_cache(
    adapter: ModelAdapter, fusor: Fusor, stock_kv: list[torch.Tensor]
) -> None:
    _, cache, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), "hkvd", ratio=1.0)
    for layer, expected in zip(cache.layers, stock_kv, strict=True):
        assert tiny.difference(layer.keys[0], expected[0]) < 1e-4
        assert tiny.difference(layer.values[0], expected[1]) < 1e-4


# -- loaded KV is used, and used right ----------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.7])
@pytest.mark.parametrize("schedule", ["constant", "linear", "geometric:0.3", "3,1,0"])
def test_exact_loaded_kv_equals_stock_whichever_tokens_are_chosen(
    adapter: ModelAdapter, stock: torch.Tensor, ratio: float, schedule: str, fast: bool
) -> None:
    fusor = Fusor(adapter, fast_attention=fast)
    for policy in (make_policy("hkvd"), Arbitrary(1), Arbitrary(2)):
        logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter), policy, ratio, schedule)
        assert tiny.difference(logits[0, 0], stock[-1]) < 1e-4


@pytest.mark.parametrize("policy", ["reuse", "boundary(4)", "hkvd"])
def test_useless_loaded_kv_shows_at_any_ratio_below_one(
    adapter: ModelAdapter, fusor: Fusor, stock: torch.Tensor, policy: str
) -> None:
    logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), policy, ratio=0.2)
    assert tiny.difference(logits[0, 0], stock[-1]) > 1e-2


def test_exact_loaded_kv_at_the_wrong_position_shows(
    adapter: ModelAdapter, fusor: Fusor, stock: torch.Tensor
) -> None:
    spans = [
        LoadedSpan(s.start, s.end, s.reader, s.stored_position + 9, exact=False)
        for s in exact_spans(adapter)
    ]
    logits, _, _ = tiny.fuse(fusor, IDS, spans, "reuse")
    assert tiny.difference(logits[0, 0], stock[-1]) > 1e-2


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gemma2", "qwen2"])
def test_exact_loaded_kv_equals_stock_beyond_sliding_windows(name: str) -> None:
    adapter = tiny.adapter(tiny.family(name))
    expected = tiny.stock(adapter.model, IDS)[0]
    fusor = Fusor(adapter)
    for policy in ("reuse", "boundary(8)", "hkvd"):
        logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter), policy, 0.3)
        assert tiny.difference(logits[0, 0], expected[-1]) < 1e-4


def test_an_exact_prefix_is_loaded_and_never_computed(
    adapter: ModelAdapter, fusor: Fusor, stock: torch.Tensor
) -> None:
    for policy in ("hkvd", "full", "reuse", "boundary(4)"):
        prefix = tiny.span(adapter, IDS, 0, 10, exact=True)
        spans = [prefix, *exact_spans(adapter)]
        logits, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.3)
        assert tiny.difference(logits[0, 0], stock[-1]) < 1e-4
        assert max(fusion.counts().rows) <= N - 10
        assert fusion.counts().candidates == CANDIDATES  # exact tokens are no candidates
        assert isinstance(prefix.reader, tiny.Held)
        assert prefix.reader.read == list(range(LAYERS))


def test_kv_of_tokens_not_chosen_is_the_loaded_and_of_the_chosen_is_fresh(
    adapter: ModelAdapter, fusor: Fusor, stock_kv: list[torch.Tensor]
) -> None:
    policy = Recording()
    spans = exact_spans(adapter, noise=3.0)
    clean_spans = exact_spans(adapter, noise=3.0)
    _, cache, _ = tiny.fuse(fusor, IDS, spans, policy, ratio=0.2)
    loaded = [torch.full_like(layer, float("nan")) for layer in stock_kv]
    for span in clean_spans:
        for i in range(LAYERS):
            at = slice(span.start, span.end)
            assert isinstance(span.reader, tiny.Held)
            loaded[i][:, :, at] = span.reader.kv.layers[i]
            tables = adapter.repositioner.tables(torch.full((span.tokens,), span.offset))
            adapter.repositioner.rotate_(loaded[i][0, :, at], i, tables)
    for i in range(2, LAYERS):  # layers 0 and 1 are exact everywhere: see below
        kept = torch.zeros(N, dtype=torch.bool)
        for a, b in CHUNKS:
            kept[a:b] = True
        kept[policy.chosen[i]] = False
        keys, values = cache.layers[i].keys[0], cache.layers[i].values[0]
        assert tiny.difference(keys[:, kept], loaded[i][0][:, kept]) < 1e-5
        assert tiny.difference(values[:, kept], loaded[i][1][:, kept]) < 1e-5
        fresh = tiny.difference(values[:, ~kept], stock_kv[i][1][:, ~kept])
        # Layer 1 attended to exact KV only, so layer 2's fresh rows still are exact.
        assert fresh < 1e-4 if i == 2 else fresh > 1e-3


def test_hkvd_leaves_layers_zero_and_one_exact(
    adapter: ModelAdapter, fusor: Fusor, stock_kv: list[torch.Tensor]
) -> None:
    _, cache, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), "hkvd", ratio=0.1)
    for i in (0, 1):
        assert tiny.difference(cache.layers[i].keys[0], stock_kv[i][0]) < 1e-5
        assert tiny.difference(cache.layers[i].values[0], stock_kv[i][1]) < 1e-5
    assert tiny.difference(cache.layers[2].values[0], stock_kv[2][1]) > 1e-2


# -- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "geometric", "9,3,1"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_chosen_sets_are_nested_and_follow_the_schedule(
    adapter: ModelAdapter, fusor: Fusor, schedule: str, ratio: float
) -> None:
    policy = Recording()
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), policy, ratio, schedule)
    wanted = Schedule.parse(schedule).counts(ratio, LAYERS, CANDIDATES)
    sizes = [policy.chosen[i].numel() for i in range(1, LAYERS)]
    assert sizes == wanted
    for i in range(2, LAYERS):
        assert set(policy.chosen[i].tolist()) <= set(policy.chosen[i - 1].tolist())
    for chosen in policy.chosen.values():
        assert chosen.tolist() == sorted(chosen.tolist())
    counts = fusion.counts()
    assert counts.candidate_rows == (CANDIDATES, *wanted)
    assert counts.rows == tuple(FRESH + c for c in (CANDIDATES, *wanted))


def test_hkvd_chooses_the_tokens_that_deviate(adapter: ModelAdapter, fusor: Fusor) -> None:
    spans = exact_spans(adapter)
    wrong = [12, 13, 40, 69, 74, 129]
    for span in spans:
        assert isinstance(span.reader, tiny.Held)
        for layer in span.reader.kv.layers:
            for position in wrong:
                if span.start <= position < span.end:
                    layer[:, :, position - span.start] += 5.0
    policy = Recording()
    tiny.fuse(fusor, IDS, spans, policy, len(wrong) / CANDIDATES, "constant")
    assert policy.chosen[1].tolist() == wrong
    # fresh against loaded: nothing but the disturbed tokens deviates at layer 1
    assert int((policy.deviations[1] > 1e-3).sum()) == len(wrong)


def test_deviation_weighs_keys_and_values_alike() -> None:
    geometry = None
    fresh_k, fresh_v = torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)
    loaded_k, loaded_v = 100 * torch.ones(2, 5, 4), torch.ones(2, 5, 4)
    fresh_k[:], fresh_v[:] = loaded_k, loaded_v
    fresh_k[:, 1] = 200.0  # twice the key
    fresh_v[:, 3] = 2.0  # twice the value
    view = LayerView(geometry, torch.arange(5), lambda: (fresh_k, fresh_v, loaded_k, loaded_v))  # type: ignore[arg-type]
    deviation = view.deviation
    assert deviation[1] == pytest.approx(float(deviation[3]))
    assert float(deviation[[0, 2, 4]].abs().max()) == 0.0


# -- what is paid -------------------------------------------------------------------------------


@contextmanager
def mlp_rows(adapter: ModelAdapter) -> Iterator[dict[int, list[int]]]:
    """Rows that really went through each layer's MLP, seen from the model itself."""
    seen: dict[int, list[int]] = {i: [] for i in range(LAYERS)}
    handles = [
        layer.mlp.register_forward_hook(
            lambda module, args, out, i=i: seen[i].append(args[0].shape[1])
        )
        for i, layer in enumerate(adapter.stack.layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("policy", ["hkvd", "reuse", "boundary(8)", "full"])
def test_counts_are_the_rows_the_model_really_ran(
    adapter: ModelAdapter, fusor: Fusor, policy: str
) -> None:
    spans = exact_spans(adapter, 1.0)
    with mlp_rows(adapter) as seen:
        _, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.2, all_rows=True)
    assert [seen[i] for i in range(LAYERS)] == [[rows] for rows in fusion.counts().rows]


def test_hkvd_pays_layer_zero_and_no_second_full_layer(adapter: ModelAdapter, fusor: Fusor) -> None:
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), "hkvd", 0.15)
    counts = fusion.counts()
    assert counts.candidate_rows[0] == CANDIDATES
    assert counts.candidate_rows[1] < CANDIDATES / 2
    recomputed = sum(counts.candidate_rows[1:])
    assert counts.ratio == pytest.approx(recomputed / ((LAYERS - 1) * CANDIDATES))
    assert abs(counts.ratio - 0.15) <= 0.5 / ((LAYERS - 1) * CANDIDATES)
    assert counts.charged_ratio == pytest.approx((CANDIDATES + recomputed) / (LAYERS * CANDIDATES))
    assert counts.charged_ratio == pytest.approx((1 + counts.ratio * (LAYERS - 1)) / LAYERS)


@pytest.mark.parametrize("k", [0, 1, 8, 58, 1000])
def test_boundary_computes_the_first_k_of_each_chunk_and_no_full_layer_zero(
    adapter: ModelAdapter, fusor: Fusor, k: int
) -> None:
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), f"boundary({k})", 0.9)
    counts = fusion.counts()
    heads = [min(k, b - a) for a, b in CHUNKS]
    assert counts.candidate_rows == (sum(heads),) * LAYERS
    assert counts.recomputed_per_span == pytest.approx(tuple(float(h) for h in heads))
    assert counts.ratio == counts.charged_ratio == pytest.approx(sum(heads) / CANDIDATES)
    assert fusion.request.geometry.chunk_spans == CHUNKS
    everywhere = torch.cat([torch.arange(a, b) for a, b in CHUNKS])
    view = LayerView(fusion.request.geometry, everywhere, lambda: pytest.fail("nothing to compare"))
    entered = make_policy(f"boundary({k})").select(0, view, 1)
    assert entered.tolist() == [i for a, b in CHUNKS for i in range(a, min(a + k, b))]


def test_reuse_computes_only_fresh_rows(adapter: ModelAdapter, fusor: Fusor) -> None:
    spans = exact_spans(adapter)
    _, _, fusion = tiny.fuse(fusor, IDS, spans, "reuse", 0.5)
    counts = fusion.counts()
    assert counts.candidate_rows == (0,) * LAYERS
    assert counts.rows == (FRESH,) * LAYERS
    assert counts.ratio == counts.charged_ratio == 0.0
    assert counts.recomputed_per_span == (0.0, 0.0)
    assert all(s.reader.read == [0, 1, 2, 3] for s in spans)  # type: ignore[attr-defined]


def test_recomputed_per_span_adds_up_to_the_ratio(adapter: ModelAdapter, fusor: Fusor) -> None:
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), "hkvd", 0.3)
    counts = fusion.counts()
    assert sum(counts.recomputed_per_span) == pytest.approx(counts.ratio * CANDIDATES)
    assert len(counts.recomputed_per_span) == 2


def test_without_spans_it_is_a_stock_prefill(
    adapter: ModelAdapter, fusor: Fusor, stock: torch.Tensor
) -> None:
    logits, _, fusion = tiny.fuse(fusor, IDS, [], "hkvd", 0.15, all_rows=True)
    assert tiny.difference(logits[0], stock) < 1e-5
    assert fusion.counts().ratio == fusion.counts().charged_ratio == 0.0


def test_a_model_of_one_layer_can_be_blended() -> None:
    adapter = tiny.adapter(tiny.llama(num_hidden_layers=1))
    expected = tiny.stock(adapter.model, IDS)[0, -1]
    for policy in ("hkvd", "reuse", "boundary(4)"):
        logits, _, _ = tiny.fuse(Fusor(adapter), IDS, exact_spans(adapter), policy, 0.2)
        assert tiny.difference(logits[0, 0], expected) < 1e-4


# -- quality ------------------------------------------------------------------------------------


def encoded_alone(adapter: ModelAdapter, ids: torch.Tensor) -> list[LoadedSpan]:
    """Chunks as ingest stores them: alone, behind token 0."""
    spans = []
    for a, b in CHUNKS:
        kv = adapter.encode((0,), ids[0, a:b].tolist())
        spans.append(LoadedSpan(a, b, tiny.Held(kv), 1, exact=False))
    return spans


def test_recomputing_more_brings_the_logits_nearer_to_full_prefill(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    ratios = (0.0, 0.15, 0.5, 1.0)
    deviations = dict.fromkeys(ratios, 0.0)
    for seed in range(10):
        ids = tiny.random_ids(N, seed=100 + seed)
        full = tiny.stock(adapter.model, ids)[0, -1]
        for ratio in ratios:
            spans = encoded_alone(adapter, ids)
            logits, _, _ = tiny.fuse(fusor, ids, spans, "hkvd" if ratio else "reuse", ratio)
            deviations[ratio] += float((logits[0, 0] - full).norm()) / 10
    assert deviations[1.0] < 1e-3
    assert deviations[0.5] < 0.8 * deviations[0.0]
    assert deviations[0.15] < deviations[0.0]


def test_a_batch_of_two_is_refused_and_leaves_no_hook(adapter: ModelAdapter, fusor: Fusor) -> None:
    from blendrag.errors import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="one prompt at a time"):
        tiny.fuse(fusor, IDS.repeat(2, 1), exact_spans(adapter), "hkvd", 0.2)
    assert not any(layer._forward_pre_hooks for layer in adapter.stack.layers)
