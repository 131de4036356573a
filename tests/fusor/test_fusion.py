"""Selective recompute of one prompt: what is computed, loaded and counted, and that it is right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

import tiny
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import Fusor
from blendrag.fusor.rows import Rows
from blendrag.fusor.selection import (
    LayerView,
    PromptGeometry,
    Schedule,
    SelectionPolicy,
    make_policy,
)
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.fusor.shift import ChunkShift
from blendrag.model import ModelAdapter
from fusor.two_chunks import (
    CANDIDATES,
    CHUNKS,
    EVERYWHERE,
    FRESH,
    IDS,
    LAYERS,
    N,
    assert_same_kv,
    assert_untouched,
    exact_spans,
    rows_through,
)

BUDGETED = (
    "cacheblend",
    "hkvd",
    "hkvd-once",
    "query",
    "query+shift",
    "query+hkvd",
    "blend",
    "random",
)
POLICIES = (*BUDGETED, "full", "reuse", "boundary(8)")
#: Fast attention, fast attention with masks where all rows are computed, the model's own attention.
PATHS = ({}, {"force_masks": True}, {"fast_attention": False, "force_masks": True})


class Recording(HKVDPolicy):
    """hkvd that remembers what it saw and chose."""

    def __init__(self) -> None:
        self.chosen: dict[int, torch.Tensor] = {}
        self.deviations: dict[int, torch.Tensor] = {}

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        self.deviations[layer] = view.deviation
        self.chosen[layer] = super().select(layer, view, budget)
        return self.chosen[layer]


class Arbitrary(SelectionPolicy):
    """Random nested sets."""

    name = "arbitrary"

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        keep = min(budget, view.tokens.numel())
        generator = torch.Generator().manual_seed(layer)
        order = torch.randperm(view.tokens.numel(), generator=generator)[:keep]
        return view.tokens[order.sort().values]


@pytest.fixture(scope="module")
def stock(adapter: ModelAdapter) -> torch.Tensor:
    return tiny.stock(adapter.model, IDS)[0]


@pytest.fixture(scope="module")
def stock_kv(adapter: ModelAdapter) -> list[torch.Tensor]:
    return list(tiny.kv_between(adapter, IDS[0].tolist(), 0, N).layers)


# -- r = 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=("fast", "masks", "slow"))
@pytest.mark.parametrize("policy", [*BUDGETED, "full", "boundary(1000)"])
def test_ratio_one_equals_full_prefill_over_useless_kv(adapter, stock, policy, path):
    spans = exact_spans(adapter, noise=3.0)
    fusor = Fusor(adapter, **path)
    logits, cache, fusion = tiny.fuse(fusor, IDS, spans, policy, ratio=1.0, all_rows=True)
    assert tiny.difference(logits[0], stock) < 1e-4
    assert fusion.counts().ratio == fusion.counts().charged_ratio == 1.0
    assert cache.get_seq_length() == N


@pytest.mark.parametrize(
    "bounds", [[(0, 149)], [(100, 149)], [(0, 20), (20, 40), (41, 42)], [(3, 4)], []]
)
def test_ratio_one_equals_full_prefill_wherever_the_chunks_are(fusor, stock, bounds):
    spans = [tiny.span(fusor.adapter, IDS, a, b, stored_at=5, noise=3.0) for a, b in bounds]
    logits, _, _ = tiny.fuse(fusor, IDS, spans, "hkvd", ratio=1.0, all_rows=True)
    assert tiny.difference(logits[0], stock) < 1e-4


# -- loaded KV ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS[::2], ids=("fast", "slow"))
@pytest.mark.parametrize(
    ("ratio", "schedule"),
    [(0.0, "constant"), (0.05, "geometric:0.3"), (0.7, "3,1,0"), (0.1, "first:1")],
)
def test_exact_loaded_kv_equals_stock_whichever_tokens_are_chosen(
    adapter, stock, ratio, schedule, path
):
    fusor = Fusor(adapter, **path)
    for policy in (Arbitrary(), *BUDGETED) if ratio else ("reuse", "boundary(4)", "hkvd"):
        logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter), policy, ratio, schedule)
        assert tiny.difference(logits[0, 0], stock[-1]) < 1e-4


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_and_two_layers(layers):
    adapter = tiny.adapter(tiny.llama(num_hidden_layers=layers))
    fusor, expected = Fusor(adapter), tiny.stock(adapter.model, IDS)[0, -1]
    for policy in POLICIES:
        for spans in (exact_spans(adapter), []):
            logits, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.2, "constant")
            assert tiny.difference(logits[0, 0], expected) < 1e-4
        assert fusion.counts().rows == (N,) * layers  # without chunks, no scout and no peek


def test_an_exact_prefix_is_loaded_and_never_computed(fusor, stock):
    for policy in ("hkvd", "full", "reuse", "query"):
        prefix = tiny.span(fusor.adapter, IDS, 0, 10, exact=True)
        spans = [prefix, *exact_spans(fusor.adapter)]
        logits, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.3)
        assert tiny.difference(logits[0, 0], stock[-1]) < 1e-4
        assert max(fusion.counts().rows) <= N - 10
        assert fusion.counts().candidates == CANDIDATES  # exact tokens are no candidates
        assert prefix.reader.read == list(range(LAYERS))  # type: ignore[attr-defined]


def test_kv_of_chosen_tokens_is_fresh_and_of_others_loaded(fusor, stock_kv):
    policy = Recording()
    spans = exact_spans(fusor.adapter, noise=3.0)
    _, cache, _ = tiny.fuse(fusor, IDS, spans, policy, ratio=0.2)
    for i in (0, 1):  # computed in full, or peeked
        assert tiny.difference(cache.layers[i].keys[0], stock_kv[i][0]) < 1e-5
        assert tiny.difference(cache.layers[i].values[0], stock_kv[i][1]) < 1e-5
    loaded = [torch.full_like(layer, float("nan")) for layer in stock_kv]
    for span in spans:
        at = slice(span.start, span.end)
        tables = fusor.adapter.repositioner.tables(torch.full((span.tokens,), span.offset))
        for i in range(LAYERS):
            loaded[i][:, :, at] = span.reader.kv.layers[i]  # type: ignore[attr-defined]
            fusor.adapter.repositioner.rotate_(loaded[i][0, :, at], i, tables)
    for i in range(2, LAYERS):
        kept = torch.zeros(N, dtype=torch.bool)
        kept[EVERYWHERE] = True
        kept[policy.chosen[i]] = False
        keys, values = cache.layers[i].keys[0], cache.layers[i].values[0]
        assert tiny.difference(keys[:, kept], loaded[i][0][:, kept]) < 1e-5
        assert tiny.difference(values[:, kept], loaded[i][1][:, kept]) < 1e-5
        fresh = tiny.difference(values[:, ~kept], stock_kv[i][1][:, ~kept])
        # layer 1 attended to exact KV only, so fresh rows of layer 2 are still exact
        assert fresh < 1e-4 if i == 2 else fresh > 1e-3


# -- what is chosen and counted -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "schedule"), [(0.01, "constant"), (0.15, "linear"), (1, "9,3,1")]
)
def test_chosen_sets_are_nested_and_follow_the_schedule(fusor, schedule, ratio):
    spans = exact_spans(fusor.adapter, 3.0)
    _, _, fusion = tiny.fuse(fusor, IDS, spans, "hkvd", ratio, schedule)
    wanted = Schedule.parse(schedule).counts(ratio, LAYERS, CANDIDATES)
    sets = [set(tokens.tolist()) for tokens in fusion.recomputed]
    assert all(later <= earlier for earlier, later in pairwise(sets))
    counts = fusion.counts()
    assert counts.candidate_rows == (CANDIDATES, *wanted)
    assert counts.rows == tuple(FRESH + c for c in counts.candidate_rows)
    assert counts.ratio == pytest.approx(sum(wanted) / ((LAYERS - 1) * CANDIDATES))
    assert counts.charged_ratio == pytest.approx((1 + counts.ratio * (LAYERS - 1)) / LAYERS)
    assert sum(counts.recomputed_per_span) == pytest.approx(counts.ratio * CANDIDATES)


def test_hkvd_chooses_the_tokens_that_deviate(fusor):
    spans = exact_spans(fusor.adapter)
    wrong = [12, 13, 40, 69, 74, 129]
    for span in spans:
        at = [position - span.start for position in wrong if span.start <= position < span.end]
        for layer in span.reader.kv.layers:  # type: ignore[attr-defined]
            layer[:, :, at] += 5.0
    policy = Recording()
    tiny.fuse(fusor, IDS, spans, policy, len(wrong) / CANDIDATES, "constant")
    assert policy.chosen[1].tolist() == wrong
    # fresh against loaded: only the disturbed tokens deviate at layer 1
    assert int((policy.deviations[1] > 1e-3).sum()) == len(wrong)


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_are_the_rows_the_model_ran_and_what_the_policy_declares(fusor, policy):
    spans = exact_spans(fusor.adapter, 1.0)
    tiny.fuse(fusor, IDS, spans, policy, 0.2)  # query+shift looks for heads that copy, once
    with rows_through([layer.mlp for layer in fusor.adapter.stack.layers]) as seen:
        _, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.2, "linear", all_rows=True)
    counts = fusion.counts()
    assert tuple(sum(rows) for rows in seen) == counts.rows
    schedule = Schedule.parse("linear")
    declared = make_policy(policy).layer_counts(schedule, 0.2, CANDIDATES, LAYERS, len(CHUNKS))
    if policy == "hkvd-once":  # frozen at layer 1: its schedule is constant but for rounding
        declared = [declared[0]] * len(declared)
    assert tuple(declared) == counts.candidate_rows[1:]
    entry = CANDIDATES if fusion.policy.needs_deviation else declared[0]
    assert counts.candidate_rows[0] == entry
    if policy in BUDGETED:
        assert abs(counts.ratio - 0.2) <= 1 / CANDIDATES
    reused, _, _ = tiny.fuse(fusor, IDS, spans, "reuse")
    logits, _, _ = tiny.fuse(fusor, IDS, spans, policy, 0.2)
    assert (tiny.difference(logits, reused) > 1e-3) == (policy != "reuse")


# -- stored KV that is moved -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "smollm3", "deepseek_v2"])
def test_an_error_that_a_chunk_has_in_common_is_taken_back(name):
    """Rotary keys in whole and in part, layers without positions, and latent KV."""
    adapter = tiny.adapter(tiny.family(name))
    fusor, moves = Fusor(adapter), adapter.repositioner
    stock = tiny.kv_between(adapter, IDS[0].tolist(), 0, N).layers
    prefix = tiny.span(adapter, IDS, 0, 10, exact=True)
    off: dict[str, list[float]] = {}
    for policy in ("query", "query+shift"):
        spans = exact_spans(adapter)
        for number, span in enumerate(spans):
            for i, layer in enumerate(span.reader.kv.layers):  # type: ignore[attr-defined]
                both = adapter.layout.layers[i].split(layer)
                generator = torch.Generator().manual_seed(10 * number + i)
                for part, stored in enumerate(both):
                    error = stored.std() * torch.randn(stored[:, :1].shape, generator=generator)
                    error = error.repeat(1, span.tokens, 1)
                    if part == moves.part(i):
                        moves.rotate_(error, i, moves.tables(torch.arange(span.tokens)))
                    stored += error * (i > 0)
        _, cache, fusion = tiny.fuse(fusor, IDS, [prefix, *spans], policy, 0.5, "constant")
        found: list[list[float]] = [[], []]
        for i, layer in enumerate(cache.layers):
            kept = torch.ones(N, dtype=torch.bool)
            kept[fusion.recomputed[i]] = False
            expected = adapter.layout.layers[i].split(stock[i])
            for ours, theirs, errors in zip(
                (layer.keys[0], layer.values[0]), expected, found, strict=True
            ):
                assert tiny.difference(ours[:, :10], theirs[:, :10]) < 1e-5  # exact
                stale = kept[EVERYWHERE].nonzero()[:, 0]
                if i > 0:
                    wrong = (ours - theirs)[:, EVERYWHERE[stale]]
                    errors.append(float(wrong.square().mean() / theirs.square().mean()))
        off[policy] = [sum(errors) / len(errors) for errors in found]
    for shifted, left in zip(off["query+shift"], off["query"], strict=True):
        assert 0 < shifted < 0.1 * left


def predicted(
    spans: Sequence[tuple[int, int]],
    tokens: int,
    chosen: torch.Tensor,
    probes: torch.Tensor,
    errors: torch.Tensor,
) -> torch.Tensor:
    """``[H, tokens, D]``: .8 times the errors that a Gaussian process predicts from the shortened ``errors``
    ``[H, n, D]`` of ``chosen``, by the textbook and token by token; 0 outside of ``spans``."""
    chunk, place = torch.full((tokens,), -1), torch.zeros(tokens)
    shortened = errors.clone()
    alike = max(16, -(-max(end - start for start, end in spans) // 64))  # tokens that move alike
    for number, (start, end) in enumerate(spans):
        chunk[start:end] = number
        place[start:end] = torch.arange(end - start) // alike * alike
        inside = chunk[chosen] == number
        if inside.any():
            lengths = errors[:, inside].norm(dim=-1, keepdim=True)
            usual = lengths.median(1, keepdim=True).values
            shortened[:, inside] *= (usual / lengths).clamp(max=1)
    is_probe = torch.isin(chosen, probes)
    weights = torch.where(is_probe, 1.0, min(1.0, 24 / max(1, int((~is_probe).sum()))))
    mean = (weights[:, None] * shortened).sum(1, keepdim=True) / (weights.sum() + 12)
    same_chunk = chunk[:, None] == chunk[chosen]
    shared = same_chunk * (
        1 / 12 + torch.exp((place[:, None] - place[chosen]).abs() / -48)
    )  # [tokens, n]
    known = shared[chosen] + torch.diag(1 / weights)
    found = mean + shared @ torch.linalg.solve(known, shortened - mean)
    return 0.8 * found.masked_fill((chunk < 0)[:, None], 0)


@pytest.mark.parametrize(
    "spans",
    [
        ((0, 180), (200, 300)),  # what is between them is no blended chunk
        ((0, 20),),
        ((0, 64), (64, 128), (128, 192)),
        ((0, 1), (1, 40), (40, 42)),
        ((0, 1100), (1100, 1140)),
    ],
)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_tokens_are_moved_by_the_errors_that_a_gaussian_process_predicts(spans, default):
    adapter = tiny.adapter(tiny.family("llama"))
    moves, tokens = adapter.repositioner, spans[-1][1]
    generator = torch.Generator().manual_seed(1)
    places = torch.cat([torch.arange(*span) for span in spans])
    starts = torch.cat([torch.full((end - start,), start) for start, end in spans])
    some = torch.rand(len(places), generator=generator) < 0.4
    some[0] = True
    chosen, index = places[some], (places - starts)[some]
    probes = chosen[::5]
    shape = adapter.model.config.num_key_value_heads, len(chosen), adapter.model.config.head_dim
    errors = torch.randn(shape, generator=generator) ** 3 + 0.5  # a few are far larger than most
    stored = torch.randn(shape[0], tokens, shape[2], generator=generator)
    turned = errors.clone()
    moves.rotate_(turned, 1, moves.tables(index))
    fresh = stored[:, chosen] + turned, stored[:, chosen] + errors
    moved = stored.clone(), stored.clone()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        geometry = PromptGeometry(tokens, spans, (tokens, tokens + 1))
        shift = ChunkShift(geometry, probes, moves, {1: torch.tensor([0])})
        shift.move_(1, Rows(chosen, tokens + 1), chosen, fresh, moved)
    finally:
        torch.set_default_dtype(dtype)
    want = predicted(spans, tokens, chosen, probes, errors)
    assert tiny.difference(moved[1] - stored, want) < 1e-5
    turned = want[:, places]
    moves.rotate_(turned, 1, moves.tables(places - starts))
    want[:, places] = turned
    want[0] = 0  # a head whose keys are kept
    assert tiny.difference(moved[0] - stored, want) < 1e-5


# -- the last layer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mistral", "gpt_oss", "gemma4", "deepseek_v2"]
)  # gpt_oss is not served fast
def test_the_last_token_is_as_if_all_rows_went_on(name):
    """Logits, K/V and counts of a forward that ends with one row, against one that keeps all rows."""
    fusor = Fusor(tiny.adapter(tiny.family(name)))
    spans = exact_spans(fusor.adapter, 1.0)
    for policy in ("query+hkvd", "blend", "boundary(8)", "reuse"):
        want, kept, whole = tiny.fuse(fusor, IDS, spans, policy, 0.3, all_rows=True)
        got, cache, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.3)
        assert got.shape[1] == 1
        assert tiny.difference(got[0, 0], want[0, -1]) < 1e-4
        assert_same_kv(cache, kept, 1e-4)
        assert fusion.counts() == whole.counts()


@pytest.mark.parametrize("policy", ["hkvd", "query", "blend"])
@pytest.mark.usefixtures("ends_early")
def test_the_last_layer_computes_keys_of_all_rows_and_then_one_row(fusor, policy):
    last, spans = fusor.adapter.stack.layers[-1], exact_spans(fusor.adapter, 1.0)
    with rows_through([last.self_attn.k_proj, last.mlp]) as seen:
        _, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.2)
    scout = [FRESH] if policy == "blend" else []  # query's ends earlier
    rows = fusion.counts().rows[-1] - sum(scout)
    assert seen == [[*scout, rows, 1], [*scout, 1]]


def test_a_batch_of_two_is_refused_and_leaves_no_hook(fusor):
    with pytest.raises(UnsupportedModelError, match="one prompt at a time"):
        tiny.fuse(fusor, IDS.repeat(2, 1), exact_spans(fusor.adapter), "hkvd", 0.2)
    assert_untouched(fusor.adapter)
