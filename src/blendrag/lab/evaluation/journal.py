"""What was asked already: one JSON line per question and way, so that an interrupted run goes on.

Owns the file and its keys. A key digests all that decides an outcome (question, answers, chunks,
model, wording, length of the answer), so that one file may hold many runs, and a run with more ways or
contexts asks only what is new. Lines are appended when a question has been answered in every way; a
line cut short by a kill is asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blendrag.errors import InvalidInputError

#: How every line begins; one cut short by a kill does, too.
BEGINNING = '{"case_key": '


@dataclass(frozen=True)
class Outcome:
    """How one way answered one question; figures are about that question alone."""

    case_key: str
    way_key: str
    answer: str
    accuracy: float
    f1: float
    rouge_l: float | None
    """Only where it is the score."""
    kl: float | None
    """Of the first token, from full prefill, in nats."""
    agreement: float | None
    """Share of tokens as full prefill gave them, up to the first difference."""
    ratio: float
    charged_ratio: float
    ttft_ms: float
    policy: str = ""
    """That really chose, where the model did not allow the one asked for."""
    schedule: str = ""
    """That really ran."""
    token_kl: float | None = None
    """Mean over full prefill's answer, teacher-forced, in nats per token."""


class Journal:
    """Outcomes by case and way, in memory and, with a path, in a file."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads what is there; raises :class:`InvalidInputError` for a file of something else."""
        self.path = path
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        if path is not None and path.exists():
            self._read(path)

    def get(self, case_key: str, way_key: str) -> Outcome | None:
        return self._outcomes.get((case_key, way_key))

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of one question; in the file when this returns."""
        for outcome in outcomes:
            self._outcomes[outcome.case_key, outcome.way_key] = outcome
        if self.path is None:
            return
        lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(lines)

    def _read(self, path: Path) -> None:
        with _writing(path):
            content = path.read_bytes()
        *lines, rest = content.decode("utf-8", errors="replace").split("\n")
        cut_short = rest.startswith(BEGINNING[: len(rest)])
        for line in [*lines, *([] if cut_short else [rest])]:
            outcome = _outcome(line)
            if outcome is None:
                raise InvalidInputError(
                    f"{path} holds {line[:40]!r}, expected the lines of an earlier evaluation; "
                    "give --out another file"
                )
            self._outcomes[outcome.case_key, outcome.way_key] = outcome
        if rest:  # what follows must begin on a line of its own; whole lines stay as they are
            with _writing(path), path.open("r+b") as file:
                if cut_short:
                    file.truncate(content.rfind(b"\n") + 1)
                else:
                    file.seek(0, os.SEEK_END)
                    file.write(b"\n")


def drop_without_lines(path: Path) -> None:
    """Remove the journal at ``path`` if not one line of it is whole: there is nothing to go on from."""
    with suppress(OSError):
        if b"\n" not in path.read_bytes():
            path.unlink()


def _outcome(line: str) -> Outcome | None:
    try:
        record: Any = json.loads(line)
        return Outcome(**{f.name: record[f.name] for f in fields(Outcome) if f.name in record})
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise InvalidInputError(
            f"{path} cannot be used ({exc.strerror or exc}); give --out another file"
        ) from exc
