"""Prompt schemas of one engine: their modules' KV in the store, and prompts that use it (Prompt Cache).

Modules have a namespace and a probe of their own, because models that cannot be blended can be placed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

from blendrag.corpus.manifest import Manifest
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.kv_validity import KVValidity
from blendrag.engine.lazy_model import opened
from blendrag.engine.model_corpus import SCHEMA_RECORDS
from blendrag.engine.request import Options, SchemaPrompt
from blendrag.engine.stream import AnswerStream
from blendrag.errors import (
    InvalidInputError,
    SchemaError,
    StoreFullError,
    UnreadableDocumentError,
    UnsupportedModelError,
)
from blendrag.fusor.loader import HeldKV
from blendrag.fusor.selection import Blending
from blendrag.model.placement import PlacedModel
from blendrag.model.sharing import before_layers
from blendrag.planning.plan import Plan, PlannedChunk, Reason
from blendrag.schema.concatenation import (
    Block,
    CachedStretch,
    ConcatenatedPrompt,
    FixedPrompt,
    FreshTokens,
    tokens_of,
)
from blendrag.schema.encoding import TokenizedSchema
from blendrag.schema.gate import verify_placement
from blendrag.schema.markup import parse_prompt, parse_schema, suggestion
from blendrag.schema.nodes import Schema
from blendrag.serving.coroutine import pausing
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler
from blendrag.store import regular_files
from blendrag.store.base import ForeignKVError, KVReader, WantedKV
from blendrag.store.identity import NATIVE_ENCODING, module_key
from blendrag.store.records import Records
from blendrag.text.prompt import Segment, SegmentedPrompt
from blendrag.wording import a_type

log = logging.getLogger(__name__)

Positions = Literal["schema", "blend"]
#: Largest file of markup.
MAX_MARKUP_BYTES = 64 * regular_files.MIB
POSITIONS: tuple[Positions, ...] = get_args(Positions)
FIXED = Reason("module at the positions of its schema")
ENCODED_NOW = Reason("module was not encoded before; encoded for this request", is_missing=True)


@dataclass(frozen=True)
class SchemaReport:
    """What :meth:`BlendEngine.encode_schema` did."""

    modules: int
    """Modules of the schema, with scaffolds and the text outside of modules."""
    encoded: int
    """How many of them were not stored before."""
    tokens: int
    """Tokens that were encoded."""
    collected: int
    """Stored entries of an earlier version of the schema that were deleted."""
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Stored:
    """The keys of one schema's modules."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _Added:
    schema: TokenizedSchema
    positions: Positions
    context_tokens: int


