"""A writer: a LoRA that is active only while chunks are encoded for a store.

The model that reads the question and answers stays as it is, so that only what is stored changes (SemPIC,
arXiv 2607.28069). A writer is a directory that PEFT saved, with :data:`MARK` beside its files; a store keeps
its writer in one file. Files are read without peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn

from blendrag.config import of_variable
from blendrag.errors import BlendragError, ModelLoadError, is_out_of_memory
from blendrag.model.adapter import ModelAdapter, end_forward
from blendrag.model.checked_files import SIZES_MIB, check_adapter_files
from blendrag.model.fingerprint import hash_bytes
from blendrag.model.sharing import only_here
from blendrag.store import regular_files
from blendrag.store.writer_files import MAX_MIB, TensorDigest, about_in, fingerprint_of
from blendrag.wording import quoted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: File that makes a PEFT directory a writer, written by :func:`mark_as_writer`.
MARK = "blendrag_writer.json"
#: In place of a directory: chunks are encoded without a writer, also if the store has one.
NONE = "none"
#: Tokens of the forward that checks whether a writer fits a model.
TRIAL_TOKENS = 4

_NUMBER = re.compile("[0-9]+")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: What a LoRA config may switch on that changes more than ``scale · B A``.
_REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "target_parameters", "layer_replication",
    "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip


class LowRank(NamedTuple):
    """The change of one linear layer: ``scale · up (down x)``."""

    scale: float
    down: torch.Tensor
    """``[r, in]``"""
    up: torch.Tensor
    """``[out, r]``"""

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""
        return self.down.shape[1], self.up.shape[0]

    @property
    def digests(self) -> list[TensorDigest]:
        return [TensorDigest(tuple(t.shape), str(t.dtype), hash_bytes(t)) for t in self[1:]]


@dataclass(frozen=True)
class Writer:
    """The tensors of a writer on the CPU, as they were saved."""

    parts: Mapping[str, LowRank]
    """By the name of the linear layer."""
    model_id: str
    """Model that it was trained for."""
    encode_after: int = 0
    """Similar chunks that each chunk was encoded after in training; 0 in writers that do not say, which
    were trained before others were possible."""

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over names, scales, shapes, dtypes and bytes: everything that changes stored KV."""
        return fingerprint_of((name, part.scale, part.digests) for name, part in self.parts.items())

    @property
    def rank(self) -> int:
        return max(part.down.shape[0] for part in self.parts.values())

    @property
    def label(self) -> str:
        """For messages."""
        return f"writer {self.fingerprint[:12]} (rank {self.rank}, {len(self.parts)} layers)"

    def trained_otherwise(self, encode_after: int) -> str:
        """Why it helps less with chunks that are encoded so; empty if it was trained so."""
        if self.encode_after == encode_after:
            return ""
        return (
            f"{self.label} was trained with encode_after {self.encode_after}, and chunks are encoded "
            f"with encode_after {encode_after}, so that it helps less"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "rank": self.rank,
            "layers": len(self.parts),
            "model": self.model_id,
            "encode_after": self.encode_after,
        }

    # -- files ------------------------------------------------------------------------------------

    @classmethod
    def load(cls, directory: Path | str) -> Writer:
        """Read a directory that :func:`mark_as_writer` marked, or the file that a store keeps.

        Raises :class:`ModelLoadError`, also for a PEFT adapter of another kind, and for NaN.
        """
        folder = Path(directory).expanduser()
        if folder.is_file():
            return cls.from_bytes(_read(folder), str(folder))
        require_files(folder)
        try:
            check_adapter_files(folder)
        except ModelLoadError as exc:
            fault, is_damage, _ = str(exc).partition("; download the model")
            raise ModelLoadError(fault + "; copy the writer again" * bool(is_damage)) from exc
        config = _json(folder / CONFIG, SIZES_MIB[CONFIG])
        mark = _json(folder / MARK, 1)
        _require_plain_lora(folder, config)
        tensors = _weights(folder / WEIGHTS)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
                raise ModelLoadError(
                    f"writer {folder} holds the tensor {key!r:.100} {tuple(tensor.shape)}, expected only "
                    "lora_A and lora_B of linear layers; train it without other changes"
                )
            found.setdefault(match[1], {})[match[2]] = tensor
        parts = {}
        for name, pair in found.items():
            rank = _rank_of(config, name)
            if pair.keys() != {"A", "B"} or not pair["A"].shape[0] == pair["B"].shape[1] == rank:
                raise ModelLoadError(
                    f"{folder / WEIGHTS} does not fit its config: {name:.100} should have lora_A and lora_B "
                    f"of rank {rank}; copy the writer again"
                )
            parts[name] = LowRank(_scale_of(config, name, rank), pair["A"], pair["B"])
        made = cls(
            _in_order(parts), str(mark.get("model", "")), _count_of(mark.get("encode_after"))
        )
        return made._checked(folder)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Writer:
        """What :meth:`to_bytes` made; ``name`` says in errors what it is. Raises :class:`ModelLoadError`."""
        try:
            about = about_in(data)
            tensors = safetensors.torch.load(data)
            parts = {
                layer: LowRank(float(scale), tensors[f"{layer}.A"], tensors[f"{layer}.B"])
                for layer, scale in about["scales"].items()
            }
            after = _count_of(about.get("encode_after"))
            return cls(_in_order(parts), str(about["model"]), after)._checked(name)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelLoadError(
                f"{name} is not the file of a writer, or it is damaged ({str(exc)[:80]}); copy it again"
            ) from exc

    def to_bytes(self) -> bytes:
        """The writer as one safetensors file."""
        tensors = {f"{name}.A": part.down.contiguous() for name, part in self.parts.items()}
        tensors |= {f"{name}.B": part.up.contiguous() for name, part in self.parts.items()}
        scales = {name: part.scale for name, part in self.parts.items()}
        about = {"model": self.model_id, "encode_after": self.encode_after, "scales": scales}
        data: bytes = safetensors.torch.save(tensors, {"writer": json.dumps(about)})
        return data

    def _checked(self, where: Path | str) -> Writer:
        if not self.parts:
            raise ModelLoadError(f"{where} changes no layer; train it again")
        for name, part in self.parts.items():
            if not (
                math.isfinite(part.scale) and all(t.double().isfinite().all() for t in part[1:])
            ):
                raise ModelLoadError(
                    f"{where} holds NaN or infinite weights ({name:.100}), expected numbers; train it again "
                    "with a lower learning rate"
                )
        return self


