"""The fast attention of selected rows equals an explicit mask, written here a second time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import attention
from blendrag.fusor.attention import ROWS_KEYWORD, NotServedError, blend_attention
from blendrag.fusor.hooks import slice_kwargs, token_arguments
from blendrag.fusor.rows import ALIGNED, BLOCK_ROWS, PromptRows, Rows
from blendrag.model import compat
from blendrag.model.windows import Window


class Runs(torch.nn.Module):
    """Chunked attention of Llama 4, which is known from the layer alone."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.layer_idx = 1
        kinds = ["full_attention", "chunked_attention"]
        self.config = SimpleNamespace(layer_types=kinds, attention_chunk_size=tokens)


def visible(positions: torch.Tensor, n: int, window: Window | None) -> torch.Tensor:
    """``[S, N]``: row s sees key j iff j <= pos_s and, within a window, pos_s - j < window, or both are in
    the same run."""
    out = torch.zeros(len(positions), n, dtype=torch.bool)
    for i, position in enumerate(positions.tolist()):
        first = 0
        if window is not None and window.is_run:
            first = position - position % window.tokens
        elif window is not None:
            first = max(0, position - window.tokens + 1)
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
    s: int, n: int, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of four heads, keys and values."""
    generator = torch.Generator().manual_seed(n)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return random(1, 4, s, 16), random(1, kv_heads, n, 16), random(1, kv_heads, n, 16)


def attend(rows: Rows, qkv: tuple[torch.Tensor, ...], window: Window | None = None) -> torch.Tensor:
    module: torch.nn.Module = torch.nn.Identity()
    given: dict[str, Any] = {ROWS_KEYWORD: rows}
    if window is not None and window.is_run:
        module = Runs(window.tokens)
    elif window is not None:
        given["sliding_window"] = window.tokens
    return blend_attention(module, *qkv, None, 0.3, **given)[0]  # type: ignore[arg-type]


def random_rows(n: int, s: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:s].sort().values


def error(
    positions: torch.Tensor,
    n: int,
    window: Window | None = None,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
) -> float:
    """Largest difference from the reference."""
    qkv = inputs(len(positions), n, kv_heads, dtype)
    out = attend(Rows(positions, n), qkv, window)
    expected = reference(*qkv, visible(positions, n, window), 0.3)
    assert out.shape == expected.shape
    assert not out.isnan().any()
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("window", [None, Window(24), Window(24, is_run=True)])
@pytest.mark.parametrize(("n", "s"), [(40, 40), (700, 300), (640, 600)])
def test_fast_attention_equals_the_explicit_mask(n, s, window):
    assert error(random_rows(n, s), n, window) < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fast_attention_equals_the_explicit_mask_for_any_rows(data):
    n = data.draw(st.integers(1, 260))
    rows = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    window = data.draw(st.none() | st.builds(Window, st.integers(1, n + 3), st.booleans()))
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    positions = torch.tensor(sorted(rows))
    assert error(positions, n, window, kv_heads=kv_heads) < 1e-5
    assert error(positions, n, window, torch.bfloat16, kv_heads) < 3e-2


@pytest.mark.parametrize(
    ("dtype", "amx", "ways"),
    [(torch.bfloat16, False, 1), (torch.bfloat16, True, 0), (torch.float32, False, 0)],
)
def test_shared_heads_are_multiplied_where_that_is_faster(dtype, amx, ways, monkeypatch):
    monkeypatch.setattr(attention, "has_amx", lambda: amx)
    monkeypatch.setattr(attention, "_by_products", mock := Mock(wraps=attention._by_products))
    assert error(random_rows(700, 60), 700, None, dtype) < 3e-2
    assert mock.call_count == ways


# -- blocks and biases --------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """Heads and rows of each attention call, and whether KV heads are shared in it."""
    seen: list[tuple[tuple[int, ...], bool]] = []
    sdpa = F.scaled_dot_product_attention

    def spied(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((tuple(query.shape[1:3]), kwargs["enable_gqa"]))
        return sdpa(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    return seen


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_kv_are_folded_into_rows_of_one(kv_heads, asked):
    assert error(random_rows(300, 40), 300, kv_heads=kv_heads) < 1e-5
    assert asked == [((kv_heads, 40 * 4 // kv_heads), False)]


@pytest.mark.parametrize(("count", "amx"), [(60, True), (70, True), (70, False)])
def test_many_rows_keep_heads_apart_where_amx_multiplies(count, amx, monkeypatch, asked):
    monkeypatch.setattr(attention, "has_amx", lambda: amx)
    monkeypatch.setattr(attention, "_multiplies", lambda query: False)
    assert error(random_rows(300, count), 300, dtype=torch.bfloat16) < 3e-2
    is_apart = amx and count >= attention.APART_ROWS
    assert asked == [((4, count), True) if is_apart else ((2, 2 * count), False)]


def test_on_a_gpu_a_bias_is_folded_whatever_it_takes(monkeypatch, asked):
    """A GPU has no fused kernel for a mask over shared KV heads."""
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", 0)
    monkeypatch.setattr("blendrag.fusor.attention.FOLDS_ANYWAY", ("cpu",))
    assert error(random_rows(300, 40), 300) < 1e-5
    assert asked == [((2, 80), False)]


def test_as_many_blocks_are_folded_as_there_is_memory_for(monkeypatch):
    positions = random_rows(900, 250, seed=3)
    plain = Rows(positions, 900).blocks(None, torch.float32)
    assert len(plain) == 3
    room = 2 * (plain[0].bias.nbytes + plain[1].bias.nbytes)
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", room)
    blocks = Rows(positions, 900).blocks(None, torch.float32, 2)
    assert [len(block.bias) // (block.b - block.a) for block in blocks] == [2, 2, 1]
    assert torch.equal(blocks[0].bias, torch.cat((plain[0].bias, plain[0].bias)))
    assert error(positions, 900) < 1e-5


@pytest.mark.parametrize("count", [1, 95, 97, 100, 143, 145, 300, 400])
def test_no_block_of_rows_is_much_shorter_than_the_others(count):
    blocks = Rows(torch.arange(900 - count, 900), 900).blocks(None, torch.float32)
    lengths = [block.b - block.a for block in blocks]
    assert sum(lengths) == count
    assert max(lengths) <= 1.5 * BLOCK_ROWS
    assert min(lengths) > 0.9 * max(lengths)


def test_forced_masks_take_the_explicit_path_and_change_nothing():
    n = 130
    outs = []
    for force in (False, True):
        rows = Rows(torch.arange(n), n, force_masks=force)
        assert rows.covers_prompt is not force
        outs.append(attend(rows, inputs(n, n)))
    assert float((outs[0] - outs[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [None, Window(24), Window(24, is_run=True)])
def test_blocks_together_are_the_mask(window):
    n, positions = 400, random_rows(400, 230, seed=3)
    rows = Rows(positions, n)
    seen = torch.zeros(len(positions), n, dtype=torch.bool)
    at = 0
    for a, b, lo, hi, bias in rows.blocks(window, torch.float32):
        assert a == at  # blocks cover the rows in order, without a gap
        at = b
        seen[a:b, lo:hi] = bias == 0
        assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
        assert bias.stride(0) % ALIGNED == 0
    assert at == len(positions)
    assert torch.equal(seen, visible(positions, n, window))
    assert torch.equal(rows.mask[0, 0], visible(positions, n, None))


def test_what_it_does_not_serve_is_refused():
    qkv, rows = inputs(4, 4), {ROWS_KEYWORD: Rows(torch.arange(4), 4)}
    for mask, given_rows in (
        (None, {}),
        (torch.zeros(1, 1, 4, 4), rows),
        (None, {**rows, "softcap": 30.0}),
        (None, {**rows, "s_aux": torch.zeros(4)}),
    ):
        with pytest.raises(NotServedError):
            blend_attention(torch.nn.Identity(), *qkv, mask, 0.3, **given_rows)  # type: ignore[arg-type]


# -- the arguments of a layer -------------------------------------------------------------------

TABLES = (torch.randn(1, 12, 4), torch.randn(1, 12, 4))
SOME = torch.tensor([3, 7, 11])


def test_arguments_of_all_rows_are_passed_on_and_of_some_are_gathered_once():
    kwargs = {
        "position_embeddings": TABLES,
        "position_ids": torch.arange(12)[None],
        "attention_mask": torch.zeros(1, 1, 12, 12),
    }
    whole = slice_kwargs(kwargs, Rows(torch.arange(12), 12, force_masks=True), masked=True)
    assert all(whole[name] is kwargs[name] for name in kwargs)
    rows = Rows(SOME, 12)
    first, second = (slice_kwargs(kwargs, rows, masked=True) for _ in range(2))
    assert all(second[name] is first[name] for name in kwargs)
    assert torch.equal(first["position_embeddings"][1], TABLES[1][:, SOME])
    assert first["position_ids"].tolist() == [[3, 7, 11]]
    assert first["attention_mask"].shape == (1, 1, 3, 12)
    other = {**kwargs, "position_embeddings": TABLES[::-1]}
    cut = slice_kwargs(other, rows, masked=True)["position_embeddings"]
    assert torch.equal(cut[0], first["position_embeddings"][1])


def test_arguments_with_an_entry_per_token_are_known_from_two_lengths_and_gathered():
    """At the length of a prompt alone, a vector of that width would look like one of them."""
    found = token_arguments(tiny.adapter(tiny.family("gemma4")).stack)
    assert found["per_layer_input"] == -2
    assert token_arguments(tiny.adapter(tiny.llama()).stack) == {"position_ids": -1}
    inputs = torch.randn(1, 12, 3)
    cut = slice_kwargs({"inputs": inputs}, Rows(SOME, 12), masked=False, by_token={"inputs": -2})
    assert torch.equal(cut["inputs"], inputs[:, SOME])


@pytest.mark.parametrize(
    "kwargs", [{"per_token": torch.zeros(1, 12)}, {"attention_mask": torch.zeros(1, 12)}]
)
def test_an_unknown_argument_of_the_prompts_length_is_refused(kwargs):
    with pytest.raises(UnsupportedModelError, match="use mode full"):
        slice_kwargs(kwargs, Rows(SOME, 12), masked=True)


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({}, True),
        ({"width": 256}, True),
        ({"width": 512}, False),
        ({"width": 192, "value_width": 128}, False),
        ({"width": 36}, False),
        ({"dtype": torch.float32}, False),
        ({"is_recent": False}, False),
    ],
)
def test_fused_kernels_of_a_gpu_take_keys_and_values_that_they_can(changes, has, monkeypatch):
    case = {"width": 128, "value_width": None, "dtype": torch.float16, "is_recent": True, **changes}
    monkeypatch.setattr(compat, "has_flash_attention", lambda device: case["is_recent"])
    key, value = (
        SimpleNamespace(
            is_cuda=True, dtype=case["dtype"], shape=(1, 2, 9, width), device=torch.device("cuda:0")
        )
        for width in (case["width"], case["value_width"] or case["width"])
    )
    assert attention.has_fused_kernels(key, value) is has


@pytest.mark.parametrize("sharing", [1, 2])
def test_stripes_merged_by_their_log_sum_exps_equal_one_mask(sharing, monkeypatch):
    def on_cpu(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
        mask = None if bias is None else bias.expand(*q.shape[:3], -1)
        return compat.cpu_flash_attention(q, k, v, attn_mask=mask, scale=scale)

    monkeypatch.setattr(compat, "cuda_attention", on_cpu)
    monkeypatch.setattr(attention, "has_fused_kernels", lambda *_: True)
    monkeypatch.setattr("blendrag.fusor.rows.STRIPED_PRODUCTS", 0)
    monkeypatch.setattr("blendrag.fusor.rows.STRIPE_ROWS", 4)
    positions, n = torch.tensor([0, 2, 3, 7, 8, 11, 19, 20, 21]), 22
    rows = Rows(positions, PromptRows(n, torch.device("cpu")), host=positions.numpy())
    assert [(one.a, one.b, one.lo, one.hi) for one in rows.stripes(torch.float32, sharing)] == [
        (0, 4, 0, 8), (4, 8, 8, 21), (8, 9, 21, 22)
    ]  # fmt: skip
    query = torch.randn(1, 2 * sharing, len(positions), 16)
    key, value = torch.randn(2, 1, 2, n, 16).unbind()
    got = attention.attend(rows, query, key, value, 0.3, None)
    expected = reference(query, key, value, visible(positions, n, None), 0.3)
    assert float((got - expected).abs().max()) < 1e-5


def test_few_rows_and_rows_known_only_on_the_device_are_not_cut_into_stripes():
    positions = torch.arange(5)
    prompt = PromptRows(9, torch.device("cpu"))
    assert Rows(positions, prompt, host=positions.numpy()).stripes(torch.float32, 2) == []
    assert Rows(positions, PromptRows(1 << 30, torch.device("cpu"))).stripes(torch.float32, 2) == []
