"""Selection policies by name: budgets, nested sets, and what each of them chooses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.config import DEFAULT_POLICY
from blendrag.fusor.rows import PromptRows, nested_rows
from blendrag.fusor.selection import POLICIES, LayerView, PromptGeometry, Schedule, make_policy
from blendrag.fusor.selection.base import top

#: Policies whose budget is the ratio's.
BUDGETED = [
    "random", "cacheblend", "hkvd", "hkvd-once", "query", "query+shift", "query+hkvd", "blend", "blend(0)",
    "blend(7)",
]  # fmt: skip
OTHERS = ["full", "reuse", "boundary", "boundary(3)"]


def candidates(geometry: PromptGeometry) -> torch.Tensor:
    return torch.cat([torch.arange(a, b) for a, b in geometry.chunk_spans])


def blind_view(
    geometry: PromptGeometry, tokens: torch.Tensor | None = None, attention: object = None
) -> LayerView:
    """A view of a policy that must not compare KV."""
    tokens = candidates(geometry) if tokens is None else tokens
    return LayerView(geometry, tokens, lambda: pytest.fail("it compares"), attention)  # type: ignore[arg-type]


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
    """What a policy chooses for layers 0…L-1 over random KV, called as a fusion calls it, and its budgets."""
    policy = make_policy(name)
    tokens = candidates(geometry)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(4, 2, geometry.prompt_tokens, 4, generator=generator)
    attention = torch.rand(geometry.prompt_tokens, generator=generator)
    budgets = (policy.schedule or Schedule.parse(schedule)).counts(ratio, layers, tokens.numel())

    def view(alive: torch.Tensor) -> LayerView:
        seen = attention[alive] if policy.needs_attention else None
        return LayerView(geometry, alive, lambda: tuple(kv[:, :, alive]), seen)  # type: ignore[arg-type, return-value]

    sets = [tokens if policy.needs_deviation else policy.select(0, view(tokens), budgets[0])]
    for layer in range(1, layers):
        sets.append(policy.select(layer, view(sets[-1]), budgets[layer - 1]))
    return sets, budgets


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(BUDGETED + OTHERS),
    geometries(),
    st.floats(0.0, 1.0),
    st.sampled_from(["constant", "linear", "geometric:0.4", "first:1", "first:2", "5,3,1,1,0"]),
    st.integers(0, 100),
)
def test_sets_are_nested_ascending_and_within_the_budget(name, geometry, ratio, schedule, seed):
    sets, budgets = chosen_sets(name, geometry, ratio, schedule, 6, seed)
    everywhere = set(candidates(geometry).tolist())
    for chosen in sets:
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert set(chosen.tolist()) <= everywhere
    for before, after in pairwise(sets):
        assert set(after.tolist()) <= set(before.tolist())
    if name == "hkvd-once":  # frozen: one token more or less is the rounding of a single layer
        assert [s.numel() for s in sets[1:]] == [budgets[0]] * 5
    elif name in BUDGETED:
        assert [s.numel() for s in sets[1:]] == budgets
    if name in BUDGETED and not make_policy(name).needs_deviation:
        assert sets[0].numel() == sets[1].numel()  # layer 0 computes nothing that layer 1 drops


def test_some_tokens_of_query_shift_are_random_in_every_layer():
    geometry = PromptGeometry(600, ((10, 210), (220, 580)), (590, 600))
    tokens = candidates(geometry)
    attention = torch.arange(len(tokens), dtype=torch.float32)
    shift, query = make_policy("query+shift"), make_policy("query")
    view = blind_view(geometry, attention=attention)
    probes = shift.probes(view, 80)
    assert probes.numel() == 12
    assert torch.equal(probes, shift.probes(view, 80))
    assert query.probes(view, 80).numel() == 0
    assert int(probes.median()) < 450  # attention alone would take the last
    for left in (80, 40, 20):
        chosen = top(shift.scores(view, 80), tokens, left)
        assert set(probes.tolist()) <= set(chosen.tolist())
        rest = sorted(set(chosen.tolist()) - set(probes.tolist()))
        others = [token for token in tokens.tolist() if token not in set(probes.tolist())]
        assert rest == others[len(others) - len(rest) :]


@pytest.mark.parametrize("name", [*POLICIES, "boundary(3)", " blend(7) ", "query(50-100)"])
def test_a_policy_is_made_by_its_name_and_prints_it(name):
    made = make_policy(name)
    assert str(made).startswith(name.strip())
    assert str(make_policy(str(made))) == str(made)
    assert make_policy(made) is made
    assert str(make_policy("calibrated")) == DEFAULT_POLICY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HKVD",
        "query+",
        "offset+query",
        "query(4)",
        "query(50-101)",
        "query(50-50)",
        "blend(0-50)",
        "hkvd(0-50)",
        "blend(x)",
        "blend(-1)",
        f"boundary({10**20})",
    ],
)
def test_a_bad_policy_is_one_sentence(text):
    with tiny.refuses("policy"):
        make_policy(text)


def test_random_is_the_same_for_the_same_prompt_only():
    one = PromptGeometry(500, ((5, 205), (210, 400)), (400, 500))
    other = PromptGeometry(501, ((5, 205), (210, 400)), (400, 501))
    entered = [
        make_policy("random").select(0, blind_view(geometry), 40).tolist()
        for geometry in (one, one, other)
    ]
    assert entered[0] == entered[1] != entered[2]


def test_hkvd_once_compares_values_alone_and_only_once():
    geometry = PromptGeometry(12, ((0, 10),), (10, 12))
    loaded, fresh_k, fresh_v = (torch.ones(2, 10, 4) for _ in range(3))
    fresh_k[:, 2] = 50.0
    fresh_v[:, 7] = 2.0

    view = LayerView(geometry, torch.arange(10), lambda: (fresh_k, fresh_v, loaded, loaded))
    policy = make_policy("hkvd-once")
    assert policy.select(1, view, 1).tolist() == [7]
    assert make_policy("hkvd").select(1, view, 1).tolist() == [2]
    assert policy.select(2, blind_view(geometry, torch.tensor([2, 7])), 1).tolist() == [2, 7]


def test_cacheblend_filters_gradually_whatever_the_schedule_of_the_request():
    geometry = PromptGeometry(505, ((5, 250), (250, 500)), (500, 505))
    found = [
        [chosen.tolist() for chosen in chosen_sets(name, geometry, 0.2, schedule, 6, 0)[0]]
        for name, schedule in (
            ("cacheblend", "constant"),
            ("hkvd", str(make_policy("cacheblend").schedule)),
            ("hkvd", "constant"),
        )
    ]
    assert found[0] == found[1] != found[2]
    sizes = [len(chosen) for chosen in found[0]]
    assert all(earlier > later for earlier, later in pairwise(sizes))
    assert sum(sizes[1:]) == sum(len(chosen) for chosen in found[2][1:])


def test_deviation_weighs_keys_and_values_alike():
    fresh_k, fresh_v = torch.full((2, 5, 4), 100.0), torch.ones(2, 5, 4)
    loaded = fresh_k.clone(), fresh_v.clone()
    fresh_k[:, 1] *= 2
    fresh_v[:, 3] *= 2
    geometry = PromptGeometry(6, ((0, 5),), (5, 6))
    view = LayerView(geometry, torch.arange(5), lambda: (fresh_k, fresh_v, *loaded))
    assert view.deviation[1] == pytest.approx(float(view.deviation[3]))
    assert float(view.deviation[[0, 2, 4]].abs().max()) == 0.0


def test_blend_spends_at_most_a_tenth_of_the_budget_on_chunk_heads():
    geometry = PromptGeometry(105, ((5, 55), (55, 100)), (100, 105))
    attention = torch.full((95,), 0.5)
    attention[[0, 1, 50, 51]] = 0.0  # the heads
    attention[[20, 21, 70, 71]] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # positions 25, 26, 75, 76

    def chosen(budget: int) -> set[int]:
        view = blind_view(geometry, attention=attention)
        return set(make_policy("blend(2)").select(0, view, budget).tolist())

    assert chosen(44) >= {5, 6, 25, 26, 55, 56, 75, 76}
    assert {5, 55} <= chosen(20)  # a tenth of 20 pays for one head of each chunk
    assert not chosen(20) & {6, 56}
    assert not chosen(19) & {5, 6, 55, 56}


def test_boundary_finds_heads_at_layer_zero_alone(monkeypatch):
    geometry = PromptGeometry(60, ((0, 20), (20, 50)), (50, 60))
    policy = make_policy("boundary(3)")
    heads = policy.select(0, blind_view(geometry), 0)
    assert heads.tolist() == [0, 1, 2, 20, 21, 22]
    monkeypatch.setattr(LayerView, "index_in_chunk", None)
    assert policy.select(1, blind_view(geometry, heads), 0).tolist() == heads.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_planned_at_once_are_those_chosen_layer_by_layer(data):
    """The reference is :func:`top`, called for each layer with the tokens of the layer before."""
    geometry = data.draw(geometries())
    n = geometry.prompt_tokens
    tokens = candidates(geometry)
    always = np.setdiff1d(np.arange(n), tokens.numpy())
    seed = data.draw(st.integers(0, 99))
    worth = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed))
    budgets = sorted(data.draw(st.lists(st.integers(0, len(tokens)), min_size=2)), reverse=True)
    rank = np.argsort(np.argsort(-worth.numpy(), kind="stable"))
    prompt = PromptRows(n, torch.device("cpu"))
    planned = nested_rows(prompt, always, tokens.numpy(), rank, budgets)
    alive, arriving = tokens, torch.arange(n)
    for budget, (rows, among, chosen) in zip(budgets, planned, strict=True):
        alive = top(worth[torch.isin(tokens, alive)], alive, budget)
        assert torch.equal(chosen, alive)
        positions = torch.cat((torch.from_numpy(always), alive)).sort().values
        assert torch.equal(rows.positions, positions)
        if rows.count != len(arriving):
            assert torch.equal(arriving[among], rows.positions)
        arriving = rows.positions


def test_the_scout_pass_of_query_ends_early_in_deep_models_only():
    for name in ("query", "query+hkvd"):
        policy = make_policy(name)
        assert policy.attention_layers(32) == range(16, 32)
        assert policy.attention_layers(12) == range(12)
        assert make_policy(f"{name}(50-100)").attention_layers(12) == range(6, 12)
    assert make_policy("blend").attention_layers(32) == range(8, 32)
    assert make_policy("hkvd").attention_layers(32) == range(0)
    assert make_policy("blend").attention_layers(1) == range(1)


@pytest.mark.parametrize("layers", [1, 4, 12, 30])
def test_a_depth_that_is_less_than_a_layer_takes_one(layers):
    for name in ("query(0-1)", "query(50-52)", "query+hkvd(99-100)"):
        assert len(make_policy(name).attention_layers(layers)) == 1
