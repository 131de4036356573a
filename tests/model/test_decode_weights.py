"""Products of packed weights equal those of the weights that they stand for, row by row."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from blendrag.model import decode_weights as packing
from blendrag.model.decode_weights import CHOICES, FORMATS, DecodeWeights
from blendrag.model.sharing import without_collection
from blendrag.model.weight_blocks import EIGHT_BITS, FOUR_BITS, Width, round_blocks

WIDTHS = {"int4": FOUR_BITS, "blocks": EIGHT_BITS}


def reference(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The float32 weight that the packed one stands for."""
    if name == "int8":
        rounded, scales = FORMATS["int8"].pack(weight.float())
        return rounded.float() * scales.float()[:, None]
    return round_blocks(weight.float(), packing.GROUP, WIDTHS[name]).weight()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 32), (48, 96), (208, 160)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_packed_product_is_that_of_the_rounded_weight(
    name: str, shape: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "ROWS_AT_A_TIME", 64)  # packed in blocks, the last one shorter
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).bfloat16()
    x = torch.randn(rows, shape[1], generator=generator).bfloat16()
    found = FORMATS[name].product(x, *packing.packed(weight, FORMATS[name])).float()
    expected = x.float() @ reference(weight, name).T
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
    of_weight = x.float() @ weight.float().T
    steps = {"int8": 127, "int4": 7, "blocks": 127}[name]
    error = (found - of_weight).square().mean().sqrt() / of_weight.square().mean().sqrt()
    assert error < 2 / steps


