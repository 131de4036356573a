"""Full-text search over the passages of a corpus: BM25 by SQLite's FTS5, in the corpus's own file.

Each passage that search may find has a row with the terms of its title and of its text
(:mod:`blendrag.text.terms`), written and deleted in the transaction that writes and deletes the passage. The
setting ``full_text`` has the version of the terms while the rows are complete. An index that is missing,
damaged or of another version is built from the passages before the next search, in short transactions, so
that other processes wait little and an interrupted build goes on where it stopped.
"""

from __future__ import annotations

import bisect
import logging
import math
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from blendrag.corpus.database import (
    CHUNK,
    DOCUMENT,
    FULL_TEXT,
    FULL_TEXT_SCHEMA,
    PASSAGE,
    CorpusFile,
    entry_of,
)
from blendrag.errors import sqlite_code
from blendrag.text.terms import TERMS_VERSION, query_terms, terms_of

logger = logging.getLogger(__name__)

#: The rarest terms of a question that are searched for, and the rows that they may be in together: 100,000
#: rows take half a second to rank, and common terms rank little.
MAX_TERMS, MAX_ROWS = 32, 4000
#: Terms of a long message whose passages are counted, as 1,000 take 0.15 s: first those with digits, which
#: name something, then the longest.
MAX_COUNTED = 256
#: Weight of a term in the title against one in the text, as each chunk of a document has its title.
TITLE_WEIGHT = 0.5
#: Passages that are added in one transaction when the index is built.
BATCH_PASSAGES = 256
#: What SQLite says of a damaged index; anything else is a fault of the file or the disk.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)
_COMPLETE, _BUILDING = str(TERMS_VERSION), f"building {TERMS_VERSION}"


@dataclass(frozen=True)
class TextRanking:
    """Passages and their BM25, the best first.

    ``information``: sum of the inverse document frequencies of the question's terms, which is about the BM25
    of a passage that has each of them once.
    """

    passages: list[tuple[int, float]]
    information: float