class Schemas:
    """The schemas of one engine. What computes runs on the scheduler's thread, under the lock."""

    def __init__(self, kv: KVNamespace, scheduler: Scheduler) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._added: dict[str, _Added] = {}
        self._recorded: dict[str, TokenizedSchema] = {}
        """What :class:`_Stored` was written for, by name."""

    # -- add ------------------------------------------------------------------------------------

    def add(self, source: Source, positions: Positions) -> TokenizedSchema:
        """See :meth:`BlendEngine.add_schema`."""
        if positions not in POSITIONS:
            raise InvalidInputError(
                f"positions is {positions!r}, expected {' or '.join(map(repr, POSITIONS))}"
            )
        schema = TokenizedSchema(_parsed(source), self._kv.model.tokens)
        limit = self._kv.model.context_tokens
        if positions == "schema" and schema.end >= limit:
            raise SchemaError(
                schema.schema.at,
                f"schema {schema.name!r} takes {schema.end:,} positions, but the model has {limit:,}; "
                'shorten it, or add it with positions="blend", where only imported modules take positions',
            )
        if schema.placeholder.note:
            log.info("schema %s: %s", schema.name, schema.placeholder.note)
        self._added[schema.name] = _Added(schema, positions, limit)
        return schema

    def __getitem__(self, name: str) -> _Added:
        try:
            return self._added[name]
        except KeyError:
            known = ", ".join(sorted(self._added)) or "none"
            raise InvalidInputError(
                f"schema {name!r:.80} was not added to this engine, which has {known}"
                f"{suggestion(name, self._added)}; call add_schema first"
            ) from None

    def read(
        self, prompt: SchemaPrompt, options: Options, is_full: bool
    ) -> tuple[SegmentedPrompt, dict[str, str], FixedPrompt | None]:
        """The tokens of ``prompt``, the source of each chunk in it, and its positions if they are fixed."""
        if options.tools:
            raise InvalidInputError(
                f"tools given ({len(options.tools)}) with a prompt of a schema, expected none; write them "
                "into a module"
            )
        parsed = parse_prompt(prompt.pml, prompt.file)
        try:
            added = self[parsed.schema]
        except InvalidInputError as unknown:
            raise SchemaError(parsed.at, str(unknown)) from None
        is_placed = added.positions == "schema" and not is_full
        limit = added.context_tokens if is_placed else sys.maxsize
        placed = added.schema.place(parsed, limit)
        if options.opening and (ids := tuple(self._kv.model.tokens.encode_text(options.opening))):
            at = tuple(range(placed.end, placed.end + len(ids)))
            placed = FixedPrompt(placed.schema, (*placed.parts, FreshTokens(ids, at)))
        if not placed.parts:
            raise SchemaError(
                parsed.at, "the prompt is empty, expected imports of modules or a question"
            )
        segments = added.schema.segments(placed)
        if is_placed:
            segments = _segments(placed)
        source = f"schema {added.schema.name}"
        sources = {s.chunk_id: source for s in segments.chunks if s.chunk_id is not None}
        return segments, sources, placed if is_placed else None

    # -- routing --------------------------------------------------------------------------------

    def imported(self, prompt: SchemaPrompt) -> dict[str, int]:
        """Tokens of each stored text that ``prompt`` imports, by its routing key.

        Loads no weights. A routing key is a stored key without the namespace, which only the model tells.
        """
        parsed = parse_prompt(prompt.pml, prompt.file)
        parts = self[parsed.schema].schema.place(parsed).parts
        stretches = [part for part in parts if isinstance(part, CachedStretch)]
        return {_routing_key(part.block, part.start, part.end): len(part.ids) for part in stretches}

    def routing_keys(self) -> dict[str, str]:
        """The routing key of each text of all schemas, by its key in the store. Loads the model."""
        if not self._added or self.model.refusal is not None:
            return {}
        namespace = self.validity.namespace
        blocks = [block for added in self._added.values() for block in added.schema.blocks]
        return {
            _key(namespace, block, *stretch): _routing_key(block, *stretch)
            for block in blocks
            for stretch in block.stretches
        }

    # -- encode ---------------------------------------------------------------------------------

    @opened
    def model(self) -> PlacedModel:
        return PlacedModel(self._kv.model.adapter)

    @opened
    def validity(self) -> KVValidity:
        kv = self._kv

        def manifest() -> Manifest:
            """Modules have no prefix, whatever that of the chunks is."""
            return replace(kv.corpus.manifest, prefix_ids=())

        return KVValidity(self.model, kv.store, kv.root, manifest, verify_placement)

    def encode(self, name: str) -> SchemaReport:
        """See :meth:`BlendEngine.encode_schema`."""
        schema = self[name].schema
        began = time.perf_counter()
        if self[name].positions == "blend":
            raise InvalidInputError(
                f'schema {name!r} has positions="blend"; its modules are encoded after their first use'
            )

        def work() -> SchemaReport:
            with self.model.lock:
                self.model.require()
                namespace = self._namespace()
                collected = self._collect(namespace, schema)
                missing = [block for block in schema.blocks if self._missing(namespace, block)]
                for block in missing:
                    self._encode(namespace, block)
            seconds = time.perf_counter() - began
            tokens = sum(len(block.ids) for block in missing)
            notes = (schema.placeholder.note,) if schema.placeholder.note else ()
            return SchemaReport(len(schema.blocks), len(missing), tokens, collected, seconds, notes)

        return self._scheduler.run(work)

    def open(self) -> float:
        """Find out how tokens are placed and attended, check stored modules; returns the seconds."""
        began = time.perf_counter()
        self.model.require()
        with suppress(UnsupportedModelError):  # then requests decode alone
            _ = self._kv.model.fusor
        self._namespace()
        return time.perf_counter() - began

    def _namespace(self) -> str:
        """Where the modules of the loaded model are stored, cleared of KV that it does not compute."""
        namespace = self.validity.namespace
        if not self.validity.is_valid(namespace) and self._kv.is_writable:
            with suppress(ForeignKVError):  # then modules are encoded and not stored
                self.validity.renew(namespace)
        return namespace

    def _missing(self, namespace: str, block: Block) -> bool:
        keys = {_key(namespace, block, *each) for each in block.stretches}
        return keys > self._kv.store.where(namespace, keys, durable=True).keys()

    def _encode(self, namespace: str, block: Block) -> dict[tuple[int, int], HeldKV]:
        """Encode ``block`` and store it, if the store can take it; readers of its stretches."""
        validity, store = self.validity, self._kv.store
        validity.require_verified()
        validity.require_identity(namespace)
        kvs = self.model.encode_at(block.ids, block.positions, block.stretches)
        readers = {s: HeldKV(kv) for s, kv in zip(block.stretches, kvs, strict=True)}
        encoding = self._kv.corpus.manifest.encoding
        for stretch, reader in readers.items():
            reader.key = _key(namespace, block, *stretch)
            if encoding != NATIVE_ENCODING:  # not what other requests read from the store
                reader.key += NATIVE_ENCODING
        try:
            if self._kv.is_writable:
                validity.admit(namespace)
                for stretch, kv in zip(block.stretches, kvs, strict=True):
                    store.put(namespace, _key(namespace, block, *stretch), validity.encoded(kv))
        except (StoreFullError, ForeignKVError) as error:
            log.warning("module %s of a schema was not stored: %s", block.name, error)
        return readers

    def _collect(self, namespace: str, schema: TokenizedSchema) -> int:
        """Delete what an earlier schema of this name stored and no schema has now; returns how many."""
        if self._recorded.get(schema.name) is schema or not self._kv.is_writable:
            return 0
        self._recorded[schema.name] = schema
        records = Records(
            self._kv.root, f"{namespace}.{SCHEMA_RECORDS}", "schemas", _Stored, ("name",)
        )
        keys = {_key(namespace, block, *s) for block in schema.blocks for s in block.stretches}
        stale: set[str] = set()
        kept = set(keys)
        for entry in records.entries():
            (stale if entry.name == schema.name else kept).update(entry.keys)
        records.keep(_Stored(schema.name, tuple(sorted(keys))))
        delete = self._kv.store.delete
        return sum(delete(namespace, key) for key in sorted(stale - kept))

    # -- answer ---------------------------------------------------------------------------------

    def prefetch_siblings(self, placed: FixedPrompt) -> None:
        """While no request waits, read the other members of the unions of ``placed`` into memory."""
        if placed.schema not in self._added:
            return
        namespace, store = self.validity.namespace, self._kv.store
        scheduler = self._scheduler
        layout = self.model.layout.encoded(self._kv.corpus.manifest.encoding)
        left = [
            (_key(namespace, block, start, end), end - start)
            for block in self._added[placed.schema].schema.siblings(placed)
            for start, end in block.stretches
        ]

        def work() -> None:
            while left:
                key, tokens = left[0]
                if not store.prefetch(namespace, key, layout, tokens, waited_for):
                    scheduler.submit(Pending(work), background=True)  # after the requests
                    return
                del left[0]

        def waited_for() -> bool:
            return scheduler.is_waited_for

        if left:
            scheduler.submit(Pending(work), background=True)

    def plan(
        self,
        placed: FixedPrompt,
        segments: SegmentedPrompt,
        stream: AnswerStream,
        avoid: Collection[str],
        loads: bool,
    ) -> tuple[Plan, ConcatenatedPrompt]:
        """Open the stored modules of ``placed``, and encode those that are not stored, are in ``avoid``, or
        with ``loads=False`` all; ``stream`` gets a note of that."""
        namespace = self._namespace()
        if placed.schema in self._added:
            self._collect(namespace, self._added[placed.schema].schema)
        usable = loads and self.validity.is_valid(namespace)
        stretches = [part for part in placed.parts if isinstance(part, CachedStretch)]
        stored = self._open(namespace, stretches, avoid) if usable else {}
        readers: list[KVReader] = []
        encoded: dict[Block, dict[tuple[int, int], HeldKV]] = {}
        is_new: list[bool] = []
        check = stream.check
        try:
            for at, part in enumerate(stretches):
                reader = None if part.block in encoded else stored.pop(at, None)
                if reader is None and part.block not in encoded:
                    check()
                    with before_layers(self.model.decoder.layers, pausing(check)):
                        encoded[part.block] = self._encode(namespace, part.block)
                is_new.append(reader is None)
                readers.append(reader or encoded[part.block][part.start, part.end])
            prompt = tokens_of(placed, readers)
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        finally:
            for reader in stored.values():  # of modules that were encoded
                reader.close()
        loaded = {span.reader: span for span in prompt.spans}
        for reader in readers:
            if reader not in loaded:  # of the last token alone, which is computed
                reader.close()
        chunks = tuple(
            PlannedChunk(
                segment, ENCODED_NOW if new else FIXED, None if new else loaded.get(reader)
            )
            for segment, reader, new in zip(segments.chunks, readers, is_new, strict=True)
        )
        if encoded:
            count, tokens = len(encoded), sum(len(block.ids) for block in encoded)
            modules = f"{count} module{'s' * (count > 1)} of the schema ({tokens:,} tokens)"
            stream.notes.append(f"{modules} had no KV in the store, encoded for this request")
        return Plan(segments, chunks, Blending.of("reuse", ratio=0.0)), prompt

    def _open(
        self, namespace: str, stretches: Sequence[CachedStretch], avoid: Collection[str]
    ) -> dict[int, KVReader]:
        """Readers of what is stored of ``stretches``, by number."""
        keys = [_key(namespace, part.block, part.start, part.end) for part in stretches]
        wanted = {
            at: WantedKV(namespace, key, len(part.ids))
            for at, (key, part) in enumerate(zip(keys, stretches, strict=True))
            if key not in avoid
        }
        layout = self.model.layout.encoded(self._kv.corpus.manifest.encoding)
        readers = self._kv.store.open_all([*wanted.values()], layout)
        found = zip(wanted, readers, strict=True)
        return {at: reader for at, reader in found if reader is not None}


