"""Files of an embedder or a reranker, looked at before sentence-transformers reads them.

They may name classes and options of ``from_pretrained``: before 6.0, sentence-transformers ran a local
directory's own code (https://github.com/huggingface/sentence-transformers/issues/3801), and of the options
6.2 removes only ``trust_remote_code``: ``weights_only: false`` runs the code in a pickle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from blendrag.config import of_variable
from blendrag.errors import ModelLoadError
from blendrag.store import regular_files

_OURS = "sentence_transformers."
#: Module types of a model that only a store names: they read weights and numbers, and import nothing.
_PLAIN = frozenset({"Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout"})
_ROUTERS = frozenset({"Router", "Asym"})
#: Modules that read no options of ``from_pretrained``.
_WITHOUT_OPTIONS = _PLAIN - {"Transformer"}
#: Files in which a Transformer looks for them.
_OPTION_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Options that neither name a file nor decide how one is read.
_OPTIONS = frozenset(
    {
        "add_pooling_layer", "do_lower_case", "dtype", "max_position_embeddings", "model_max_length",
        "padding_side", "torch_dtype", "truncation_side", "use_fast",
    }
)  # fmt: skip
#: What :mod:`.mean_embedder` computes.
_MEAN = ("Transformer", "Pooling", "Normalize")
#: Routers within routers.
_MAX_DEPTH = 4


@dataclass(frozen=True)
class ModelFiles:
    """The files of one embedding model, in a directory or on the hub."""

    name: str
    local_files_only: bool
    recorded: bool
    """The name was read from a store and not given by the user: only plain module types are accepted, with
    weights in safetensors."""

    @property
    def exist(self) -> bool:
        """Whether any of what makes a model is there."""
        return any(map(self._path, ("modules.json", "config.json")))

    def check(self) -> None:
        """Raise :class:`ModelLoadError` unless all modules are sentence-transformers' own with harmless
        options."""
        modules = self._json("modules.json")
        if modules is None:  # a plain transformers model
            modules = [{"type": f"{_OURS}Transformer"}]
        if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
            raise self._refusal("has a modules.json that is not a list of modules; check it")
        for module in modules:
            kind, folder = str(module.get("type")), PurePosixPath(str(module.get("path", "")))
            if folder.is_absolute() or ".." in folder.parts:
                raise self._refusal(
                    f"has a module in {str(folder)!r}, expected one of its own folders"
                )
            self._check_module(kind, folder, _MAX_DEPTH)
            if self.recorded:
                self._check_recorded(_last(kind), folder)

    def length_of_mean(self) -> int | None:
        """Most tokens of a window, if the model is one that :mod:`.mean_embedder` computes; else ``None``."""
        modules = self._json("modules.json")
        if not isinstance(modules, list):
            return None
        kinds = [_last(str(each.get("type"))) for each in modules]
        if kinds != [*_MEAN] or modules[0].get("path"):
            return None
        pooling = self._dictionary(PurePosixPath(str(modules[1].get("path")), "config.json"))
        modes = {name: value for name, value in pooling.items() if "pooling_mode" in name and value}
        ours = self._dictionary(PurePosixPath("config_sentence_transformers.json"))
        model = self._dictionary(PurePosixPath("config.json"))
        reading = self._dictionary(PurePosixPath("sentence_bert_config.json"))
        length = reading.get("max_seq_length")
        is_plain = (
            modes in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"})
            and not any((ours.get("prompts") or {}).values())
            and not ours.get("default_prompt_name")
            and not ours.get("truncate_dim")
            and model.get("architectures") == ["BertModel"]
            and (model.get("dtype") or model.get("torch_dtype") or "float32") == "float32"
            and {*reading} <= {"max_seq_length", "do_lower_case"}
            and not reading.get("do_lower_case")
            and self._path("adapter_config.json") is None
        )
        return length if is_plain and type(length) is int and 0 < length <= 512 else None

    def _check_module(self, kind: str, folder: PurePosixPath, depth: int) -> None:
        """The class, its options, and those of the modules that a router names in its own file."""
        if not kind.startswith(_OURS):
            raise self._refusal(
                f"consists of {kind[:80]!r}, code that comes with it, expected classes of "
                "sentence-transformers; choose another embedder, or read that code and set "
                "trust_remote_code"
            )
        if _last(kind) not in _WITHOUT_OPTIONS:
            self._check_options(folder)
        if _last(kind) in _ROUTERS:
            names = [folder / name for name in ("router_config.json", "config.json")]
            file = names[0] if self._path(names[0]) is not None else names[1]
            types = self._dictionary(file).get("types")
            if not isinstance(types, dict) or not depth:
                raise self._refusal("has a router that names no classes; check it")
            for part, inner in types.items():
                self._check_module(str(inner), folder / str(part), depth - 1)

    def _check_options(self, folder: PurePosixPath) -> None:
        for file in _OPTION_FILES:
            for group, options in self._dictionary(folder / file).items():
                # processing_kwargs say how a text is tokenised after loading
                if group == "processing_kwargs" or not group.endswith(("_args", "_kwargs")):
                    continue
                if not isinstance(options, dict) or not all(map(_is_harmless, options.items())):
                    raise self._refusal(
                        f"sets {group}={str(options)[:80]} in {file}, expected only "
                        f"{', '.join(sorted(_OPTIONS))}; choose another embedder, or, if you trust it, "
                        "name it and set trust_remote_code"
                    )

    def _check_recorded(self, kind: str, folder: PurePosixPath) -> None:
        if kind not in _PLAIN:
            expected = ", ".join(sorted(_PLAIN))
            raise self._distrust(f"has a module {kind!r}, expected one of {expected}")
        file = folder / "config.json"
        if kind == "Dense":
            activation = str(self._dictionary(file).get("activation_function") or "torch.nn.")
            safe = self._path(folder / "model.safetensors") is not None
            if not safe or not activation.startswith("torch.nn."):
                raise self._distrust(
                    "has a dense layer with an activation outside torch.nn or without model.safetensors"
                )
        if kind == "Transformer":
            # transformers reads whatever file an index names, by its suffix
            own = str(self._dictionary(file).get("transformers_weights") or "model.safetensors")
            for index in {"model.safetensors.index.json", own}:
                if not index.endswith(".index.json") or self._path(folder / index) is None:
                    continue
                shards = self._dictionary(folder / index).get("weight_map")
                if not isinstance(shards, dict) or not all(map(_is_safetensors, shards.values())):
                    raise self._distrust(
                        f"has a {index} that names other files than *.safetensors in its folder"
                    )
            if self._path(folder / "adapter_config.json") is not None:
                raise self._distrust("is an adapter of another model, expected a whole model")

    def _refusal(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"embedder {self.name!r}{of_variable('embedder', self.name)} {why}")

    def _distrust(self, why: str) -> ModelLoadError:
        trust = f"if you trust it, name it as the embedder: {self.name}"
        return self._refusal(f"is named only by the store and {why}; {trust}")

    def _json(self, file: PurePosixPath | str) -> Any:
        """The content of a file; ``None`` if it does not exist."""
        path = self._path(file)
        if path is None:
            return None
        try:
            return json.loads(regular_files.read_bytes(path, regular_files.MIB, follow=True))
        except (OSError, ValueError, RecursionError) as exc:
            raise self._refusal(f"has a {file} that cannot be read ({exc}); check it") from exc

    def _dictionary(self, file: PurePosixPath) -> dict[str, Any]:
        """The content of a file; empty if it does not exist or is something else."""
        content = self._json(file)
        return content if isinstance(content, dict) else {}

    def _path(self, file: PurePosixPath | str) -> Path | None:
        if Path(self.name).is_dir():
            path = Path(self.name) / file
            return path if path.exists() else None
        try:
            return Path(
                hf_hub_download(self.name, str(file), local_files_only=self.local_files_only)
            )
        except LocalEntryNotFoundError:
            if self.local_files_only:
                return None  # a cached model has all of its files in the cache
            raise
        except EntryNotFoundError:
            return None


def _is_harmless(option: tuple[str, Any]) -> bool:
    key, value = option
    return key in _OPTIONS and isinstance(value, (str, int, float, bool, type(None)))


def _is_safetensors(shard: Any) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\")


def _last(kind: str) -> str:
    return kind.rpartition(".")[2]
