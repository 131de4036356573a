"""The same on a GPU: skipped where there is none."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import tiny
from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine, Options
from blendrag.fusor import Fusor
from blendrag.fusor.gate import verify
from blendrag.fusor.loader import LayerLoader, LoadedSpan
from blendrag.fusor.pack import PackedPrompt, Prefilled
from blendrag.fusor.staging import CudaRing
from blendrag.model import ModelAdapter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IDS = tiny.random_ids(90)


@pytest.fixture(scope="module")
def here() -> ModelAdapter:
    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def there(here: ModelAdapter) -> ModelAdapter:
    return tiny.adapter(copy.deepcopy(here.model).to("cuda"))


def spans(held_by: ModelAdapter) -> list[LoadedSpan]:
    """Two chunks, the second moved, noisy and cut off; held in host memory."""
    kv = tiny.kv_between(held_by, IDS[0].tolist(), 0, 30)
    whole = tiny.span(held_by, IDS, 30, 60, stored_at=7, noise=1.0)
    return [LoadedSpan(0, 30, tiny.Held(kv), 0, False), LoadedSpan(30, 55, whole.reader, 7, False)]


def test_layers_arrive_on_the_device_through_two_pinned_slots(here):
    asked = spans(here)
    buffers = [torch.zeros(2, 2, 90, 8, device="cuda") for _ in range(4)]
    loader = LayerLoader(buffers, [asked] * 4)
    assert isinstance(loader._ring, CudaRing)
    loader.start()
    for layer, buffer in enumerate(buffers):
        loader.synchronize(layer)
        for span in asked:
            stored = span.reader.kv.layers[layer][:, :, : span.tokens]
            assert torch.equal(buffer[:, :, span.start : span.end].cpu(), stored)
    assert [slot.is_pinned() for slot in loader._ring._slots] == [True, True]
    loader.close()
    assert loader._ring._slots == []


def test_a_slow_copy_is_waited_for_by_the_stream_and_not_by_the_host(here):
    """What is queued after synchronize() sees the layer, although the host went on before it came."""
    buffers = [torch.zeros(2, 2, 90, 8, device="cuda") for _ in range(4)]
    loader = LayerLoader(buffers, [spans(here)] * 4)
    with torch.cuda.stream(loader._ring._stream):
        torch.cuda._sleep(200_000_000)
    loader.start()
    loader.synchronize(0)
    assert not loader._ring._arrived[0].query()
    seen = buffers[0][:, :, :30].clone()
    assert torch.equal(seen.cpu(), spans(here)[0].reader.kv.layers[0])
    for layer in range(1, 4):
        loader.synchronize(layer)
    loader.close()


def test_a_loader_closed_half_way_ends(here):
    buffers = [torch.zeros(2, 2, 90, 8, device="cuda") for _ in range(4)]
    loader = LayerLoader(buffers, [spans(here)] * 4)
    loader.start()
    loader.synchronize(0)
    closer = threading.Thread(target=loader.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()


@pytest.mark.parametrize("policy", ["hkvd", "query", "blend", "random", "boundary"])
def test_a_blended_prefill_equals_that_of_the_cpu(here, there, policy):
    asked = spans(here)
    expected, cache, _ = tiny.fuse(Fusor(here), IDS, asked, policy, 0.3, "constant")
    got, moved, _ = tiny.fuse(Fusor(there), IDS.cuda(), asked, policy, 0.3, "constant")
    assert tiny.difference(got.cpu(), expected) < 1e-3
    for a, b in zip(cache.layers, moved.layers, strict=True):
        assert tiny.difference(b.keys.cpu(), a.keys) < 1e-3


@pytest.mark.parametrize("folded_bytes", [0, 1 << 20])
def test_prompts_packed_on_the_device_get_what_they_get_alone_on_the_cpu(
    here, there, folded_bytes, monkeypatch
):
    monkeypatch.setattr("blendrag.fusor.rows.FOLDED_BYTES", folded_bytes)
    asked = spans(here)
    policies = ("hkvd", "query", "random")
    prompts = [
        PackedPrompt(IDS.to(there.device), tiny.request(IDS, asked, policy, 0.3, "constant"), 4)
        for policy in policies
    ]
    fusor = Fusor(there)
    for policy, got in zip(policies, fusor.batched_prefill(prompts), strict=True):
        assert isinstance(got, Prefilled), got
        expected, cache, _ = tiny.fuse(Fusor(here), IDS, asked, policy, 0.3, "constant")
        assert tiny.difference(fusor.first_logits([got]).cpu()[0], expected[0, -1]) < 1e-3
        for a, b in zip(cache.layers, got.fusion.cache.layers, strict=True):
            assert tiny.difference(b.keys.cpu(), a.keys) < 1e-3


def test_a_profile_is_measured_and_predicts(there, tmp_path):
    with tiny.engine(there.model, tmp_path / "kv") as engine:
        measured = engine.profile().profile
    assert measured.device_bytes_per_s
    assert measured.prefill_s(200) > 0


def test_the_gate_holds(there):
    assert verify(there).blendable


def test_the_demo_answers_on_the_device(tmp_path):
    with BlendEngine(
        "demo", tmp_path / "kv", chunk_tokens=64, embedder="minilm-offline", device="cuda"
    ) as engine:
        engine.ingest([demo_corpus_path()])
        answer = engine.ask("Which sport does Anna Bell enjoy?", options=Options(mode="blend"))
    assert answer.text.strip(" .") == "skating"
    assert answer.metrics.reused_tokens > 0
