"""Packed training samples: a context, and questions that each see the context and themselves only.

Also the prompt forms that the demo model is trained and measured on. A prompt is tokenised segment by
segment without special tokens (head, chunk, separator, chunk, …, question), as blendrag does: it must
find the tokens that it stored.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from blendrag.demo import Question
from blendrag_lab.synthetic.generator import GeneratedDocument

#: The holes of a form; neither can occur in generated text.
CONTEXT, QUESTION = "\x00", "\x01"
#: Most positions skipped before a chunk in samples with gaps, to prepare for longer contexts.
MAX_GAP = 400


@dataclass(frozen=True)
class Form:
    """One way to ask: `messages` as (role, content) with the two holes."""

    name: str
    messages: tuple[tuple[str, str], ...]
    entry_head: str = ""
    """Before each entry, with {path}."""


def _user(content: str) -> tuple[tuple[str, str], ...]:
    return (("user", content.format(context=CONTEXT, question=QUESTION)),)


_STUFF = "Use the following pieces of context to answer the question.\n\n"
_TEXT_QA = (
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\n"
    "Query: {question}\nAnswer: "
)
_TEXT_QA_SYSTEM = (
    "You are an expert Q&A system that is trusted around the world.\n"
    "Always answer the query using the provided context information, and not prior knowledge.\n"
    "Some rules to follow:\n"
    "1. Never directly reference the given context in your answer.\n"
    "2. Avoid statements like 'Based on the context, ...' or 'The context information ...' or "
    "anything along those lines."
)
_CHAT_QA = (("system", _TEXT_QA_SYSTEM), *_user(_TEXT_QA))
_PATH = "file_path: {path}\n\n"

NATIVE = Form(
    "native",
    _user("Answer the question from the context.\n\n{context}\n\nQuestion: {question}\nAnswer:"),
)
FORMS: tuple[Form, ...] = (
    NATIVE,
    Form("stuff", _user(_STUFF + "{context}\n\nQuestion: {question}\nHelpful Answer:")),
    Form("stuff-system", (("system", _STUFF + CONTEXT), ("user", QUESTION))),
    Form("plain", _user("Use the context.\n\n{context}\n\nQuestion: {question}\nAnswer:")),
    # LlamaIndex's question prompts, for completion and for chat models.
    Form("text-qa", _user(_TEXT_QA)),
    Form("text-qa-paths", _user(_TEXT_QA), _PATH),
    Form("chat-qa", _CHAT_QA),
    Form("chat-qa-paths", _CHAT_QA, _PATH),
)


@dataclass(frozen=True)
class PromptChunk:
    """A chunk as a retriever returns it, with the file name that some frameworks write above it."""

    text: str
    path: str = ""


def entries(documents: Sequence[GeneratedDocument]) -> list[PromptChunk]:
    """The chunks of whole documents with the file of each."""
    return [PromptChunk(p, f"{d.doc_id}.txt") for d in documents for p in d.paragraphs]


@dataclass(frozen=True)
class Template:
    """A form rendered by a chat template and cut at its holes; text, not tokens."""

    head: str
    before_question: str
    after_question: str
    entry_head: str

    def context_segments(self, entries: Sequence[PromptChunk]) -> list[tuple[str, bool]]:
        """(text, is_chunk) of everything before the question part."""
        segments: list[tuple[str, bool]] = []
        fresh = self.head
        for entry in entries:
            head = fresh + self.entry_head.format(path=entry.path)
            segments += [(head, False), (entry.text.strip(), True)]
            fresh = "\n\n"
        return segments


def template(tokenizer: PreTrainedTokenizerBase, form: Form) -> Template:
    """`form` through the tokenizer's own chat template, ready for the assistant's answer."""
    messages = [{"role": role, "content": content} for role, content in form.messages]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    head, rest = rendered.split(CONTEXT)
    before, after = rest.split(QUESTION)
    return Template(head, before, after, form.entry_head)


@dataclass(frozen=True)
class QuestionSegment:
    """One question segment; the loss is on the tokens from `answer_at` on."""

    tokens: list[int]
    answer_at: int
    kind: str = ""


@dataclass
class Sample:
    """A context with its positions, the chunk of each token (-1: none), and its questions."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    questions: list[QuestionSegment] = field(default_factory=list)

    @property
    def question_position(self) -> int:
        return self.positions[-1] + 1

    def append(self, tokens: list[int], chunk: int = -1, gap: int = 0) -> None:
        start = gap + (self.question_position if self.positions else 0)
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.chunks += [chunk] * len(tokens)


class SampleWriter:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._templates = {form.name: template(tokenizer, form) for form in FORMS}
        self.bos: int = tokenizer.bos_token_id
        self.end: int = tokenizer.eos_token_id
        self.n_special = len(tokenizer.all_special_ids)

    def empty(self, questions: Sequence[QuestionSegment] = ()) -> Sample:
        """A sample whose context is <|bos|> alone."""
        return Sample([self.bos], [0], [-1], list(questions))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)

    def random_tokens(self, rng: random.Random, n: int, pool: int) -> list[int]:
        """`n` of the first `pool` tokens that are not special."""
        return [rng.randrange(self.n_special, self.n_special + pool) for _ in range(n)]

    def question(self, form: Form, text: str) -> list[int]:
        """The tokens after the last chunk, up to the answer."""
        made = self._templates[form.name]
        return self.encode(made.before_question + text + made.after_question)

    def sample(
        self,
        form: Form,
        entries: Sequence[PromptChunk],
        questions: Sequence[Question],
        rng: random.Random | None = None,
    ) -> Sample:
        """With `rng`, positions skip ahead at random before chunks."""
        sample = Sample()
        segments = self._templates[form.name].context_segments(entries)
        for i, (text, is_chunk) in enumerate(segments):
            gap = rng.randrange(MAX_GAP) if rng and i and rng.random() < 0.5 else 0
            sample.append(self.encode(text), i if is_chunk else -1, gap)
        for question in questions:
            asked = self.question(form, question.text)
            # The answer keeps the space before it, so that a word has the token it has in documents.
            answer = [*self.encode(" " + question.answer), self.end]
            sample.questions.append(QuestionSegment(asked + answer, len(asked), question.kind))
        return sample
