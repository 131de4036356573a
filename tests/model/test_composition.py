"""Chunks of hybrid models, composed at other places, give what a stock prefill computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import tiny
from blendrag.errors import UnsupportedModelError
from blendrag.fusor.gate import verify
from blendrag.fusor.loader import HeldKV
from blendrag.model import ModelAdapter, linear_layers
from blendrag.model.composition import Composition
from blendrag.model.linear_layers import LinearLayer, Map, MixerRun, RecurrentState, RunningStates
from blendrag.store.kv import ChunkKV

COMPOSED = [name for name, (_, config, _) in tiny.HYBRIDS.items() if hasattr(transformers, config)]
#: One for each kind of linear layer, one with experts, one of layers that have a mixer or an MLP only, and
#: one whose states were in its modules and whose outputs have no cache.
EACH_KIND = [
    n
    for n in COMPOSED
    if n in ("qwen3_5", "lfm2", "falcon_h1", "jamba", "nemotron_h", "recurrent_gemma")
]
#: What linear layers do to their states, by family.
KINDS = {
    "qwen3_5": {"matrix"}, "qwen3_next": {"matrix"}, "olmo_hybrid": {"matrix"}, "lfm2": {"convolution"},
    "lfm3": {"convolution"}, "falcon_h1": {"decay"}, "nemotron_h": {"decay"}, "bamba": {"decay"},
    "granitemoehybrid": {"decay"}, "jamba": {"decay"}, "recurrent_gemma": {"decay"}, "minimax": {"decay"},
}  # fmt: skip
IDS = tiny.random_ids(90, seed=1)
#: Where a prompt is cut: three runs that are computed, with chunks between and two that follow one another.
FIRST, SECOND, THIRD = (11, 40), (43, 70), (70, 72)


@pytest.fixture(scope="module", params=COMPOSED)
def adapter(request: pytest.FixtureRequest) -> ModelAdapter:
    return tiny.shared(request.param)


@pytest.fixture(scope="module")
def qwen() -> ModelAdapter:
    return tiny.shared("qwen3_5")


def of(adapter: ModelAdapter) -> Composition:
    assert adapter.composition is not None
    return adapter.composition


def records(composition: Composition, offset: int = 37) -> list[ChunkKV]:
    """Of the chunks behind what really precedes them, at other positions."""
    ids = IDS[0].tolist()
    return [composition.encode(ids[:a], ids[a:b], offset) for a, b in (FIRST, SECOND, THIRD)]


def composed(composition: Composition, kvs: Sequence[ChunkKV], offset: int = 37) -> torch.Tensor:
    """Logits of the tokens behind the last chunk."""
    cache, at = composition.new_cache(), 0
    for (start, end), kv in zip((FIRST, SECOND, THIRD), kvs, strict=True):
        if start > at:
            composition.forward(IDS[:, at:start], cache, at)
        composition.append(cache, composition.read(HeldKV(kv)), kv.tokens, -offset)
        at = end
    return composition.forward(IDS[:, at:], cache, at, IDS.shape[1] - at)


@torch.inference_mode()
def test_chunks_with_their_true_inputs_give_a_stock_prefills_logits(adapter):
    composition, stock = of(adapter), tiny.stock(adapter.model, IDS)[0, THIRD[1] :]
    differs = tiny.difference(composed(composition, records(composition)), stock)
    assert differs < 1e-4 * float(stock.abs().max())
    expected = KINDS.get(adapter.model.config.model_type.removesuffix("_text"))
    assert expected is None or expected == {*composition.kinds} - {"rotary", "position-free"}


@pytest.mark.parametrize("adapter", EACH_KIND, indirect=True)
def test_the_gate_passes(adapter):
    found = verify(adapter)
    assert (found.verdict, found.greedy_equal) == ("blendable", True), found.reason
    assert found.subset_logit_diff < found.allowed_logit_diff < found.perturbed_logit_diff / 100


@pytest.mark.parametrize("adapter", EACH_KIND, indirect=True)
def test_the_gate_sees_disturbed_states(adapter, monkeypatch):
    stock = Composition.append

    def forgetting(self: Composition, cache: Any, layers: Any, tokens: int, offset: int) -> None:
        stock(self, cache, layers, tokens, offset)
        for entry in self.entries:
            if entry.linear is not None:
                zero = RunningStates(
                    *(tuple(map(torch.zeros_like, s)) for s in entry.linear.held(cache))
                )
                entry.linear.put(cache, zero)

    monkeypatch.setattr(Composition, "append", forgetting)
    assert "composing chunks changes logits" in verify(adapter).reason


@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma"])
def test_the_gate_passes_in_bfloat16(name):
    found = verify(tiny.adapter(tiny.family(name, initializer_range=0.2).bfloat16()))
    assert found.blendable, found.reason


@torch.inference_mode()
def test_states_keep_their_dtype_beside_kv_in_another(qwen):
    composition = of(tiny.adapter(tiny.family("qwen3_5", initializer_range=0.2).bfloat16()))
    linear = [entry.linear for entry in composition.entries if entry.linear is not None]
    assert {state.dtype for layer in linear for state in layer.recurrent} == {torch.float32}
    assert composition.layout.dtype == "bfloat16"
    (kv, *_) = records(composition)
    record = linear[0].unpacked(kv.layers[0])
    assert torch.equal(linear[0].packed(record), kv.layers[0])
    assert (record.maps[0].dtype, record.tails[0].dtype) == (torch.float32, torch.bfloat16)


@torch.inference_mode()
@pytest.mark.usefixtures("empty_cache")
def test_a_state_that_is_no_linear_function_of_the_one_before_is_refused(monkeypatch):
    stock = MixerRun.run_from

    def squared(self: MixerRun, states: RunningStates) -> RunningStates:
        found = stock(self, states)
        return found._replace(recurrent=tuple(s + s * s for s in found.recurrent))

    monkeypatch.setattr(MixerRun, "run_from", squared)
    adapter = tiny.adapter(tiny.family("bamba", initializer_range=0.2))
    assert adapter.composition is None
    assert "is no linear function of the state before it" in (adapter.refusal or "")
    assert tiny.one_sentence(adapter.refusal or "")
    with pytest.raises(UnsupportedModelError, match="mode full"):
        adapter.require_blendable()


@pytest.mark.parametrize("kind", Map)
@pytest.mark.parametrize("shape", [(1, 2, 6, 4), (1, 2, 4, 6)])
def test_a_map_is_found_by_probes(kind, shape):
    state = RecurrentState(shape, torch.float32, kind)
    a = torch.randn(state.map_shape)
    found = state.map_of([state.applied(a, probe) for probe in state.probes()])
    assert torch.equal(found, a)


def test_the_heads_of_mamba_2_share_a_decay_each():
    composition = of(tiny.shared("bamba"))
    states = [s for e in composition.entries if e.linear is not None for s in e.linear.recurrent]
    assert {state.map_shape for state in states} == {(1, 8, 1, 1)}


def test_a_chunk_shorter_than_the_convolution_leaves_what_was_before_it():
    conv = linear_layers.ConvState((1, 1, 4), torch.float32)
    layer = LinearLayer(linear_layers.Place(0), torch.nn.Identity(), (), (conv,))
    tail = torch.tensor([[[0.0, 0.0, 8.0, 9.0]]])
    record = linear_layers.LayerRecord((), (), (tail,))
    before = RunningStates((), (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]),))
    assert layer.after(record, before, 2).conv[0].tolist() == [[[3, 4, 8, 9]]]
    assert layer.after(record, before, 4).conv[0].tolist() == tail.tolist()


def test_the_record_does_not_grow_with_the_chunk(qwen):
    layout = of(qwen).layout
    sizes = [layout.size_bytes(tokens) for tokens in (0, 100, 200)]
    assert sizes[0] > 0
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == 100 * layout.token_bytes


def test_a_model_that_was_converted_is_measured_again(qwen):
    adapter = tiny.adapter(tiny.family("bamba", initializer_range=0.2))
    before = adapter.identity
    adapter.model.bfloat16()
    assert adapter.identity.namespace != before.namespace
    assert adapter.layout.dtype == "bfloat16"


def test_a_disturbed_record_is_not_alike(qwen):
    composition = of(qwen)
    with torch.inference_mode():
        (kv, *_) = records(composition)
        wrong = composition.disturbed(kv, 0.1)
    assert composition.is_alike(0, kv.layers[0], kv.layers[0], 1e-3)
    assert not composition.is_alike(0, kv.layers[0], wrong.layers[0], 1e-3)
    assert replace(wrong, layers=kv.layers) == kv
