"""Decoding with folded heads gives what transformers' own attention gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny
from blendrag.fusor import attention
from blendrag.fusor.attention import decode_attention, fast_decoding
from blendrag.model import ModelAdapter, compat

#: How far apart sums in another order may be.
CLOSE = 2e-5
#: Has code for ``sdpa`` by name, and adds masks to scores under any other.
FALCON = ("FalconForCausalLM", "FalconConfig", {"multi_query": True})
FAMILIES = {**tiny.FAMILIES, "falcon": FALCON}
#: Attention of its own, and latent vectors, of which no query heads share keys.
UNSHARED = {"gpt_oss"} | {name for name in FAMILIES if "kv_lora_rank" in FAMILIES[name][2]}


@pytest.mark.parametrize("name", sorted({*FAMILIES} - UNSHARED - tiny.ALIKE))
def test_logits_are_those_of_stock_decoding(name: str) -> None:
    """Through prefill, decoding, and the windows of layers that have one; in a batch with padding, too."""
    model = tiny.build(FAMILIES[name], initializer_range=0.2, num_key_value_heads=2)
    stack = ModelAdapter(model, tiny.tokenizer()).stack
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 600, (2, 3 * tiny.WINDOW), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for rows in (slice(1, 2), slice(0, 2)):
        arguments = {
            "attention_mask": mask[rows], "max_new_tokens": 3, "do_sample": False, "eos_token_id": None,
            "return_dict_in_generate": True, "output_logits": True,
        }  # fmt: skip
        expected = model.generate(ids[rows], **arguments)
        with fast_decoding(stack):
            got = model.generate(ids[rows], **arguments)
        assert got.sequences.equal(expected.sequences)
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            assert (ours - theirs).abs().max() <= CLOSE * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharing", [1, 2, 3, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_one_token_is_that_of_repeated_heads(
    dtype: torch.dtype, sharing: int, masked: bool
) -> None:
    heads = 2 * sharing
    query = torch.randn(1, heads, 1, 16).to(dtype)
    key, value = torch.randn(2, 1, 2, 41, 16).to(dtype)
    mask = torch.rand(1, 1, 1, 41) < 0.7 if masked else None
    out = attention.attend_token(query, key, value, None, mask)
    repeated = (each.repeat_interleave(sharing, 1) for each in (key, value))
    expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask).transpose(1, 2)
    close = 1e-2 if dtype == torch.bfloat16 else CLOSE
    torch.testing.assert_close(out, expected, atol=close, rtol=close)


@pytest.mark.parametrize(
    ("dtype", "amx", "sharing", "rows"),
    [
        (torch.bfloat16, True, 7, 7),
        (torch.bfloat16, True, attention.FOLDED_HEADS, attention.FOLDED_HEADS),
        (torch.bfloat16, True, 3, 1),
        (torch.bfloat16, False, 3, 4),
        (torch.bfloat16, False, 5, 6),
        (torch.bfloat16, False, 9, 9),
        (torch.float32, True, 3, 3),
        (torch.bfloat16, True, 1, 1),
        (torch.bfloat16, False, 1, 2),
        (torch.float32, False, 1, 1),
    ],
)
def test_heads_are_rows_of_one_where_that_is_faster(
    dtype: torch.dtype, amx: bool, sharing: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V are never repeated; an odd row is."""
    monkeypatch.setattr(attention, "has_amx", lambda: amx)
    monkeypatch.setattr(attention.compat, "cpu_multiplies_fast", lambda dtype: True)
    seen: list[tuple[int, int]] = []
    stock = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((query.shape[2], key.shape[1]))
        return stock(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    key = torch.randn(1, 2, 9, 8).to(dtype)
    attention.attend_token(torch.randn(1, 2 * sharing, 1, 8).to(dtype), key, key, None)
    assert seen == [(rows, 2)]


@pytest.mark.parametrize(
    ("heads", "threads", "parts"), [(3, 2, 2), (1, 4, 4), (4, 2, 1), (2, 6, 3)]
)
@pytest.mark.parametrize("left", [0, 1])
def test_threads_that_have_no_head_of_their_own_share_the_tokens_of_one(
    heads: int, threads: int, parts: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attention, "PART_TOKENS", 8)
    seen: list[tuple[int, int]] = []
    stock = compat.cpu_flash_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> Any:
        seen.append((key.shape[0], key.shape[2]))
        return stock(query, key, value, **given)

    monkeypatch.setattr(attention.compat, "cpu_flash_attention", watched)
    tokens = 8 * parts + left
    query = torch.randn(1, 2 * heads, 1, 8)
    key, value = (torch.randn(1, heads, tokens + 5, 8)[:, :, :tokens] for _ in range(2))
    out = attention.attend_token(query, key, value, 0.3)
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=CLOSE, rtol=CLOSE)
    assert [each for each in seen if each[0] > 1] == [(parts, 8)] * (parts > 1)


