"""Questions to train on: made by the model about passages, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.calibrate import question_about
from blendrag.text.chunking import Chunker
from blendrag.text.json_records import records_in
from blendrag_lab.distillation.material import Asked, Group
from blendrag_lab.distillation.prompts import TrainingPassage
from blendrag_lab.qa_records import passage_texts, read_text

FORMS = "one question a line, or JSON records of {question, ctxs: [{title, text}, …]}"
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
    text = read_text(path, f"a text file of {FORMS}")
    if not text.strip():
        raise InvalidInputError(f"--questions {path} is empty; expected {FORMS}")
    if text.lstrip()[0] not in "[{":
        return [line.strip() for line in text.splitlines() if line.strip()], []
    alone: list[str] = []
    groups: dict[tuple[TrainingPassage, ...], list[Asked]] = {}
    parts: dict[str, list[str]] = {}
    for number, record in enumerate(records_in(text, str(path), FORMS), 1):
        where = f"record {number} of {path}"
        question = record.get("question")
        if not isinstance(question, str) or not question.strip():
            raise InvalidInputError(f"{where} has no question, expected {FORMS}")
        passages = passage_texts(record, where) if record.get("ctxs") else []
        for passage in passages:
            if passage not in parts:
                parts[passage] = [chunk.text for chunk in chunker.split(passage)]
        texts = [text for passage in passages for text in parts[passage]]
        if texts:
            given = tuple(TrainingPassage(text) for text in dict.fromkeys(texts))
            groups.setdefault(given, []).append(Asked(question.strip()))
        else:
            alone.append(question.strip())
    return alone, [Group(given, tuple(asked), path.stem) for given, asked in groups.items()]
