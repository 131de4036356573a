"""Every use of private parts of transformers, torch, jinja and accelerate, in one place.

Each function names what it touches, why nothing public does the same, and the version it was checked with.
``tests/model/test_compat.py`` has a test for each, which fails by its name when a release moves the part;
that of :func:`cuda_attention` is in ``tests/fusor/test_cuda.py`` and needs a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import nn
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import chat_template_utils

# -- attention of transformers ----------------------------------------------------------------------

#: transformers' own ``sdpa``: ``(module, query, key, value, attention_mask, …)`` → ``(output, weights)``
#: (transformers 5.23).
stock_sdpa = sdpa_attention_forward


def register_attention(name: str, attend: Callable[..., Any]) -> None:
    """Add ``attend`` to transformers' registry of attention functions, which all models of the process share.

    ``ALL_ATTENTION_FUNCTIONS`` (transformers 5.23) is the instance that models look into.
    """
    ALL_ATTENTION_FUNCTIONS.register(name, attend)


def replace_sdpa(attend: Callable[..., Any]) -> None:
    """Register ``attend`` under the name ``sdpa``, unless somebody else has replaced that.

    The name stays, because some models (transformers 5.23) look at it: under another one Falcon adds boolean
    masks to its scores, and models with an indexer leave out the mask of what it chose.
    """
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is stock_sdpa:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def attention_name(config: Any) -> str | None:
    """The name of the attention function that a model with this ``config`` runs.

    ``PreTrainedConfig._attn_implementation`` (transformers 5.23) can be set by a public method, but not read.
    """
    name: str | None = config._attn_implementation
    return name


@functools.cache
def choose_attention(choice: Callable[[PreTrainedConfig], str | None]) -> None:
    """Let configs answer with the attention function that ``choice`` names; ``None`` leaves their own.

    transformers (5.23) reads ``_attn_implementation`` of the config in every layer and for every mask, and
    has no other way to choose for one call. Setting it on the config would change forwards of other threads
    too, so the property that all configs share is replaced.
    """
    stock = PreTrainedConfig._attn_implementation

    def get(config: PreTrainedConfig) -> Any:
        name = choice(config)
        return stock.fget(config) if name is None else name

    PreTrainedConfig._attn_implementation = property(get, stock.fset, doc=stock.__doc__)


# -- models of transformers -------------------------------------------------------------------------


def origin(config: Any) -> tuple[str, str]:
    """The name and the commit that a model was loaded from; empty where that is not known.

    Configs have the name in ``_name_or_path``. Older releases leave the commit in ``_commit_hash``;
    transformers 5.23 keeps it nowhere.
    """
    names = (getattr(config, name, "") for name in ("_name_or_path", "_commit_hash"))
    name, commit = (str(each or "") for each in names)
    return name, commit


def accelerate_hooks(module: Any) -> list[Any]:
    """The hooks by which accelerate moves the weights of ``module``.

    accelerate (1.15) keeps them in ``_hf_hook`` and has no function that lists them.
    """
    hook = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", (hook,)) if hasattr(each, "execution_device")]


# -- chat templates ---------------------------------------------------------------------------------

#: transformers' own compiler of chat templates: text → jinja template (transformers 5.23).
stock_template_compiler: Callable[[str], Any] = chat_template_utils._compile_jinja_template


def replace_template_compiler(compiler: Callable[[str], Any]) -> None:
    """Let transformers compile chat templates by ``compiler``.

    ``_compile_jinja_template`` (transformers 5.23) makes their environment, which cannot be given.
    """
    chat_template_utils._compile_jinja_template = compiler


def template_variables(template: str) -> frozenset[str]:
    """Names that a chat template reads, as transformers tells template arguments from others.

    ``_get_template_variables`` (transformers 5.23). Raises jinja's errors.
    """
    names: frozenset[str] = chat_template_utils._get_template_variables(template)
    return names


def template_clock() -> datetime:
    """What ``strftime_now`` of a chat template formats: ``datetime`` of transformers' module (5.23)."""
    now: datetime = chat_template_utils.datetime.now()
    return now


class TransformedTemplates(ImmutableSandboxedEnvironment):
    """Compiles what :meth:`transformed` makes of a template's syntax tree.

    jinja (3.1) calls ``_parse`` for each template; extensions see only the text or tags of their own.
    """

    def transformed(self, tree: nodes.Template) -> nodes.Template:
        """What is compiled in place of ``tree``; each subclass has its own."""
        raise NotImplementedError

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return self.transformed(super()._parse(source, name, filename))


# -- torch ------------------------------------------------------------------------------------------


def is_in_function_mode() -> bool:
    """Whether a ``TorchFunctionMode`` is active in this thread.

    ``_len_torch_function_stack`` (torch 2.13) is the only function that tells.
    """
    return bool(_len_torch_function_stack())


