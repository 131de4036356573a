"""Load an adapter by name: hub id, local directory, or ``demo``.

Errors of the libraries underneath are mapped here, once.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import lru_cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.utils import cached_file

from blendrag.config import DEMO_MODEL, of_variable
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    ModelLoadError,
    NoThreadError,
    is_out_of_memory,
    is_out_of_space,
    is_out_of_threads,
    is_panic,
)
from blendrag.model.adapter import ModelAdapter, context_tokens_of
from blendrag.model.checked_files import check_adapter_files, check_model_files
from blendrag.model.compat import cpu_multiplies_fast
from blendrag.model.gguf_files import is_gguf, unpacked_directory
from blendrag.model.sharing import loaded_once
from blendrag.model.tokens import Tokens
from blendrag.store import regular_files
from blendrag.store.kv import dtype_name
from blendrag.store.regular_files import MIB
from blendrag.store.tensor_bytes import DTYPES
from blendrag.wording import quoted

log = logging.getLogger(__name__)

#: Arguments of ``from_pretrained`` that say where the files are, for tokenizer and config too.
_HUB = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")
_OWN = {
    **dict.fromkeys(("device", "trust_remote_code"), "pass it as an option of its own"),
    **dict.fromkeys(("output_loading_info", "config"), "the engine sets it itself; leave it out"),
}


def checked_model_kwargs(
    model_kwargs: Mapping[str, Any] | None, device_map: Any, dtype: str, device: str
) -> dict[str, Any]:
    """Arguments of ``from_pretrained``, with ``device_map`` among them and ``torch_dtype`` as ``dtype``.

    Raises :class:`InvalidInputError` for what is given twice or cannot be given here.
    """
    given = dict(model_kwargs or {})
    if "torch_dtype" in given:
        given["dtype"] = given.pop("torch_dtype")
    if device_map is not None:
        given["device_map"] = device_map
    for name, why in _OWN.items():
        if name in given:
            raise InvalidInputError(f"model_kwargs holds {name}: {why}")
    for name, value in {"dtype": dtype, "device_map": device}.items():
        if name in given and value != "auto":
            option = "dtype" if name == "dtype" else "device"
            raise InvalidInputError(
                f"{option} {value!r} and {name} {given[name]!r} were both given; leave out one of them"
            )
    return given


def hub_kwargs(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``model_kwargs`` that tokenizer and config are loaded with as well."""
    return {name: model_kwargs[name] for name in _HUB if name in model_kwargs}


