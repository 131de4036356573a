"""Questions to train on: made by the model about passages, or read from a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.calibrate import question_about
from blendrag.store import regular_files
from blendrag.text.chunking import Chunker
from blendrag.wording import quoted
from blendrag_lab.distillation.material import Asked, Group
from blendrag_lab.distillation.prompts import TrainingPassage

#: Size limit of a file of questions.
MAX_BYTES = 1024 * regular_files.MIB
FORMS = "one question a line, or JSON records of {question, ctxs: [{text}, …]}"
#: Behind the passage, where small models follow it.
ASKING = "\n\nTask: ask a question about the context.\nQuestion:"
#: Passages that are asked about in one batch, the beginning of each, and tokens of a question.
BATCH, BATCH_CUDA, PASSAGE_CHARS, QUESTION_TOKENS = 8, 64, 800, 32
#: Fewer words are no question, and shorter words name nothing.
MIN_WORDS, NAMING_CHARS = 4, 5
_GENERIC = {
    "answer", "context", "passage", "question", "significance", "purpose", "about", "which", "where",
}  # fmt: skip
#: Words that a question is about where the model wrote none.
SUBJECT_WORDS = 8
_LEAD = re.compile(r"\W*(?:\d+\W+)?(?:(?:question|q)\s*\d*\s*[:.])?\W*", re.IGNORECASE)


@torch.inference_mode()
def ask_model(
    adapter: ModelAdapter, texts: Sequence[str], watch: Callable[[int, int], None]
) -> Iterator[tuple[str, str]]:
    """Each text with a question about it by the model itself, empty where it wrote none; shortest first."""
    tokens = adapter.tokens
    prompts = []
    for text in texts:
        asked = f"Context: {text[:PASSAGE_CHARS]}{ASKING}"
        rendered = asked
        if tokens.has_template:
            rendered = tokens.render([{"role": "user", "content": asked}])
        prompts.append(tokens.encode_prompt(rendered, begins=True).ids)
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    pad = _pad_of(adapter)
    batch = BATCH_CUDA if adapter.device.type == "cuda" else BATCH
    for at in range(0, len(order), batch):
        watch(at, len(order))
        numbers = order[at : at + batch]
        longest = max(len(prompts[n]) for n in numbers)
        left = [longest - len(prompts[n]) for n in numbers]
        rows = [[pad] * gap + list(prompts[n]) for gap, n in zip(left, numbers, strict=True)]
        seen = [[0] * gap + [1] * (longest - gap) for gap in left]
        given = {"input_ids": rows, "attention_mask": seen}
        out = adapter.model.generate(
            **{name: torch.tensor(v, device=adapter.device) for name, v in given.items()},
            do_sample=False, max_new_tokens=QUESTION_TOKENS, pad_token_id=pad,
        )  # fmt: skip
        for n, row in zip(numbers, out, strict=True):
            said = tokens.tokenizer.decode(row[longest:], skip_special_tokens=True)
            yield texts[n], cleaned_question(said, texts[n])


def _pad_of(adapter: ModelAdapter) -> int:
    tokenizer = adapter.tokens.tokenizer
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    return 0


def cleaned_question(said: str, text: str) -> str:
    """The first question in what a model said, if it names something in ``text``; else empty."""
    line = next((line for line in said.splitlines() if line.strip()), "")
    line = line[_LEAD.match(line).end() :]  # type: ignore[union-attr]  # it matches everything
    end = line.find("?")
    question = line[: end + 1] if end >= 0 else ""
    words = question.lower().split()
    about = {word.strip("?.,'\"") for word in words if len(word) >= NAMING_CHARS} - _GENERIC
    there = text.lower()
    is_about = any(word in there for word in about)
    return question if len(words) >= MIN_WORDS and is_about else ""


def question_in(text: str) -> str:
    """A question about a few words from the middle of ``text``."""
    words = text.split()
    at = len(words) // 3
    return question_about(" ".join(words[at : at + SUBJECT_WORDS]))


# -- files ------------------------------------------------------------------------------------------


def read_questions(path: Path, chunker: Chunker) -> tuple[list[str], list[Group]]:
    """Questions of a file without passages, and groups of the others: one for all with the same passages.

    Raises :class:`InvalidInputError`.
    """
    try:
        text = regular_files.read_text(path, MAX_BYTES, follow=True, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"--questions {path} cannot be read ({reason}); expected a text file of {FORMS}"
        ) from exc
    if not text.strip():
        raise InvalidInputError(f"--questions {path} is empty; expected {FORMS}")
    if text.lstrip()[0] not in "[{":
        return [line.strip() for line in text.splitlines() if line.strip()], []
    alone: list[str] = []
    groups: dict[tuple[TrainingPassage, ...], list[Asked]] = {}
    parts: dict[str, list[str]] = {}
    for number, record in enumerate(_records(text, path), 1):
        question, passages = _fields(record, f"record {number} of {path}")
        for passage in passages:
            if passage not in parts:
                parts[passage] = [chunk.text for chunk in chunker.split(passage)]
        texts = [text for passage in passages for text in parts[passage]]
        if texts:
            given = tuple(TrainingPassage(text) for text in dict.fromkeys(texts))
            groups.setdefault(given, []).append(Asked(question))
        else:
            alone.append(question)
    return alone, [Group(given, tuple(asked), path.stem) for given, asked in groups.items()]


def _records(text: str, path: Path) -> list[Any]:
    found: list[Any] = []
    for part in [text] if text.lstrip().startswith("[") else text.split("\n"):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except (ValueError, RecursionError) as exc:
            raise InvalidInputError(
                f"--questions {path} is not JSON ({exc}); expected {FORMS}"
            ) from exc
        found += value if isinstance(value, list) else [value]
    return found


def _fields(record: Any, where: str) -> tuple[str, list[str]]:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise InvalidInputError(f"{where} is {quoted(record, 60)}, expected {{question, ctxs}}")
    passages = record.get("ctxs") or []
    if not isinstance(passages, list):
        raise InvalidInputError(
            f"{where} has ctxs {quoted(passages, 60)}, expected a list of {{text}}"
        )
    texts = [each.get("text", "") if isinstance(each, dict) else each for each in passages]
    question = record["question"].strip()
    if not question or not all(isinstance(each, str) for each in texts):
        raise InvalidInputError(
            f"{where} has an empty question or a passage without text; complete it or leave it out"
        )
    return question, [text for text in texts if text.strip()]
