"""Which writer encodes the chunks of a corpus, and its copy in the store.

The corpus's manifest names the writer, and the store keeps a copy of it. So another engine over the store
finds the KV and encodes what is missing without any option.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from blendrag.engine.model_corpus import ModelCorpus
from blendrag.errors import BlendragError, ModelLoadError
from blendrag.model.adapter import ModelAdapter
from blendrag.model.writer import NONE, FittedWriter, Writer, require_files
from blendrag.store import writer_files

log = logging.getLogger(__name__)


class StoreWriter:
    """The writer of one engine over one corpus: the given one, else that of the corpus."""

    def __init__(self, given: str | Path | bytes | None, corpus: ModelCorpus) -> None:
        """``given``: a directory, :data:`NONE`, or what another process :meth:`sent`. Raises
        :class:`ModelLoadError` for a directory that has not the files of a writer, which are read later."""
        self._is_off = str(given) == NONE  # the command line makes paths of directories
        self._given = None if self._is_off else given
        if isinstance(self._given, str | Path):
            require_files(self._given)
        self._corpus = corpus
        self._read: Writer | None = None
        self._fitted: tuple[tuple[Hashable, ...], FittedWriter] | None = None
        self._misfit: tuple[tuple[Hashable, ...], str] | None = None
        """The one that did not fit, and why."""
        self._is_kept = False

    @property
    def is_given(self) -> bool:
        return self._given is not None

    @property
    def fingerprint(self) -> str:
        """That of the writer with which chunks are encoded; empty if there is none. Raises
        :class:`ModelLoadError` for a given one that cannot be read."""
        if self._given is not None:
            return self._given_writer.fingerprint
        return "" if self._is_off else self._corpus.manifest.writer

    @property
    def _given_writer(self) -> Writer:
        assert self._given is not None
        if self._read is None:
            given = self._given
            if isinstance(given, bytes):
                self._read = Writer.from_bytes(given, "the writer that this process was sent")
            else:
                self._read = Writer.load(given)
        return self._read

    def writer(self) -> Writer | None:
        """The writer, from the store if none was given. Raises :class:`ModelLoadError`."""
        fingerprint = self.fingerprint
        return self._writer_of(fingerprint) if fingerprint else None

    def _writer_of(self, fingerprint: str) -> Writer:
        """That writer; another one may be the corpus's by now."""
        if self._given is not None:
            return self._given_writer
        if self._read is None or self._read.fingerprint != fingerprint:
            self._read = kept_writer(self._corpus.root, fingerprint)
        return self._read

    @property
    def trouble(self) -> str:
        """Why chunks cannot be encoded; empty if they can."""
        try:
            self.writer()
        except ModelLoadError as exc:
            return str(exc)
        if self._misfit is not None and self._misfit[0][0] == self.fingerprint:
            return self._misfit[1]
        return ""

    def sent(self) -> bytes | str:
        """What another process is given to encode with the same writer."""
        writer = self.writer()
        return NONE if writer is None else writer.to_bytes()

    def keep(self) -> None:
        """Copy a given writer into the store, unless it is there and whole.

        Raises :class:`StoreFullError` and :class:`StoreUnavailableError`.
        """
        if self._given is None:
            return
        writer, root = self._given_writer, self._corpus.root
        if self._is_kept and writer_files.is_kept(root, writer.fingerprint):
            return
        try:
            kept_writer(root, writer.fingerprint)
        except ModelLoadError:
            writer_files.write(root, writer.fingerprint, writer.to_bytes())
        self._is_kept = True

    def fit(self, adapter: ModelAdapter) -> None:
        """Raise :class:`ModelLoadError` for a given writer that does not fit ``adapter``."""
        if self._given is not None:
            with adapter.lock:
                self._fitted_to(adapter, self.fingerprint)

    def active(
        self, adapter: ModelAdapter, fingerprint: str, skip: int, tokens: int
    ) -> AbstractContextManager[None]:
        """The context in which ``adapter`` encodes ``tokens`` behind ``skip`` with that writer, if any.

        Raises :class:`ModelLoadError` for one that is lost or does not fit. The caller holds the lock.
        """
        if not fingerprint:
            return nullcontext()
        return self._fitted_to(adapter, fingerprint).active(skip, tokens)

    def _fitted_to(self, adapter: ModelAdapter, fingerprint: str) -> FittedWriter:
        fitted = fingerprint, adapter.device, adapter.layout.dtype
        if self._misfit is not None and self._misfit[0] == fitted:
            raise ModelLoadError(self._misfit[1])
        if self._fitted is None or self._fitted[0] != fitted:
            writer = self._writer_of(fingerprint)
            if adapter.identity.adapters:
                log.warning(
                    "%s was trained for a model without a lora and is used with one; its KV may be worse",
                    writer.label,
                )
            try:
                self._fitted = fitted, FittedWriter(writer, adapter)
            except ModelLoadError as exc:
                self._misfit = fitted, str(exc)
                raise
        return self._fitted[1]


def kept_writer(root: Path, fingerprint: str) -> Writer:
    """The copy of a writer in the store at ``root``. Raises :class:`ModelLoadError`."""
    try:
        data = writer_files.read(root, fingerprint)
        writer = Writer.from_bytes(data, str(writer_files.path_of(root, fingerprint)))
        if writer.fingerprint == fingerprint:
            return writer
        why = "is damaged"
    except FileNotFoundError:
        why = "is missing"
    except OSError as exc:
        why = f"cannot be read ({exc.strerror or exc})"
    except BlendragError:
        why = "is damaged"
    raise ModelLoadError(
        f"writer {fingerprint[:12]} of store {root} {why}, so no more chunks are encoded; give its directory "
        "(writer, --writer) to blendrag ingest, or none to encode without a writer"
    )
