"""Grammars in llguidance's Lark (https://github.com/guidance-ai/llguidance), over the tokens of one model."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from blendrag.errors import InvalidOptionError
from blendrag.model.tokens import Tokens

#: White space between JSON's parts. Without a limit small models write nothing else.
_WHITE_SPACE = {"whitespace_pattern": "\\n? {0,12}"}


def library() -> Any:
    """llguidance. Raises :class:`InvalidOptionError` without it."""
    try:
        import llguidance
    except ImportError:
        raise InvalidOptionError(
            "response_format", "needs llguidance; pip install 'blendrag[grammar]'"
        ) from None
    return llguidance


def has_library() -> bool:
    try:
        return importlib.util.find_spec("llguidance") is not None
    except ValueError:  # a module that is None
        return False


def vocabulary(tokens: Tokens) -> Any:
    """The tokens for llguidance; about a second, once per model."""
    if tokens.grammar_tokenizer is None:
        from llguidance.hf import from_tokenizer

        tokens.grammar_tokenizer = from_tokenizer(tokens.tokenizer)
    return tokens.grammar_tokenizer


def dumped(schema: Mapping[str, Any], guidance: Mapping[str, Any] | None = None) -> str:
    """A JSON schema for ``%json``. ``guidance``: options of llguidance's compiler."""
    try:
        more = {"x-guidance": {**_WHITE_SPACE, **(guidance or {})}}
        return json.dumps({**schema, **more}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidOptionError(
            "response_format", f"has a schema that cannot be written as JSON ({exc}); change it"
        ) from None


def literal(text: str, tokens: Tokens) -> str:
    """``text`` in a grammar. Control tokens in it are written as such, which other text never is."""
    control = written_ids(text, tokens)
    if not control:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split(f"({'|'.join(map(re.escape, sorted(control, key=len, reverse=True)))})", text)
    return " ".join(
        f"<[{control[part]}]>" if part in control else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def written_ids(text: str, tokens: Tokens) -> dict[str, int]:
    """The control tokens in ``text`` with their ids."""
    is_special = vocabulary(tokens).is_special_token
    added = {str(token): index for index, token in tokens.tokenizer.added_tokens_decoder.items()}
    return {each: i for each, i in added.items() if each and each in text and is_special(i)}


def checked(lark: str, tokens: Tokens) -> str:
    """Why ``lark`` cannot be compiled, or that no text has its form; empty if nothing is wrong."""
    matcher = library().LLMatcher(vocabulary(tokens), lark, log_level=0)
    wrong = matcher.get_error()
    if not wrong:
        matcher.compute_bitmask()  # finds that nothing can be the first token
        if matcher.is_error():
            return "no text has this form"
    return next((line.strip() for line in wrong.splitlines() if line.strip()), "")
