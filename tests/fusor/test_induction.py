"""Heads that copy are found by their attention, and their stored keys stay where they are."""

from __future__ import annotations

import pytest
import torch

import tiny
from blendrag.fusor import Fusor, induction
from blendrag.fusor.induction import copying_heads
from blendrag.fusor.pack import PackedPrompt, Prefilled
from fusor.two_chunks import EVERYWHERE, IDS, exact_spans


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_heads_copy_that_attend_to_what_followed_a_random_token(name, monkeypatch):
    """Against stock eager attention: grouped heads, windows, attention sinks, latent KV."""
    for name_of in ("recall", "remember"):
        monkeypatch.setattr(induction.measurements, name_of, lambda *_: None)
    adapter = tiny.adapter(tiny.family(name))
    given: list[torch.Tensor] = []
    run = adapter.stack.base.forward

    def noted(*args, **kwargs):
        given.append(kwargs["input_ids"])
        return run(*args, **kwargs)

    monkeypatch.setattr(adapter.stack.base, "forward", noted)
    copying_heads(adapter)
    ids = given[0]
    assert torch.equal(ids[0, 16:63], ids[0, 64:])
    adapter.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = adapter.model(ids, output_attentions=True, use_cache=False).attentions
    rows = torch.arange(64, ids.shape[1])
    shares = [each[0][:, rows, rows - 47].mean(-1) for each in attentions]  # [H]
    by_head = [
        each.view(shape.kv_heads, -1).amax(-1)
        for each, shape in zip(shares, adapter.layout.layers, strict=True)
    ]
    limit = float(torch.cat(by_head).median())
    monkeypatch.setattr(induction, "COPIES_FROM", limit - 1e-7)
    expected = {
        layer: (each >= limit).nonzero()[:, 0].tolist()
        for layer, each in enumerate(by_head)
        if (each >= limit).any()
    }
    assert {layer: heads.tolist() for layer, heads in copying_heads(adapter).items()} == expected


def test_heads_that_copy_are_measured_once(monkeypatch):
    monkeypatch.setattr(induction, "_VERSION", "of this test")
    monkeypatch.setattr(induction, "COPIES_FROM", 0.0)
    adapter = tiny.adapter(tiny.family("llama"))
    measured = copying_heads(adapter)
    assert measured
    monkeypatch.setattr(induction, "scouting", None)  # nothing is measured any more
    for layer, heads in copying_heads(adapter).items():
        assert torch.equal(heads, measured.pop(layer))
    assert not measured


def test_heads_that_copy_are_looked_up_again_for_other_weights(monkeypatch):
    adapter, asked = tiny.adapter(tiny.llama()), []
    monkeypatch.setattr(
        "blendrag.fusor.fusor.copying_heads", lambda given: asked.append(given) or {}
    )
    fusor = Fusor(adapter)
    assert adapter.identity
    for _ in range(2):
        fusor.prepare()
    assert len(asked) == 1
    with torch.no_grad():
        adapter.model.lm_head.weight.mul_(2)
    assert adapter.identity  # as an engine reads it when it plans a request
    fusor.prepare()
    assert len(asked) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_keys_of_heads_that_copy_are_not_moved(packed, monkeypatch):
    adapter = tiny.adapter(tiny.family("llama"))
    monkeypatch.setattr(
        "blendrag.fusor.fusor.copying_heads", lambda adapter: {2: torch.tensor([1])}
    )
    fusor, spans = Fusor(adapter), exact_spans(adapter, 1.0)
    caches = []
    for policy in ("reuse", "query+shift"):
        if packed:
            asked = tiny.request(IDS, spans, policy, 0.3)
            (done,) = fusor.batched_prefill([PackedPrompt(IDS, asked)])
            assert isinstance(done, Prefilled)
            fusion, cache = done.fusion, done.fusion.cache
        else:
            _, cache, fusion = tiny.fuse(fusor, IDS, spans, policy, 0.3)
        caches.append(cache)
    stored, moved = caches
    stale = torch.ones(IDS.shape[1], dtype=torch.bool)
    stale[fusion.recomputed[2]] = False
    at = EVERYWHERE[stale[EVERYWHERE]]
    for layer in (1, 2, 3):
        for part in ("keys", "values"):
            one, other = (getattr(cache.layers[layer], part)[0][:, at] for cache in (stored, moved))
            unmoved = [head for head in range(len(one)) if torch.equal(one[head], other[head])]
            assert unmoved == ([1] if (layer, part) == (2, "keys") else [])
