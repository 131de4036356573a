"""Every policy by its name: budgets, nested sets, r = 1, and that each of them does something."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.fusor.rows import PromptRows, nested_rows
from blendrag.fusor.selection import (
    POLICIES,
    LayerView,
    PromptGeometry,
    Schedule,
    make_policy,
)
from blendrag.fusor.selection.base import top
from blendrag.fusor.selection.blend import BlendPolicy
from blendrag.model import ModelAdapter
from fusor.two_chunks import CANDIDATES, CHUNKS, IDS, LAYERS, exact_spans

CPU = torch.device("cpu")
#: Policies that spend the budget they are given.
BUDGETED = ["random", "hkvd", "hkvd-once", "query", "query+hkvd", "blend", "blend(0)", "blend(7)"]
OTHERS = ["full", "reuse", "boundary", "boundary(3)"]


@st.composite
def geometries(draw: st.DrawFn) -> PromptGeometry:
    spans, at = [], draw(st.integers(0, 5))
    for length in draw(st.lists(st.integers(1, 70), min_size=1, max_size=6)):
        spans.append((at, at + length))
        at += length + draw(st.integers(0, 3))
    return PromptGeometry(at + 5, tuple(spans), (at, at + 5))


def candidates(geometry: PromptGeometry, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in geometry.chunk_spans])


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
        told = question[alive] if policy.needs_attention else None
        return LayerView(geometry, alive, lambda: tuple(kv[:, :, alive]), told)  # type: ignore[arg-type, return-value]

    sets = [tokens if policy.needs_deviation else policy.select(0, view(tokens), budgets[0])]
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
    if name in BUDGETED and not make_policy(name).needs_deviation:
        assert sets[0].numel() == sets[1].numel()  # layer 0 is not paid for anybody else


@pytest.mark.parametrize("name", [*POLICIES, "boundary(3)", "blend(7)"])
def test_a_policy_is_made_by_its_name_and_prints_it(name: str) -> None:
    made = make_policy(name)
    assert str(made).startswith(name)
    assert str(make_policy(str(made))) == str(made)


@pytest.mark.parametrize(
    "text",
    [
        "", "query+", "+query", "offset+query", "query+offset", "random(3)", "blend(x)", "blend(-1)",
        "query(4)", "hkvd_once", f"boundary({10**20})",
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

        def worth(self, view: LayerView, budget: int) -> torch.Tensor:
            self.question = view.attention
            return super().worth(view, budget)

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


def test_boundary_looks_for_heads_at_layer_zero_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PromptGeometry(60, ((0, 20), (20, 50)), (50, 60))
    policy = make_policy("boundary(3)")
    heads = torch.tensor(entry("boundary(3)", geometry, 0))
    assert heads.tolist() == [0, 1, 2, 20, 21, 22]
    view = LayerView(geometry, heads, lambda: pytest.fail("it compares"))
    monkeypatch.setattr(LayerView, "index_in_chunk", None)
    assert policy.select(1, view, 0).tolist() == heads.tolist()


@pytest.mark.parametrize("name", ["query", "hkvd", "query+hkvd", "blend", "hkvd-once", "random"])
@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_and_two_layers(name: str, layers: int) -> None:
    adapter = tiny.adapter(tiny.llama(num_hidden_layers=layers))
    expected = tiny.stock(adapter.model, IDS)[0, -1]
    for spans in (exact_spans(adapter), []):
        logits, _, _ = tiny.fuse(Fusor(adapter), IDS, spans, name, 0.2, "constant")
        assert tiny.difference(logits[0, 0], expected) < 1e-4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_planned_at_once_are_those_chosen_layer_by_layer(data: st.DataObject) -> None:
    """The reference is :meth:`SelectionPolicy.select`, asked for each layer with what is still alive."""
    geometry = data.draw(geometries())
    n = geometry.prompt_tokens
    tokens = candidates(geometry, CPU)
    always = np.setdiff1d(np.arange(n), tokens.numpy())
    seed = data.draw(st.integers(0, 99))
    worth = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed))
    budgets = sorted(data.draw(st.lists(st.integers(0, len(tokens)), min_size=2)), reverse=True)
    rank = np.argsort(np.argsort(-worth.numpy(), kind="stable"))
    planned = nested_rows(PromptRows(n, CPU), always, tokens.numpy(), rank, budgets)
    alive, arriving = tokens, torch.arange(n)
    for budget, (rows, among, chosen) in zip(budgets, planned, strict=True):
        alive = top(worth[torch.isin(tokens, alive)], alive, budget)
        assert torch.equal(chosen, alive)
        assert torch.equal(
            rows.positions, torch.cat((torch.from_numpy(always), alive)).sort().values
        )
        if rows.count != len(arriving):
            assert torch.equal(arriving[among], rows.positions)
        arriving = rows.positions


def test_the_scout_pass_of_query_ends_early_in_deep_models_only() -> None:
    for name in ("query", "query+hkvd"):
        policy = make_policy(name)
        assert policy.attention_layers(32) == range(10, 21)
        assert policy.attention_layers(12) == range(12)
    assert make_policy("blend").attention_layers(32) == range(8, 32)
    assert make_policy("hkvd").attention_layers(32) == range(0)
    assert make_policy("blend").attention_layers(1) == range(1)
