"""The correctness gate over the families, and that it fails when any of its parts is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
from blendrag.engine import BlendEngine, Options, kv_validity
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import attention
from blendrag.fusor import rows as rows_module
from blendrag.fusor.gate import HeldKV, remembered, verdicts, verify
from blendrag.model import ModelAdapter
from blendrag.model.positions import Repositioner

CPU = torch.device("cpu")


def expected_kinds(model: object) -> list[str]:
    """From the config alone: which layers have no rotary embedding."""
    config = model.config  # type: ignore[attr-defined]
    layers = config.num_hidden_layers
    if config.model_type == "smollm3":
        return ["rotary" if rope else "position-free" for rope in config.no_rope_layers]
    if config.model_type in ("cohere2", "exaone4"):
        names = {"sliding_attention": "rotary", "full_attention": "position-free"}
        return [names[kind] for kind in config.layer_types]
    return ["rotary"] * layers


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_family_passes_the_gate(name: str) -> None:
    model = tiny.family(name)
    adapter = tiny.adapter(model)
    assert adapter.refusal is None, adapter.refusal
    result = verify(adapter)
    assert result.verdict == "blendable", result.reason
    assert result.subset_logit_diff is not None
    assert result.subset_logit_diff < 1e-4
    assert result.perturbed_logit_diff is not None
    assert result.perturbed_logit_diff > 1e-2
    assert result.max_logit_diff is not None
    assert result.max_logit_diff < 1e-4
    assert result.greedy_equal is True
    assert result.prompt_tokens >= 2 * tiny.WINDOW
    assert list(result.layers) == expected_kinds(model)


def test_families_without_rotary_in_some_layers_are_seen_as_such() -> None:
    for name in ("smollm3", "cohere2", "exaone4"):
        kinds = set(tiny.adapter(tiny.family(name)).repositioner.kinds)
        assert kinds == {"rotary", "position-free"}, name


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
def test_gate_passes_in_bfloat16(name: str) -> None:
    result = verify(tiny.adapter(tiny.family(name).to(torch.bfloat16)))
    assert result.blendable, result.reason


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gate_passes_with_eager_attention(name: str) -> None:
    model = tiny.family(name, attn_implementation="eager")
    result = verify(tiny.adapter(model))
    assert result.blendable, result.reason
    assert not result.fast_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gate_passes_with_large_key_biases(dtype: torch.dtype) -> None:
    result = verify(tiny.adapter(tiny.large_biases().to(dtype)))
    assert result.blendable, result.reason


# -- the gate sees what is wrong ----------------------------------------------------------------


def test_keys_left_where_they_were_stored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny.adapter(tiny.llama())
    monkeypatch.setattr(Repositioner, "rotate_", lambda self, keys, layer, tables: None)
    result = verify(adapter)
    assert result.verdict == "refused"
    assert tiny.one_sentence(result.reason)


def test_sliding_window_ignored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny.adapter(tiny.family("mistral", initializer_range=0.2))
    blocks = rows_module.Rows.blocks
    monkeypatch.setattr(
        rows_module.Rows, "blocks", lambda self, window, *how: blocks(self, None, *how)
    )
    assert verify(adapter).verdict == "refused"


def test_triangular_mask_aligned_bottom_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def triangular(
        self: rows_module.Rows, window: int | None, dtype: torch.dtype, sharing: int
    ) -> list:
        n, s = self.prompt_tokens, self.count
        hidden = ~torch.ones(s, n).tril(n - s).bool()
        bias = torch.zeros(s, n, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return [rows_module.Block(0, s, 0, n, bias)]

    adapter = tiny.adapter(tiny.llama())
    monkeypatch.setattr(rows_module.Rows, "blocks", triangular)
    assert verify(adapter).verdict == "refused"


def test_a_gate_that_cannot_see_a_disturbance_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny.adapter(tiny.llama())
    init = HeldKV.__init__
    monkeypatch.setattr(HeldKV, "__init__", lambda self, kv, disturbance=0.0: init(self, kv))
    result = verify(adapter)
    assert result.verdict == "refused"
    assert "disturb" in result.reason


def test_values_that_hardly_matter_are_not_made_to_matter_by_large_key_biases() -> None:
    model = tiny.large_biases()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-4)
    result = verify(tiny.adapter(model))
    assert result.verdict == "refused"
    assert "cannot see a wrong KV" in result.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_left_where_they_were_are_noticed_behind_large_biases(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny.adapter(tiny.large_biases().to(dtype))
    monkeypatch.setattr(Repositioner, "rotate_", lambda self, keys, layer, tables: None)
    assert "changes logits" in verify(adapter).reason


def test_a_wrong_attention_is_noticed_behind_one_channel_far_larger_than_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.family("starcoder2")
    with torch.no_grad():
        model.model.norm.bias[3] = 1e5
    stack = tiny.adapter(model).stack
    assert attention.serves(stack)
    right = attention.blend_attention

    def wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return 0.5 * right(*args, **kwargs)[0], None

    monkeypatch.setattr(attention, "blend_attention", wrong)
    assert not attention.serves(stack)


def test_nan_weights_are_refused_and_never_pass_a_comparison() -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    assert verify(tiny.adapter(model)).verdict == "refused"


def test_verification_is_remembered_per_namespace(tmp_path, adapter: ModelAdapter) -> None:
    result = verify(adapter)
    namespace = adapter.identity.namespace
    assert remembered(tmp_path, namespace, CPU) is None
    verdicts(tmp_path, namespace).keep(result)
    assert remembered(tmp_path, namespace, CPU) == result
    assert remembered(tmp_path, namespace, torch.device("meta")) is None
    assert remembered(tmp_path, "f" * 64, CPU) is None


def test_a_damaged_memory_of_the_gate_is_no_memory(tmp_path, adapter: ModelAdapter) -> None:
    verdicts(tmp_path, "a" * 64).keep(verify(adapter))
    file = next((tmp_path / "verified").iterdir())
    for content in ("", "{", "[]", "null", '{"verdict": "blendable"}'):
        file.write_text(content)
        assert remembered(tmp_path, "a" * 64, CPU) is None


# -- refused families ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_family_is_refused_with_one_sentence(name: str) -> None:
    adapter = tiny.adapter(tiny.family(name))
    result = verify(adapter)
    assert result.verdict == "refused"
    assert tiny.one_sentence(result.reason)
    assert "use mode full" in result.reason
    with pytest.raises(UnsupportedModelError, match="use mode full"):
        adapter.require_blendable()


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "bloom"])
def test_refused_model_answers_in_mode_full_only(name: str, tmp_path) -> None:
    model = tiny.family(name)
    with BlendEngine(model, tmp_path / "store", tokenizer=tiny.tokenizer()) as engine:
        full = engine.generate("hello there", Options(mode="full", max_new_tokens=4))
        assert full.metrics.mode == "full"
        assert full.metrics.new_tokens == 4
        for mode in ("blend", "reuse", "prefix"):
            with pytest.raises(UnsupportedModelError, match="use mode full"):
                engine.generate("hello there", Options(mode=mode, max_new_tokens=4))
        assert engine.verify().verdict == "refused"


def test_a_gate_that_takes_long_says_so_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_validity, "ANNOUNCED_S", 0.0)
    with (
        tiny.engine(tiny.llama(), tmp_path / "s") as engine,
        caplog.at_level("WARNING", "blendrag"),
    ):
        engine.ingest([tiny.document(0)])
    (said,) = [r.getMessage() for r in caplog.records if "checking once" in r.getMessage()]
    assert re.search(r"a prompt of 96 tokens, about \d+ s$", said)


def test_windows_that_only_masks_know_go_to_the_models_own_attention() -> None:
    """Six tokens, which :func:`serves` compares, are within any window."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = {**tiny.COMMON, **tiny.SLIDES, **experts}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**config)).eval()
    result = verify(tiny.adapter(model))
    assert result.blendable, result.reason
    assert not result.fast_attention