def mark_as_writer(directory: Path, model_id: str, encode_after: int = 0) -> None:
    """Mark what PEFT saved in ``directory`` as a writer for a model, trained on chunks that were encoded
    after so many similar ones."""
    mark = {"model": model_id, "encode_after": encode_after}
    regular_files.replace(directory / MARK, json.dumps(mark, indent=1).encode())


def _in_order(parts: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """By name, layer 2 before layer 10. Files are read in a random order, and errors name the first."""
    return dict(
        sorted(parts.items(), key=lambda part: _NUMBER.sub(lambda n: n[0].zfill(6), part[0]))
    )


def _count_of(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def require_files(directory: Path | str) -> None:
    """Raise :class:`ModelLoadError` unless ``directory`` has the files of a writer, or is one file; reads
    nothing."""
    folder = Path(directory).expanduser()
    if folder.is_file():
        return
    missing = [name for name in (CONFIG, WEIGHTS, MARK) if not (folder / name).is_file()]
    shown = f"{quoted(str(folder), 200)}{of_variable('writer', folder)}"
    if missing == [MARK]:
        raise ModelLoadError(
            f"{shown} is a LoRA adapter that was not trained as a writer (it has no {MARK}); give it as "
            "lora, or train a writer with blendrag adapt"
        )
    if not folder.exists():
        raise ModelLoadError(
            f"there is no writer {shown}, expected a directory that blendrag adapt made"
        )
    if missing:
        raise ModelLoadError(
            f"{shown} is not the directory of a writer (it has no {missing[0]}), expected one "
            "that blendrag adapt made"
        )


def _require_plain_lora(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    wrong = f"peft_type {kind!r:.40}" if kind != "LORA" else ""
    if config.get("bias", "none") != "none":
        wrong = wrong or f"bias {config['bias']!r:.40}"
    wrong = wrong or next((name for name in _REFUSED if config.get(name)), "")
    if wrong:
        raise ModelLoadError(
            f"writer {folder} has {wrong}, expected a plain LoRA of linear layers; train it without that"
        )


def _json(file: Path, limit_mib: float) -> dict[str, Any]:
    try:
        content = json.loads(
            regular_files.read_bytes(file, int(limit_mib * regular_files.MIB), follow=True)
        )
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelLoadError(
            f"{file} cannot be read ({str(exc)[:80]}); copy the writer again"
        ) from exc
    if not isinstance(content, dict):
        raise ModelLoadError(
            f"{file} is a {type(content).__name__}, expected a JSON object; copy the writer again"
        )
    return content


def _weights(file: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(_read(file))
    except (SafetensorError, ValueError) as exc:
        raise ModelLoadError(f"{file} is damaged ({str(exc)[:80]}); copy the writer again") from exc


def _read(file: Path) -> bytes:
    try:
        return regular_files.read_bytes(file, MAX_MIB * regular_files.MIB, follow=True)
    except OSError as exc:
        raise ModelLoadError(
            f"{file} cannot be read ({str(exc)[:80]}); copy the writer again"
        ) from exc


def _rank_of(config: Mapping[str, Any], name: str) -> Any:
    return _by_pattern(config.get("rank_pattern"), name, config.get("r"))


def _scale_of(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise ModelLoadError(f"the writer's lora_alpha is {alpha!r:.40}, expected a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, name: str, otherwise: Any) -> Any:
    """The value of the first of ``patterns`` that ends the ``name`` of a layer, as peft 0.21 looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


# -- encoding with it -----------------------------------------------------------------------------


class _Part(NamedTuple):
    """One linear layer on the device."""

    name: str
    module: nn.Module
    shape: tuple[int, int]
    """Inputs and outputs."""
    down: torch.Tensor
    """``[r, in]``"""
    up: torch.Tensor
    """``[r, out]``, scaled."""

    @classmethod
    def of(cls, name: str, module: nn.Module, part: LowRank, like: Any) -> _Part:
        """``like``: device and dtype."""
        up = (part.up.T * part.scale).contiguous().to(*like)
        return cls(name, module, part.shape, part.down.to(*like), up)


class FittedWriter:
    """A writer on the device and in the dtype of one model, whose modules it does not change."""

    def __init__(self, writer: Writer, adapter: ModelAdapter) -> None:
        """Raises :class:`ModelLoadError` for a model that it does not fit. The caller holds the lock."""
        self._adapter = adapter
        other = "" if writer.model_id in ("", adapter.model_id) else f" of {writer.model_id}"
        self._label = f"{writer.label}{other}"
        if adapter.composition is not None:
            raise self._unfit(
                "some of whose layers have running states, which no writer was trained for"
            )
        modules = dict(adapter.model.named_modules())
        if unknown := [name for name in writer.parts if name not in modules]:
            raise self._unfit(f"which has no layer {unknown[0]:.100}")
        needed = self._needed(writer, {name: modules[name] for name in writer.parts})
        like = adapter.device, adapter.layout.torch_dtype
        with torch.inference_mode(False), torch.no_grad():
            self._parts = [_Part.of(n, modules[n], writer.parts[n], like) for n in needed]
        self._require_fit()

    def _unfit(self, why: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._label} does not fit {self._adapter.model_id}, {why}; give a writer that was trained for "
            "this model, or none"
        )

    def _needed(self, writer: Writer, modules: Mapping[str, nn.Module]) -> list[str]:
        """The writer's layers without those behind the last layer's K and V, which change nothing that is
        stored.

        Raises :class:`ModelLoadError` unless all of them fit.
        """
        called: dict[str, None] = {}
        needed: list[str] = []

        def noted(name: str) -> Any:
            def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                self._require_shape(name, writer.parts[name].shape, args, output, TRIAL_TOKENS)
                called[name] = None

            return only_here(note)

        hooks = {module: noted(name) for name, module in modules.items()}
        with torch.inference_mode(), _hooked(hooks):
            self._adapter.prefill_at(range(TRIAL_TOKENS), after_kv=lambda: needed.extend(called))
        self._require_all(writer.parts, called)
        return needed or [*called]  # all if the model never says when the last layer has K and V

    @torch.inference_mode()
    def _require_fit(self) -> None:
        """Raise :class:`ModelLoadError` unless it can be used, by one short forward."""
        try:
            with self.active(0, TRIAL_TOKENS):
                self._adapter.prefill_at(range(TRIAL_TOKENS), after_kv=end_forward)
        except RuntimeError as exc:
            if isinstance(exc, BlendragError) or is_out_of_memory(exc):
                raise
            raise self._unfit(f"whose layers compute otherwise ({str(exc)[:80]})") from exc

    @contextmanager
    def active(self, skip: int, tokens: int) -> Iterator[None]:
        """Within this context, the caller's forward over ``skip + tokens`` tokens is changed behind the first
        ``skip``. Forwards of other threads and greenlets are not.

        Raises :class:`ModelLoadError` after a forward that left out a layer of the writer.
        """
        called: set[str] = set()
        hooks = {
            part.module: only_here(self._hook(part, skip, skip + tokens, called))
            for part in self._parts
        }
        with _hooked(hooks):
            yield
        self._require_all((part.name for part in self._parts), called)

    def _hook(self, part: _Part, skip: int, end: int, called: set[str]) -> Any:
        (inputs, outputs), down, up = part.shape, part.down, part.up
        shapes = (1, end, inputs), (1, end, outputs)

        def change(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not args or (getattr(args[0], "shape", None), output.shape) != shapes:
                self._require_shape(part.name, part.shape, args, output, end)
            low = F.linear(args[0][0, skip:].to(down.dtype), down)  # [T, r]
            if output.dtype == up.dtype:
                output[0, skip:].addmm_(low, up)  # [T, out]
            else:  # quantised layers may compute in another dtype
                output[0, skip:] += (low @ up).to(output.dtype)
            called.add(part.name)

        return change

    def _require_all(self, names: Iterable[str], called: Container[str]) -> None:
        if left_out := next((name for name in names if name not in called), ""):
            raise self._unfit(f"which does not run {left_out:.100} while it encodes")

    def _require_shape(
        self, name: str, shape: tuple[int, int], args: tuple[Any, ...], output: Any, tokens: int
    ) -> None:
        """Raise :class:`ModelLoadError` unless a layer of that shape is given all ``tokens``."""
        if not _gets_all(args, tokens):
            raise self._unfit(f"whose {name:.100} is not given all tokens in their order")
        inputs, outputs = args[0].shape[-1], output.shape[-1]
        if (inputs, outputs) != shape:
            raise self._unfit(
                f"whose {name:.100} is {inputs} × {outputs}, not {shape[0]} × {shape[1]}"
            )


@contextmanager
def _hooked(hooks: Mapping[nn.Module, Callable[..., None]]) -> Iterator[None]:
    """Within this context these are forward hooks of the modules."""
    with ExitStack() as stack:
        for module, hook in hooks.items():
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _gets_all(args: tuple[Any, ...], tokens: int) -> bool:
    """Whether a layer that is called with ``args`` is given all ``tokens`` in their order."""
    given = args[0] if args else None
    return isinstance(given, torch.Tensor) and given.shape[:-1] == (1, tokens)


@torch.no_grad()
def layers_for_writers(adapter: ModelAdapter, layers: Mapping[str, nn.Module]) -> list[str]:
    """Names of those of ``layers`` that a writer may change: they are given all tokens in their order, before
    the last layer has K and V.

    Experts are not, nor are layers beside experts in some models. The caller holds the lock.
    """
    found: dict[str, bool] = {}
    needed: list[str] = []

    def noted(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            found[name] = found.get(name, True) and _gets_all(args, TRIAL_TOKENS)

        return only_here(note)

    with ExitStack() as stack:
        for name, module in layers.items():
            stack.callback(module.register_forward_pre_hook(noted(name)).remove)
        adapter.prefill_at(range(TRIAL_TOKENS), after_kv=lambda: needed.extend(found))
    # all if the model never says when the last layer has K and V
    return [name for name in layers if found.get(name) and name in (needed or found)]
