"""Attention over shared chunks gives each request what it would compute over KV of its own."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from blendrag.errors import InvalidInputError
from blendrag.model.positions import Repositioner
from blendrag.model.windows import Window
from blendrag.serving import shared_attention
from blendrag.serving.shared_attention import (
    HeldChunk,
    Overlays,
    RunningKV,
    SharedAttention,
    SharedChunk,
    private_kv,
)
from blendrag.store.kv import KVLayout, LayerShape, dtype_name

WIDTH = 16
SCALING = 0.3
#: A rotary layer and one without positions.
KINDS = ("rotary", "position-free")
ROTARY = LlamaRotaryEmbedding(
    LlamaConfig(hidden_size=WIDTH, num_attention_heads=1, max_position_embeddings=4096)
)
REPOSITIONER = Repositioner(KINDS, ("", ""), ROTARY, apply_rotary_pos_emb)
#: How far apart the ways may be, relative to values of magnitude 1.
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Case:
    """Requests over shared chunks, with random K and V of two KV heads."""

    def __init__(
        self, seed: int = 0, heads: int = 4, dtype: torch.dtype = torch.float32, tokens: int = 1000
    ) -> None:
        self.heads, self.dtype = heads, dtype
        self.random = torch.Generator().manual_seed(seed)
        layout = KVLayout((LayerShape(2, WIDTH),) * len(KINDS), dtype_name(dtype))
        self.overlays = Overlays(layout, tokens)
        self.requests: list[RunningKV] = []

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def chunk(self, tokens: int, start: int = 3) -> SharedChunk:
        return SharedChunk([self.normal(2, 2, tokens, WIDTH) for _ in KINDS], start)

    def join(self, held: list[HeldChunk], positions: list[int], room: int = 4) -> RunningKV:
        request = self.overlays.join(held, positions, room)
        for layer, buffer in enumerate(self.overlays.layers):
            # what no request wrote must not be read
            buffer.narrow(2, request.start, request.room).fill_(torch.nan)
            view = self.overlays.view(layer, request)
            view.copy_(self.normal(*view.shape))
        self.requests.append(request)
        return request

    def shared(self) -> SharedAttention:
        return SharedAttention(self.requests, self.overlays, REPOSITIONER)

    def step(
        self, shared: SharedAttention, layer: int = 0, window: Window | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A new token of every request: what it gets, and the reference.  [R, H, D]"""
        count = len(self.requests)
        query, key, value = (self.normal(count, heads, WIDTH) for heads in (self.heads, 2, 2))
        got = shared.attend(layer, query, key, value, SCALING, window)
        return got, self.reference(query, layer, window)

    def reference(self, query: torch.Tensor, layer: int, window: Window | None) -> torch.Tensor:
        rows = []
        for request, q in zip(self.requests, query, strict=True):
            kv, positions = private_kv(request, layer, self.overlays, REPOSITIONER)
            newest = request.positions[-1]
            first = 0 if window is None else window.first_seen(newest)
            seen = [i for i, at in enumerate(positions) if at >= first]
            keys, values = kv[:, :, seen].float().repeat_interleave(self.heads // 2, 1)  # [H, n, D]
            weights = (torch.einsum("hd,hnd->hn", q.float(), keys) * SCALING).softmax(-1)
            rows.append(torch.einsum("hn,hnd->hd", weights, values))
        return torch.stack(rows)


def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    got, expected = pair
    assert got.shape == expected.shape
    return float((got.float() - expected).abs().max())


def random_case(seed: int, heads: int, dtype: torch.dtype, rows: int) -> Case:
    """Prompts of some chunks at any places, with recomputed tokens and others around the chunks."""
    case, draw = Case(seed, heads, dtype, tokens=9000), random.Random(seed)
    chunks = [case.chunk(draw.choice([1, 7, 40]), draw.choice([0, 5])) for _ in range(4)]
    for _ in range(rows):
        at, held, own = draw.randrange(3), [], []
        for chunk in draw.choices(chunks, k=draw.randrange(5)):  # the same one may come twice
            tokens = chunk.layers[0].shape[2]
            share = draw.choice([0, 0.2, 1])
            stale = torch.tensor([draw.random() < share for _ in range(tokens)])
            held.append(HeldChunk(chunk, at, stale if share else None))
            gap = draw.randrange(3)
            own += [at + i for i in range(tokens + gap) if i >= tokens or stale[i]]
            at += tokens + gap
        case.join(held, [*own, at])
    return case


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shared_chunks_give_what_private_copies_give(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(CLOSE)))
    heads = 2 * data.draw(st.integers(1, 8))
    rows = data.draw(st.sampled_from([1, 2, 5, 32]))
    case = random_case(data.draw(st.integers(0, 1000)), heads, dtype, rows)
    windows = [None, Window(data.draw(st.integers(1, 120)), is_run=data.draw(st.booleans()))]
    shared = case.shared()
    for _ in range(2):
        shared.advance()
        for layer in range(len(KINDS)):
            for window in windows:
                assert error(case.step(shared, layer, window)) < CLOSE[dtype]


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_grow_and_come_and_go_keep_their_kv(seed: int) -> None:
    """Stretches grow where they are, move to gaps, and move with all others to longer buffers."""
    case, draw = random_case(seed, 4, torch.float32, 5), random.Random(seed)
    for _ in range(25):
        for request in case.requests:
            if len(request.positions) == request.room:
                case.overlays.grow(request, request.room + draw.randrange(1, 4))
        shared = case.shared()
        shared.advance()
        for layer in range(len(KINDS)):
            assert error(case.step(shared, layer)) < CLOSE[torch.float32]
        if draw.random() < 0.2:
            case.overlays.leave(case.requests.pop(draw.randrange(5)))
            case.join([], [draw.randrange(9)])
    stretches = sorted((each.start, each.start + each.room) for each in case.requests)
    assert all(end <= start for (_, end), (start, _) in pairwise(stretches))
    assert stretches[-1][1] <= case.overlays.layers[0].shape[2]
    for request in case.requests:
        case.overlays.leave(request)
    assert not case.overlays.layers[0].numel()