def test_int4_takes_a_narrower_range_where_that_lowers_the_error() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    groups = weight.unflatten(1, (-1, packing.GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    nearest = ((groups - low) / step).round() * step + low
    searched = reference(weight, "int4")
    plain = (nearest.flatten(1) - weight).square().mean()
    assert (searched - weight).square().mean() < 0.95 * plain


def made(model: nn.Module, name: str = "int8") -> DecodeWeights:
    return DecodeWeights(model, name, packing.pack(model, name))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    return tiny.llama().bfloat16()


def test_the_likeliest_logits_are_those_of_the_native_head(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "EXACT_LOGITS", 32)  # few of the vocabulary
    head = made(model).layers["lm_head"]
    assert head.kind.name == "int4"
    rows = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    native, found = F.linear(rows, head.layer.weight), head.multiply(rows)
    assert torch.equal(found.argmax(-1), native.argmax(-1))
    same = (found == native).sum(-1)
    assert same.min() >= packing.EXACT_LOGITS
    assert not torch.equal(found, native)


@pytest.mark.parametrize("name", CHOICES)
def test_inputs_that_are_not_contiguous_are_multiplied(name: str, model: nn.Module) -> None:
    layer = made(model, name).layers["model.layers.0.mlp.up_proj"]
    inputs = layer.layer.in_features
    rows = torch.randn(2, 1, inputs, 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    strided = rows[..., 0]
    assert torch.equal(layer.multiply(strided), layer.multiply(strided.contiguous()))


@torch.inference_mode()
def test_only_the_thread_that_decodes_uses_packed_weights(model: nn.Module) -> None:
    ids = tiny.random_ids(1)
    native = model(ids).logits
    others: list[torch.Tensor] = []

    def compute() -> None:
        with torch.inference_mode():
            others.append(model(ids).logits)

    with made(model).used(1):
        packed = model(ids).logits
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert torch.equal(others[0], native)
    assert not torch.equal(packed, native)
    assert torch.equal(model(ids).logits, native)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.inference_mode()
def test_biases_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.large_biases(4.0, values=3.0).bfloat16()
    ids = tiny.random_ids(1)
    native = model(ids).logits
    with made(model).used(1):
        packed = model(ids).logits
    assert (packed - native).abs().max() < 0.1 * native.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_reordered_weights_give_the_logits_of_the_native_ones(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.large_biases(4.0, values=3.0).bfloat16()
    ids = tiny.random_ids(rows).T  # [R, 1]
    native = model(ids).logits
    weights = DecodeWeights(model, "head", packing.reorder(model))
    assert "lm_head" not in weights.layers
    with weights.used(rows):
        reordered = model(ids).logits
    assert torch.equal(reordered, native)


@pytest.mark.parametrize("error", [0.01, RuntimeError("not built with oneDNN")])
def test_layers_are_not_reordered_if_their_products_would_change(
    error: float | Exception, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_up = packing.linear_layers(model)["model.layers.0.mlp.up_proj"].out_features
    wrong_outputs = 2 * of_up  # those of gate and up

    def pack(weight: torch.Tensor) -> packing.Packed:
        return (weight.clone(),)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = F.linear(x, weight, bias)
        if len(weight) != wrong_outputs:
            return found
        if isinstance(error, Exception):
            raise error
        return found * (1 + error)

    reordered = replace(packing.REORDERED, pack=pack, product=product)
    monkeypatch.setattr(packing, "REORDERED", reordered)
    names = {name for at in packing.reorder(model) for name in at.split("+")}
    layers = packing.layers_below_head(model)
    assert names == {at for at, layer in layers.items() if layer.out_features != of_up}


def test_layers_with_the_same_input_have_one_copy(model: nn.Module) -> None:
    """Their products are computed once; another input gets those of the native weights."""
    at = "model.layers.0.mlp."
    names = f"{at}gate_proj+{at}up_proj"
    copies = packing.reorder(model)
    if names not in copies:
        pytest.skip("oneDNN rounds otherwise on this CPU")
    weights = DecodeWeights(model, "head", packing.PackedWeights({names: copies[names]}))
    gate, up = weights.layers[names].layers
    x, other = torch.randn(2, 1, 1, gate.in_features).bfloat16()
    expected = [layer(each) for each in (x, other) for layer in (gate, up)]
    with tiny.counted(F, "linear") as native, weights.used(1):
        found = [gate(x), up(x)]
        assert not native
        found += [gate(other), up(other)]
        gate(x)
        assert torch.equal(up(other), expected[3])
        assert len(native) == 1
    assert all(map(torch.equal, found, expected))
    assert weights.are_current
    weights.layers[names].layers[1].weight.data.add_(1)
    assert not weights.are_current


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outputs", [128, 80])
@pytest.mark.parametrize("rows", [1, 3])
def test_joined_copies_give_the_numbers_of_the_separate_ones(
    name: str, outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.family(
        "qwen2", intermediate_size=outputs, hidden_size=64, initializer_range=0.2
    ).bfloat16()
    copies = packing.PackedWeights(
        (at, packing.packed(layer.weight, FORMATS[name]))
        for at, layer in packing.linear_layers(model).items()
    )
    separate = DecodeWeights(model, name, copies)
    joined = DecodeWeights(model, name, packing.joined(model, packing.PackedWeights(copies)))
    at = "model.layers.0.mlp."
    is_one = f"{at}gate_proj+{at}up_proj" in joined.layers
    assert is_one is (outputs % packing.OUTPUTS_TOGETHER == 0)
    assert joined.size_bytes == separate.size_bytes
    assert joined.layers_by_format == separate.layers_by_format == {name: len(copies)}
    ids = tiny.random_ids(rows).T
    logits = []
    for weights in (separate, joined):
        with weights.used(rows):
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


@pytest.fixture
def one_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[[], DecodeWeights]:
    """Makes weights with a joined copy of gate and up alone."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.llama(intermediate_size=packing.OUTPUTS_TOGETHER).bfloat16()
    at = "model.layers.0.mlp.gate_proj+model.layers.0.mlp.up_proj"

    def make() -> DecodeWeights:
        copies = packing.joined(model, packing.pack(model, "int8"))
        return DecodeWeights(model, "int8", packing.PackedWeights({at: copies[at]}))

    return make


def test_layers_with_one_copy_give_outputs_like_any_linear_layer(
    one_copy: Callable[[], DecodeWeights],
) -> None:
    weights = one_copy()
    (copy,) = weights.layers.values()
    x = torch.randn(3, 1, 32).bfloat16()
    with torch.no_grad(), weights.used(3):
        assert [layer(x).is_contiguous() for layer in copy.layers] == [True, True]


def test_nothing_of_a_forward_that_was_abandoned_is_kept(
    one_copy: Callable[[], DecodeWeights],
) -> None:
    weights = one_copy()
    (copy,) = weights.layers.values()
    x = torch.randn(1, 1, 32).bfloat16()
    with torch.no_grad(), suppress(KeyboardInterrupt), weights.used(1):
        output = weakref.ref(copy.layers[0](x))
        raise KeyboardInterrupt
    assert output() is None


def test_memory_of_copies_is_free_at_once_when_nobody_uses_them(
    one_copy: Callable[[], DecodeWeights],
) -> None:
    weights = one_copy()
    (copy,) = weights.layers.values()
    parts = [weakref.ref(part) for part in copy.packed]
    with without_collection():
        del weights, copy
        assert [part() for part in parts] == [None, None]


def test_replaced_biases_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.large_biases(4.0, values=3.0).bfloat16()
    weights = made(model)
    layer = next(one.layer for one in weights.layers.values() if one.layer.bias is not None)
    layer.bias = nn.Parameter(layer.bias + 1)
    assert not weights.are_current


def test_replaced_forwards_and_weights_are_noticed(model: nn.Module) -> None:
    weights = made(model)
    assert weights.are_current
    layer = next(iter(weights.layers.values())).layer
    layer.forward = layer.forward
    assert not weights.are_current
    del layer.forward
    layer.weight.data.add_(1)
    assert not weights.are_current


class Costs:
    """A clock: native products take ``native_ms``, packed ones ``row_ms`` for each row, and every product
    the next of ``delays_ms`` more."""

    def __init__(self, native_ms: float, row_ms: float, delays_ms: Iterable[float] = ()) -> None:
        self.native_ms, self.row_ms, self.now = native_ms, row_ms, 0.0
        self.products = 0
        self._delays_ms = iter(delays_ms)

    def __call__(self) -> float:
        return self.now

    def _spend(self, milliseconds: float) -> None:
        self.now += (milliseconds + next(self._delays_ms, 0.0)) / 1000
        self.products += 1

    def most_rows(self, monkeypatch: pytest.MonkeyPatch) -> packing.FastRows:
        stock, native = FORMATS["int8"], F.linear

        def product(x: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
            self._spend(self.row_ms * len(x))
            return stock.product(x, *packed)

        def linear(*given: Any, **more: Any) -> torch.Tensor:
            self._spend(self.native_ms)
            return native(*given, **more)

        layer = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        timed = replace(stock, product=product)
        monkeypatch.setitem(FORMATS, "int8", timed)  # type: ignore[arg-type]
        copy = packing.packed(layer.weight, timed)
        one = packing.PackedLayer(layer, copy, False, packing._Thread())
        monkeypatch.setattr(F, "linear", linear)
        return packing.most_rows([one], self)


@pytest.mark.parametrize(("row_ms", "most"), [(0.3, 2), (0.2, 4), (2.0, 0), (0.0, 32)])
def test_copies_are_used_up_to_the_rows_where_native_products_are_faster(
    row_ms: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(1.0, row_ms)
    assert costs.most_rows(monkeypatch) == (most, True)
    assert costs.products <= 6 * 2 * packing.TIMED_ROUNDS


def test_rounds_that_something_disturbed_are_outvoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are faster for one row and slower for two; each is disturbed in some rounds."""
    copy_late, native_late = (0.0, 5.0), (5.0, 0.0)
    disturbed = (*copy_late * 2, *(0.0,) * 6, *native_late * 2)
    assert Costs(1.0, 0.6, disturbed).most_rows(monkeypatch) == (1, True)


def test_rounds_that_keep_disagreeing_are_no_steady_result(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = (0.0, 5.0, 0.0, 0.0) * 1000
    found = Costs(1.0, 0.1, disturbed).most_rows(monkeypatch)
    assert (found.most > 0, found.is_steady) == (True, False)


def test_no_rounds_are_added_that_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(600.0, 300.0, (0.0, 5000.0, 0.0, 0.0) * 1000)
    assert costs.most_rows(monkeypatch) == (1, False)
    assert costs.products == 2 * 2 * packing.TIMED_ROUNDS


def test_copies_that_are_as_fast_are_a_steady_result_either_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    varies = (0.0, 0.01, 0.01, 0.0) * 1000
    costs = Costs(1.0, 1.0, varies)
    assert costs.most_rows(monkeypatch) == (0, True)
    assert costs.products == 2 * packing.MOST_ROUNDS


def quantised(blocks: str, shape: torch.Size) -> torch.Tensor:
    """Weights ``[N, K]`` of a GGUF file with such blocks, in float32."""
    generator = torch.Generator().manual_seed(3)
    weight, spread = 0.03 * torch.randn(2, *shape, generator=generator)
    weight = weight * (20 * spread).exp()  # some are far larger, as in models
    if blocks in MADE_BY_HAND:
        low, high, size, has_minima = MADE_BY_HAND[blocks]
        groups = weight.unflatten(1, (-1, size))
        least = groups.amin(-1, keepdim=True) if has_minima else torch.zeros(())
        scale = (groups - least).abs().amax(-1, keepdim=True) / max(-low, high)
        if has_minima:  # minima of 6 bits, in superblocks
            step = least.abs().amax() / 63
            least = (least / step).round() * step
        # the file's scale is not the one from which the numbers were rounded
        numbers = ((groups - least) / (0.98 * scale)).round().clamp(low, high)
        return (numbers * (0.98 * scale) + least).flatten(1)
    quants = pytest.importorskip("gguf").quants
    kind = pytest.importorskip("gguf").GGMLQuantizationType[blocks]
    return torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))


#: Lowest and highest number, size, and whether a block has a minimum: what the package gguf only reads.
MADE_BY_HAND = {
    "Q2_K": (0, 3, 16, True),
    "Q3_K": (-4, 3, 16, False),
    "Q4_K": (0, 15, 32, True),
    "Q5_K": (0, 31, 32, True),
    "Q6_K": (-32, 31, 16, False),
}


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q4_K", "int4"),
        ("Q2_K", "blocks"), ("Q3_K", "blocks"), ("Q5_0", "blocks"), ("Q5_1", "blocks"),
        ("Q5_K", "blocks"), ("Q6_K", "blocks"), ("Q8_0", "blocks"),
    ],
)  # fmt: skip
def test_weights_of_gguf_files_are_not_rounded_a_second_time(
    blocks: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their scales are, to bfloat16, as the outputs. Rounding to 8 bits for each output makes several
    times the error."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model, at = (
        tiny.llama(intermediate_size=512, num_hidden_layers=1).bfloat16(),
        "model.layers.0.mlp.down_proj",
    )
    layer = packing.linear_layers(model)[at]
    of_file = quantised(blocks, layer.weight.shape)
    layer.weight.data.copy_(of_file)
    copy = made(model).layers[at]
    assert copy.kind.name == kind
    rows = torch.eye(layer.in_features, dtype=torch.bfloat16)
    found = copy.multiply(rows).float().T  # [N, K]

    def error(weight: torch.Tensor) -> float:
        return float((weight - of_file).norm() / of_file.norm())

    assert error(found) < 0.0035
    assert error(reference(layer.weight.detach(), "int8")) > 3 * error(found)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_constant_and_empty_blocks_keep_their_value(width: Width) -> None:
    weight = torch.tensor([0.0, 0.5, -2.0, 1e-30]).repeat_interleave(packing.GROUP).view(2, -1)
    found = round_blocks(weight, packing.GROUP, width).weight()
    assert torch.allclose(found, weight, rtol=2**-8, atol=1e-12)


def test_weights_of_no_file_keep_a_scale_for_each_output(model: nn.Module) -> None:
    kinds = {at: copy.kind.name for at, copy in made(model).layers.items()}
    assert kinds.pop("lm_head") == "int4"
    assert {*kinds.values()} == {"int8"}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "phi3", "deepseek_v3", "bloom"])
def test_other_architectures_decode_nearly_alike_with_packed_weights(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them experts, tied embeddings, fused projections and latent attention."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.family(family, initializer_range=0.05).bfloat16().eval()
    ids = tiny.random_ids(1)
    native = model(ids).logits
    weights = made(model)
    assert not any("experts" in at for at in weights.layers if "shared" not in at)
    with weights.used(1):
        packed = model(ids).logits
    assert not torch.equal(packed, native)
    assert (packed - native).abs().max() < 0.1 * native.abs().max()


@pytest.mark.parametrize("family", sorted({*tiny.READ_IMAGES} - tiny.ALIKE))
def test_only_layers_that_decode_text_are_packed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    model = tiny.family(family)
    found = packing.linear_layers(model)
    towers = [name for name in found if "vision" in name or "visual" in name or "projector" in name]
    assert not towers
    kinds = {name.rpartition(".")[2] for name in found}
    assert {"q_proj", "v_proj", "o_proj", "up_proj", "lm_head"} <= kinds


@pytest.mark.parametrize("inputs", [4, 36, 48, 100])
def test_layers_whose_inputs_are_no_whole_groups_keep_their_weights(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's products would read what lies behind the weight."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    layers = nn.ModuleList([nn.Linear(inputs, 64), nn.Linear(64, inputs)])
    assert list(packing.linear_layers(layers)) == ["1"]


def test_layers_whose_weights_are_not_contiguous_keep_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(layer.weight.detach().T)
    assert not packing.linear_layers(nn.ModuleList([layer]))


@torch.inference_mode()
def test_layers_below_a_lora_adapter_are_packed_and_the_adapter_is_added(
    model: nn.Module,
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).bfloat16()
    base = adapted.get_base_model()
    ids = tiny.random_ids(1)
    native = adapted(ids).logits
    weights = made(base)
    assert any("base_layer" in at for at in weights.layers)
    with weights.used(1):
        packed = adapted(ids).logits
    assert not torch.equal(packed, native)
    assert (packed - native).abs().max() < 0.1 * native.abs().max()
