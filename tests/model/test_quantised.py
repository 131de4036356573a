"""Quantised weights: what computes is in the fingerprint, and what cannot be seen is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiny
from blendrag.engine import Options
from blendrag.fusor.gate import verify
from blendrag.model import fingerprint

DOWN = "model.layers.1.mlp.down_proj"


def names_of(model: Any) -> set[str]:
    return {each.name for each in fingerprint.loaded(model).tensors}


def tensor_of(model: Any, name: str) -> torch.Tensor:
    return next(each.tensor for each in fingerprint.loaded(model).tensors if each.name == name)


def is_another_identity(model: Any, name: str, write: Callable[[torch.Tensor], Any]) -> None:
    """Whether ``write`` to the tensor of that name is noticed, and undoing it leads back."""
    adapter = tiny.adapter(model)
    before, tensor = adapter.identity, tensor_of(model, name)
    kept = tensor.detach().clone()
    with torch.no_grad():
        write(tensor)
        assert adapter.identity.namespace != before.namespace, name
        tensor.copy_(kept)
    assert adapter.identity == before


def blends(model: Any, store: Path) -> None:
    with tiny.engine(model, store) as engine:
        assert engine.verify().blendable, engine.verify().reason
        engine.ingest([tiny.document(0)])
        text = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat did the company build?"
        full = engine.generate(text, Options(mode="full"))
        blended = engine.generate(text, Options(mode="blend", ratio=1.0))
        assert blended.metrics.reused_tokens > 0
        assert blended.text == full.text


# -- torchao ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def int8_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    tiny.llama().save_pretrained(folder)
    return folder


def int8(folder: Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config
    ).eval()


def test_torchao_int8_weights_blend(int8_dir: Path, tmp_path: Path) -> None:
    blends(int8(int8_dir), tmp_path / "s")


def test_every_part_of_a_torchao_weight_is_in_the_fingerprint(int8_dir: Path) -> None:
    model = int8(int8_dir)
    parts = {f"{DOWN}.weight.{part}" for part in ("qdata", "scale", "zero_point")}
    assert parts <= names_of(model)
    for part in parts:
        is_another_identity(model, part, lambda tensor: tensor.add_(1))
    assert tiny.adapter(int8(int8_dir)).identity == tiny.adapter(model).identity


# -- packed GGUF --------------------------------------------------------------------------------

Q8_0 = 8
BLOCK = 32


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` ``[out, in]`` as GGUF blocks: a float16 scale and 32 int8 each.  uint8 [out, bytes]"""
    blocks = weight.detach().reshape(weight.shape[0], -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    values = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    together = torch.cat((scale.view(torch.uint8), values.view(torch.uint8)), dim=-1)
    return together.reshape(weight.shape[0], -1)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of transformers' packed GGUF modules; its kernel of the hub is replaced by its reference."""
    gguf = pytest.importorskip("transformers.integrations.gguf.utils")
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    dequantize = kernels.dequantize

    def mul_mat_vec(weight: torch.Tensor, x: torch.Tensor, kind: int, out: int) -> torch.Tensor:
        return x @ dequantize(weight, kind, x.dtype).reshape(out, -1).T

    kernel = SimpleNamespace(mul_mat_vec=mul_mat_vec, supports=lambda kind: kind == Q8_0)
    monkeypatch.setattr(kernels, "_gguf_kernel", kernel)
    model = tiny.llama(intermediate_size=64)
    linear = [
        (name, module)
        for name, module in model.model.named_modules(prefix="model")
        if isinstance(module, nn.Linear)
    ]
    made = gguf.replace_with_gguf_modules(
        model, {f"{name}.weight": Q8_0 for name, _ in linear}, kernel, torch.float32
    )
    for name, module in linear:
        made[f"{name}.weight"].weight.copy_(q8_0(module.weight))
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    return model.eval()


def test_packed_gguf_weights_blend(packed: Any, tmp_path: Path) -> None:
    assert tensor_of(packed, f"{DOWN}.weight").dtype == torch.uint8
    blends(packed, tmp_path / "s")


def test_every_part_of_a_packed_gguf_weight_is_in_the_fingerprint(packed: Any) -> None:
    module = packed.get_submodule(DOWN)
    is_another_identity(packed, f"{DOWN}.weight", lambda tensor: tensor[0, 0].add_(1))
    module.input_permutation = torch.arange(64)
    is_another_identity(
        packed, f"{DOWN}.input_permutation", lambda tensor: tensor.copy_(tensor.flip(0))
    )


# -- what other quantizers do -------------------------------------------------------------------


class GPTQLike(nn.Module):
    """Weights in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)
        self.register_buffer("qzeros", torch.zeros_like(scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.qweight.float() - self.qzeros) * self.scales).T


class BitsAndBytesLike(nn.Module):
    """Scales in no buffer: only the state dict names them, and packs some anew each time."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.quant = SimpleNamespace(absmax=linear.weight.detach().abs().amax(1, keepdim=True))
        values = (linear.weight.detach() / self.quant.absmax * 127).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.quant.absmax
        destination[prefix + "weight.quant_state"] = torch.tensor([8, 1, 2])
        destination[prefix + "weight_format"] = "row"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.quant.absmax / 127).T


class Mxfp4Like(nn.Module):
    """Weights in objects of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        data = linear.weight.detach()
        self.weight = SimpleNamespace(storage=SimpleNamespace(data=data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.storage.data.T


def with_module(kind: type[nn.Module]) -> Any:
    model = tiny.llama()
    mlp = model.model.layers[1].mlp
    mlp.down_proj = kind(mlp.down_proj)
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    return model


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (GPTQLike, ("qweight", "scales", "qzeros")),
        (BitsAndBytesLike, ("weight", "weight.absmax")),
    ],
)
def test_scales_and_zero_points_are_in_the_fingerprint(
    kind: type[nn.Module], parts: tuple[str, ...]
) -> None:
    model = with_module(kind)
    assert verify(tiny.adapter(model)).blendable
    for part in parts:
        is_another_identity(model, f"{DOWN}.{part}", lambda tensor: tensor.add_(1))


def test_what_a_quantizer_packs_anew_is_not_taken_for_a_change() -> None:
    adapter = tiny.adapter(with_module(BitsAndBytesLike))
    before = adapter.identity
    with tiny.counted(fingerprint, "hash_bytes") as hashed:
        assert adapter.identity is before
    assert not hashed


def test_weights_in_objects_of_a_quantizer_are_refused(tmp_path: Path) -> None:
    with tiny.engine(with_module(Mxfp4Like), tmp_path / "s") as engine:
        verdict = engine.verify()
        assert not verdict.blendable
        assert f"{DOWN}.weight" in verdict.reason
        assert tiny.one_sentence(verdict.reason)
        assert engine.generate("hello there", Options(mode="full")).metrics.new_tokens == 6
