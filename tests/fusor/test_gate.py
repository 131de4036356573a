"""The correctness gate over the families, and that it fails when any of its parts is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import tiny
from blendrag.engine import BlendEngine, Options, kv_validity
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import attention, gate
from blendrag.fusor.gate import verify
from blendrag.fusor.rows import AttentionBlock, Rows
from blendrag.model.positions import Repositioner
from blendrag.model.windows import Window
from blendrag.wording import is_step

CPU = torch.device("cpu")


def expected_kinds(config: Any) -> list[str]:
    """From the config alone: which layers have no rotary embedding."""
    if config.model_type in ("smollm3", "llama4_text"):
        return ["rotary" if rope else "position-free" for rope in config.no_rope_layers]
    if config.model_type in ("cohere2", "exaone4", "afmoe"):
        names = {"sliding_attention": "rotary", "full_attention": "position-free"}
        return [names[kind] for kind in config.layer_types]
    if config.model_type in ("bloom", "mpt"):
        return ["position-free"] * config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        return ["latent"] * config.num_hidden_layers
    return ["rotary"] * (config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in tiny.ALIKE else []) for n in tiny.FAMILIES],
)
def test_family_passes_the_gate(name):
    model = tiny.family(name)
    result = verify(tiny.adapter(model))
    assert result.verdict == "blendable", result.reason
    assert result.subset_logit_diff is not None
    assert result.perturbed_logit_diff is not None
    assert result.max_logit_diff is not None
    assert max(result.subset_logit_diff, result.max_logit_diff) < 1e-4
    assert result.perturbed_logit_diff > 1e-2
    assert result.greedy_equal is True
    assert result.prompt_tokens >= 2 * tiny.WINDOW
    assert list(result.layers) == expected_kinds(model.config.get_text_config(decoder=True))


def test_as_many_greedy_tokens_are_compared_as_outside_of_tests(monkeypatch):
    monkeypatch.setattr(gate, "GREEDY_TOKENS", 32)
    model = tiny.llama()
    with tiny.counted(model, "forward") as forwards:
        result = verify(tiny.adapter(model))
    assert result.greedy_equal is True
    assert len(forwards) > 2 * 31


#: Shared KV, inputs per layer, latent vectors, chunked attention.
SPECIAL = (
    "gemma3n", "gemma4", "deepseek_v2", "minicpm3", "mimo_v2_flash", "llama4_text",
)  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_families_with_special_layers_pass_the_gate_in_bfloat16(name):
    model = tiny.family(name).to(torch.bfloat16)
    result = verify(tiny.adapter(model))
    assert result.verdict == "blendable", result.reason
    assert list(result.layers) == expected_kinds(model.config)


def test_a_rounded_model_may_differ_as_much_as_from_itself(monkeypatch):
    monkeypatch.setattr(
        "blendrag.fusor.gate.LOGIT_TOLERANCE", dict.fromkeys(gate.LOGIT_TOLERANCE, 1e-9)
    )
    rounded = verify(tiny.adapter(tiny.llama().to(torch.bfloat16)))
    assert rounded.blendable, rounded.reason
    exact = verify(tiny.adapter(tiny.llama()))
    assert "over loaded KV" in exact.reason
    monkeypatch.setattr(gate, "_own_noise", lambda *args: 0.0)
    assert not verify(tiny.adapter(tiny.llama().to(torch.bfloat16))).blendable


@pytest.mark.parametrize(
    "made",
    [
        lambda: tiny.family("gemma2").to(torch.bfloat16),
        lambda: tiny.family("mistral", attn_implementation="eager"),
        lambda: tiny.large_biases().to(torch.bfloat16),
        lambda: tiny.large_biases().to(torch.float16),
    ],
    ids=("bf16-softcap", "eager", "biases-bf16", "biases-fp16"),
)
def test_gate_passes_in_low_precision_with_eager_attention_and_large_key_biases(made):
    model = made()
    result = verify(tiny.adapter(model))
    assert result.blendable, result.reason
    if model.config._attn_implementation == "eager":
        assert not result.fast_attention


def test_a_model_that_gives_logits_of_every_row_passes(monkeypatch):
    """Video-LLaMA 3 and Qwen-Omni have no ``logits_to_keep``."""
    model = tiny.llama()
    stock = model.forward
    monkeypatch.setattr(model, "forward", lambda logits_to_keep=0, **given: stock(**given))
    assert verify(tiny.adapter(model)).blendable


def test_tokens_that_a_model_forbids_do_not_hide_the_others():
    """Chameleon gives tokens of images the smallest number there is."""
    model = tiny.llama()

    def forbid(module: Any, args: Any, logits: torch.Tensor) -> None:
        logits[..., 600:] = torch.finfo(logits.dtype).min

    model.lm_head.register_forward_hook(forbid)
    result = verify(tiny.adapter(model))
    assert result.blendable, result.reason
    assert result.allowed_logit_diff is not None
    assert result.allowed_logit_diff < 1


def test_windows_that_only_masks_know_go_to_the_models_own_attention():
    """The six tokens that ``serves`` compares are within any window."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = {**tiny.COMMON, **tiny.SLIDES, **experts}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**config)).eval()
    result = verify(tiny.adapter(model))
    assert result.blendable, result.reason
    assert not result.fast_attention