def consists_of_tensors(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a class that wraps others, which ``__tensor_flatten__`` names.

    ``is_traceable_wrapper_subclass`` (torch 2.13) is how ``torch.compile`` tells.
    """
    return bool(is_traceable_wrapper_subclass(tensor))


def write_count(tensor: torch.Tensor) -> int:
    """Changes with each write in place to ``tensor``; 0 for tensors of inference mode, which do not count.

    ``_version`` (torch 2.13) is what autograd checks.
    """
    return 0 if tensor.is_inference() else tensor._version


def registered_tensors(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]:
    """The parameters and the buffers of ``module`` itself.

    ``_parameters`` and ``_buffers`` (torch 2.13). ``named_parameters(recurse=False)`` gives the same in twice
    the time, which every request would take.
    """
    return module._parameters, module._buffers


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of ``model`` with their paths: each once, a parent before its children.

    ``_modules`` (torch 2.13). ``named_modules`` gives the same in five times the time, which every request
    would take.
    """
    found: dict[nn.Module, str] = {}

    def visit(path: str, module: nn.Module) -> None:
        found[module] = path
        for name, child in module._modules.items():
            if child is not None and child not in found:
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return [(path, module) for module, path in found.items()]


def saves_more(module: nn.Module) -> bool:
    """Whether a module's state is more than its parameters and buffers (bitsandbytes, HQQ: scales).

    Such modules override ``_save_to_state_dict`` (torch 2.13) or ``state_dict``.
    """
    kind = type(module)
    return (
        kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
    )


#: Where ``torch.compile(module)`` keeps the module (torch 2.13).
COMPILED_INNER = "_orig_mod"


def unwrapped(module: Any) -> Any:
    """The module inside ``torch.compile(module)``; any other module unchanged.

    The wrapper (torch 2.13) has it as its child :data:`COMPILED_INNER`.
    """
    while isinstance(module, nn.Module) and COMPILED_INNER in module._modules:
        module = module._modules[COMPILED_INNER]
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled: by a wrapper, by ``.compile()`` or through its ``forward``.

    torch (2.13) has no function that tells: ``.compile()`` sets ``_compiled_call_impl``, and a compiled
    function has ``_torchdynamo_orig_callable``.
    """
    return "torch._dynamo" in sys.modules and (
        COMPILED_INNER in module._modules
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


#: By dtype: what says whether oneDNN has fast products in it.
_FAST_PRODUCTS = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def cpu_multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast matrix products in ``dtype`` on this CPU.

    Operators of ``torch.ops.mkldnn`` (torch 2.13) say so; builds without oneDNN lack them.
    """
    if dtype not in _FAST_PRODUCTS:
        return True
    return bool(getattr(torch.ops.mkldnn, _FAST_PRODUCTS[dtype], lambda: False)())


#: torch's CPU kernel: ``(query, key, value, attn_mask=, scale=)`` → outputs and log-sum-exps, which
#: ``scaled_dot_product_attention`` does not return (torch 2.13).
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[B, H, M, D]`` and log-sum-exps ``[B, H, M]`` of torch's CUDA kernels (torch 2.13): flash
    attention, or with a ``bias`` that expands to ``[B, H, M, T]`` the memory-efficient one. For half
    precision and as many heads in all three; rows of ``bias`` begin at multiples of 16 elements."""
    if bias is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = flash(query, key, value, scale=scale)
        return out, lse
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    whole = bias.expand(*query.shape[:3], key.shape[2])
    out, lse, *_ = efficient(query, key, value, whole, True, scale=scale)
    return out, lse[..., : query.shape[2]]  # padded to a multiple of 32


#: Widest heads of torch's flash attention (2.13) on a GPU.
FLASH_WIDTH = 256


@functools.cache
def has_flash_attention(device: int) -> bool:
    """Whether this GPU has torch's flash attention (2.13): NVIDIA's since Ampere.

    ``can_use_flash_attention`` of ``torch.backends.cuda`` tells, too, but takes tensors and far longer.
    """
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


# -- products of packed weights ---------------------------------------------------------------------
# Operators of torch (2.13) that nothing public calls on a CPU; gpt-fast and torchao call the same.


def int8_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 ``x`` ``[M, K]`` by int8 ``weight`` ``[N, K]`` and ``scales`` ``[N]`` → ``[M, N]``."""
    out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    return out


def int4_pack(weight: torch.Tensor) -> torch.Tensor:
    """int32 ``weight`` ``[N, K]``, numbers in [0, 15], in the layout that :func:`int4_product` reads."""
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1)
    return packed


def int4_product(
    x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    """bfloat16 ``x`` ``[M, K]`` by a packed weight ``[N, K]`` → ``[M, N]``.

    ``scales_and_zeros`` ``[K/group, N, 2]``: a weight is (number - 8) · scale + zero.
    """
    group = x.shape[1] // scales_and_zeros.shape[0]
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, packed, group, scales_and_zeros
    )
    return out


# Operators of torch (2.13) that inductor calls for frozen weights. ``torch.utils.mkldnn.to_mkldnn`` is
# public, but copies inputs and outputs, and its weights stay in rows.


def reorder(weight: torch.Tensor) -> torch.Tensor:
    """A copy of ``weight`` ``[N, K]`` in the order in which oneDNN reads it; an opaque tensor."""
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return reordered


def reordered_product(
    x: torch.Tensor, reordered: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` ``[M, K]`` by a weight ``[N, K]`` of :func:`reorder`, plus ``bias`` → ``[M, N]``."""
    product = torch.ops.mkldnn._linear_pointwise
    out: torch.Tensor = product(x, reordered, bias, "none", [], "")
    return out
