"""Quantised weights: everything that computes is in the fingerprint, and hidden weights are refused."""

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


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {each.name: each.tensor for each in fingerprint.loaded(model).tensors}


def assert_identifies(model: Any, name: str, write: Callable[[torch.Tensor], Any]) -> None:
    """``write`` to the tensor of that name changes the identity, and undoing it restores it."""
    adapter = tiny.adapter(model)
    before, tensor = adapter.identity, tensors_of(model)[name]
    kept = tensor.detach().clone()
    with torch.no_grad():
        write(tensor)
        assert adapter.identity.namespace != before.namespace, name
        tensor.copy_(kept)
    assert adapter.identity == before


def assert_blends(model: Any, store: Path) -> None:
    with tiny.engine(model, store) as engine:
        assert engine.verify().blendable, engine.verify().reason
        engine.ingest([tiny.document(0)])
        full = engine.generate(tiny.prompt(engine, 0), Options(mode="full"))
        blended = engine.generate(tiny.prompt(engine, 0), Options(mode="blend", ratio=1.0))
        assert blended.metrics.reused_tokens > 0
        assert blended.text == full.text


def int8(folder: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config
    ).eval()


def test_torchao_int8_weights_blend_and_every_part_is_fingerprinted(
    checkpoint: str, tmp_path: Path
) -> None:
    model = int8(checkpoint)
    assert_blends(model, tmp_path / "s")
    for part in ("qdata", "scale", "zero_point"):
        assert_identifies(model, f"{DOWN}.weight.{part}", lambda tensor: tensor.add_(1))
    assert tiny.adapter(int8(checkpoint)).identity == tiny.adapter(model).identity


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
    """A model of transformers' packed GGUF modules, with the reference in place of the hub's kernel."""
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


@pytest.mark.slow
def test_packed_gguf_weights_blend_and_every_part_is_fingerprinted(
    packed: Any, tmp_path: Path
) -> None:
    assert tensors_of(packed)[f"{DOWN}.weight"].dtype == torch.uint8
    assert_blends(packed, tmp_path / "s")
    module = packed.get_submodule(DOWN)
    assert_identifies(packed, f"{DOWN}.weight", lambda tensor: tensor[0, 0].add_(1))
    module.input_permutation = torch.arange(64)
    assert_identifies(
        packed, f"{DOWN}.input_permutation", lambda tensor: tensor.copy_(tensor.flip(0))
    )


class BitsAndBytesLike(nn.Module):
    """Zeros in a buffer; scales in the state dict only, which packs some anew each time."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.quant = SimpleNamespace(absmax=linear.weight.detach().abs().amax(1, keepdim=True))
        values = (linear.weight.detach() / self.quant.absmax * 127).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("zeros", torch.zeros(values.shape[0], 1), persistent=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.quant.absmax
        destination[prefix + "weight.quant_state"] = torch.tensor([8, 1, 2])
        destination[prefix + "weight_format"] = "row"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.weight.float() - self.zeros) * self.quant.absmax / 127).T


class Mxfp4Like(nn.Module):
    """Weights in other objects."""

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


def test_scales_and_zero_points_are_fingerprinted_and_repacked_ones_are_no_change() -> None:
    model = with_module(BitsAndBytesLike)
    adapter = tiny.adapter(model)
    assert verify(adapter).blendable
    before = adapter.identity
    with tiny.counted(fingerprint, "hash_bytes") as hashed:
        assert adapter.identity is before
    assert not hashed
    for part in ("weight", "weight.absmax", "zeros"):
        assert_identifies(model, f"{DOWN}.{part}", lambda tensor: tensor.add_(1))


def torch_int8() -> Any:
    engines = torch.backends.quantized.supported_engines
    if not {"fbgemm", "x86", "qnnpack", "onednn"} & set(engines):
        pytest.skip(f"torch has no quantised kernels here ({engines})")
    return torch.ao.quantization.quantize_dynamic(tiny.llama(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: with_module(Mxfp4Like), f"{DOWN}.weight"), (torch_int8, "packed")]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_in_other_objects_are_refused(
    make: Callable[[], Any], name: str, tmp_path: Path
) -> None:
    with tiny.engine(make(), tmp_path / "s") as engine:
        verdict = engine.verify()
        assert not verdict.blendable
        assert name in verdict.reason
        assert tiny.one_sentence(verdict.reason)
        assert engine.generate("hello there", Options(mode="full")).metrics.new_tokens == 6