@pytest.mark.parametrize(("tokens", "multiplies"), [(63, False), (64, True)])
def test_a_token_behind_many_is_attended_by_two_products(
    tokens: int, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exactly as by torch's kernel, also if logits are far larger than their differences."""
    monkeypatch.setattr(attention, "has_amx", lambda: False)
    monkeypatch.setattr(attention.compat, "cpu_multiplies_fast", lambda dtype: True)
    monkeypatch.setattr(attention, "PRODUCT_TOKENS", 64)
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (
        torch.randn(1, heads, count, 16, generator=generator)
        for heads, count in ((6, 1), (2, tokens + 5), (2, tokens + 5))
    )
    query[..., 0], keys[..., 0] = 20, 10  # logits of about 50
    query, key, value = (
        each.bfloat16() for each in (query, keys[:, :, :tokens], values[:, :, :tokens])
    )
    with tiny.counted(F, "scaled_dot_product_attention") as calls:
        out = attention.attend_token(query, key, value, None)
    assert (not calls) is multiplies
    exact = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), enable_gqa=True
    ).transpose(1, 2)
    assert out.shape == exact.shape
    assert (out - exact).norm() <= 0.005 * exact.norm()


@pytest.mark.parametrize("name", ["attention_mask", "position_bias"])
def test_what_differs_by_head_is_left_to_transformers(name: str) -> None:
    query, key, by_head = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 4, 1, 9)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    given = {"attention_mask": None, name: by_head}
    out, _ = decode_attention(module, query, key, key, **given)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, **given)
    torch.testing.assert_close(out, expected)


def test_heads_are_folded_only_here_and_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(threading.current_thread().name)
        return decode_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "decode_attention", counted)
    model = tiny.llama()
    stack, ids = ModelAdapter(model, tiny.tokenizer()).stack, tiny.random_ids(6)

    def forward() -> None:
        model(input_ids=ids)

    with fast_decoding(stack):
        assert stack.config._attn_implementation == "sdpa"
        owner = threading.Thread(target=forward, name="owner")
        owner.start()
        owner.join()
        assert not calls
        forward()
        assert len(calls) == len(stack.layers)
    forward()
    assert len(calls) == len(stack.layers)


def test_one_token_on_a_gpu_is_attended_by_the_kernel_that_needs_no_preparation(monkeypatch):
    def on_cpu(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
        assert bias is None
        return compat.cpu_flash_attention(q, k, v, scale=scale)

    query, (key, value) = torch.randn(1, 8, 1, 16), torch.randn(2, 1, 2, 9, 16)
    expected = attention.attend_token(query, key, value, 0.3)
    monkeypatch.setattr(compat, "cuda_attention", on_cpu)
    monkeypatch.setattr(attention, "has_fused_kernels", lambda *_: True)
    with tiny.counted(compat, "cuda_attention") as calls:
        got = attention.attend_token(query, key, value, 0.3)
    assert len(calls) == 1
    assert tiny.difference(got, expected) < 1e-5
