"""Every policy by its name: budgets, nested sets, r = 1, and that each of them does something."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.fusor.rows import Rows
from blendrag.fusor.shift import ChunkShift
from blendrag.model import ModelAdapter
from blendrag.selection import POLICIES, LayerView, PromptGeometry, Schedule, boundary, make_policy
from blendrag.selection.blend import BlendPolicy
from blendrag.selection.offset import PROBES
from blendrag.selection.places import candidates, places, spread
from core.lab import CANDIDATES, CHUNKS, IDS, LAYERS, exact_spans

CPU = torch.device("cpu")
#: Policies that spend the budget they are given.
BUDGETED = [
    "random", "hkvd", "hkvd-once", "query", "offset", "blend", "blend(0)", "blend(7)",
    "offset+random", "offset+hkvd", "offset+hkvd-once", "offset+query", "offset+blend(3)",
]  # fmt: skip
OTHERS = ["full", "reuse", "boundary", "boundary(3)", "offset+boundary(3)", "offset+reuse"]


@st.composite
def geometries(draw: st.DrawFn) -> PromptGeometry:
    spans, at = [], draw(st.integers(0, 5))
    for length in draw(st.lists(st.integers(1, 70), min_size=1, max_size=6)):
        spans.append((at, at + length))
        at += length + draw(st.integers(0, 3))
    return PromptGeometry(at + 5, tuple(spans), (at, at + 5))


def chosen_sets(
    name: str, geometry: PromptGeometry, ratio: float, schedule: str, layers: int, seed: int
) -> tuple[list[torch.Tensor], list[int]]:
    """What a policy chooses for layers 0…L-1 over random KV, asked as a fusion asks, and its budgets."""
    policy = make_policy(name)
    tokens = candidates(geometry, CPU)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(4, 2, geometry.prompt_tokens, 4, generator=generator)
    question = torch.rand(geometry.prompt_tokens, generator=generator)
    asked = policy.schedule or Schedule.parse(schedule)
    budgets = asked.counts(ratio, layers, tokens.numel())

    def view(alive: torch.Tensor) -> LayerView:
        told = question[alive] if policy.asks else None
        return LayerView(geometry, alive, lambda: tuple(kv[:, :, alive]), told)  # type: ignore[arg-type, return-value]

    sets = [tokens if policy.looks else policy.select(0, view(tokens), budgets[0])]
    for layer in range(1, layers):
        sets.append(policy.select(layer, view(sets[-1]), budgets[layer - 1]))
    return sets, budgets


def entry(name: str, geometry: PromptGeometry, budget: int) -> list[int]:
    """What a policy that neither looks nor asks enters layer 0 with."""
    tokens = candidates(geometry, CPU)
    view = LayerView(geometry, tokens, lambda: pytest.fail("it looks"))
    return make_policy(name).select(0, view, budget).tolist()


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(BUDGETED + OTHERS),
    geometries(),
    st.floats(0.0, 1.0),
    st.sampled_from(["constant", "linear", "geometric:0.4", "first:1", "first:2", "5,3,1,1,0"]),
    st.integers(0, 100),
)
def test_sets_are_nested_ascending_and_within_the_budget(
    name: str, geometry: PromptGeometry, ratio: float, schedule: str, seed: int
) -> None:
    sets, budgets = chosen_sets(name, geometry, ratio, schedule, 6, seed)
    everywhere = set(candidates(geometry, CPU).tolist())
    for chosen in sets:
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert set(chosen.tolist()) <= everywhere
    for before, after in pairwise(sets):
        assert set(after.tolist()) <= set(before.tolist())
    if name == "hkvd-once":  # frozen: one token more or less is the rounding of a single layer
        assert [s.numel() for s in sets[1:]] == [budgets[0]] * 5
    elif name in BUDGETED and "once" not in name:
        assert [s.numel() for s in sets[1:]] == budgets
    if name in BUDGETED and not make_policy(name).looks:
        assert sets[0].numel() == sets[1].numel()  # layer 0 is not paid for anybody else


@pytest.mark.parametrize("name", [*POLICIES, "boundary(3)", "blend(7)", "offset+query"])
def test_a_policy_is_made_by_its_name_and_prints_it(name: str) -> None:
    made = make_policy(name)
    assert str(made).startswith(name)
    assert str(make_policy(str(made))) == str(made)


@pytest.mark.parametrize(
    "text",
    [
        "offset+", "+query", "offset+offset", "offset+best", "query+offset", "random(3)", "blend(x)",
        "blend(-1)", "offset(4)", "hkvd_once", "offset+offset+query", f"boundary({10**20})",
    ],
)  # fmt: skip
def test_a_bad_policy_is_one_sentence(text: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        make_policy(text)
    assert tiny.one_sentence(str(raised.value))
    assert "policy" in str(raised.value)


# -- through a model ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in BUDGETED if n != "hkvd"])
@pytest.mark.parametrize("masks", [True, False])
def test_ratio_one_equals_full_prefill_even_over_useless_kv(
    adapter: ModelAdapter, name: str, masks: bool
) -> None:
    fusor = Fusor(adapter, force_masks=masks)
    logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 3.0), name, 1.0, all_rows=True)
    assert tiny.difference(logits[0], tiny.stock(adapter.model, IDS)[0]) < 1e-4


@pytest.mark.parametrize("name", BUDGETED + OTHERS)
def test_exact_loaded_kv_equals_stock(adapter: ModelAdapter, fusor: Fusor, name: str) -> None:
    logits, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter), name, 0.2)
    assert tiny.difference(logits[0, 0], tiny.stock(adapter.model, IDS)[0, -1]) < 1e-4


@pytest.mark.parametrize("name", BUDGETED)
def test_a_fifth_recomputed_differs_from_reuse_and_costs_a_fifth(
    adapter: ModelAdapter, fusor: Fusor, name: str
) -> None:
    reused, _, _ = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), "reuse")
    logits, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), name, 0.2, "linear")
    assert tiny.difference(logits, reused) > 1e-3
    assert abs(fusion.counts().ratio - 0.2) <= 1 / CANDIDATES


@pytest.mark.parametrize("name", ["query", "hkvd", "blend", "random", "boundary(3)"])
def test_the_shift_of_the_probes_shows(adapter: ModelAdapter, fusor: Fusor, name: str) -> None:
    """The same sets, shifted and not."""
    policy = make_policy(f"offset+{name}")
    shifted, _, one = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), policy, 0.2)
    policy = make_policy(f"offset+{name}")
    policy.shifts = False
    plain, _, other = tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), policy, 0.2)
    assert one.counts().candidate_rows == other.counts().candidate_rows
    assert tiny.difference(shifted, plain) > 1e-3


# -- each policy's own idea ---------------------------------------------------------------------


def test_random_is_the_same_for_the_same_prompt_and_another_for_another() -> None:
    one = PromptGeometry(500, ((5, 205), (210, 400)), (400, 500))
    other = PromptGeometry(501, ((5, 205), (210, 400)), (400, 501))
    entered = [entry("random", geometry, 40) for geometry in (one, one, other)]
    assert entered[0] == entered[1] != entered[2]


def test_hkvd_once_sees_values_alone_and_only_once() -> None:
    geometry = PromptGeometry(12, ((0, 10),), (10, 12))
    loaded, fresh_k, fresh_v = (torch.ones(2, 10, 4) for _ in range(3))
    fresh_k[:, 2] = 50.0
    fresh_v[:, 7] = 2.0

    def view(tokens: list[int]) -> LayerView:
        at = torch.tensor(tokens)
        kv = (fresh_k[:, at], fresh_v[:, at], loaded[:, at], loaded[:, at])
        return LayerView(geometry, at, lambda: kv)

    policy = make_policy("hkvd-once")
    assert policy.select(1, view(list(range(10))), 1).tolist() == [7]
    assert make_policy("hkvd").select(1, view(list(range(10))), 1).tolist() == [2]
    assert policy.select(2, view([2, 7]), 1).tolist() == [2, 7]


def test_hkvd_once_is_constant_whatever_is_asked_for(adapter: ModelAdapter, fusor: Fusor) -> None:
    spans = exact_spans(adapter, 1.0)
    _, _, fusion = tiny.fuse(fusor, IDS, spans, "hkvd-once", 0.2, "geometric:0.3")
    assert str(fusion.schedule) == "constant"
    assert len(set(fusion.counts().candidate_rows[1:])) == 1


def blend_view(geometry: PromptGeometry, question: torch.Tensor) -> LayerView:
    return LayerView(geometry, candidates(geometry, CPU), lambda: pytest.fail("it looks"), question)


def test_blend_takes_heads_always_out_of_at_most_a_tenth_of_the_budget() -> None:
    geometry = PromptGeometry(105, ((5, 55), (55, 100)), (100, 105))
    question = torch.full((95,), 0.5)
    question[[0, 1, 50, 51]] = 0.0  # nobody looks at the heads
    question[[20, 21, 70, 71]] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # positions 25, 26, 75, 76
    policy = make_policy("blend(2)")

    def chosen(budget: int) -> list[int]:
        return policy.select(0, blend_view(geometry, question), budget).tolist()

    assert set(chosen(44)) >= {5, 6, 25, 26, 55, 56, 75, 76}
    assert {5, 55} <= set(chosen(20))  # one head of each chunk is what a tenth of 20 pays for
    assert not set(chosen(20)) & {6, 56}
    assert not set(chosen(19)) & {5, 6, 55, 56}


def test_damped_attention_is_the_sum_of_roots_over_all_but_the_first_layers(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    class Told(BlendPolicy):
        question: torch.Tensor | None = None

        def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
            self.question = view.question if layer == 0 else self.question
            return super().select(layer, view, budget)

    policy = Told()
    tiny.fuse(fusor, IDS, exact_spans(adapter), policy, 0.2)
    model = tiny.llama()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    later = weights[LAYERS // 4 :]
    paid = sum(layer[0, :, CHUNKS[-1][1] :].float().sqrt().sum((0, 1)) for layer in later)
    expected = torch.cat([paid[a:b] for a, b in CHUNKS])  # type: ignore[index]
    assert policy.question is not None
    assert tiny.difference(policy.question, expected) < 1e-2 * float(expected.std())


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(1, 64))
def test_any_first_part_of_the_spread_order_is_spread_evenly(
    geometry: PromptGeometry, wanted: int
) -> None:
    tokens = candidates(geometry, CPU)
    order = spread(geometry, tokens)
    chunks = places(geometry, tokens).chunk
    for i, (a, b) in enumerate(geometry.chunk_spans):
        first = tokens[(chunks == i) & (order < wanted)]
        assert abs(first.numel() - min(wanted, b - a)) <= 1 + wanted.bit_length()
        ring = sorted(first.tolist())
        gaps = [y - x for x, y in pairwise([*ring, ring[0] + b - a])]
        assert max(gaps) <= 2 * -(-(b - a) // min(wanted, b - a)) + 1


@pytest.mark.parametrize("name", ["offset", "offset+query", "offset+hkvd"])
def test_one_vector_that_a_whole_chunk_is_off_by_is_repaired_by_its_probes(
    adapter: ModelAdapter, fusor: Fusor, name: str
) -> None:
    stock = tiny.stock(adapter.model, IDS)[0, -1]

    def off(policy: str) -> float:
        # Stored where it is used: what is added to the keys is not rotated away.
        spans = [tiny.span(adapter, IDS, a, b) for a, b in CHUNKS]
        generator = torch.Generator().manual_seed(3)
        for span in spans:
            for layer in span.reader.kv.layers[1:]:  # type: ignore[attr-defined]
                layer += 2 * torch.randn(2, layer.shape[1], 1, layer.shape[3], generator=generator)
        logits, _, _ = tiny.fuse(fusor, IDS, spans, policy, 0.2, "constant")
        return tiny.difference(logits[0, 0], stock)

    assert off(name) < 1e-4
    assert off(name.removeprefix("offset").removeprefix("+") or "random") > 1e-2


def test_probes_beside_another_policy_are_few_and_what_that_one_chose_does_not_count() -> None:
    geometry = PromptGeometry(210, ((0, 100), (100, 200)), (200, 210))
    policy = make_policy("offset+random")
    entered = torch.tensor(entry("offset+random", geometry, 60))
    assert entered.numel() == 60
    probes = policy.probes(geometry, entered)
    assert 2 * PROBES <= probes.numel() <= 4 * PROBES  # of 60, in two chunks
    spent = torch.tensor(entry("offset", geometry, 60))
    assert make_policy("offset").probes(geometry, spent).tolist() == spent.tolist()


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(0, 100))
def test_a_shift_is_what_a_loop_over_chunks_does_and_touches_nothing_else(
    geometry: PromptGeometry, seed: int
) -> None:
    """The slow reference. Tokens between the chunks are fresh, or of a span that is exact."""
    generator = torch.Generator().manual_seed(seed)
    tokens, n = candidates(geometry, CPU), geometry.prompt_tokens
    buffer = torch.randn(2, 3, n, 4, generator=generator)
    computed = torch.rand(n, generator=generator) < 0.4
    positions = computed.nonzero().flatten()
    fresh = torch.randn(2, 3, positions.numel(), 4, generator=generator)
    probes = tokens[computed[tokens] & (torch.rand(tokens.numel(), generator=generator) < 0.5)]

    expected, stored, at = buffer.clone(), buffer.clone(), positions.tolist()
    for a, b in geometry.chunk_spans:
        own = [p for p in probes.tolist() if a <= p < b]
        if own:
            off = sum(fresh[:, :, at.index(p)] - stored[:, :, p] for p in own) / len(own)
            expected[:, :, a:b] += off[:, :, None]  # type: ignore[index]
    rows = Rows(positions, n)
    shift = ChunkShift(geometry)
    shift.look(rows.positions, lambda *_: probes[:0])
    shift.look(tokens, lambda *_: probes)
    shift.apply(buffer, rows, fresh[0], fresh[1])
    assert tiny.difference(buffer, expected) < 1e-5
    outside = torch.ones(n, dtype=torch.bool)
    outside[tokens] = False
    assert torch.equal(buffer[:, :, outside], stored[:, :, outside])


def test_a_policy_beside_offset_that_ignores_the_budget_ignores_it_at_ratio_one_too(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    _, _, fusion = tiny.fuse(fusor, IDS, exact_spans(adapter), "offset+reuse", 1.0)
    assert set(fusion.counts().candidate_rows) == {fusion.counts().candidate_rows[0]}
    assert 0 < fusion.counts().candidate_rows[0] <= 4 * PROBES * len(CHUNKS)


def test_boundary_looks_for_heads_at_layer_zero_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PromptGeometry(60, ((0, 20), (20, 50)), (50, 60))
    policy = make_policy("boundary(3)")
    heads = torch.tensor(entry("boundary(3)", geometry, 0))
    assert heads.tolist() == [0, 1, 2, 20, 21, 22]
    monkeypatch.setattr(boundary, "places", lambda *_: pytest.fail("it looks again"))
    view = LayerView(geometry, heads, lambda: pytest.fail("it compares"))
    assert policy.select(1, view, 0).tolist() == heads.tolist()


def test_policies_that_do_not_shift_ask_for_no_probes(
    adapter: ModelAdapter, fusor: Fusor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blendrag.fusor import fusion

    monkeypatch.setattr(fusion, "ChunkShift", lambda *_: pytest.fail("it shifts"))
    for name in POLICIES:
        if not make_policy(name).shifts:
            tiny.fuse(fusor, IDS, exact_spans(adapter, 1.0), name, 0.2)


@pytest.mark.parametrize("name", ["offset+query", "blend", "offset+hkvd-once", "random"])
@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_and_two_layers(name: str, layers: int) -> None:
    adapter = tiny.adapter(tiny.llama(num_hidden_layers=layers))
    expected = tiny.stock(adapter.model, IDS)[0, -1]
    for spans in (exact_spans(adapter), []):
        logits, _, _ = tiny.fuse(Fusor(adapter), IDS, spans, name, 0.2, "constant")
        assert tiny.difference(logits[0, 0], expected) < 1e-4
