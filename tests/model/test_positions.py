"""A key moved to another position is the key that the model computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from blendrag.model import ModelAdapter, positions
from blendrag.model.kv_compare import content, magnitude, misfit
from blendrag.model.positions import PROBE_OFFSETS, Rotation, apply_rotary, rotary_table

IDS = tiny.random_ids(20, seed=3)[0].tolist()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
DYNAMIC = rope("dynamic", factor=4.0)
LONGROPE = rope(
    "longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=4.0,
    original_max_position_embeddings=128,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("llama", {}),
    "partial rotary in one fused projection": ("gpt_neox", {}),
    "partial rotary sliced by the attention": ("stablelm", {}),
    "interleaved": ("cohere", {}),
    "interleaved and partial": ("glm4", {}),
    "two tables": ("gemma3_text", {}),
    "some layers position-free": ("smollm3", {}),
    "yarn": ("llama", YARN),
    "llama3 scaling": ("llama", LLAMA3),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelAdapter:
    name, changes = MODELS[request.param]
    return tiny.adapter(tiny.family(name, initializer_range=0.2, **changes))


@torch.no_grad()
def keys_at(adapter: ModelAdapter, offset: int) -> list[torch.Tensor]:
    return [layer.keys[0].clone() for layer in adapter.prefill_at(IDS, offset).layers]


def moved(adapter: ModelAdapter, keys: torch.Tensor, layer: int, delta: Any) -> torch.Tensor:
    """A copy of ``keys`` ``[Hkv, n, D]`` moved by one offset or by one per token."""
    offsets = torch.as_tensor(delta).expand(keys.shape[-2])
    rotated = keys.clone()
    adapter.repositioner.rotate_(rotated, layer, adapter.repositioner.tables(offsets))
    return rotated


def close(a: torch.Tensor, b: torch.Tensor, share: float = 1e-3) -> bool:
    return tiny.difference(a, b) < share * float(b.abs().max())


def test_keys_moved_by_an_offset_per_token_equal_keys_computed_there(model):
    offsets = torch.tensor([0, 5, -200, 1100] * 5)
    keys = keys_at(model, 200)
    rotated = [moved(model, each, i, offsets) for i, each in enumerate(keys)]
    for offset in (0, 5, -200, 1100):
        at = (offsets == offset).nonzero().flatten()
        there = [each[:, at] for each in keys_at(model, 200 + offset)]
        assert all(close(a[:, at], b) for a, b in zip(rotated, there, strict=True)), offset
    assert not all(close(a[:, at], b, 1e-2) for a, b in zip(keys, there, strict=True))


def test_a_rotation_by_its_parts_equals_the_models_own(model):
    moves = model.repositioner
    keys, offsets = (
        torch.randn(2, 4, model.layout.layers[0].head_dim),
        torch.tensor([0, 5, -200, 1100]),
    )
    for name in {moves.table_names[i] for i, kind in enumerate(moves.kinds) if kind == "rotary"}:
        table = rotary_table(moves.rotary, name, offsets)
        cos, sin, half = Rotation.of(moves.apply, table, keys.shape[-1])
        by_parts = keys * cos + (keys @ half) * sin
        assert close(by_parts, apply_rotary(moves.apply, keys, table), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_turned_in_place_are_those_of_the_models_own_function_to_the_last_bit(model, dtype):
    moves = model.repositioner
    offsets = torch.arange(70) * 17
    tables = moves.tables(offsets)
    for layer, kind in enumerate(moves.kinds):
        if kind != "rotary":
            continue
        shape = model.layout.layers[layer]
        keys = torch.randn(2, shape.kv_heads, 70, shape.head_dim).to(dtype)
        expected = apply_rotary(moves.apply, keys, tables[moves.table_names[layer]]).to(dtype)
        turned = keys.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(positions, "HALVES_VALUES", keys.numel() // 3)  # in several blocks
            moves.rotate_(turned, layer, tables)
        assert torch.equal(turned, expected), layer


@torch.no_grad()
def test_values_and_position_free_keys_do_not_move(model):
    near, far = (model.prefill_at(IDS, offset).layers for offset in (0, 900))
    kinds = model.repositioner.kinds
    for layer, (here, there) in enumerate(zip(near, far, strict=True)):
        assert close(here.values, there.values)
        is_free = kinds[layer] == "position-free"
        assert close(here.keys, there.keys) == is_free, layer
        if is_free:
            assert torch.equal(moved(model, here.keys[0], layer, 900), here.keys[0])


def test_positions_are_measured_in_one_forward_as_each_reads_all_weights():
    made, forwards = tiny.llama(), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    made.model.register_forward_pre_hook(count)
    assert tiny.adapter(made).refusal is None
    assert forwards == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keys_are_rotated_in_float32_and_rounded_once(dtype):
    adapter = tiny.adapter(tiny.llama().to(dtype))
    torch.manual_seed(1)
    keys = torch.randn(2, 30, 8).to(dtype)
    offsets = torch.arange(30) * 40
    table = adapter.repositioner.tables(offsets)[""]
    assert table.cos.dtype == torch.float32
    wide = keys.double()
    turned = torch.cat((-wide[..., 4:], wide[..., :4]), -1)
    expected = wide * table.cos.double()[0] + turned * table.sin.double()[0]
    rotated = moved(adapter, keys, 0, offsets)
    error = (rotated.double() - expected).abs() / expected.abs().clamp_min(0.1)
    assert float(error.max()) <= 0.51 * torch.finfo(dtype).eps


def test_an_error_of_the_models_function_is_not_taken_for_partial_rotary(adapter):
    def broken(*args: Any) -> Any:
        raise RuntimeError("boom")

    tables = adapter.repositioner.tables(torch.arange(3))
    with pytest.raises(RuntimeError, match="boom"):
        apply_rotary(broken, torch.randn(2, 3, 8), tables[""])


# -- large biases -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_with_large_biases_are_rotary(dtype):
    adapter = tiny.adapter(tiny.large_biases().to(dtype))
    assert adapter.refusal is None, adapter.refusal
    assert set(adapter.repositioner.kinds) == {"rotary"}
    keys, there = keys_at(adapter, 0)[0].float(), keys_at(adapter, 7)[0].float()
    assert float((there - keys).norm() / keys.norm()) < 6e-2  # a norm over all sees no rotation


def turning(speed: float) -> Any:
    """Large biases; the first layer turns ``speed`` times as fast as the rotary table says."""
    model = tiny.large_biases()

    def turned(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, _ = kwargs["position_embeddings"]
        table = model.model.rotary_emb(cos, kwargs["position_ids"] * speed)
        return args, {**kwargs, "position_embeddings": table}

    model.model.layers[0].self_attn.register_forward_pre_hook(turned, with_kwargs=True)
    return model


def shifting(name: str) -> Any:
    """Large biases; the first layer's projection of that name adds the cosine of the position."""
    model = tiny.large_biases(values=300.0)
    attention, seen = model.model.layers[0].self_attn, {}
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    getattr(attention, name).register_forward_hook(
        lambda module, args, out: out + 2 * seen["position_ids"].float().cos()[..., None].to(out)
    )
    return model


