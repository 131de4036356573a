"""Operations of a corpus during which system calls of SQLite fail, or the process is killed.

Every call fails once, one by one, with ENOSPC, EIO and others. Afterwards each document must be there whole
or not at all, acknowledged ones must be there, the error must have been one of ours, and the same corpus
object and a new one must work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.errors import BlendragError
from corpus.small_corpus import MANIFEST, make_corpus, put, text_of
from lab.soak.store.audit import SoakReport, Verdict
from lab.soak.store.children import ChildReport, Teller, summary
from lab.soak.store.faults import OperationRunner, faults_of

#: Documents at first, those that are put, and one that the audit puts.
BEFORE, ADDED, FRESH = range(5), (11, 12), 20

Act = Callable[[Corpus, Teller], object]


@dataclass(frozen=True)
class CorpusOperation:
    """One operation to be disturbed. See :class:`lab.soak.store.faults.Operation`."""

    act: Act
    creates: bool = False
    """Whether the corpus is made by the operation."""
    opens: bool = False
    """Whether opening it is part of the operation."""
    removes: tuple[int, ...] = ()
    """Documents that it removes."""

    may_lose: int = 0

    def build(self, root: Path) -> None:
        if self.creates:
            root.mkdir()
        else:
            make_corpus(root)

    def prepare(self, root: Path, attempts: int, teller: Teller) -> Callable[[], None]:
        """For the child: get ready, and return the action, whose second attempt must succeed."""
        opened = None if self.opens or self.creates else Corpus.open(root)

        def once() -> None:
            if opened is not None:
                self.act(opened, teller)
                return
            with Corpus.open(root, create=True) as corpus:
                if corpus.manifest_or_none is None:
                    corpus.begin(MANIFEST)
                self.act(corpus, teller)

        def action() -> None:
            for attempt in range(attempts):
                try:
                    once()
                except BlendragError as exc:
                    kind = "complaints" if attempt else "errors"
                    teller.say(kind, f"{type(exc).__name__}: {exc}")
                except Exception as exc:
                    teller.say("complaints", f"no named error: {summary(exc)}")

        return action


def _put(corpus: Corpus, teller: Teller) -> None:
    for number in ADDED:
        put(corpus, number)
        teller.say("acknowledged", number)


def _remove(corpus: Corpus, teller: Teller) -> None:
    corpus.remove_source("doc1.md")


def _read(corpus: Corpus, teller: Teller) -> None:
    for number in BEFORE:
        if texts_of(corpus, number) != texts(number):
            teller.say("complaints", f"document {number} is wrong")


def texts(number: int) -> list[str]:
    return [text_of(number, at) for at in range(3)]


def texts_of(corpus: Corpus, number: int) -> list[str]:
    return [chunk.text for chunk in corpus.chunks_of(f"doc{number}.md")]


CORPUS_OPERATIONS = {
    "create a corpus": CorpusOperation(_put, creates=True),
    "put documents": CorpusOperation(_put),
    "open and put documents": CorpusOperation(_put, opens=True),
    "remove a document": CorpusOperation(_remove, removes=(1,)),
    "read documents": CorpusOperation(_read, opens=True),
}


class CorpusOperationRunner(OperationRunner):
    """Runs one operation of a corpus again and again."""

    _operation: CorpusOperation  # type: ignore[assignment]

    def _audit(self, heard: ChildReport, root: Path) -> Verdict:
        operation, complaints = self._operation, []
        lost, wrong = [], []
        with Corpus.open(root, create=True) as corpus:
            required = {*heard.acknowledged, *(() if operation.creates else BEFORE)}
            for number in (*BEFORE, *ADDED):
                found = texts_of(corpus, number)
                if not found:
                    lost += [number] * (number in required - set(operation.removes))
                elif found != texts(number):
                    wrong.append(number)
            if corpus.manifest_or_none is None:
                corpus.begin(MANIFEST)
            put(corpus, FRESH)
            if texts_of(corpus, FRESH) != texts(FRESH):
                complaints.append("a document put afterwards cannot be read")
        complaints += check_corpus(root).faults
        return Verdict(tuple(lost), tuple(wrong), tuple(complaints))


def fail_corpus(directory: Path, name: str, report: SoakReport, most: int | None = None) -> None:
    """Every fault of an operation of a corpus, or about ``most`` of them, evenly spread."""
    bench = CorpusOperationRunner(directory, CORPUS_OPERATIONS[name])  # type: ignore[arg-type]
    faults = [fault for call in bench.calls() for fault in faults_of(call)]
    for fault in faults[:: 1 if most is None else -(-len(faults) // most)]:
        report.note("corpus faults", f"{name}, {fault}", bench.run(fault))
