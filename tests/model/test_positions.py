"""A key moved to another position is the key the model computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import Options
from blendrag.errors import UnsupportedModelError
from blendrag.model import ModelAdapter
from blendrag.model.kv_compare import content, magnitude, misfit
from blendrag.model.positions import PROBE_OFFSETS, apply_rotary, rotary_table

IDS = tiny.random_ids(20, seed=3)[0].tolist()


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
DYNAMIC = rope("dynamic", factor=4.0)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
    factor=4.0,
    original_max_position_embeddings=128,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("llama", {}),
    "partial rotary in one fused projection": ("gpt_neox", {}),
    "partial rotary sliced by the attention": ("stablelm", {}),
    "partial rotary of phi": ("phi", {}),
    "interleaved": ("cohere", {}),
    "interleaved and partial": ("glm4", {}),
    "two tables": ("gemma3_text", {}),
    "two tables of olmo": ("olmo3", {}),
    "layers without any": ("smollm3", {}),
    "yarn": ("llama", YARN),
    "linear scaling": ("llama", rope("linear", factor=3.0)),
    "llama3 scaling": ("llama", LLAMA3),
}


@pytest.fixture(scope="module", params=MODELS)
def moved(request: pytest.FixtureRequest) -> ModelAdapter:
    name, changes = MODELS[request.param]
    return tiny.adapter(tiny.family(name, initializer_range=0.2, **changes))


@torch.no_grad()
def keys_at(adapter: ModelAdapter, offset: int) -> list[torch.Tensor]:
    return [layer.keys[0].clone() for layer in adapter.prefill_at(IDS, offset).layers]


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 37), (1, 1300), (900, 2), (1300, 0)])
def test_repositioned_keys_equal_keys_computed_there(
    moved: ModelAdapter, start: int, end: int
) -> None:
    before, there = keys_at(moved, start), keys_at(moved, end)
    tables = moved.repositioner.tables(torch.full((len(IDS),), end - start))
    changed = False
    for layer, (keys, expected) in enumerate(zip(before, there, strict=True)):
        unmoved = keys.clone()
        moved.repositioner.rotate_(keys, layer, tables)
        scale = float(expected.abs().max())
        assert tiny.difference(keys, expected) < 1e-3 * scale, layer
        changed |= tiny.difference(unmoved, expected) > 1e-2 * scale
    assert changed  # leaving them alone would have been noticed


def test_each_token_moves_by_its_own_offset(moved: ModelAdapter) -> None:
    offsets = torch.tensor([0, 5, -3, 100] * 5)
    base = 200
    keys = keys_at(moved, base)
    tables = moved.repositioner.tables(offsets)
    for layer, rotated in enumerate(keys):
        moved.repositioner.rotate_(rotated, layer, tables)
    for offset in (0, 5, -3, 100):
        there = keys_at(moved, base + offset)
        at = (offsets == offset).nonzero().flatten()
        for rotated, expected in zip(keys, there, strict=True):
            scale = float(expected.abs().max())
            assert tiny.difference(rotated[:, at], expected[:, at]) < 1e-3 * scale


@torch.no_grad()
def test_values_and_position_free_keys_do_not_move(moved: ModelAdapter) -> None:
    kinds = moved.repositioner.kinds
    near, far = (moved.prefill_at(IDS, offset).layers for offset in (0, 900))
    tables = moved.repositioner.tables(torch.full((len(IDS),), 900))
    for layer, (here, there) in enumerate(zip(near, far, strict=True)):
        scale = float(here.values.abs().max())
        assert tiny.difference(here.values, there.values) < 1e-3 * scale, layer
        keys, scale = here.keys[0], float(here.keys.abs().max())
        stays = tiny.difference(keys, there.keys[0]) < 1e-3 * scale
        assert stays == (kinds[layer] == "position-free"), layer
        if stays:
            before = keys.clone()
            moved.repositioner.rotate_(keys, layer, tables)
            assert torch.equal(keys, before)


def test_a_model_with_layers_without_any_rotary_has_some_that_stay() -> None:
    kinds = tiny.adapter(tiny.family("smollm3")).repositioner.kinds
    assert set(kinds) == {"rotary", "position-free"}


def test_yarn_scaling_is_not_applied_a_second_time() -> None:
    adapter = tiny.adapter(tiny.llama(**YARN))
    rotary = adapter.stack.rotary
    assert rotary is not None
    assert rotary.attention_scaling != 1.0
    table = rotary_table(rotary, "", torch.arange(6))
    norms = table.cos.square() + table.sin.square()
    assert tiny.difference(norms, torch.ones_like(norms)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keys_are_rotated_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    adapter = tiny.adapter(tiny.llama().to(dtype))
    torch.manual_seed(1)
    keys = torch.randn(2, 30, 8).to(dtype)
    offsets = torch.arange(30) * 40
    repositioner = adapter.repositioner
    tables = repositioner.tables(offsets)
    table = tables[""]
    assert table.cos.dtype == torch.float32
    half = keys.shape[-1] // 2
    wide = keys.double()
    angles = table.cos.double()[0], table.sin.double()[0]
    turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
    expected = wide * angles[0] + turned * angles[1]
    rotated = keys.clone()
    repositioner.rotate_(rotated, 0, tables)
    ulp = float(torch.finfo(dtype).eps)
    assert float(((rotated.double() - expected).abs() / expected.abs().clamp_min(0.1)).max()) <= ulp
    low = keys * table.cos.to(dtype) + turned.to(dtype) * table.sin.to(dtype)
    errors = [(x.double() - expected).abs().mean() for x in (rotated, low)]
    assert errors[0] < 0.7 * errors[1]  # rounding at every step would have been noticed


def test_a_rotation_and_its_inverse_give_the_key_back(adapter: ModelAdapter) -> None:
    keys = torch.randn(2, 10, 8)
    turned = keys.clone()
    for delta in (77, -77):
        adapter.repositioner.rotate_(
            turned, 0, adapter.repositioner.tables(torch.full((10,), delta))
        )
        if delta > 0:
            assert tiny.difference(turned, keys) > 0.1
    assert tiny.difference(turned, keys) < 1e-4


def test_an_error_of_the_models_own_function_is_not_taken_for_partial_rotary() -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("boom")

    adapter = tiny.adapter(tiny.llama())
    tables = adapter.repositioner.tables(torch.arange(3))
    with pytest.raises(RuntimeError, match="boom"):
        apply_rotary(broken, torch.randn(2, 3, 8), tables[""])


# -- keys and values with large biases ----------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_with_large_biases_are_rotary(dtype: torch.dtype) -> None:
    adapter = tiny.adapter(tiny.large_biases().to(dtype))
    assert adapter.refusal is None, adapter.refusal
    assert set(adapter.repositioner.kinds) == {"rotary"}
    keys = keys_at(adapter, 0)[0].float()
    moved = keys_at(adapter, 7)[0].float()
    assert float((moved - keys).norm() / keys.norm()) < 6e-2  # a norm over all sees no rotation


def test_keys_with_large_biases_and_no_rotary_are_position_free() -> None:
    model = tiny.large_biases()

    def unturned(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, sin = kwargs["position_embeddings"]
        table = torch.ones_like(cos), torch.zeros_like(sin)
        return args, {**kwargs, "position_embeddings": table}

    model.model.layers[0].self_attn.register_forward_pre_hook(unturned, with_kwargs=True)
    kinds = tiny.adapter(model.to(torch.bfloat16)).repositioner.kinds
    assert kinds == ("position-free", "rotary", "rotary", "rotary")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("speed", [0.5, 1.1, 2.0])
def test_a_wrong_rotation_behind_large_biases_is_refused(dtype: torch.dtype, speed: float) -> None:
    model = tiny.large_biases()

    def turned(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, sin = kwargs["position_embeddings"]
        angles = speed * torch.outer(positions[0], model.model.rotary_emb.inv_freq.float())
        angles = torch.cat((angles, angles), -1)[None]
        table = angles.cos().to(cos.dtype), angles.sin().to(sin.dtype)
        return args, {**kwargs, "position_embeddings": table}

    positions = seen_positions(model)
    model.model.layers[0].self_attn.register_forward_pre_hook(turned, with_kwargs=True)
    refusal = tiny.adapter(model.to(dtype)).refusal
    assert refusal is not None
    assert refusal.startswith("the keys of layer 0 change with position")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_what_changes_with_position_behind_large_biases_is_refused(
    dtype: torch.dtype, name: str
) -> None:
    model = tiny.large_biases(values=300.0)
    positions = seen_positions(model)
    project = getattr(model.model.layers[0].self_attn, name)
    project.register_forward_hook(
        lambda module, args, out: out + (positions[0].cos() * 2)[:, None].to(out.dtype)
    )
    refusal = tiny.adapter(model.to(dtype)).refusal
    assert refusal is not None
    assert "of layer 0 change with position" in refusal


def seen_positions(model: Any) -> list[torch.Tensor]:
    """What the forward under way has as positions ``[n]``, float32, as the only item."""
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any) -> None:
        seen[:] = [args[1][0].float()]

    model.model.rotary_emb.register_forward_pre_hook(look)
    return seen


def test_a_misfit_is_what_a_loop_over_channels_finds() -> None:
    torch.manual_seed(0)
    tensor, others, error = torch.randn(3, 2, 6, 4)  # [H, n, D]
    allowed = 0.1 * content(tensor, others) + 0.01 * magnitude(tensor)
    channels = []
    for d in range(4):
        of_heads = []
        for h in range(2):
            says = sum(float(x) ** 2 / 2 for x in tensor[h, :, d] - others[h, :, d]) / 6
            largest = max(abs(float(x)) for x in tensor[h, :, d])
            off = sum(float(x) ** 2 for x in error[h, :, d]) / 6
            of_heads.append(off / (0.1 * says**0.5 + 0.01 * largest) ** 2)
        channels.append(sum(of_heads) / 2)
    found = misfit(tensor + error, tensor, allowed)
    assert found.overall == pytest.approx((sum(channels) / 4) ** 0.5, rel=1e-4)
    assert found.worst_channel == pytest.approx(max(channels) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("error", "fits"), [(0.0, True), (0.9, True), (1.1, False), (float("nan"), False)]
)
def test_an_error_fits_up_to_what_is_allowed(error: float, fits: bool) -> None:
    tensor = torch.randn(2, 8, 64)
    assert misfit(tensor + error, tensor, torch.ones(2, 1, 64)).fits == fits


def test_no_channel_may_be_off_by_far_more_than_the_others() -> None:
    tensor = torch.randn(2, 8, 4096)
    one = tensor.clone()
    one[..., 5] += 11.0
    found = misfit(one, tensor, torch.ones(2, 1, 4096))
    assert found.overall < 1.0
    assert not found.fits


def test_channels_that_are_always_zero_fit() -> None:
    zeros = torch.zeros(2, 8, 4)
    assert misfit(zeros, zeros, torch.zeros(2, 1, 4)).fits
    assert not misfit(zeros + 1, zeros, torch.zeros(2, 1, 4)).fits


# -- tables that depend on the length -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "limit"), [(DYNAMIC, 512), (LONGROPE, 128), ({}, None), (YARN, None)]
)
def test_only_length_dependent_tables_have_a_blend_limit(changes: dict, limit: int | None) -> None:
    adapter = tiny.adapter(tiny.llama(max_position_embeddings=512, **changes))
    assert adapter.refusal is None, adapter.refusal
    assert adapter.blend_limit_tokens == limit


@pytest.mark.parametrize("changes", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_prompts_beyond_the_limit_are_refused_in_blend_and_answered_in_full(
    changes: dict, tmp_path
) -> None:
    adapter = tiny.adapter(tiny.llama(max_position_embeddings=512, **changes))
    limit = adapter.blend_limit_tokens
    assert limit is not None
    adapter.model.config.max_position_embeddings = 2048
    if changes is DYNAMIC:
        adapter.model.config.rope_parameters["original_max_position_embeddings"] = limit
    assert adapter.blend_limit_tokens == limit
    with tiny.engine(adapter, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        plain = "the town of Place " * 400
        while len(engine.plan(plain).ids) > limit + 40:
            plain = plain[:-20]
        unknown = engine.generate(plain, Options(mode="blend", max_new_tokens=4))
        assert unknown.metrics.reused_tokens == 0, "without chunks it is an ordinary prefill"
        words = tiny.chunk_texts(engine, 0)[0] + "\n\n" + "the town of Place " * 400
        while len(engine.plan(words).ids) > limit + 40:
            words = words[:-20]
        with pytest.raises(UnsupportedModelError, match="use mode full"):
            engine.generate(words, Options(mode="blend", max_new_tokens=4))
        full = engine.generate(words, Options(mode="full", max_new_tokens=4))
        assert full.metrics.prompt_tokens + 4 > limit
        short = engine.generate("the town of Place", Options(mode="blend", max_new_tokens=4))
        assert short.metrics.new_tokens == 4


def test_learned_positions_shorter_than_the_probe_reaches_are_refused_with_a_sentence() -> None:
    model = tiny.family("gpt2", max_position_embeddings=256)
    assert model.config.n_positions == 256 < max(PROBE_OFFSETS)
    refusal = tiny.adapter(model).refusal
    assert refusal is not None
    assert tiny.one_sentence(refusal)


@pytest.mark.parametrize("context", [64, 512, 4096])
def test_a_short_context_does_not_keep_a_model_from_being_probed(context: int) -> None:
    adapter = tiny.adapter(tiny.llama(max_position_embeddings=context))
    assert set(adapter.repositioner.kinds) == {"rotary"}
