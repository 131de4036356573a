"""Several prompts in one forward: each gets what it gets alone, whatever lies beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tiny
from blendrag.errors import CorruptKVError, RequestCancelled
from blendrag.fusor import BlendCache, Fusor, PackedPrompt, Prefilled
from blendrag.fusor.loader import LoadedSpan, SpanCorruptError
from blendrag.fusor.selection import LayerView
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.model import ModelAdapter

NEW_TOKENS = 5
pytestmark = pytest.mark.usefixtures("ends_early")


@dataclass(frozen=True)
class Asked:
    """A prompt of ``tokens`` ids with stored chunks at ``chunks``, and how it is blended."""

    tokens: int
    chunks: tuple[tuple[int, int], ...]
    policy: str
    ratio: float = 0.3
    schedule: str = "constant"
    exact: bool = False

    @property
    def ids(self) -> torch.Tensor:
        return tiny.random_ids(self.tokens, seed=self.tokens)

    def spans(self, adapter: ModelAdapter) -> list[LoadedSpan]:
        return [
            tiny.span(adapter, self.ids, a, b, stored_at=a if self.exact else 1, exact=self.exact,
                      noise=0.0 if self.exact else 0.5)
            for a, b in self.chunks
        ]  # fmt: skip


#: Beyond twice the sliding windows, of different lengths, with and without chunks.
VARIED = (
    Asked(110, ((5, 60), (64, 100)), "hkvd", 0.3, "geometric"),
    Asked(90, ((10, 70),), "query", 0.2),
    Asked(37, (), "query"),
    Asked(95, ((4, 44), (44, 80)), "query+hkvd", 0.3, "linear"),
    Asked(75, ((1, 40), (41, 70)), "reuse"),
    Asked(64, ((0, 50),), "reuse", exact=True),
    Asked(100, ((8, 60), (62, 90)), "boundary(6)"),
    Asked(81, ((3, 70),), "blend(8)", 0.25),
    Asked(70, ((3, 33), (33, 61)), "hkvd-once", 0.4),
    Asked(52, ((2, 40),), "full", 1.0),
)
#: Whose layers tell their attention which rows see what.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3_moe", "phi3", "gemma3_text", "smollm3", "cohere2",
    "gpt_neox", "exaone4",
)  # fmt: skip


def prompt(adapter: ModelAdapter, asked: Asked, spans: Sequence[Any] | None = None) -> PackedPrompt:
    spans = asked.spans(adapter) if spans is None else spans
    request = tiny.request(asked.ids, spans, asked.policy, asked.ratio, asked.schedule)
    return PackedPrompt(asked.ids, request, NEW_TOKENS)


def assert_as_alone(fusor: Fusor, asked: Asked, got: Prefilled | Exception) -> None:
    """Logits, KV and what was counted, against a forward of this prompt alone, all its rows to the end."""
    assert isinstance(got, Prefilled), got
    alone = prompt(fusor.adapter, asked)
    logits, cache, fusion = fusor.prefill(alone.ids, alone.request, NEW_TOKENS, logits_to_keep=0)
    scale = max(1.0, float(logits.abs().max()))
    assert tiny.difference(fusor.first_logits([got])[0], logits[0, -1]) < 1e-4 * scale
    for one, other in zip(got.cache.layers, cache.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        assert tiny.difference(one.keys, other.keys) < 1e-3
        assert tiny.difference(one.values, other.values) < 1e-3
    assert got.fusion.counts() == fusion.counts()


@contextmanager
def layer_forwards(adapter: ModelAdapter, layer: int = 2) -> Iterator[list[int]]:
    """How many rows each forward of that layer computes."""
    rows: list[int] = []
    hook = adapter.stack.layers[layer].register_forward_hook(
        lambda module, args, out: rows.append((out if torch.is_tensor(out) else out[0]).shape[1])
    )
    try:
        yield rows
    finally:
        hook.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_many_kinds_in_one_forward_get_what_they_get_alone(name: str) -> None:
    changes = {"initializer_range": 0.2} if name == "llama" else {}
    fusor = Fusor(tiny.adapter(tiny.family(name, **changes)))
    assert fusor.packs
    together = fusor.batched_prefill([prompt(fusor.adapter, asked) for asked in VARIED])
    for asked, got in zip(VARIED, together, strict=True):
        assert_as_alone(fusor, asked, got)


def test_every_layer_runs_once_over_the_rows_of_all(adapter: ModelAdapter, fusor: Fusor) -> None:
    asked = [Asked(80 + i, ((5, 60),), "boundary(4)") for i in range(4)]
    prompts = [prompt(adapter, one) for one in asked]
    with layer_forwards(adapter) as rows:
        fusor.batched_prefill(prompts)
    assert rows == [sum(one.tokens - 55 + 4 for one in asked)]
    with layer_forwards(adapter) as rows:
        for one in prompts:
            fusor.batched_prefill([one])
    assert len(rows) == 4


def test_those_that_ask_share_one_scout_pass(adapter: ModelAdapter, fusor: Fusor) -> None:
    asked = [Asked(80 + i, ((5, 60),), "query", 0.2) for i in range(3)]
    asked.append(Asked(70, ((5, 60),), "reuse"))
    prompts = [prompt(adapter, one) for one in asked]
    with layer_forwards(adapter, 1) as rows:
        together = fusor.batched_prefill(prompts)
    fresh = sum(one.tokens - 55 for one in asked)
    assert rows == [fresh - 15, fresh + 3 * 11]
    for one, got in zip(asked, together, strict=True):
        assert_as_alone(fusor, one, got)


def test_first_logits_of_all_are_those_of_each(adapter: ModelAdapter, fusor: Fusor) -> None:
    got = fusor.batched_prefill([prompt(adapter, asked) for asked in VARIED])
    prefilled = [one for one in got if isinstance(one, Prefilled)]
    all_logits = fusor.first_logits(prefilled)
    for logits, one in zip(all_logits, prefilled, strict=True):
        assert tiny.difference(logits, fusor.first_logits([one])[0]) < 1e-4


@pytest.mark.parametrize("beside", range(len(VARIED)))
def test_greedy_decoding_goes_on_as_after_a_prefill_alone(
    adapter: ModelAdapter, fusor: Fusor, beside: int
) -> None:
    asked = VARIED[beside]
    others = [prompt(adapter, one) for one in VARIED[:3]]
    got = fusor.batched_prefill([*others, prompt(adapter, asked)])[-1]
    assert isinstance(got, Prefilled)
    with got.replayed(adapter.stack.base) as cache:
        tokens = greedy(adapter, asked.ids, cache)
    assert len(cache.layers[0].keys[0, 0]) == asked.tokens + NEW_TOKENS - 1
    alone = prompt(adapter, asked)
    cache = fusor.new_cache(asked.tokens, NEW_TOKENS)
    with adapter.lock, fusor.fuse(cache, alone.request):
        assert torch.equal(tokens, greedy(adapter, asked.ids, cache))


def greedy(adapter: ModelAdapter, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    tokens: torch.Tensor = adapter.model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokens[0, ids.shape[1] :]


def test_an_answer_longer_than_its_room_harms_no_other(adapter: ModelAdapter, fusor: Fusor) -> None:
    asked = VARIED[3]
    first, second = fusor.batched_prefill([prompt(adapter, asked) for _ in range(2)])
    assert isinstance(first, Prefilled)
    before = [layer.keys.clone() for layer in second.cache.layers]  # type: ignore[union-attr]
    with first.replayed(adapter.stack.base) as cache:
        adapter.model.generate(
            asked.ids, past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False
        )
    for layer, keys in zip(second.cache.layers, before, strict=True):  # type: ignore[union-attr]
        assert torch.equal(layer.keys, keys)


# -- one leaves ---------------------------------------------------------------------------------


class Damaged(tiny.Held):
    """Its bytes are not what was put, from a layer on."""

    def __init__(self, held: tiny.Held, layer: int) -> None:
        super().__init__(held.kv, "damaged")
        self.layer = layer

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        if layer == self.layer:
            raise CorruptKVError("checksum differs")
        super().read_layer(layer, out)


def damaged(adapter: ModelAdapter, asked: Asked, layer: int) -> PackedPrompt:
    spans = [
        LoadedSpan(s.start, s.end, Damaged(s.reader, layer), s.stored_position, s.exact)  # type: ignore[arg-type]
        for s in asked.spans(adapter)
    ]
    return prompt(adapter, asked, spans)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("asked", [VARIED[0], VARIED[1], VARIED[3]], ids=lambda a: a.policy)
def test_a_prompt_whose_kv_is_corrupt_leaves_and_the_others_get_theirs(
    adapter: ModelAdapter, fusor: Fusor, asked: Asked, layer: int
) -> None:
    if layer == 0 and asked.policy == "hkvd":
        layer = 1  # its layer 0 is not read
    others = VARIED[:4]
    prompts = [prompt(adapter, one) for one in others]
    prompts.insert(2, damaged(adapter, asked, layer))
    got = fusor.batched_prefill(prompts)
    failed = got.pop(2)
    assert isinstance(failed, SpanCorruptError)
    assert failed.span.reader.key == "damaged"
    for one, outcome in zip(others, got, strict=True):
        assert_as_alone(fusor, one, outcome)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_batch_that_everybody_left_is_given_up(
    adapter: ModelAdapter, fusor: Fusor, layer: int
) -> None:
    for asked in (VARIED[3], VARIED[1]):
        prompts = [damaged(adapter, asked, layer) for _ in range(3)]
        with layer_forwards(adapter, 3) as last:
            got = fusor.batched_prefill(prompts)
        assert [type(one) for one in got] == [SpanCorruptError] * 3
        assert last == []
    assert_untouched(adapter)


@pytest.mark.parametrize("asked", [VARIED[1], VARIED[3]], ids=lambda a: a.policy)
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_caller_who_has_gone_leaves_alone(
    adapter: ModelAdapter, fusor: Fusor, asked: Asked, after: int
) -> None:
    gone = prompt(adapter, asked)
    prompts = [prompt(adapter, VARIED[0]), PackedPrompt(gone.ids, gone.request, 0, leaving(after))]
    first, second = fusor.batched_prefill(prompts)
    assert_as_alone(fusor, VARIED[0], first)
    if after == 5 and asked.policy == "reuse":
        assert_as_alone(fusor, asked, second)  # four layers are over before
    else:
        assert isinstance(second, RequestCancelled)


def leaving(after: int) -> Callable[[], None]:
    asked = iter(range(100))

    def check() -> None:
        if next(asked) >= after:
            raise RequestCancelled("gone")

    return check


def test_who_leaves_a_batch_keeps_nobodys_kv(adapter: ModelAdapter, fusor: Fusor) -> None:
    """Not even until garbage is collected: what holds the error holds no frame of the forward."""
    gc.collect()
    gc.disable()
    try:
        gone = prompt(adapter, VARIED[3])
        prompts = [
            prompt(adapter, VARIED[0]),
            PackedPrompt(gone.ids, gone.request, 0, leaving(2)),
            damaged(adapter, VARIED[1], 2),
        ]
        failed = fusor.batched_prefill(prompts)[1:]
        assert [type(one) for one in failed] == [RequestCancelled, SpanCorruptError]
        del failed
        assert not [one for one in gc.get_objects() if isinstance(one, BlendCache)]
    finally:
        gc.enable()


class Failing(HKVDPolicy):
    """Cannot choose for layer 2, while layer 1 is computed."""

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if layer == 2:
            raise ZeroDivisionError("no share of nothing")
        return super().select(layer, view, budget)


def test_rows_of_who_fails_are_computed_to_the_end_of_the_layer_and_no_further(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    asked, beside = Asked(110, ((5, 60),), "hkvd", 0.2), Asked(90, ((5, 60),), "reuse")
    request = tiny.request(asked.ids, asked.spans(adapter), Failing(), asked.ratio, "constant")
    prompts = [prompt(adapter, beside), PackedPrompt(asked.ids, request), prompt(adapter, beside)]
    with layer_forwards(adapter, 1) as second, layer_forwards(adapter, 2) as third:
        first, failed, last = fusor.batched_prefill(prompts)
    assert isinstance(failed, ZeroDivisionError)
    assert second == [35 + 55 + 11 + 35]
    assert third == [35 + 35]
    assert_as_alone(fusor, beside, first)
    assert_as_alone(fusor, beside, last)


def assert_untouched(adapter: ModelAdapter) -> None:
    stack = adapter.stack
    for module in (stack.base, *stack.layers):
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)
    assert stack.config._attn_implementation == "sdpa"


def test_the_model_is_untouched_afterwards(adapter: ModelAdapter, fusor: Fusor) -> None:
    expected = tiny.stock(adapter.model, VARIED[0].ids)
    (got,) = fusor.batched_prefill([prompt(adapter, VARIED[1])])
    assert_untouched(adapter)
    assert isinstance(got, Prefilled)
    with pytest.raises(KeyError), got.replayed(adapter.stack.base):
        raise KeyError
    assert_untouched(adapter)
    assert torch.equal(tiny.stock(adapter.model, VARIED[0].ids), expected)


def test_models_with_attention_of_their_own_are_not_packed() -> None:
    assert not Fusor(tiny.adapter(tiny.family("gemma2", attn_implementation="eager"))).packs
    assert not Fusor(tiny.adapter(tiny.family("stablelm"))).packs
    assert not Fusor(tiny.adapter(tiny.llama()), fast_attention=False).packs