def two_requests(at: int = 30, stale: torch.Tensor | None = None) -> Case:
    """Two requests over one chunk, which the second one has at ``at``."""
    case = Case()
    chunk = case.chunk(20)
    case.join([HeldChunk(chunk, 3)], [0, 1, 2, 23])
    case.join([HeldChunk(chunk, at, stale)], [at + 20])
    return case


@pytest.mark.parametrize("other", [{"at": 3}, {"stale": torch.arange(20) < 15}])
def test_place_and_stale_entries_of_a_chunk_count(other: dict[str, object]) -> None:
    """A request with the chunk elsewhere, or with entries recomputed, gets another result."""
    results = []
    for changes in ({}, other):
        case = two_requests(**changes)
        shared = case.shared()
        shared.advance()
        got, expected = case.step(shared)
        assert error((got, expected)) < CLOSE[torch.float32]
        results.append(got)
    first, second = (results[0] - results[1]).abs().amax((1, 2)).tolist()
    assert first < CLOSE[torch.float32]
    assert second > 0.1


def test_parts_are_weighted_by_their_scores() -> None:
    case = two_requests()
    shared = case.shared()
    shared.advance()
    for kv in case.requests[0].held[0].chunk.layers:
        kv[0], kv[1] = 1.0, 1.0
    for layer in case.overlays.layers:
        layer[0], layer[1] = 0.0, 0.0
    none = torch.zeros(2, 2, WIDTH)
    got = shared.attend(1, torch.ones(2, 4, WIDTH), none, none, 1.0)
    assert got.min() > 0.99  # scores 16 and 0, values 1 and 0


@pytest.mark.parametrize("window", [None, Window(5)])
def test_a_chunk_hidden_from_all_rows_or_one_is_left_out(window: Window | None) -> None:
    case = Case()
    chunk = case.chunk(20)
    nothing = torch.ones(20, dtype=torch.bool)
    for stale in (nothing, None, nothing):
        case.join([HeldChunk(chunk, 2, stale)], [0, 1, 22])
    case.join([], list(range(9)))
    for requests in (case.requests, case.requests[::2], case.requests[3:]):
        case.requests = requests
        shared = case.shared()
        shared.advance()
        assert error(case.step(shared, window=window)) < CLOSE[torch.float32]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("way", ["kernel", "products in float32", "products in the dtype"])
def test_products_and_the_kernel_are_equal(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, way: str
) -> None:
    multiply_in_bfloat16(monkeypatch)
    if way != "products in the dtype":
        monkeypatch.setattr(shared_attention, "_multiplies", lambda dtype: False)
    monkeypatch.setattr(shared_attention, "PRODUCT_ROWS", 1000 if way == "kernel" else 0)
    case = random_case(1, 8, dtype, 5)
    shared = case.shared()
    shared.advance()
    for window in (None, Window(30), Window(30, is_run=True)):
        assert error(case.step(shared, window=window)) < CLOSE[dtype]