# Parameters made in inference mode (torch 2.13, CPU, bfloat16) prefill a third slower.
@torch.inference_mode(False)
def load_adapter(
    name: str = DEMO_MODEL,
    dtype: str = "auto",
    device: str = "auto",
    lora: str | None = None,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> ModelAdapter:
    """Load ``name`` (hub id, directory, GGUF file or ``demo``) and probe it.

    Args:
        dtype: ``auto`` (the checkpoint's, or float32 on a CPU without fast products in it) or a key of
            :data:`blendrag.store.tensor_bytes.DTYPES`.
        lora: directory of a PEFT adapter.
        trust_remote_code: run Python files that the model's directory or repository contains.
        model_kwargs: more arguments of ``from_pretrained``, of :func:`checked_model_kwargs`.

    Raises :class:`ModelLoadError`, :class:`InvalidInputError`, and what lack of memory or disk space raises.
    """
    if dtype != "auto" and dtype not in DTYPES:
        named = f"dtype {quoted(dtype)}{of_variable('dtype', dtype)}"
        raise InvalidInputError(f"{named} is not one of auto, {', '.join(DTYPES)}")
    target = resolve_device(device)
    given = dict(model_kwargs or {})
    files = {"trust_remote_code": trust_remote_code, **hub_kwargs(given)}
    _check_files(name, **files)
    tokens = _tokens_once(name, **files)
    config = _pretrained("AutoConfig", name, **files)
    in_files = next(filter(None, _of_any_part(config, "quantization_config")), None)
    quantised = given.get("quantization_config") or in_files
    method = _quantization_method(quantised)
    given = {"dtype": DTYPES.get(dtype, "auto"), **files, **given}
    with _quantised(name, method, target) if method else nullcontext():
        model = _complete_model(config, name, method, target, given)
        with _mapped(lambda exc: f"model {name!r} cannot be moved to {target}: {_first_line(exc)}"):
            model = model if "device_map" in given else model.to(target)
            is_chosen = dtype != "auto" or "dtype" in (model_kwargs or {})
            model = model if is_chosen else _widened(model, name)
        if lora is not None:
            model = _with_lora(model, lora)
        with _mapped(lambda exc: _load_message(name, exc)):
            return ModelAdapter(model, tokens, model_id=name)


def load_tokens(name: str, trust_remote_code: bool = False, **hub: Any) -> Tokens:
    """Only the tokenizers of ``name``, the same object that :func:`load_adapter` gives its adapter while
    somebody holds it; raises :class:`ModelLoadError`."""
    _check_files(name, trust_remote_code, **hub)
    return _tokens_once(name, trust_remote_code=trust_remote_code, **hub)


def _tokens_once(name: str, **options: Any) -> Tokens:
    """The tokenizers of the files that are there now; a large vocabulary takes a second to read."""

    def load() -> Tokens:
        tokenizer = _tokenizer(name, **options)
        with _mapped(lambda exc: _load_message(name, exc)):
            return Tokens(tokenizer)

    key = ("tokens", name, model_signature(name), repr(sorted(options.items())))
    return loaded_once(key, load)


@lru_cache(maxsize=32)
def load_context_tokens(name: str, trust_remote_code: bool = False, **hub: Any) -> int:
    """Context window of ``name`` in tokens, from its config alone; raises :class:`ModelLoadError`."""
    _check_files(name, trust_remote_code, **hub)
    config = _pretrained("AutoConfig", name, trust_remote_code=trust_remote_code, **hub)
    return context_tokens_of(config)


def _check_files(name: str, trust_remote_code: bool = False, **hub: Any) -> None:
    """Raise :class:`ModelLoadError` for local files, or cached ones of the hub, that must not be loaded."""
    folder = Path(_resolve_model(name))
    if not folder.is_dir():
        where = {key: hub[key] for key in ("cache_dir", "revision") if hub.get(key) is not None}
        if (cached := _cached_config(name, **where)) is None:
            return
        folder = cached.parent
    folder /= hub.get("subfolder") or ""
    _check_once(folder, trust_remote_code, _states(folder))


@lru_cache(maxsize=32)
def _check_once(folder: Path, trust_remote_code: bool, _: Hashable) -> None:
    """Check files that are as they are now; tokenizers and weights are opened one after the other."""
    check_model_files(folder, trust_remote_code)


def _states(folder: Path) -> Hashable:
    """What changes with any file in the folder."""
    with suppress(OSError):
        found = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
        return tuple(
            (name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in found
        )
    return object()


def _pretrained(kind: str, name: str, **options: Any) -> Any:
    """What this class of transformers loads for ``name``."""
    with _mapped(lambda exc: _load_message(name, exc)):
        return _from_pretrained(kind, name, **options)


def _from_pretrained(kind: str, name: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(_resolve_model(name), **options)


def _tokenizer(name: str, **options: Any) -> Any:
    """The tokenizer, with the processor's chat template if it has none itself.

    Models that read images may keep it in ``chat_template.json``, which only their processor reads.
    """
    made = _pretrained("AutoTokenizer", name, **options)
    if not getattr(made, "chat_template", None):
        where = {key: value for key, value in options.items() if key != "trust_remote_code"}
        with suppress(OSError, ValueError, TypeError):  # no such file, or not a template
            file = cached_file(_resolve_model(name), "chat_template.json", **where)
            given = json.loads(regular_files.read_text(Path(file), MIB, follow=True))
            if isinstance(template := given["chat_template"], str):
                made.chat_template = template
    return made


def _class_for(config: Any) -> str:
    """The class of transformers that loads a model with this ``config``.

    A model that takes images or sound is loaded whole, unless its text part is known as a causal LM.
    """
    import transformers

    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_multimodal = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if is_multimodal and not is_causal and not getattr(config, "is_encoder_decoder", False):
        return "AutoModelForMultimodalLM"
    return "AutoModelForCausalLM"


def _complete_model(
    config: Any, name: str, method: str, target: torch.device, options: dict[str, Any]
) -> Any:
    """The model with this ``config``.

    Raises :class:`ModelLoadError` if weights are missing: transformers would make them up.
    Errors of a quantised model are mapped by :func:`_quantised`.
    """
    load = _from_pretrained if method else _pretrained
    if method and target.type != "cpu":
        options.setdefault("device_map", {"": target})  # quantizers choose kernels for this device
    kind = _class_for(config)
    if kind == "AutoModelForMultimodalLM" and _lacks_forward(config):
        raise ModelLoadError(
            f"model {name!r} cannot be loaded: transformers has no forward of {config.model_type} as a "
            "whole; save the part that answers text, such as its thinker, as a model of its own"
        )
    model, report = load(kind, name, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if len(missing) == 1 and missing[0].endswith("lm_head.weight") and _tie_lm_head(model, config):
        return model
    if missing:
        readable = f" in a quantisation that transformers reads, not {method!r}" if method else ""
        raise ModelLoadError(
            f"model {name!r} lacks {len(missing)} weights, such as {missing[0]}; expected a complete "
            f"checkpoint{readable}"
        )
    return model


def _lacks_forward(config: Any) -> bool:
    """Whether its class only runs models one after another in ``generate`` (Qwen-Omni, transformers 5.23)."""
    import transformers

    made = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return getattr(made, "forward", None) is torch.nn.Module.forward


def _of_any_part(config: Any, name: str) -> list[Any]:
    """What ``config`` and that of its text part have; checkpoints have it in either."""
    return [getattr(one, name, None) for one in (config, config.get_text_config(decoder=True))]


def _tie_lm_head(model: Any, config: Any) -> bool:
    """Make the LM head share the embedding's weights if ``config`` or that of its text part says so,
    and tell whether it does.

    transformers (5.23) looks at one of the two, which differs by class.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    says = any(_of_any_part(config, "tie_word_embeddings"))
    if (
        not says
        or getattr(head, "weight", None) is None
        or head.weight.shape != embedding.weight.shape
    ):
        return False
    head.weight = embedding.weight
    return True


def _resolve_model(name: str) -> str:
    """``demo`` → the directory inside the package, a GGUF file → that of its unpacked weights; other names
    unchanged. Raises :class:`ModelLoadError` for a path where there is nothing."""
    if name == DEMO_MODEL:
        return str(Path(__file__).resolve().parent.parent / "demo" / "model")
    if is_gguf(name):
        return str(unpacked_directory(name))
    if not (os.path.lexists(name) or _is_hub_id(name)):
        raise ModelLoadError(
            f"there is no model {quoted(name, 200)}{of_variable('model', name)}; expected a directory with "
            "config.json and weights, a GGUF file, a hub id (owner/name) or 'demo'"
        )
    return name


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def resolve_device(device: str) -> torch.device:
    """``auto`` → CUDA if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = f"device {quoted(device)}{of_variable('device', device)}"
    try:
        target = torch.device(device)
    except RuntimeError as exc:
        raise InvalidInputError(f"{named} is not one of auto, cpu, cuda, cuda:N") from exc
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(f"{named} asked for, but torch sees no CUDA device; use cpu")
    return target


def model_signature(name: str) -> str:
    """Cheap signature of a checkpoint's local files (name, size, mtime); ``""`` if there are none.

    It lets ingest skip an unchanged corpus without loading the model. What a query may reuse is decided by
    the fingerprint of the loaded tensors.
    """
    root = Path(_resolve_model(name))
    if not root.is_dir():
        if (cached := _cached_config(name)) is None:
            return ""
        root = cached.parent
    files = [(file.name, file.stat()) for file in sorted(root.iterdir()) if file.is_file()]
    return "|".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in files)


def _cached_config(name: str, **where: Any) -> Path | None:
    """The config of hub id ``name`` in the hub's local cache."""
    try:
        cached = try_to_load_from_cache(name, "config.json", **where) if "/" in name else None
    except ValueError:  # not a valid hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def _with_lora(model: Any, lora: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise ModelLoadError(f"adapter {lora!r} needs peft: pip install 'blendrag[lora]'") from exc
    check_adapter_files(Path(lora))
    with _mapped(lambda exc: f"adapter {lora!r} cannot be loaded: {_first_line(exc)}"):
        return PeftModel.from_pretrained(model, lora)


# -- quantised checkpoints --------------------------------------------------------------------------


def _quantization_method(config: Any) -> str:
    """The method of a quantisation config (gptq, torchao, …); empty if there is none."""
    found = config or {"quant_method": ""}
    as_dict = found if isinstance(found, dict) else found.to_dict()
    method = as_dict.get("quant_method", "an unnamed method")
    return str(getattr(method, "value", method))


_redirecting = threading.Lock()


@contextmanager
def _quantised(name: str, method: str, target: torch.device) -> Iterator[None]:
    """For loading a model: errors name the method and the device, and nothing is printed to stdout."""

    def message(exc: BaseException) -> str:
        why = _first_line(exc)
        if method == "gptq" and find_spec("gptqmodel") is None:  # transformers 5.23 asks for a GPU
            why = "it needs the packages optimum and gptqmodel"
        return f"model {name!r} is quantised by {method} and cannot be loaded on {target}: {why}"

    # gptqmodel 7.7 prints a logo and its progress to stdout, where commands print answers. One thread at a
    # time: each puts back what it found.
    with _mapped(message), _redirecting, redirect_stdout(StringIO()):
        yield


# -- dtype auto -------------------------------------------------------------------------------------
# Without CPU instructions for them, products in bfloat16 or float16 take about 75 times as long as in
# float32 (measured on a CPU with AVX2 alone). float32 represents every number of either exactly, in twice
# the memory.


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` has fast matrix products in ``dtype``: on a CPU, oneDNN kernels."""
    return device.type != "cpu" or cpu_multiplies_fast(dtype)


def automatic_dtype(checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The compute dtype on ``device`` of a model saved in ``checkpoint``, if the dtype is ``auto``."""
    return checkpoint if has_fast_products(checkpoint, device) else torch.float32


def precision_signature(dtype: str, device: torch.device) -> str:
    """What ``dtype`` means on ``device``, as far as it is known without the checkpoint."""
    if dtype != "auto":
        return dtype
    slow = [
        f"-{dtype_name(kind)}"
        for kind in (torch.bfloat16, torch.float16)
        if not has_fast_products(kind, device)
    ]
    return " ".join(("auto", *slow))


def _widened(model: Any, name: str) -> Any:
    """``model``, converted to its :func:`automatic_dtype` unless it is quantised; a conversion is logged."""
    dtype = automatic_dtype(model.dtype, model.device)
    if dtype == model.dtype or getattr(model, "hf_quantizer", None) is not None:
        return model
    saved = dtype_name(model.dtype)
    log.info(
        f"this CPU has no fast products in {saved}, so {name} is loaded in {dtype_name(dtype)}: more "
        f"memory, and KV stored in {saved} is not used; pass dtype {saved} to keep it"
    )
    model.config.dtype = dtype
    return model.to(dtype)


# -- errors -----------------------------------------------------------------------------------------


@contextmanager
def _mapped(message: Callable[[BaseException], str]) -> Iterator[None]:
    """Raise :class:`ModelLoadError` for errors of loading; lack of memory and disk space pass unchanged.

    transformers, peft, safetensors and tokenizers raise all kinds of exceptions for a broken file, bare
    ``Exception`` included.
    """
    try:
        yield
    except BlendragError:
        raise
    except BaseException as exc:
        if not (isinstance(exc, Exception) or is_panic(exc)):
            raise
        if is_out_of_threads(exc):
            raise NoThreadError from exc
        if is_out_of_memory(exc) or is_out_of_space(exc):
            raise
        raise ModelLoadError(message(exc)) from exc


def _load_message(name: str, exc: BaseException) -> str:
    why = _first_line(exc)
    shown = f"{quoted(name, 200)}{of_variable('model', name)}"
    if "trust_remote_code" in str(exc):  # transformers (5.17) asks in three lines
        return (
            f"model {shown} needs its own Python files, which blendrag does not run by default; read them, "
            "then allow them with trust_remote_code=True (--trust-remote-code)"
        )
    if isinstance(exc, TypeError) and "unexpected keyword" in why:
        return f"model {shown} refuses one of model_kwargs: {why}; expected arguments of from_pretrained"
    if isinstance(exc, ImportError):
        return f"model {shown} needs a package that is not installed: {why}"
    if is_gguf(name):
        return f"{shown} is a GGUF file but not a loadable causal LM: {why}"
    if Path(name).is_file():
        return (
            f"{shown} is a file, expected a directory with config.json and weights, or a GGUF file"
        )
    if (folder := Path(_resolve_model(name))).exists():
        if not (folder / "config.json").exists():
            return (
                f"{shown} is a directory without config.json, expected a model in transformers' format; "
                "check the path"
            )
        return f"{shown} is a directory but not a loadable causal LM: {why}"
    if not isinstance(exc, OSError) or _cached_config(name) is not None:
        return f"model {shown} was found but is not a loadable causal LM: {why}"
    where = "could not be loaded from the hub"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        where = "not in the local cache (HF_HUB_OFFLINE=1)"
    return (
        f"model {shown} is not a local directory and {where}; expected a hub id, a "
        "directory with "
        f"config.json and weights, a GGUF file, or 'demo' ({why})"
    )


#: What messages of torch (2.13) and transformers (5.23) mean, whose own remedies are none here.
_MEANT = {
    "Weights only load failed": "its weights are a pickle that may run code; convert them to safetensors",
    "ignore_mismatched_sizes": "its weights have other shapes than config.json says; download it again",
}


def _first_line(exc: BaseException) -> str:
    text, unclear = str(exc).strip(), (KeyError, TypeError, AttributeError)
    for said, meant in _MEANT.items():
        if said in text:
            return meant
    if not text or isinstance(exc, unclear):
        text = f"{type(exc).__name__} {text}".strip()
    first, *more = filter(None, map(str.strip, text.splitlines()))
    if first.endswith(":") and more:  # what is wrong stands below
        first = f"{first} {more[0]}"
    return first[:300].removesuffix(":")