def test_arguments_of_which_only_some_layers_have_one_per_token_are_sliced():
    """BEAM scales the queries of its full-attention layers by their positions."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    result = verify(tiny.adapter(tiny.beam(kinds)))
    assert result.blendable, result.reason
    assert result.fast_attention


# -- the gate sees what is wrong ----------------------------------------------------------------


def int8_activations() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny.llama()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


@pytest.mark.parametrize(
    "made",
    [tiny.llama, lambda: tiny.large_biases().to(torch.bfloat16), int8_activations],
    ids=("plain", "biases-bf16", "int8-activations"),
)
def test_keys_left_where_they_were_stored_are_refused(made, monkeypatch):
    adapter = tiny.adapter(made())
    monkeypatch.setattr(Repositioner, "rotate_", lambda self, keys, layer, tables: None)
    result = verify(adapter)
    assert result.verdict == "refused"
    assert "changes logits" in result.reason
    assert tiny.one_sentence(result.reason)


def test_sliding_window_ignored_is_refused(monkeypatch):
    adapter = tiny.adapter(tiny.family("mistral", initializer_range=0.2))
    blocks = Rows.blocks
    monkeypatch.setattr(Rows, "blocks", lambda self, window, *how: blocks(self, None, *how))
    assert verify(adapter).verdict == "refused"


def test_triangular_mask_aligned_bottom_right_is_refused(monkeypatch):
    def triangular(
        self: Rows, window: Window | None, dtype: torch.dtype, sharing: int
    ) -> list[AttentionBlock]:
        n, s = self.prompt_tokens, self.count
        hidden = ~torch.ones(s, n).tril(n - s).bool()
        bias = torch.zeros(s, n, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return [AttentionBlock(0, s, 0, n, bias)]

    adapter = tiny.adapter(tiny.llama())
    monkeypatch.setattr(Rows, "blocks", triangular)
    assert verify(adapter).verdict == "refused"


def test_a_gate_that_cannot_see_a_disturbance_refuses(monkeypatch):
    monkeypatch.setattr(gate, "_disturbed", lambda kv, *_: kv)
    result = verify(tiny.adapter(tiny.llama()))
    assert result.verdict == "refused"
    assert "disturb" in result.reason


def test_large_key_biases_do_not_enlarge_the_disturbance_of_values_that_hardly_matter():
    model = tiny.large_biases()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-5)
    result = verify(tiny.adapter(model))
    assert result.verdict == "refused"
    assert "cannot see a wrong KV" in result.reason


def test_a_wrong_attention_is_noticed_next_to_one_channel_far_larger_than_the_others(monkeypatch):
    model = tiny.family("starcoder2")
    with torch.no_grad():
        model.model.norm.bias[3] = 1e5
    stack = tiny.adapter(model).stack
    assert attention.serves(stack)
    right = attention.blend_attention
    monkeypatch.setattr(
        attention,
        "blend_attention",
        lambda *args, **kwargs: (0.5 * right(*args, **kwargs)[0], None),
    )
    assert not attention.serves(stack)


def test_nan_weights_are_refused():
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    assert verify(tiny.adapter(model)).verdict == "refused"


@pytest.mark.usefixtures("empty_cache")
def test_a_gate_that_takes_long_says_so_before_it_runs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kv_validity, "ANNOUNCED_S", 0.0)
    with (
        tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine,
        caplog.at_level("INFO", "blendrag"),
    ):
        engine.ingest([tiny.document(0)])
    (said,) = [r for r in caplog.records if "checking once" in r.getMessage()]
    assert is_step(said)
    assert re.search(r"a prompt of 96 tokens, about \d+ s$", said.getMessage())


# -- refused families ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_family_is_refused_with_one_sentence(name):
    adapter = tiny.adapter(tiny.family(name))
    result = verify(adapter)
    assert result.verdict == "refused"
    assert tiny.one_sentence(result.reason)
    assert "use mode full" in result.reason
    with pytest.raises(UnsupportedModelError, match="use mode full"):
        adapter.require_blendable()


def test_a_model_that_places_tokens_by_their_order_is_refused_for_that():
    """BART takes position_ids and ignores them, so its KV would seem free of positions."""
    assert "by their order" in (tiny.adapter(tiny.family("bart")).refusal or "")


@pytest.mark.parametrize(("seed", "error"), [(40, KeyError), (41, TypeError), (42, ValueError)])
def test_whatever_a_forward_raises_is_a_refusal_and_mode_full_remains(
    seed, error, tmp_path, monkeypatch
):
    model = tiny.llama(seed)  # verdicts are kept
    own = type(model.model.layers[1]).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if attention.ROWS_KEYWORD in kwargs or kwargs.get("attention_mask") is not None:
            raise error()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[1]), "forward", forward)
    with tiny.engine(model, tmp_path) as engine:
        result = engine.verify()
        assert result.verdict == "refused"
        assert tiny.one_sentence(result.reason)
        assert error.__name__ in result.reason
        answer = engine.generate("hello there", Options(mode="full", max_new_tokens=4))
        assert answer.metrics.new_tokens


def test_memory_that_runs_out_is_no_refusal(monkeypatch):
    adapter = tiny.adapter(tiny.llama())
    monkeypatch.setattr(gate, "_measure", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        verify(adapter)


def test_refused_model_blends_nothing(tmp_path):
    model = tiny.family("gpt2")
    with BlendEngine(model, tmp_path / "store", tokenizer=tiny.tokenizer()) as engine:
        full = engine.generate("hello there", Options(mode="full", max_new_tokens=4))
        assert (full.metrics.mode, full.metrics.new_tokens) == ("full", 4)
        for mode in ("blend", "reuse"):
            with pytest.raises(UnsupportedModelError, match="use mode full, or prefix"):
                engine.generate("hello there", Options(mode=mode, max_new_tokens=4))
        prefix = engine.generate("hello there", Options(mode="prefix", max_new_tokens=4))
        assert prefix.text == full.text
        assert engine.verify().verdict == "refused"
