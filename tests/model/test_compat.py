"""Private parts of other packages are where blendrag looks for them, and do what it relies on."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, LlamaConfig
from transformers.utils import chat_template_utils

import tiny
from blendrag.model import compat

# -- attention of transformers ----------------------------------------------------------------------


def test_models_run_an_attention_function_that_is_registered() -> None:
    calls: list[tuple[tuple[str, ...], set[str]]] = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append((tuple(type(each).__name__ for each in args[1:4]), set(kwargs)))
        return compat.stock_sdpa(*args, **kwargs)

    compat.register_attention("blendrag_test", attend)
    model = tiny.llama()
    model.set_attn_implementation("blendrag_test")
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == model.config.num_hidden_layers
    tensors, keywords = calls[0]
    assert tensors == ("Tensor",) * 3
    assert keywords >= {"scaling", "dropout"}


def test_sdpa_takes_and_returns_what_its_replacement_does() -> None:
    parameters = list(inspect.signature(compat.stock_sdpa).parameters)
    assert parameters[:7] == [
        "module", "query", "key", "value", "attention_mask", "dropout", "scaling",
    ]  # fmt: skip
    module = SimpleNamespace(num_key_value_groups=1, is_causal=False, training=False)
    query = torch.randn(1, 2, 3, 4)
    output, weights = compat.stock_sdpa(module, query, query, query, None)
    assert output.shape == (1, 3, 2, 4)
    assert weights is None


def test_sdpa_is_replaced_unless_somebody_else_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(*args: Any, **kwargs: Any) -> Any: ...
    def owners(*args: Any, **kwargs: Any) -> Any: ...

    everybodys = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", everybodys)
    for registered, expected in ((compat.stock_sdpa, ours), (owners, owners)):
        compat.register_attention("sdpa", registered)
        compat.replace_sdpa(ours)
        assert compat.ALL_ATTENTION_FUNCTIONS["sdpa"] is expected


def test_the_attention_of_a_config_is_read_where_it_is_set() -> None:
    model = tiny.llama()
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        assert compat.attention_name(model.config) == name


def test_configs_answer_with_the_attention_that_is_chosen() -> None:
    chosen, other = tiny.llama(), tiny.llama()
    choices: dict[int, str] = {}
    compat.choose_attention(lambda config: choices.get(id(config)))
    own = compat.attention_name(chosen.config)
    seen: list[nn.Module] = []

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return compat.stock_sdpa(module, *args, **kwargs)

    compat.register_attention("blendrag_test", attend)
    choices[id(chosen.config)] = "blendrag_test"
    with torch.inference_mode():
        for model in (chosen, other):
            model(input_ids=torch.tensor([[1, 2, 3]]))
    assert compat.attention_name(chosen.config) == "blendrag_test"
    assert seen == [layer.self_attn for layer in chosen.model.layers]
    choices.clear()
    assert compat.attention_name(chosen.config) == own
    chosen.set_attn_implementation("eager")
    assert compat.attention_name(chosen.config) == "eager"


# -- models of transformers -------------------------------------------------------------------------


def test_a_config_knows_where_it_was_loaded_from(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--owner--model/snapshots" / commit
    LlamaConfig().save_pretrained(snapshot)
    reference = tmp_path / "models--owner--model/refs/main"
    reference.parent.mkdir()
    reference.write_text(commit)
    config = AutoConfig.from_pretrained("owner/model", cache_dir=tmp_path, local_files_only=True)
    name, found = compat.origin(config)
    assert name == "owner/model"
    assert found in (commit, "")  # newer releases do not keep it
    assert compat.origin(LlamaConfig()) == ("", "")


def test_hooks_of_accelerate_are_on_the_module() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module = nn.Linear(2, 2)
    assert compat.accelerate_hooks(module) == []
    align = hooks.AlignDevicesHook(execution_device="cpu", offload=False)
    hooks.add_hook_to_module(module, align)
    assert compat.accelerate_hooks(module) == [align]
    assert not align.offload
    hooks.add_hook_to_module(module, hooks.ModelHook(), append=True)
    assert compat.accelerate_hooks(module) == [align]


# -- chat templates ---------------------------------------------------------------------------------


def test_chat_templates_are_compiled_by_the_function_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced = chat_template_utils._compile_jinja_template
    compiled: list[str] = []

    def compiler(template: str) -> Any:
        compiled.append(template)
        return compat.stock_template_compiler(template)

    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", replaced)
    compat.replace_template_compiler(compiler)
    template = "{{ messages[0].content }}, compiled"
    messages = [{"role": "user", "content": "hello"}]
    rendered = tiny.tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False
    )
    assert rendered == "hello, compiled"
    assert compiled == [template]


def test_the_compiler_makes_jinja_templates_in_a_sandbox() -> None:
    environment = compat.stock_template_compiler("{{ strftime_now('%Y') }}").environment
    assert isinstance(environment, jinja2.sandbox.ImmutableSandboxedEnvironment)
    assert {"raise_exception", "strftime_now"} <= environment.globals.keys()


def test_variables_of_a_template_are_found() -> None:
    found = compat.template_variables("{% for m in messages %}{{ m.role }}{{ date }}{% endfor %}")
    assert found >= {"messages", "date"}
    with pytest.raises(jinja2.TemplateSyntaxError):
        compat.template_variables("{% for %}")


def test_templates_format_the_clock_of_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = SimpleNamespace(now=lambda: compat.datetime(2001, 2, 3))
    monkeypatch.setattr(chat_template_utils, "datetime", fixed)
    template = compat.stock_template_compiler("{{ strftime_now('%d.%m.%Y') }}")
    assert template.render() == compat.template_clock().strftime("%d.%m.%Y") == "03.02.2001"


def test_jinja_compiles_the_transformed_tree() -> None:
    class Shouting(compat.TransformedTemplates):
        def transformed(self, tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
            for data in tree.find_all(jinja2.nodes.TemplateData):
                data.data = data.data.upper()
            return tree

    assert Shouting().from_string("hello {{ name }}").render(name="you") == "HELLO you"


# -- torch ------------------------------------------------------------------------------------------


def test_an_active_function_mode_is_seen() -> None:
    assert not compat.is_in_function_mode()
    with TorchFunctionMode():
        assert compat.is_in_function_mode()
    assert not compat.is_in_function_mode()


def test_tensors_that_consist_of_others_are_told_from_plain_ones() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert not compat.consists_of_tensors(torch.ones(2))
    assert not compat.consists_of_tensors(nn.Parameter(torch.ones(2)))
    both = TwoTensor(torch.ones(2), torch.zeros(2))
    assert compat.consists_of_tensors(both)
    parts, _ = both.__tensor_flatten__()
    assert [type(getattr(both, part)) for part in parts] == [torch.Tensor, torch.Tensor]


def test_a_write_in_place_is_counted() -> None:
    tensor = torch.ones(2)
    before = compat.write_count(tensor)
    tensor.mul_(2)
    assert compat.write_count(tensor) > before
    with torch.inference_mode():
        assert compat.write_count(torch.ones(2)) == 0


def test_parameters_and_buffers_of_a_module_itself_are_found() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert compat.registered_tensors(module) == ({}, {})
    parameters, buffers = compat.registered_tensors(module[0])
    assert list(parameters) == ["weight", "bias"]
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def test_modules_are_those_that_torch_names() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Identity())
    model.register_module("again", model[0][0])
    model.register_module("none", None)
    assert compat.modules_of(model) == list(model.named_modules())


def test_a_module_that_saves_more_than_its_tensors_is_seen() -> None:
    class Scaled(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}scale"] = torch.ones(1)

    assert compat.saves_more(Scaled(2, 2))
    assert "scale" in Scaled(2, 2).state_dict()
    assert not compat.saves_more(nn.Linear(2, 2))


def test_every_form_of_torch_compile_is_seen_and_its_wrapper_removed() -> None:
    plain, own = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = torch.compile(plain)
    assert not compat.is_compiled(plain)
    assert compat.is_compiled(wrapped)
    assert compat.unwrapped(wrapped) is plain
    assert compat.unwrapped(plain) is plain
    assert all(name.startswith(compat.COMPILED_INNER) for name in wrapped.state_dict())
    own.compile()
    assert compat.is_compiled(own)
    plain.forward = torch.compile(plain.forward)  # type: ignore[method-assign]
    assert compat.is_compiled(plain)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_says_which_dtypes_it_multiplies_fast() -> None:
    for operator in compat._FAST_PRODUCTS.values():
        assert getattr(torch.ops.mkldnn, operator)() in (False, True)
    assert compat.cpu_multiplies_fast(torch.float32)


def test_the_cpu_kernel_returns_outputs_and_log_sum_exps() -> None:
    query, keys, values = torch.randn(3, 1, 2, 5, 8).unbind()
    bias = torch.zeros(5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    output, lse = compat.cpu_flash_attention(query, keys, values, attn_mask=bias, scale=0.5)
    scores = query @ keys.mT * 0.5 + bias
    torch.testing.assert_close(output, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_products_of_packed_weights_are_those_of_the_weights() -> None:
    x = torch.randn(2, 64).bfloat16()
    eight, scales = torch.randint(-127, 128, (16, 64), dtype=torch.int8), torch.rand(16).bfloat16()
    four, pairs = torch.randint(0, 16, (16, 64), dtype=torch.int32), torch.rand(2, 16, 2).bfloat16()
    scale, zero = pairs.transpose(0, 1).float().repeat_interleave(32, 1).unbind(-1)  # [N, K]
    for found, weight in (
        (compat.int8_product(x, eight, scales), eight * scales.float()[:, None]),
        (compat.int4_product(x, compat.int4_pack(four), pairs), (four - 8) * scale + zero),
    ):
        expected = x.float() @ weight.T
        assert (found.float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_products_of_reordered_weights_are_those_of_the_weights() -> None:
    weight, bias, x = torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16(), torch.randn(2, 64)
    x = x.bfloat16()
    reordered = compat.reorder(weight)
    assert reordered.is_mkldnn
    assert reordered.nbytes == weight.nbytes
    for added in (bias, None):
        found = compat.reordered_product(x, reordered, added)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, added))
