"""The fast attention of selected rows equals an explicit mask, written here a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.fusor.attention import ROWS_KEYWORD, NotServedError, blend_attention
from blendrag.fusor.hooks import slice_kwargs
from blendrag.fusor.rows import ALIGNED, Rows


def visible(positions: torch.Tensor, n: int, window: int | None) -> torch.Tensor:
    """``[S, N]``: row s sees key j iff j <= pos_s and, within a window, pos_s - j < window."""
    out = torch.zeros(len(positions), n, dtype=torch.bool)
    for i, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        out[i, first : position + 1] = True
    return out


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention in float64, heads repeated.  [1, S, H, D]"""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).double() for x in (k, v))
    scores = (q.double() @ k.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def inputs(
    s: int, n: int, heads: int, kv_heads: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return random(1, heads, s, 16), random(1, kv_heads, n, 16), random(1, kv_heads, n, 16)


def random_rows(n: int, s: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:s].sort().values


def run(
    positions: torch.Tensor, n: int, window: int | None, dtype: torch.dtype, kv_heads: int = 2
) -> float:
    q, k, v = inputs(len(positions), n, 4, kv_heads, dtype, seed=n)
    rows = Rows(positions, n)
    out, _ = blend_attention(
        torch.nn.Identity(), q, k, v, None, 0.3, sliding_window=window, **{ROWS_KEYWORD: rows}
    )
    expected = reference(q, k, v, visible(positions, n, window), 0.3)
    assert out.shape == expected.shape
    assert not out.isnan().any()
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 24, 4096])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "s"), [(1, 1), (40, 1), (40, 40), (300, 7), (300, 120), (700, 300), (1200, 1150)]
)
def test_fast_attention_equals_the_explicit_mask(
    n: int, s: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert run(random_rows(n, s, seed=s), n, window, dtype, kv_heads) < tolerance


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_kv_are_folded_into_rows_of_one(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def spied(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append((tuple(query.shape[1:3]), kwargs["enable_gqa"]))
        return sdpa(query, *args, **kwargs)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    assert run(random_rows(300, 40, seed=1), 300, None, torch.float32, kv_heads) < 1e-5
    assert asked == [((kv_heads, 40 * 4 // kv_heads), False)]


def test_where_folding_takes_too_much_memory_heads_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Rows(random_rows(300, 40, seed=1), 300)
    (folded,), (plain,) = rows.blocks(None, torch.float32, 2), rows.blocks(None, torch.float32)
    assert torch.equal(folded.bias, torch.cat((plain.bias, plain.bias)))
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", 2 * plain.bias.nbytes - 1)
    (unfolded,) = Rows(rows.positions, 300).blocks(None, torch.float32, 2)
    assert torch.equal(unfolded.bias, plain.bias)
    assert run(rows.positions, 300, None, torch.float32, 2) < 1e-5


def test_as_many_blocks_are_folded_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = random_rows(900, 250, seed=3)
    plain = Rows(positions, 900).blocks(None, torch.float32)
    assert len(plain) == 3
    room = 2 * (plain[0].bias.nbytes + plain[1].bias.nbytes)
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", room)
    blocks = Rows(positions, 900).blocks(None, torch.float32, 2)
    assert [len(block.bias) // (block.b - block.a) for block in blocks] == [2, 2, 1]
    assert run(positions, 900, None, torch.float32, 2) < 1e-5


def test_on_a_gpu_a_bias_is_folded_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of a GPU takes a mask and shared KV heads, but the unfused one."""
    asked = []

    def spied(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs["enable_gqa"])
        return sdpa(query, *args, **kwargs)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", 0)
    monkeypatch.setattr("blendrag.fusor.attention.FOLDS_ANYWAY", ("cpu",))
    assert run(random_rows(300, 40, seed=1), 300, None, torch.float32, 2) < 1e-5
    assert asked == [False]


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("window", [None, 50])
def test_rows_of_a_bias_are_aligned(sharing: int, window: int | None) -> None:
    for block in Rows(random_rows(301, 120, seed=1), 301).blocks(window, torch.bfloat16, sharing):
        assert block.bias.stride(0) % ALIGNED == 0
        assert block.bias.stride(1) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fast_attention_equals_the_explicit_mask_for_any_rows(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 260))
    rows = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    window = data.draw(st.none() | st.integers(1, n + 3))
    assert run(torch.tensor(sorted(rows)), n, window, torch.float32) < 1e-5


def test_an_exact_prefix_is_seen_by_every_row_behind_it() -> None:
    positions = torch.arange(50, 120)  # nothing of the first 50 tokens is computed
    assert run(positions, 120, None, torch.float32) < 1e-5
    assert run(positions, 120, 24, torch.float32) < 1e-5


def test_a_triangular_mask_aligned_bottom_right_would_be_caught() -> None:
    n, positions = 60, torch.tensor([3, 10, 11, 40, 59])
    q, k, v = inputs(len(positions), n, 4, 2, torch.float32, seed=1)
    triangular = torch.ones(len(positions), n).tril(n - len(positions)).bool()
    wrong = reference(q, k, v, triangular, 0.3)
    right = reference(q, k, v, visible(positions, n, None), 0.3)
    assert float((wrong - right).abs().max()) > 1e-2


def test_forced_masks_take_the_explicit_path_and_change_nothing() -> None:
    n = 130
    q, k, v = inputs(n, n, 4, 2, torch.float32, seed=2)
    outs = []
    for force in (False, True):
        rows = Rows(torch.arange(n), n, force_masks=force)
        assert rows.covers_prompt is not force
        out, _ = blend_attention(torch.nn.Identity(), q, k, v, None, 0.3, **{ROWS_KEYWORD: rows})
        outs.append(out)
    assert float((outs[0] - outs[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [None, 5, 24])
def test_blocks_put_together_are_the_mask(window: int | None) -> None:
    n, positions = 400, random_rows(400, 230, seed=3)
    rows = Rows(positions, n)
    seen = torch.zeros(len(positions), n, dtype=torch.bool)
    at = 0
    for a, b, lo, hi, bias in rows.blocks(window, torch.float32):
        assert a == at  # blocks cover the rows in order, without a gap
        at = b
        seen[a:b, lo:hi] = bias == 0
        assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
    assert at == len(positions)
    assert torch.equal(seen, visible(positions, n, window))
    assert torch.equal(rows.mask()[0, 0], visible(positions, n, None))


@pytest.mark.parametrize("what", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_what_it_does_not_serve_is_refused(what: dict) -> None:
    q, k, v = inputs(4, 4, 4, 2, torch.float32, seed=4)
    rows = Rows(torch.arange(4), 4)
    with pytest.raises(NotServedError):
        blend_attention(torch.nn.Identity(), q, k, v, None, 0.3, **{ROWS_KEYWORD: rows}, **what)


def test_without_rows_or_with_a_mask_it_is_refused() -> None:
    q, k, v = inputs(4, 4, 4, 2, torch.float32, seed=4)
    with pytest.raises(NotServedError):
        blend_attention(torch.nn.Identity(), q, k, v, None, 0.3)
    with pytest.raises(NotServedError):
        blend_attention(
            torch.nn.Identity(), q, k, v, F.relu(q), 0.3, **{ROWS_KEYWORD: Rows(torch.arange(4), 4)}
        )


def test_what_covers_the_prompt_is_handed_on_and_the_rest_is_gathered() -> None:
    n = 6
    cos, mask = torch.randn(1, n, 4), torch.zeros(1, 1, n, n)
    kwargs = {
        "position_embeddings": (cos, cos),
        "position_ids": torch.arange(n)[None],
        "attention_mask": mask,
    }
    whole = slice_kwargs(kwargs, Rows(torch.arange(n), n, force_masks=True), masked=True)
    assert whole["position_embeddings"][0] is cos
    assert whole["position_ids"] is kwargs["position_ids"]
    assert whole["attention_mask"] is mask
    some = torch.tensor([1, 4])
    part = slice_kwargs(kwargs, Rows(some, n), masked=True)
    assert torch.equal(part["position_embeddings"][1], cos[:, some])
    assert part["position_ids"].tolist() == [[1, 4]]
    assert part["attention_mask"].shape == (1, 1, 2, n)


def test_what_every_layer_passes_is_cut_to_its_rows_once() -> None:
    n, rows = 12, Rows(torch.tensor([3, 7, 11]), 12)
    tables = (torch.randn(1, n, 4), torch.randn(1, n, 4))
    kwargs = {
        "attention_mask": None,
        "position_embeddings": tables,
        "position_ids": torch.arange(n),
    }
    first, second = (slice_kwargs(kwargs, rows, masked=True) for _ in range(2))
    for name in kwargs:
        assert second[name] is first[name]
    assert torch.equal(first["position_embeddings"][1], tables[1][:, [3, 7, 11]])
    other = {**kwargs, "position_embeddings": (tables[1], tables[0])}
    cut = slice_kwargs(other, rows, masked=True)["position_embeddings"]
    assert torch.equal(cut[0], first["position_embeddings"][1])


def test_nothing_in_one_argument_is_not_taken_for_nothing_in_another() -> None:
    rows = Rows(torch.tensor([3, 7, 11]), 12)
    cut = slice_kwargs({"attention_mask": None, "position_embeddings": None}, rows, masked=True)
    assert cut["attention_mask"].shape == (1, 1, 3, 12)
    assert cut["position_embeddings"] is None
