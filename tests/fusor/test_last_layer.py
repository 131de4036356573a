"""Of the last layer nothing but its K/V and the row of the last token is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.pack import PackedPrompt, Prefilled
from blendrag.model import ModelAdapter
from fusor.two_chunks import FRESH, IDS, LAYERS, N, exact_spans

LAST = LAYERS - 1
POLICIES = ("hkvd", "hkvd-once", "query", "query+hkvd", "random", "boundary(8)", "reuse")


@contextmanager
def rows_of(module: torch.nn.Module) -> Iterator[list[int]]:
    """Of every forward of ``module``."""
    seen: list[int] = []
    hook = module.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    try:
        yield seen
    finally:
        hook.remove()


def assert_alike(fusor: Fusor, policy: str, ratio: float = 0.3) -> None:
    """The last row's logits and all K/V, against a forward that takes all rows to the end."""
    spans = exact_spans(fusor.adapter, 1.0)
    want, kept, whole = tiny.fuse(fusor, IDS, spans, policy, ratio, all_rows=True)
    got, cache, fusion = tiny.fuse(fusor, IDS, spans, policy, ratio)
    assert got.shape[1] == 1
    scale = max(1.0, float(want.abs().max()))
    assert tiny.difference(got[0, 0], want[0, -1]) < 1e-4 * scale
    for one, other in zip(cache.layers, kept.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        assert tiny.difference(one.keys, other.keys) < 1e-4
        assert tiny.difference(one.values, other.values) < 1e-4
    assert fusion.counts() == whole.counts()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fast", [True, False])
def test_the_last_token_is_as_if_all_rows_went_on(
    adapter: ModelAdapter, policy: str, fast: bool
) -> None:
    assert_alike(Fusor(adapter, fast_attention=fast), policy)
    assert_alike(Fusor(adapter, fast_attention=fast, force_masks=True), policy, ratio=1.0)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_in_every_family(name: str) -> None:
    fusor = Fusor(tiny.adapter(tiny.family(name)))
    assert_alike(fusor, "hkvd")
    assert_alike(fusor, "query")


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("policy", ["hkvd", "query", "reuse"])
def test_of_a_model_whose_first_or_second_layer_is_the_last(layers: int, policy: str) -> None:
    assert_alike(Fusor(tiny.adapter(tiny.llama(num_hidden_layers=layers))), policy)


@pytest.mark.parametrize("policy", ["hkvd", "query", "blend", "reuse", "full"])
@pytest.mark.usefixtures("ends_early")
def test_the_last_layer_computes_keys_of_all_rows_and_no_more_than_one(
    adapter: ModelAdapter, fusor: Fusor, policy: str
) -> None:
    layers, spans = adapter.stack.layers, exact_spans(adapter, 1.0)
    with rows_of(layers[LAST].self_attn.k_proj) as keys, rows_of(layers[LAST].mlp) as seen:
        _, _, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.2)
    scout = [FRESH] if policy == "blend" else []  # query's ends before
    assert seen == [*scout, 1]
    assert keys == [*scout, fusion.counts().rows[LAST] - sum(scout), 1]


def test_within_fuse_all_rows_go_on_unless_it_is_said_that_nobody_wants_them(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    asked = tiny.request(IDS, exact_spans(adapter), "boundary(8)")
    rows = []
    for given in ({}, {"last_row_only": True}):
        cache = fusor.new_cache(N, 4)
        with adapter.lock, torch.inference_mode(), fusor.fuse(cache, asked, **given) as fusion:
            out = adapter.model(input_ids=IDS, past_key_values=cache, logits_to_keep=0)
        rows.append(out.logits.shape[1])
    assert rows == [fusion.counts().rows[LAST], 1]


def test_of_prompts_together_one_row_each_goes_on(adapter: ModelAdapter, fusor: Fusor) -> None:
    def prompt(policy: str, tokens: int) -> PackedPrompt:
        ids: Any = IDS[:, :tokens]
        return PackedPrompt(ids, tiny.request(ids, exact_spans(adapter, 1.0), policy, 0.2), 4)

    prompts = [prompt("boundary(4)", 140), prompt("reuse", N), prompt("hkvd", 145)]
    layer = adapter.stack.layers[LAST]
    with rows_of(layer.self_attn.k_proj) as keys, rows_of(layer.mlp) as seen:
        got = fusor.batched_prefill(prompts)
    assert seen == [3]
    counts = [one.fusion.counts() for one in got if isinstance(one, Prefilled)]
    assert keys == [sum(one.rows[LAST] for one in counts), 3]
