"""Quantised models blend, every weight is in the fingerprint, and what cannot be loaded says why."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import tiny
from blendrag.engine import Options
from blendrag.errors import ModelLoadError
from blendrag.fusor.gate import verify
from blendrag.model import fingerprint, load_adapter, loading

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


def assert_blends(model: Any, store: Path, alike: bool = True) -> None:
    """``alike``: its noise is that of its dtype, so that recomputing everything repeats the answer."""
    with tiny.engine(model, store) as engine:
        assert engine.verify().blendable, engine.verify().reason
        engine.ingest([tiny.document(0)])
        full = engine.generate(tiny.prompt(engine, 0), Options(mode="full"))
        blended = engine.generate(tiny.prompt(engine, 0), Options(mode="blend", ratio=1.0))
        assert blended.metrics.reused_tokens > 0
        assert not alike or blended.text == full.text


def torchao(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(getattr(quantization, kind)())


def bitsandbytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**options)


def loaded(folder: str, quantization: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantization
    ).eval()


def int8(folder: str) -> Any:
    return loaded(folder, torchao("Int8WeightOnlyConfig"))


@pytest.mark.parametrize(
    ("quantization", "alike"),
    [
        (lambda: torchao("Int8WeightOnlyConfig"), True),
        (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), False),
        (lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), False),
        (lambda: bitsandbytes(load_in_8bit=True), False),
    ],
    ids=["torchao", "torchao-activations", "bitsandbytes-4bit", "bitsandbytes-8bit"],
)
def test_a_directory_of_quantised_weights_blends(quantization, alike, checkpoint, tmp_path):
    saved = str(tmp_path / "quantised")
    loaded(checkpoint, quantization()).save_pretrained(saved)
    tiny.tokenizer().save_pretrained(saved)
    adapter = load_adapter(saved)
    assert adapter.precision == torch.bfloat16
    assert load_adapter(saved).identity == adapter.identity
    assert_blends(adapter.model, tmp_path / "s", alike)


def test_kv_is_not_shared_between_a_model_and_its_quantised_form(checkpoint, tmp_path):
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    models = {"plain": plain, "quantised": int8(checkpoint)}
    for first, second in (("plain", "quantised"), ("quantised", "plain")):
        with tiny.engine(models[first], tmp_path / first) as engine:
            engine.ingest([tiny.document(0)])
            assert engine.generate(tiny.prompt(engine, 0)).metrics.reused_tokens > 0
        with tiny.engine(models[second], tmp_path / first) as engine:
            assert engine.adapter.model_id == checkpoint
            assert engine.generate(tiny.prompt(engine, 0)).metrics.reused_tokens == 0


def test_how_a_quantizer_computes_is_part_of_the_identity(checkpoint):
    model = int8(checkpoint)
    before = tiny.adapter(model).identity
    model.config.quantization_config.modules_to_not_convert = ["other"]
    after = tiny.adapter(model).identity
    assert after.tensors_fingerprint == before.tensors_fingerprint
    assert after.namespace != before.namespace


def quantised_config(checkpoint: str, method: str) -> None:
    path = Path(checkpoint) / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize(
    ("method", "why"),
    [("gptq", "needs the packages optimum and gptqmodel"), ("fbgemm_fp8", "requires a GPU")],
)
def test_a_method_that_cannot_be_loaded_is_one_sentence_on_stderr(
    method, why, checkpoint, monkeypatch, capsys
):
    load = loading._from_pretrained

    def printing(kind: str, *args: Any, **options: Any) -> Any:
        if kind == "AutoModelForCausalLM":
            print("the logo of a quantizer")  # noqa: T201
        return load(kind, *args, **options)

    monkeypatch.setattr(loading, "_from_pretrained", printing)
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    quantised_config(checkpoint, method)
    with tiny.refuses(
        f"quantised by {method} and cannot be loaded on cpu: .*{why}", ModelLoadError
    ):
        load_adapter(checkpoint, device="cpu")
    assert capsys.readouterr().out == ""


def test_two_threads_that_load_leave_stdout_as_it_was():
    before, entered, both = sys.stdout, threading.Event(), threading.Event()
    quiet = partial(loading._quantised, "some", "torchao", torch.device("cpu"))

    def leave_first() -> None:
        with quiet():
            entered.set()
            both.wait(0.3)

    first = threading.Thread(target=leave_first)
    first.start()
    entered.wait()
    with quiet():
        both.set()
        first.join()
    assert sys.stdout is before


def test_weights_of_an_unknown_method_are_not_made_up(checkpoint):
    quantised_config(checkpoint, "unheard")
    weights = Path(checkpoint) / "model.safetensors"
    tensors = load_file(weights)
    tensors[f"{DOWN}.packed"] = tensors.pop(f"{DOWN}.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with tiny.refuses(f"lacks 1 weights, such as {DOWN}.* not 'unheard'", ModelLoadError):
        load_adapter(checkpoint)


def test_weights_that_the_first_forward_unpacks_are_unpacked_before_the_probe():
    model = tiny.llama()
    linear = model.get_submodule(DOWN)
    linear.register_buffer("packed", linear._parameters.pop("weight").detach().half())
    model.hf_quantizer = SimpleNamespace(is_compileable=False)

    def unpack(*args: Any) -> None:  # as compressed-tensors does
        linear.weight = nn.Parameter(linear._buffers.pop("packed").float())
        hook.remove()

    hook = model.register_forward_pre_hook(unpack)
    adapter = tiny.adapter(model)
    assert verify(adapter).blendable
    assert not linear.weight.is_inference()


def test_torchao_int8_weights_blend_and_every_part_is_fingerprinted(checkpoint, tmp_path):
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
def test_packed_gguf_weights_blend_and_every_part_is_fingerprinted(packed, tmp_path):
    assert tensors_of(packed)[f"{DOWN}.weight"].dtype == torch.uint8
    assert_blends(packed, tmp_path / "s")
    module = packed.get_submodule(DOWN)
    assert_identifies(packed, f"{DOWN}.weight", lambda tensor: tensor[0, 0].add_(1))
    module.input_permutation = torch.arange(64)
    assert_identifies(
        packed, f"{DOWN}.input_permutation", lambda tensor: tensor.copy_(tensor.flip(0))
    )


def test_noise_that_moving_does_not_cause_is_allowed_for_in_quantised_models_alone():
    generator = torch.Generator().manual_seed(0)

    def noisy(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 0.1 * torch.randn(out.shape, generator=generator))

    model = tiny.llama()
    model.get_submodule(DOWN).register_forward_hook(noisy)
    assert not verify(tiny.adapter(model)).blendable
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    assert verify(tiny.adapter(model)).blendable


def test_a_quantised_model_whose_kv_depends_on_positions_is_refused():
    model = tiny.family("gpt2")
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    assert tiny.adapter(model).refusal


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


def test_scales_and_zero_points_are_fingerprinted_and_repacked_ones_are_no_change():
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
def test_weights_in_other_objects_are_refused(make, name, tmp_path):
    with tiny.engine(make(), tmp_path / "s") as engine:
        verdict = engine.verify()
        assert not verdict.blendable
        assert name in verdict.reason
        assert tiny.one_sentence(verdict.reason)
        assert engine.generate("hello there", Options(mode="full")).metrics.new_tokens == 6