def multiply_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with products of bfloat16, however few rows there are."""
    monkeypatch.setattr(shared_attention, "PRODUCT_ROWS", 0)
    monkeypatch.setattr(shared_attention, "_multiplies", lambda dtype: dtype == torch.bfloat16)


def test_products_lose_nothing_to_the_mean_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of models with biases are far from zero, and so are their scores."""
    multiply_in_bfloat16(monkeypatch)
    case = Case(seed=2, dtype=torch.bfloat16)
    chunk = case.chunk(40, start=0)
    case.join([HeldChunk(chunk, 0)], [40])
    for kv in (*chunk.layers, *case.overlays.layers):
        kv[0] += 512
    shared = case.shared()
    shared.advance()
    assert error(case.step(shared, layer=1)) < CLOSE[torch.bfloat16]


def test_products_serve_rows_with_negative_scores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_bfloat16(monkeypatch)
    case = Case(dtype=torch.bfloat16)
    chunk = case.chunk(40, start=0)
    for keys, _ in chunk.layers:
        keys.abs_()[:, :20].neg_()
    case.join([HeldChunk(chunk, 0, torch.arange(40) >= 20)], [40])
    shared = case.shared()
    shared.advance()
    query, none = torch.ones(1, 4, WIDTH).bfloat16(), torch.zeros(1, 2, WIDTH).bfloat16()
    got = shared.attend(1, query, none, none, SCALING)
    assert error((got, case.reference(query, 1, None))) < CLOSE[torch.bfloat16]


@pytest.mark.parametrize("longest", [0, 12, 1000])
def test_short_and_long_overlays_are_attended_alike(
    monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    monkeypatch.setattr(shared_attention, "SHORT_TOKENS", longest)
    case = random_case(3, 4, torch.float32, 8)
    assert {len(request.positions) <= 12 for request in case.requests} == {True, False}
    shared = case.shared()
    for _ in range(2):
        shared.advance()
        for window in (None, Window(9)):
            assert error(case.step(shared, window=window)) < CLOSE[torch.float32]


def test_masks_and_tables_are_made_once_for_all_layers_and_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int | None] = []

    class Counted(shared_attention._ChunkCalls):
        def __init__(self, requests: object, window: Window | None, *args: object) -> None:
            made.append(window)
            super().__init__(requests, window, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_attention, "_ChunkCalls", Counted)
    case = random_case(2, 4, torch.float32, 3)
    shared = case.shared()
    for _ in range(3):
        shared.advance()
        for window in (None, None, Window(9), Window(9)):
            case.step(shared, 0, window)
    assert made == [None, *[Window(9)] * 3]  # what a window shows changes with every step


def test_a_request_that_leaves_makes_room_for_another() -> None:
    case = Case()
    first, second, third = (case.join([], list(range(300)), room=20) for _ in range(3))
    with pytest.raises(
        InvalidInputError, match="KV for 100 tokens of its own, and there is room for 40;"
    ):
        case.join([], list(range(80)), room=20)
    for request in (first, third, second):
        case.overlays.leave(request)
    assert case.overlays.join([], list(range(900)), room=100).start == 0


def test_a_request_without_room_for_its_next_token_is_refused() -> None:
    case = Case()
    case.join([], [0, 1], room=9)
    case.join([], [0, 1], room=1)
    shared = case.shared()
    shared.advance()
    with pytest.raises(InvalidInputError, match="used its room for 3 tokens"):
        shared.advance()
    assert [len(request.positions) for request in case.requests] == [3, 3]


def test_a_step_that_failed_can_be_repeated() -> None:
    case = two_requests()
    shared = case.shared()
    shared.advance()
    case.step(shared)
    before = [list(request.positions) for request in case.requests]
    shared.advance()
    shared.retract()
    assert [request.positions for request in case.requests] == before
    shared.advance()
    assert error(case.step(shared)) < CLOSE[torch.float32]


def test_without_memory_to_grow_all_stretches_keep_their_kv(monkeypatch):
    overlays = Overlays(KVLayout((LayerShape(1, WIDTH),) * 3, "float32"), 100)
    gone, *rest = requests = [overlays.join([], list(range(5)), 1) for _ in range(3)]
    held = [[torch.randn(2, 1, 5, WIDTH) for _ in range(3)] for _ in requests]
    for request, layers in zip(requests, held, strict=True):
        for layer, kv in enumerate(layers):
            overlays.view(layer, request).copy_(kv)
    overlays.leave(gone)
    made, allocate = itertools.count(), torch.Tensor.new_empty

    def new_empty(self, *args):
        if next(made) == 1:  # of the second layer
            raise RuntimeError("out of memory")
        return allocate(self, *args)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for again in range(2):
        if again:
            overlays.grow(rest[0], 50)
        else:
            with pytest.raises(RuntimeError, match="out of memory"):
                overlays.grow(rest[0], 50)
        for request, layers in zip(rest, held[1:], strict=True):
            for layer, kv in enumerate(layers):
                assert torch.equal(overlays.view(layer, request), kv)
