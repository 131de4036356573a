"""From messages to a rendered prompt, and from a rendered prompt to the chunks in it.

Owns blendrag's own RAG prompt and the template call. A plain string is one user message through the
chat template; ``apply_chat_template=False`` sends it raw, with BOS where the tokenizer adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blendrag.anchors import Match
from blendrag.engine.options import Options
from blendrag.engine.types import Prompt
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.retriever.corpus import Corpus
from blendrag.retriever.retriever import RetrievedChunk

LEADING = "Answer the question from the context.\n\n"
SEPARATOR = "\n\n"


def rag_prompt(question: str, chunks: Sequence[RetrievedChunk]) -> str:
    """blendrag's own prompt over retrieved chunks."""
    return prompt_over(question, [chunk.text for chunk in chunks])


def prompt_over(question: str, texts: Sequence[str]) -> str:
    """blendrag's own prompt over the texts of chunks."""
    if not question.strip():
        raise InvalidInputError("the question is empty; ask something")
    context = SEPARATOR.join(texts)
    return f"{LEADING}{context}{SEPARATOR}Question: {question.strip()}\nAnswer:"


def render(prompt: Prompt, tokens: Tokens, options: Options) -> str:
    """The text the model reads. Raises :class:`InvalidInputError` for what cannot be rendered."""
    _check_tools(tokens, options)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InvalidInputError("the prompt is empty; ask something")
        if not (options.apply_chat_template and tokens.has_template):
            bos = tokens.tokenizer.bos_token if tokens.adds_bos else ""
            return (prompt if prompt.startswith(bos) else f"{bos}{prompt}") + options.opening
        messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        messages = [_flattened(message) for message in prompt if isinstance(message, Mapping)]
    else:
        raise InvalidInputError(
            f"a prompt that is a {type(prompt).__name__}, expected a text or a list of messages with "
            "role and content; send one of them"
        )
    if not messages:
        raise InvalidInputError("no messages; send at least one")
    if not tokens.has_template:
        raise InvalidInputError(
            "this model's tokenizer has no chat template; send a plain string, or set "
            "tokenizer.chat_template"
        )
    given = dict(options.template) | ({"tools": list(options.tools)} if options.tools else {})
    try:
        return tokens.render([dict(m) for m in messages], **given) + options.opening
    except Exception as exc:  # jinja errors of many kinds, raised by the template's own checks
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise InvalidInputError(
            f"the chat template refuses these messages (roles: {roles}): {exc}"
        ) from exc


def refuse_silence(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InvalidInputError` where there are messages and none says or calls anything."""
    if messages and not any(_says(m.get("content")) or m.get("tool_calls") for m in messages):
        empty = "the message is" if len(messages) == 1 else f"all {len(messages)} messages are"
        raise InvalidInputError(f"{empty} empty, expected some text; ask something")


def _says(content: Any) -> bool:
    """Whether there is more than white space in it; parts that are no text are :func:`render`'s to refuse."""
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, list):
        return content is not None
    return any(
        _says(p.get("text") if isinstance(p, Mapping) and "text" in p else p) for p in content
    )


def _check_tools(tokens: Tokens, options: Options) -> None:
    if not options.tools:
        return
    if not options.apply_chat_template:
        raise InvalidInputError(
            f"tools given ({len(options.tools)}) with apply_chat_template=False, which shows them to nobody; "
            "leave out one of the two"
        )
    if not tokens.has_tools:
        raise InvalidInputError(
            f"tools given ({len(options.tools)}) to a model whose chat template knows none; take a model "
            "whose template does, or ask for the call in plain text"
        )


def _flattened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(str(part["text"]))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidInputError(
                f"a content part of type {kind!r}, and only text can be read; say it in words or leave "
                "it out"
            )
    return {**message, "content": "".join(texts)}


def explain_bos(prompt: Prompt, tokens: Tokens, options: Options) -> tuple[str, ...]:
    """A sentence for the metrics when text that was rendered before goes through the template again."""
    bos = tokens.tokenizer.bos_token
    if not (bos and options.apply_chat_template and tokens.has_template):
        return ()
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    if not any(isinstance(text, str) and text.startswith(bos) for text in contents):
        return ()
    return (
        f"a message begins with {bos}, as if it had been through a chat template before; send rendered "
        "text with apply_chat_template=False",
    )


def chunk_matches(corpus: Corpus | None, rendered: str) -> list[Match]:
    """Known chunks in ``rendered``, ascending and disjoint."""
    return corpus.anchors.find(rendered) if corpus is not None else []


def explain_misses(
    corpus: Corpus | None, rendered: str, matches: Sequence[Match]
) -> tuple[str, ...]:
    """Sentences for the metrics when nothing was recognised, or less than there is."""
    if corpus is None or not len(corpus):
        return ()
    if corpus.anchors.looks_escaped(rendered, matches):
        return (
            "chunk text arrived escaped (as JSON or a Python repr), so not all of it could be recognised; "
            "pass texts, not their representation",
        )
    if matches:
        return ()
    return ("no known chunk was recognised in this prompt; it was prefilled normally",)
