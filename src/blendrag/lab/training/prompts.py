"""The prompt forms the demo model is trained and measured on, cut into the segments that the
product tokenises.

Owns: the wording of each form, and `segments`: head, chunk, separator, chunk, …, question. A prompt
is tokenised segment by segment without special tokens, because blendrag recognises chunks in a
rendered prompt and must find the same tokens it stored. Does not know: where documents come from,
how the model is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

CONTEXT, QUESTION = (
    "\x00",
    "\x01",
)  # where the template's holes are; neither can occur in generated text


@dataclass(frozen=True)
class Form:
    """One way to ask: `messages` as (role, content) with the two holes, and whether entries
    carry a `file_path` line.
    """

    name: str
    messages: tuple[tuple[str, str], ...]
    entry_head: str = ""  # before each entry, with {path}


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
    # LlamaIndex's question prompts, for completion and for chat models, as they stand there.
    Form("text-qa", _user(_TEXT_QA)),
    Form("text-qa-paths", _user(_TEXT_QA), _PATH),
    Form("chat-qa", _CHAT_QA),
    Form("chat-qa-paths", _CHAT_QA, _PATH),
)


@dataclass(frozen=True)
class Entry:
    """A chunk as the retriever hands it over: its text, and the file name that some frameworks
    write above it.
    """

    text: str
    path: str = ""


@dataclass(frozen=True)
class Template:
    """A form rendered by a tokenizer's chat template, cut at its holes: all of it text, nothing
    tokenised yet.
    """

    head: str
    before_question: str
    after_question: str
    entry_head: str

    def context_segments(self, entries: Sequence[Entry]) -> list[tuple[str, bool]]:
        """(text, is_chunk) for everything before the question part, whose text `question` gives."""
        segments: list[tuple[str, bool]] = []
        fresh = self.head
        for entry in entries:
            segments += [
                (fresh + self.entry_head.format(path=entry.path), False),
                (entry.text.strip(), True),
            ]
            fresh = "\n\n"
        return segments

    def question(self, text: str) -> str:
        """Everything after the last chunk, up to where the answer begins."""
        return self.before_question + text + self.after_question


def template(tokenizer: PreTrainedTokenizerBase, form: Form) -> Template:
    """`form` through the tokenizer's own chat template, ready for the assistant's answer."""
    messages = [{"role": role, "content": content} for role, content in form.messages]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    head, rest = rendered.split(CONTEXT)
    before, after = rest.split(QUESTION)
    return Template(head, before, after, form.entry_head)
