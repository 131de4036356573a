"""One forward over the stored chunks of a hybrid model gives what a stock prefill does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tiny
from blendrag.errors import CorruptKVError
from blendrag.fusor.chunk_repair import computed_runs
from blendrag.fusor.composer import Composer
from blendrag.fusor.loader import HeldKV, LoadedSpan, SpanCorruptError
from blendrag.model import ModelAdapter
from model.test_composition import EACH_KIND, FIRST, IDS, SECOND, THIRD, of, records

OFFSET = 37


@pytest.fixture(scope="module", params=EACH_KIND)
def adapter(request: pytest.FixtureRequest) -> ModelAdapter:
    return tiny.shared(request.param)


def spans_of(adapter: ModelAdapter) -> list[LoadedSpan]:
    chunks = zip((FIRST, SECOND, THIRD), records(of(adapter), OFFSET), strict=True)
    return [LoadedSpan(a, b, HeldKV(kv), OFFSET + a, exact=False) for (a, b), kv in chunks]


@torch.inference_mode()
def test_one_forward_gives_a_stock_prefills_answer(adapter):
    composer = Composer(adapter)
    assert composer.serves
    assert composer.observes
    assert composer.fast_attention
    given: dict[str, Any] = {
        "attention_mask": torch.ones_like(IDS), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 1,
        "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None,
    }  # fmt: skip
    prompt = composer.prefill(IDS, spans_of(adapter))
    with prompt.replayed(adapter.stack.base) as cache:
        assert cache.get_seq_length() == 0
        ours = adapter.model.generate(IDS, past_key_values=cache, **given)
    stock = adapter.model.generate(IDS, **given)
    assert torch.equal(ours.sequences, stock.sequences)
    for one, other in zip(ours.logits, stock.logits, strict=True):
        assert tiny.difference(one, other) < 1e-4 * float(other.abs().max())


def test_an_argument_is_cut_by_token_and_not_by_chance_of_its_size():
    """The check computes 12 tokens, and each layer has 12 gains."""
    made = tiny.adapter(tiny.family("qwen3_5", initializer_range=0.2))

    def with_gains(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "gains": torch.ones(1, 12)}

    def checked(forward: Any, *args: Any, gains: torch.Tensor, **kwargs: Any) -> Any:
        assert gains.shape == (1, 12)
        return forward(*args, **kwargs)

    for mixer in (entry.linear.mixer for entry in of(made).entries if entry.linear is not None):
        mixer.forward = partial(checked, mixer.forward)
        mixer.register_forward_pre_hook(with_gains, with_kwargs=True)
    assert Composer(made).serves


@torch.inference_mode()
@pytest.mark.parametrize("ratio", [0.45, 1.0])
def test_chunks_that_are_computed_again_give_a_stock_prefills_logits(adapter, ratio):
    """And those of a disturbed record do, too, where it is not used."""
    spans = spans_of(adapter)
    if ratio == 1:
        wrong = [of(adapter).disturbed(kv, 3.0) for kv in records(of(adapter), OFFSET)]
        spans = [replace(span, reader=HeldKV(kv)) for span, kv in zip(spans, wrong, strict=True)]
    prompt = Composer(adapter).prefill(IDS, spans, ratio, THIRD[1])
    tokens = [span.tokens for span in spans]
    assert 0 < sum(prompt.recomputed) <= round(ratio * sum(tokens))
    with prompt.replayed(adapter.stack.base) as cache:
        ours = adapter.model(input_ids=IDS, past_key_values=cache).logits[0, -1]
    stock = tiny.stock(adapter.model, IDS)[0, -1]
    assert tiny.difference(ours, stock) < 1e-4 * float(stock.abs().max())


def test_chunks_are_computed_up_to_the_tokens_of_most_attention_within_the_ratio():
    readers = [Mock(tokens=10)] * 4
    spans = [LoadedSpan(10 * i, 10 * i + 10, r, 0, exact=not i) for i, r in enumerate(readers)]
    attention = torch.zeros(45)
    attention[[5, 12, 27, 24, 31]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    assert computed_runs(spans, 0.01, attention) == {}
    assert computed_runs(spans, 0.1, attention) == {1: 3}
    assert computed_runs(spans, 8 / 30, attention) == {1: 3, 2: 5}  # 27 is too far
    assert computed_runs(spans, 11 / 30, attention) == {1: 3, 2: 8}
    assert computed_runs(spans, 13 / 30, attention) == {1: 3, 2: 8, 3: 2}
    assert computed_runs(spans, 1.0, attention) == {1: 10, 2: 10, 3: 10}
    assert computed_runs(spans, 0.4, None) == {2: 2, 3: 10}


@torch.inference_mode()
def test_the_models_own_attention_with_masks_gives_the_same(adapter):
    """The reference."""
    found = []
    for fast in (True, False):
        composer = Composer(adapter)
        composer.fast_attention = fast
        found.append(composer.prefill(IDS, spans_of(adapter)).output.last_hidden_state)
    assert tiny.difference(*found) < 1e-4 * float(found[1].abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("adapter", ["qwen3_5", "recurrent_gemma"], indirect=True)
def test_the_model_is_left_as_it_was(adapter):
    before = [dict(vars(module)) for module in adapter.model.modules()]
    prompt = Composer(adapter).prefill(IDS, spans_of(adapter))
    after = [dict(vars(module)) for module in adapter.model.modules()]
    assert all(a.keys() == b.keys() for a, b in zip(before, after, strict=True))
    assert all(a.get("forward") == b.get("forward") for a, b in zip(before, after, strict=True))
    assert not any(module._forward_pre_hooks for module in adapter.model.modules())
    assert not any("update" in vars(layer) for layer in prompt.cache.layers)


def test_a_chunk_whose_bytes_are_damaged_ends_the_prefill_and_is_named():
    adapter = tiny.adapter(tiny.family("bamba", initializer_range=0.2))
    with torch.inference_mode():
        first, second, third = spans_of(adapter)
        broken = tiny.Held(records(of(adapter))[1], fails_at=2)
        second = LoadedSpan(second.start, second.end, broken, second.stored_position, exact=False)
        with pytest.raises(SpanCorruptError) as raised:
            Composer(adapter).prefill(IDS, [first, second, third])
    assert raised.value.span is second
    assert isinstance(raised.value.__cause__, CorruptKVError)


def test_a_model_that_one_forward_does_not_serve_is_composed_in_order(tmp_path):
    """Zaya's layers of attention keep running states, too."""
    with tiny.engine(tiny.family("zaya", initializer_range=0.2), tmp_path) as made:
        made.ingest([tiny.document(0)])
        assert made.generate(tiny.prompt(made, 0)).metrics.reused_tokens
        assert not made.kv_namespace.model.composer.serves
