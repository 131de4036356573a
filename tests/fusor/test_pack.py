"""Several prompts in one forward: each gets what it gets alone, whatever the others do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tiny
from blendrag.errors import RequestCancelled
from blendrag.fusor import BlendCache, Fusor, PackedPrompt, Prefilled
from blendrag.fusor.loader import LoadedSpan, SpanCorruptError
from blendrag.fusor.selection import LayerView
from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.model import ModelAdapter
from fusor.two_chunks import assert_same_kv, assert_untouched, rows_through

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
        stored = {"exact": True} if self.exact else {"stored_at": 1, "noise": 0.5}
        return [tiny.span(adapter, self.ids, a, b, **stored) for a, b in self.chunks]  # type: ignore[arg-type]


#: Longer than twice the sliding windows, of different lengths, with and without chunks.
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
    Asked(88, ((5, 40), (43, 71)), "query+shift", 0.3, "linear"),
)
HKVD, QUERY, _, BOTH, REUSE, *_ = VARIED


def prompt(
    adapter: ModelAdapter,
    asked: Asked,
    spans: Sequence[Any] | None = None,
    check: Callable[[], None] | None = None,
) -> PackedPrompt:
    spans = asked.spans(adapter) if spans is None else spans
    request = tiny.request(asked.ids, spans, asked.policy, asked.ratio, asked.schedule)
    return PackedPrompt(asked.ids, request, NEW_TOKENS, check)


def assert_as_alone(fusor: Fusor, asked: Asked, got: Prefilled | Exception) -> None:
    """Logits, KV and counts are those of a forward of this prompt alone that keeps all rows."""
    assert isinstance(got, Prefilled), got
    alone = prompt(fusor.adapter, asked)
    logits, cache, fusion = fusor.prefill(alone.ids, alone.request, NEW_TOKENS, logits_to_keep=0)
    scale = max(1.0, float(logits.abs().max()))
    assert tiny.difference(fusor.first_logits([got])[0], logits[0, -1]) < 1e-4 * scale
    assert_same_kv(got.fusion.cache, cache)
    assert got.fusion.counts() == fusion.counts()


@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "gpt_neox",
        "gemma4",
        "deepseek_v2",
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_prompts_in_one_forward_get_what_they_get_alone(name):
    fusor = Fusor(tiny.adapter(tiny.family(name)))
    assert fusor.packs
    outcomes = fusor.batched_prefill([prompt(fusor.adapter, asked) for asked in VARIED])
    for asked, got in zip(VARIED, outcomes, strict=True):
        assert_as_alone(fusor, asked, got)
    prefilled = [one for one in outcomes if isinstance(one, Prefilled)]
    for logits, one in zip(fusor.first_logits(prefilled), prefilled, strict=True):
        assert tiny.difference(logits, fusor.first_logits([one])[0]) < 1e-4


def test_prompts_share_each_layer_the_scout_pass_and_the_peek(fusor):
    asked = [Asked(80 + i, ((5, 60),), "query", 0.2) for i in range(3)]
    asked += [Asked(70, ((5, 60),), "reuse"), Asked(90, ((5, 60),), "hkvd", 0.2)]
    prompts = [prompt(fusor.adapter, one) for one in asked]
    layer, last = fusor.adapter.stack.layers[1], fusor.adapter.stack.layers[3]
    modules = [layer.self_attn.k_proj, layer.mlp, last.self_attn.k_proj, last.mlp]
    with rows_through(modules) as (keys, rows, last_keys, last_rows):
        outcomes = fusor.batched_prefill(prompts)
    scout = sum(one.tokens - 55 for one in asked if one.policy == "query")
    blended = sum(one.tokens - 55 for one in asked) + 4 * 11
    assert rows == [scout, blended]
    assert keys == [scout, 90, blended]
    assert last_keys == [blended, 5]
    assert last_rows == [5]  # each prompt's last
    for one, got in zip(asked, outcomes, strict=True):
        assert_as_alone(fusor, one, got)


def greedy(adapter: ModelAdapter, ids: torch.Tensor, cache: Any, n: int = NEW_TOKENS) -> Any:
    tokens = adapter.model.generate(
        ids, past_key_values=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False
    )
    return tokens[0, ids.shape[1] :]


def test_an_answer_longer_than_its_room_harms_no_other(fusor):
    first, second = fusor.batched_prefill([prompt(fusor.adapter, BOTH) for _ in range(2)])
    assert isinstance(first, Prefilled)
    assert isinstance(second, Prefilled)
    before = [layer.keys.clone() for layer in second.fusion.cache.layers]
    with first.replayed(fusor.adapter.stack.base) as cache:
        greedy(fusor.adapter, BOTH.ids, cache, 40)
    for layer, keys in zip(second.fusion.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


# -- a prompt leaves ----------------------------------------------------------------------------


def damaged(adapter: ModelAdapter, asked: Asked, layer: int) -> PackedPrompt:
    spans = [
        replace(span, reader=tiny.Held(span.reader.kv, "damaged", layer))  # type: ignore[attr-defined]
        for span in asked.spans(adapter)
    ]
    return prompt(adapter, asked, spans)


def leaving(after: int) -> Callable[[], None]:
    calls = iter(range(100))

    def check() -> None:
        if next(calls) >= after:
            raise RequestCancelled("gone")

    return check


@pytest.mark.parametrize(("asked", "layer"), [(HKVD, 3), (QUERY, 0), (BOTH, 1)])
def test_a_prompt_whose_kv_is_corrupt_leaves_and_the_others_get_theirs(fusor, asked, layer):
    others = VARIED[1:4]
    prompts = [prompt(fusor.adapter, one) for one in others]
    prompts.insert(2, damaged(fusor.adapter, asked, layer))
    got = fusor.batched_prefill(prompts)
    failed = got.pop(2)
    assert isinstance(failed, SpanCorruptError)
    assert failed.span.reader.key == "damaged"
    for one, outcome in zip(others, got, strict=True):
        assert_as_alone(fusor, one, outcome)


@pytest.mark.parametrize(("prompts", "layer"), [(1, 1), (3, 3)])
def test_a_pack_that_all_prompts_left_ends(fusor, prompts, layer):
    for asked in (BOTH, QUERY):
        leavers = [damaged(fusor.adapter, asked, layer) for _ in range(prompts)]
        with rows_through([fusor.adapter.stack.layers[3].mlp]) as (last,):
            got = fusor.batched_prefill(leavers)
        assert [type(one) for one in got] == [SpanCorruptError] * prompts
        assert last == []
    assert_untouched(fusor.adapter)


@pytest.mark.parametrize("asked", [QUERY, REUSE], ids=lambda asked: asked.policy)
@pytest.mark.parametrize("after", [0, 5])
def test_a_caller_who_has_gone_leaves_alone(fusor, asked, after):
    prompts = [prompt(fusor.adapter, HKVD), prompt(fusor.adapter, asked, check=leaving(after))]
    first, second = fusor.batched_prefill(prompts)
    assert_as_alone(fusor, HKVD, first)
    if after == 5 and asked is REUSE:
        assert_as_alone(fusor, asked, second)  # its four layers are over before
    else:
        assert isinstance(second, RequestCancelled)


def test_errors_of_prompts_hold_no_kv(fusor):
    """Not even until garbage is collected: the errors hold no frame of the forward."""
    gc.collect()
    gc.disable()
    try:
        prompts = [
            prompt(fusor.adapter, HKVD),
            prompt(fusor.adapter, BOTH, check=leaving(2)),
            damaged(fusor.adapter, QUERY, 2),
        ]
        failed = fusor.batched_prefill(prompts)[1:]
        assert [type(one) for one in failed] == [RequestCancelled, SpanCorruptError]
        assert not [one for one in gc.get_objects() if isinstance(one, BlendCache)]
    finally:
        gc.enable()


class Failing(HKVDPolicy):
    """Fails to choose for layer 2, while layer 1 is computed."""

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if layer == 2:
            raise ZeroDivisionError("no share of nothing")
        return super().select(layer, view, budget)


def test_rows_of_a_prompt_that_fails_are_computed_to_the_end_of_the_layer(fusor):
    asked, other = Asked(110, ((5, 60),), "hkvd", 0.2), Asked(90, ((5, 60),), "reuse")
    request = tiny.request(
        asked.ids, asked.spans(fusor.adapter), Failing(), asked.ratio, "constant"
    )
    prompts = [
        prompt(fusor.adapter, other),
        PackedPrompt(asked.ids, request),
        prompt(fusor.adapter, other),
    ]
    with rows_through([fusor.adapter.stack.layers[i].mlp for i in (1, 2)]) as (second, third):
        first, failed, last = fusor.batched_prefill(prompts)
    assert isinstance(failed, ZeroDivisionError)
    assert second == [35 + 55 + 11 + 35]
    assert third == [35 + 35]
    assert_as_alone(fusor, other, first)
    assert_as_alone(fusor, other, last)


def test_the_model_is_untouched_afterwards(fusor):
    expected = tiny.stock(fusor.adapter.model, HKVD.ids)
    (got,) = fusor.batched_prefill([prompt(fusor.adapter, QUERY)])
    assert_untouched(fusor.adapter)
    assert isinstance(got, Prefilled)
    with pytest.raises(KeyError), got.replayed(fusor.adapter.stack.base):
        raise KeyError
    assert_untouched(fusor.adapter)
    assert torch.equal(tiny.stock(fusor.adapter.model, HKVD.ids), expected)


def test_models_whose_attention_takes_masks_are_not_packed():
    assert not Fusor(tiny.adapter(tiny.family("gemma2", attn_implementation="eager"))).packs
    assert not Fusor(tiny.adapter(tiny.family("stablelm"))).packs
    assert not Fusor(tiny.adapter(tiny.llama()), fast_attention=False).packs
