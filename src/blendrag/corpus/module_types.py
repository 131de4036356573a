"""Which classes and options a sentence-transformers model may name, checked before it is loaded.

``modules.json`` of a model names the class of each module. Before 6.0, sentence-transformers imported
whatever class a local directory named, with the directory's own code
(https://github.com/huggingface/sentence-transformers/issues/3801). Its other files may hold options of
``from_pretrained``, of which sentence-transformers 6.2 removes only ``trust_remote_code``:
``weights_only: false`` runs the code in a pickle.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from blendrag.errors import ModelLoadError
from blendrag.store import regular_files

_OURS = "sentence_transformers."
#: Classes of a model that only a store names: they read weights and numbers, and import nothing.
_PLAIN = frozenset({"Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout"})
_ROUTERS = frozenset({"Router", "Asym"})
#: Modules that read no options of ``from_pretrained``.
_WITHOUT_OPTIONS = _PLAIN - {"Transformer"}
#: The files in which a Transformer looks for them.
_OPTION_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Options that neither name a file nor decide how one is read.
_OPTIONS = frozenset(
    {
        "add_pooling_layer",
        "do_lower_case",
        "dtype",
        "max_position_embeddings",
        "model_max_length",
        "padding_side",
        "torch_dtype",
        "truncation_side",
        "use_fast",
    }
)
_MAX_BYTES = regular_files.MIB
#: Routers within routers.
_MAX_DEPTH = 4


def check_module_types(name: str, local_files_only: bool, recorded: bool) -> None:
    """Raise :class:`ModelLoadError` unless all modules of the model are sentence-transformers' own.

    Their files may set harmless options only. ``recorded``: the name was read from a store and not given
    by the user; only plain types then, with weights in safetensors.
    """
    modules = _json(name, "modules.json", local_files_only)
    if modules is None:  # a plain transformers model
        _check_options(name, PurePosixPath(), local_files_only)
        if recorded:
            _check_weights(name, PurePosixPath(), local_files_only)
        return
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelLoadError(
            f"embedder {name!r} has a modules.json that lists no modules; check it"
        )
    for module in modules:
        kind, folder = str(module.get("type")), PurePosixPath(str(module.get("path", "")))
        _check_type(name, kind, recorded)
        if folder.is_absolute() or ".." in folder.parts:
            raise ModelLoadError(
                f"embedder {name!r} has a module in {str(folder)!r}, expected one of its own folders"
            )
        if _last(kind) not in _WITHOUT_OPTIONS:
            _check_options(name, folder, local_files_only)
        if recorded and _last(kind) == "Transformer":
            _check_weights(name, folder, local_files_only)
        if _last(kind) in _ROUTERS:
            _check_router(name, folder, local_files_only, _MAX_DEPTH)
        if recorded and _last(kind) == "Dense":
            _check_dense(name, folder, local_files_only)


def _check_type(name: str, kind: str, recorded: bool) -> None:
    if not kind.startswith(_OURS):
        raise ModelLoadError(
            f"embedder {name!r} consists of {kind[:80]!r}, code that it brings along, expected classes of "
            "sentence-transformers; choose another embedder, or read that code and set trust_remote_code"
        )
    if recorded and _last(kind) not in _PLAIN:
        raise ModelLoadError(
            f"embedder {name!r} is named only by the store and has a module {_last(kind)!r}, expected "
            f"one of {', '.join(sorted(_PLAIN))}; if you trust it, name it: --embedder {name}"
        )


def _check_router(name: str, folder: PurePosixPath, local_files_only: bool, depth: int) -> None:
    """The classes that a router names in a file of its own."""
    config = _json(name, str(folder / "router_config.json"), local_files_only)
    if config is None:
        config = _json(name, str(folder / "config.json"), local_files_only)
    types = config.get("types") if isinstance(config, dict) else None
    if not isinstance(types, dict) or not depth:
        raise ModelLoadError(f"embedder {name!r} has a router that names no classes; check it")
    for part, kind in types.items():
        _check_type(name, str(kind), recorded=False)
        if _last(str(kind)) not in _WITHOUT_OPTIONS:
            _check_options(name, folder / str(part), local_files_only)
        if _last(str(kind)) in _ROUTERS:
            _check_router(name, folder / str(part), local_files_only, depth - 1)


def _check_dense(name: str, folder: PurePosixPath, local_files_only: bool) -> None:
    config = _json(name, str(folder / "config.json"), local_files_only)
    activation = config.get("activation_function") if isinstance(config, dict) else None
    safe = _file(name, str(folder / "model.safetensors"), local_files_only) is not None
    if not safe or not str(activation or "torch.nn.").startswith("torch.nn."):
        raise ModelLoadError(
            f"embedder {name!r} is named only by the store and has a dense layer with an activation "
            "outside torch.nn or without model.safetensors; if you trust it, name it: --embedder "
            f"{name}"
        )


def _check_options(name: str, folder: PurePosixPath, local_files_only: bool) -> None:
    for file in _OPTION_FILES:
        config = _json(name, str(folder / file), local_files_only)
        for group, options in config.items() if isinstance(config, dict) else ():
            # processing_kwargs say how a text is tokenized, after loading
            if group == "processing_kwargs" or not group.endswith(("_args", "_kwargs")):
                continue
            if not isinstance(options, dict) or not all(map(_is_harmless, options.items())):
                raise ModelLoadError(
                    f"embedder {name!r} sets {group}={str(options)[:80]} in {file}, expected only "
                    f"{', '.join(sorted(_OPTIONS))}; choose another embedder, or, if you trust it, name it "
                    "and set trust_remote_code"
                )


def _is_harmless(option: tuple[str, Any]) -> bool:
    key, value = option
    return key in _OPTIONS and isinstance(value, (str, int, float, bool, type(None)))


def _check_weights(name: str, folder: PurePosixPath, local_files_only: bool) -> None:
    """Weights in safetensors only: transformers reads whatever file an index names, by its suffix."""
    config = _json(name, str(folder / "config.json"), local_files_only)
    own = config.get("transformers_weights") if isinstance(config, dict) else None
    for file in {"model.safetensors.index.json", str(own or "model.safetensors")}:
        if not file.endswith(".index.json"):
            continue
        index = _json(name, str(folder / file), local_files_only)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if index is not None and not (
            isinstance(shards, dict) and all(map(_is_safetensors, shards.values()))
        ):
            raise ModelLoadError(
                f"embedder {name!r} is named only by the store and has a {file} that names other files than "
                f"*.safetensors beside it; if you trust it, name it: --embedder {name}"
            )
    if _file(name, str(folder / "adapter_config.json"), local_files_only) is not None:
        raise ModelLoadError(
            f"embedder {name!r} is named only by the store and is an adapter of another model, expected "
            f"a whole model; if you trust it, name it: --embedder {name}"
        )


def _is_safetensors(shard: Any) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\")


def _last(kind: str) -> str:
    return kind.rpartition(".")[2]


def _json(name: str, file: str, local_files_only: bool) -> Any:
    """What a file of the model holds; ``None`` where there is no such file."""
    path = _file(name, file, local_files_only)
    if path is None:
        return None
    try:
        return json.loads(regular_files.read_bytes(path, _MAX_BYTES, follow=True))
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelLoadError(
            f"embedder {name!r} has a {file} that cannot be read ({exc}); check it"
        ) from exc


def _file(name: str, file: str, local_files_only: bool) -> Path | None:
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(name, file, local_files_only=local_files_only))
    except LocalEntryNotFoundError:
        if local_files_only:
            return None  # where the model is cached, so is this file if it has one
        raise
    except EntryNotFoundError:
        return None
