"""Several prompts of one call: all planned before one is answered, and answered in order.

The frameworks decide what an error of one does to the others: LangChain's and LlamaIndex's calls of
several prompts raise it, ``return_exceptions=True`` keeps it in its place. Both are offered here, and
never is an answer lost without an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from blendrag.engine.answers import Started
from blendrag.engine.types import Answer, Prompt
from blendrag.errors import RequestTimeout

T = TypeVar("T")


def prepared(
    prompts: Sequence[Prompt], prepare: Callable[[Prompt], T], keep_errors: bool
) -> list[T | Exception]:
    """``prepare`` of each; its errors are raised, or in their places."""
    made: list[T | Exception] = []
    for i, prompt in enumerate(prompts):
        try:
            made.append(prepare(prompt))
        except Exception as exc:
            _name(exc, i, len(prompts))
            if not keep_errors:
                raise
            made.append(exc)
    return made


def wait_all(started: Sequence[Started | Exception], keep_errors: bool) -> list[Answer | Exception]:
    """Answers in order; the first error abandons the rest and is raised, or stands in its place."""
    answers: list[Answer | Exception] = []
    try:
        for i, one in enumerate(started):
            try:
                answers.append(one.wait() if isinstance(one, Started) else one)
            except Exception as exc:
                _name(exc, i, len(started))
                if not keep_errors:
                    raise
                answers.append(exc)
    finally:
        _abandon_all(started)
    return answers


async def all_awaited(
    started: Sequence[Started | Exception], keep_errors: bool
) -> list[Answer | Exception]:
    """:func:`wait_all` without blocking the event loop."""
    answers: list[Answer | Exception] = []
    try:
        for i, one in enumerate(started):
            try:
                answers.append(await one.awaited() if isinstance(one, Started) else one)
            except Exception as exc:
                _name(exc, i, len(started))
                if not keep_errors:
                    raise
                answers.append(exc)
    finally:
        _abandon_all(started)
    return answers


def all_late(prompts: Sequence[Prompt], timeout_s: float) -> list[Answer | Exception]:
    """For prompts that were still being planned when their time was up: an error in the place of each."""
    late: list[Answer | Exception] = []
    for i in range(len(prompts)):
        error = RequestTimeout(timeout_s)
        _name(error, i, len(prompts))
        late.append(error)
    return late


def _abandon_all(started: Sequence[Started | Exception]) -> None:
    for one in started:
        if isinstance(one, Started):
            one.stream.cancel()


def _name(exc: Exception, index: int, count: int) -> None:
    if count > 1:
        exc.add_note(f"prompt {index + 1} of {count} of this batch")