def test_keys_with_large_biases_and_no_rotary_are_position_free():
    kinds = tiny.adapter(turning(0.0).to(torch.bfloat16)).repositioner.kinds
    assert kinds == ("position-free", "rotary", "rotary", "rotary")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "how", "what"),
    [
        (turning, 0.5, "keys"),
        (turning, 1.1, "keys"),
        (shifting, "k_proj", "keys"),
        (shifting, "v_proj", "values"),
    ],
)
def test_other_changes_with_position_behind_large_biases_are_refused(dtype, make, how, what):
    refusal = tiny.adapter(make(how).to(dtype)).refusal or ""
    assert refusal.startswith(f"the {what} of layer 0 change with position")


@pytest.mark.parametrize("layer", [0, 2])
def test_a_model_without_positions_may_not_depend_on_the_order_of_tokens_in_any_layer(layer):
    model = tiny.family("bloom")

    def ordered(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        states = args[0].clone()
        states[..., 0] += torch.arange(states.shape[1]).cos()
        return (states, *args[1:]), kwargs

    model.transformer.h[layer].register_forward_pre_hook(ordered, with_kwargs=True)
    assert "places tokens by their order" in (tiny.adapter(model).refusal or "")


def test_attention_that_depends_on_the_position_is_refused():
    """BEAM's queries are scaled by their positions; only KV of its last layer may come after that."""
    model = tiny.beam(["full_attention", "sliding_attention"] * 2, initializer_range=0.2)
    refusal = tiny.adapter(model).refusal or ""
    assert refusal.startswith("the attention below layer 1 depends on where")


def test_a_misfit_equals_a_loop_over_channels():
    torch.manual_seed(0)
    tensor, others, error = torch.randn(3, 2, 6, 4)  # [H, n, D]
    channels = []
    for d in range(4):
        of_heads = []
        for h in range(2):
            carries = ((tensor - others)[h, :, d].square().mean() / 2).sqrt()
            allowed = 0.1 * carries + 0.01 * tensor[h, :, d].abs().max()
            of_heads.append(float(error[h, :, d].square().mean() / allowed**2))
        channels.append(sum(of_heads) / 2)
    allowed = 0.1 * content(tensor, others) + 0.01 * magnitude(tensor)
    found = misfit(tensor + error, tensor, allowed)
    assert found.overall == pytest.approx((sum(channels) / 4) ** 0.5, rel=1e-4)
    assert found.worst_channel == pytest.approx(max(channels) ** 0.5, rel=1e-4)


def test_a_misfit_fits_up_to_the_allowance_in_every_channel():
    tensor, allowed = torch.randn(2, 8, 4096), torch.ones(2, 1, 4096)
    for error, fits in ((0.0, True), (0.9, True), (1.1, False), (float("nan"), False)):
        assert misfit(tensor + error, tensor, allowed).fits == fits
    one = tensor.clone()
    one[..., 5] += 11.0
    assert misfit(one, tensor, allowed).overall < 1.0
    assert not misfit(one, tensor, allowed).fits
    zeros = torch.zeros(2, 8, 4)
    assert misfit(zeros, zeros, torch.zeros(2, 1, 4)).fits
    assert not misfit(zeros + 1, zeros, torch.zeros(2, 1, 4)).fits


# -- tables that depend on the length -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "limit"), [(DYNAMIC, 512), (LONGROPE, 128), ({}, None), (YARN, None)]
)
def test_only_length_dependent_tables_have_a_blend_limit(changes, limit):
    adapter = tiny.adapter(tiny.llama(max_position_embeddings=512, **changes))
    assert adapter.refusal is None, adapter.refusal
    assert adapter.blend_limit_tokens == limit


def test_models_with_a_short_context_are_probed():
    for context in (64, 512):
        assert context < max(PROBE_OFFSETS)
        short = tiny.adapter(tiny.llama(max_position_embeddings=context))
        assert set(short.repositioner.kinds) == {"rotary"}
    learned = tiny.family("gpt2", max_position_embeddings=256)
    assert tiny.one_sentence(tiny.adapter(learned).refusal or "")