def _key(namespace: str, block: Block, start: int, end: int) -> str:
    return module_key(namespace, block.ids, block.positions, start, end)


def _routing_key(block: Block, start: int, end: int) -> str:
    return _key("", block, start, end)


def _segments(placed: FixedPrompt) -> SegmentedPrompt:
    """``placed`` in reading order, each cached stretch as a chunk."""
    found: list[Segment] = []
    for part in placed.parts:
        at = found[-1].end if found else 0
        name = part.block.name if isinstance(part, CachedStretch) else None
        found.append(Segment("", part.ids, at, name, part.ids if name else ()))
    return SegmentedPrompt(tuple(found))


class HasSchema(Protocol):
    """A prompt program."""

    schema: Schema


#: Markup, a file of it, a parsed schema, or a program.
Source = str | Path | Schema | HasSchema


def _parsed(source: Source) -> Schema:
    """The schema of ``source``."""
    if isinstance(source, Schema):
        return source
    if not isinstance(source, str | Path):
        if isinstance(schema := getattr(source, "schema", None), Schema):
            return schema
        raise InvalidInputError(
            f"a schema that is {a_type(source)}, expected markup, a file of it, or a program"
        )
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("<"):
        return parse_schema(source, "<schema>")
    path = Path(source)
    try:
        text = regular_files.read_text(path, MAX_MARKUP_BYTES, follow=True)
    except (OSError, ValueError) as exc:
        why = "not UTF-8" if isinstance(exc, UnicodeDecodeError) else getattr(exc, "strerror", 0)
        raise UnreadableDocumentError(path, f"{why or exc}; expected a file of markup") from exc
    return parse_schema(text, str(path))