class FullTextIndex:
    """The full-text index of one corpus."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self.building = threading.Lock()
        """Held by the thread that builds."""
        self._is_sound = False
        """Whether it has found a passage that it holds."""

    # -- in the transaction of a change ----------------------------------------------------------

    def add(self, passage: int, title: str, source: str, text: str) -> None:
        """Index a new passage, unless the index is to be built."""
        row = passage, *_terms(title, source, text)
        self._change(f"INSERT INTO {FULL_TEXT} (rowid, title, text) VALUES (?, ?, ?)", row)

    def remove(self, passage: int) -> None:
        self._change(f"DELETE FROM {FULL_TEXT} WHERE rowid = ?", (passage,))

    def end_change(self) -> None:
        """Write what FTS5 keeps in memory until a commit, which a damaged index would refuse."""
        self._change(f"SELECT rowid FROM {FULL_TEXT} WHERE {FULL_TEXT} MATCH ? LIMIT 1", ("a",))

    def _change(self, statement: str, parameters: Sequence[object]) -> None:
        state = self._file.meta(FULL_TEXT)
        if state not in (_COMPLETE, _BUILDING):
            if state:  # of another version, whose rows are no longer complete
                self._file.set_meta(FULL_TEXT, "")
            return
        try:
            self._file.connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as exc:
            if sqlite_code(exc) not in _DAMAGED:
                raise
            self._say_damaged("the next search builds it again")
            self.reset()

    def reset(self) -> None:
        """Make an empty index, which is then to be built."""
        connection = self._file.connection
        _drop(connection)
        connection.execute(FULL_TEXT_SCHEMA)
        self._file.set_meta(FULL_TEXT, "")

    # -- building --------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Build the index if it has to be. Returns why it cannot be used; empty if it can.

        One thread builds; others do without meanwhile.
        """
        if self._is_complete():
            if self._is_sound or self._answers():
                self._is_sound = True
                return ""
            return self.rebuild_damaged()
        if self._file.read_only:
            return "it has no full-text index and cannot be written"
        if not self.building.acquire(blocking=False):
            return "its full-text index is being built"
        try:
            self._build()
            if not self._is_complete():  # damage was found on the way
                self._build()
        finally:
            self.building.release()
        return "" if self._is_complete() else "its full-text index is damaged again and again"

    def _answers(self) -> bool:
        """Whether a term of the newest row finds it: without its root, an index finds nothing, in silence."""
        with self._file.reading() as connection, suppress(sqlite3.DatabaseError):
            newest = f"SELECT max(id) FROM {FULL_TEXT}_docsize"
            for row, title, text in connection.execute(
                f"SELECT rowid, title, text FROM {FULL_TEXT} WHERE rowid = ({newest})"
            ):
                term = f"{text} {title}".split()[:1]
                return not term or bool(
                    connection.execute(
                        f"SELECT 1 FROM {FULL_TEXT} WHERE {FULL_TEXT} MATCH ? AND rowid = ?",
                        (_quoted(term[0]), row),
                    ).fetchone()
                )
            return True
        return False

    def _is_complete(self) -> bool:
        def read() -> bool:
            return self._file.has_full_text() and self._file.meta(FULL_TEXT) == _COMPLETE

        return self._file.known("full-text index is complete", read)

    def _build(self) -> None:
        with self._file.writing():
            if self._is_complete():
                return
            if not (self._file.has_full_text() and self._file.meta(FULL_TEXT) == _BUILDING):
                self.reset()
                self._file.set_meta(FULL_TEXT, _BUILDING)
        ((count,),) = self._file.rows("SELECT count(*) FROM passage WHERE length(vector) > 0")
        if count:
            logger.warning(
                "building the full-text index of the corpus at %s once (%d passages)",
                self._file.directory,
                count,
            )
        last: int | None = 0
        while last is not None:
            last = self.build_after(last)

    def build_after(self, last: int) -> int | None:
        """Add the next passages that the index lacks; the last of them, ``None`` at the end."""
        with self._file.writing():
            if self._file.meta(FULL_TEXT) != _BUILDING:  # another process ended it, or began again
                return None
            ids = self._file.rows(
                "SELECT id FROM passage WHERE id > ? AND length(vector) > 0 AND NOT EXISTS "
                f"(SELECT 1 FROM {FULL_TEXT}_docsize AS row WHERE row.id = passage.id) "
                f"ORDER BY id LIMIT {BATCH_PASSAGES}",
                last,
            )
            if not ids:
                self._file.set_meta(FULL_TEXT, _COMPLETE)
                return None
            wanted = {passage for (passage,) in ids}
            rows = self._file.sound_rows(
                (PASSAGE, CHUNK, DOCUMENT),
                "JOIN chunk ON chunk.id = passage.chunk JOIN document ON document.id = passage.document "
                "WHERE passage.id BETWEEN ? AND ? ORDER BY passage.id",
                min(wanted),
                max(wanted),
            )
            for passage, chunk, document in rows:
                if passage[0] in wanted:
                    self.add(passage[0], document[2], document[1], chunk[2])
            return max(wanted)

    # -- searching -------------------------------------------------------------------------------

    def ranked(
        self, text: str, allowed: np.ndarray | None = None, rare_only: bool = True
    ) -> TextRanking:
        """Passages with any of the rarest terms of ``text`` and their BM25, the best first.

        ``allowed``: ids of passages, others are left out. ``rare_only``: nothing is found if every term is
        in too many passages to tell them apart. In a read transaction.
        """
        try:
            terms, information = self._rarest(query_terms(text), rare_only)
            rows = self._file.connection.execute(
                f"SELECT bm25({FULL_TEXT}, {TITLE_WEIGHT}, 1.0), rowid FROM {FULL_TEXT} "
                f"WHERE {FULL_TEXT} MATCH ?",
                (" OR ".join(map(_quoted, terms)),),
            ).fetchall() if terms else []  # fmt: skip
        except sqlite3.Error as exc:
            if sqlite_code(exc) not in _DAMAGED:
                raise
            raise DamagedIndex from exc
        if allowed is not None:
            known = set(allowed.tolist())
            rows = [row for row in rows if row[1] in known]
        rows.sort()  # FTS5 gives the best passage the smallest number
        return TextRanking([(passage, -score) for score, passage in rows], information)

    def _rarest(self, terms: Sequence[str], rare_only: bool) -> tuple[list[str], float]:
        """At most :data:`MAX_TERMS` that are in the fewest passages, in at most :data:`MAX_ROWS` together;
        and the sum of the inverse document frequencies of all."""
        ((size, last),) = self._file.connection.execute(
            f"SELECT count(*), max(id) FROM {FULL_TEXT}_docsize"
        )
        if len(terms) > MAX_COUNTED:
            terms = sorted(terms, key=lambda term: (term.isalpha(), -len(term)))[:MAX_COUNTED]
        information = 0.0
        counted: list[tuple[int, int, str]] = []
        bound = MAX_ROWS + 1  # counting ends there: a term that is in more passages is no candidate
        for at, term in enumerate(terms):
            ((count, reached),) = self._file.connection.execute(
                f"SELECT count(*), max(rowid) FROM (SELECT rowid FROM {FULL_TEXT} "
                f"WHERE {FULL_TEXT} MATCH ? LIMIT ?)",
                (_quoted(term), bound),
            )
            # of a term whose counting ended, the rest is taken to be as dense
            total = min(size, count * last / reached) if count == bound else count
            information += math.log(1 + max(0.5, size - total + 0.5) / (total + 0.5))
            if count:
                bisect.insort(counted, (count, at, term))
            if len(counted) > MAX_TERMS:
                counted.pop()
                bound = counted[-1][0] + 1
        rows = 0
        chosen: list[str] = []
        for count, _, term in counted:
            rows += count
            if rows > MAX_ROWS and (chosen or rare_only):
                break
            chosen.append(term)
        return chosen, information

    def rebuild_damaged(self) -> str:
        """After :class:`DamagedIndex`: build the index again, as :meth:`prepare`."""
        if self._file.read_only:
            self._say_damaged("it cannot be written, so texts are found by their vectors only")
            return "its full-text index is damaged and cannot be written"
        self._say_damaged("it is built again")
        with self._file.writing():
            if self._is_complete():  # else another thread or process is building it again
                self.reset()
        return self.prepare()

    def _say_damaged(self, what_then: str) -> None:
        self._file.warn_once(
            f"the full-text index of the corpus at {self._file.directory} is damaged; {what_then}"
        )

    # -- checking --------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """What is wrong with an index that is said to be complete, in words. Reads all of it."""
        if not self._is_complete():
            return []
        execute = self._file.connection.execute
        searchable = "SELECT id FROM passage WHERE length(vector) > 0"
        indexed = f"SELECT id FROM {FULL_TEXT}_docsize"
        try:
            ((lost,),) = execute(f"SELECT count(*) FROM ({searchable} EXCEPT {indexed})")
            execute(
                f"CREATE VIRTUAL TABLE IF NOT EXISTS temp.vocabulary USING fts5vocab(main, {FULL_TEXT}, row)"
            )
            ((found,),) = execute("SELECT coalesce(sum(cnt), 0) FROM temp.vocabulary")
            rows = execute(f"SELECT title, text FROM {FULL_TEXT}")
            terms = sum(len(title.split()) + len(text.split()) for title, text in rows)
        except sqlite3.Error as exc:
            if sqlite_code(exc) not in _DAMAGED:
                raise
            return ["full-text index: it cannot be read"]
        if lost or found != terms:  # rows of lost passages are harmless: searches skip them
            return ["full-text index: it is not that of the passages"]
        return []


class DamagedIndex(Exception):
    """The full-text index cannot be read."""


def _drop(connection: sqlite3.Connection) -> None:
    try:
        connection.execute(f"DROP TABLE IF EXISTS {FULL_TEXT}")
    except sqlite3.Error:  # one of its tables is lost, so SQLite cannot open what it is to drop
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("DELETE FROM sqlite_master WHERE name = ?", (FULL_TEXT,))
        connection.execute("PRAGMA writable_schema = RESET")
    for part in ("data", "idx", "content", "docsize", "config"):
        connection.execute(f"DROP TABLE IF EXISTS {FULL_TEXT}_{part}")


def _terms(title: str, source: str, text: str) -> tuple[str, str]:
    name = PurePath(entry_of(source)[1]).name
    return " ".join(terms_of(f"{title} {name}")), " ".join(terms_of(text))


def _quoted(term: str) -> str:
    """For FTS5: a term has letters and digits only, and so no quotes."""
    return f'"{term}"'
