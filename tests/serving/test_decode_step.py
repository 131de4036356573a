"""A joint decode step gives each request what it gets alone."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.cache import BlendCache
from blendrag.model import ModelAdapter
from blendrag.serving import decode_step
from blendrag.serving.chunk_pool import ChunkPool, RequestKV
from blendrag.serving.decode_step import DecodeStep, can_join, decoded_together

#: How far apart sums in another order may be.
CLOSE = 2e-5
LENGTHS = (1, 5, tiny.WINDOW + 3, 3 * tiny.WINDOW)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 600, (1, length), generator=generator) for length in LENGTHS]


def prefilled(adapter: ModelAdapter, ids: torch.Tensor, room: int = 8) -> BlendCache:
    cache = BlendCache(adapter.layout, ids.shape[1] + room, adapter.device)
    adapter.model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def decoded(adapter: ModelAdapter, caches: list[BlendCache], token: int) -> list[Any]:
    """The outputs for the next token of each request, from one forward."""
    steps = [
        DecodeStep(adapter.model.forward, torch.tensor([[token + i]]), RequestKV(cache))
        for i, cache in enumerate(caches)
    ]
    return decoded_together(steps, ChunkPool(adapter, 0))


@torch.inference_mode()
@pytest.mark.parametrize("name", sorted({*tiny.FAMILIES} - tiny.ALIKE))
def test_logits_are_those_of_each_request_alone(name: str) -> None:
    """Over three tokens, behind prompts shorter and longer than the window."""
    model = tiny.build(tiny.FAMILIES[name], initializer_range=0.2)
    adapter = ModelAdapter(model, tiny.tokenizer())
    if not Fusor(adapter).packs:
        pytest.skip("decodes alone")
    alone, together = ([prefilled(adapter, ids) for ids in prompts()] for _ in range(2))
    for token in (7, 8, 9):
        outputs = decoded(adapter, together, token)
        for i, (cache, ours) in enumerate(zip(alone, outputs, strict=True)):
            ids = torch.tensor([[token + i]])
            theirs = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            assert ours.logits.shape == theirs.shape == (1, 1, tiny.COMMON["vocab_size"])
            assert (ours.logits - theirs).abs().max() <= CLOSE * theirs.abs().max()
            assert ours.past_key_values.get_seq_length() == cache.get_seq_length()


class Shapes(TorchDispatchMode):
    """The shapes of all that operators compute in this context, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = out if isinstance(out, tuple | list) else (out,)
            self.computed += [each.shape for each in results if isinstance(each, torch.Tensor)]
        return out


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_reads_kv_where_it_is_and_makes_no_mask(
    name: str, dtype: torch.dtype, count: int
) -> None:
    """Nothing that it computes is as long as a prompt: no copy of KV, no repeated heads, no mask."""
    adapter = ModelAdapter(tiny.family(name).to(dtype), tiny.tokenizer())
    lengths = range(331, 331 + count)
    caches = [prefilled(adapter, tiny.random_ids(length)) for length in lengths]
    with Shapes() as seen:
        decoded(adapter, caches, 7)
    assert seen.computed
    long = {*range(331, 340), tiny.WINDOW, tiny.WINDOW + 1}
    assert not [shape for shape in seen.computed if long & {*shape}]


@torch.inference_mode()
def test_a_step_is_prepared_once_until_a_request_joins_or_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = tiny.adapter(tiny.llama())
    kept = [RequestKV(prefilled(adapter, ids)) for ids in prompts()]
    pool, made, stock = ChunkPool(adapter, 0), [0], decode_step._Rows.__init__

    def counted(*args: Any) -> None:
        made[0] += 1
        stock(*args)

    monkeypatch.setattr(decode_step._Rows, "__init__", counted)

    def decode(requests: list[RequestKV], tokens: int) -> int:
        for token in range(7, 7 + tokens):
            steps = [
                DecodeStep(adapter.model.forward, torch.tensor([[token]]), kv) for kv in requests
            ]
            decoded_together(steps, pool)
        return made[0]

    assert decode(kept, 3) == 1
    pool.leave(kept[0])
    assert decode(kept[1:], 3) == 2
    assert decode(kept[1:], 1) == 2
    gone = weakref.ref(kept.pop().cache)
    decode(kept[1:], 1)
    assert gone() is None  # nothing waits for the garbage collector


@torch.inference_mode()
def test_a_failed_step_leaves_the_caches_as_they_were() -> None:
    adapter = tiny.adapter(tiny.llama())
    caches = [prefilled(adapter, ids) for ids in prompts()]

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    hook = adapter.stack.layers[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        decoded(adapter, caches, 7)
    hook.remove()
    assert [cache.get_seq_length() for cache in caches] == list(LENGTHS)
    assert {layer.get_seq_length() for layer in caches[-1].layers} == {LENGTHS[-1]}


@torch.inference_mode()
def test_what_a_joint_step_cannot_give_is_decoded_alone() -> None:
    adapter = tiny.adapter(tiny.llama())
    cache = prefilled(adapter, prompts()[1])
    ids = torch.tensor([[7]])
    of = {"input_ids": ids, "past_key_values": cache, "attention_mask": torch.ones(1, 6)}
    assert can_join(adapter, of)
    for other in (
        {"output_hidden_states": True},
        {"input_ids": ids.expand(2, 1)},
        {"input_ids": torch.tensor([[7, 8]])},
        {"past_key_values": None},
    ):
        assert not can_join(adapter, of | other)
    cache.batch_repeat_interleave(2)
    assert not can_join(adapter, of)
