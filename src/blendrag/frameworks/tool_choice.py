"""A tool call that must be made: how the model's own template opens one.

A local model cannot be told to call a tool by a flag of its API. Its answer can be begun for it,
though, with the text its template puts before a call; that text is found by rendering a call, so that
there is no list of models here. Knows no framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: A name no template writes by itself, and an id that the strictest (Mistral's nine characters) takes.
_NAME, _ID = "name_of_the_tool", "a1b2c3d4e"
_USER = {"role": "user", "content": "x"}
_CALL = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": {}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class CallForm:
    """What a model writes round a call: ``before`` NAME ``after`` arguments."""

    before: str
    after: str

    def opening(self, name: str | None = None) -> str:
        """The beginning of a call of ``name``, or of any tool."""
        # no white space at the end: tokenizers join it with what follows
        text = self.before if name is None else f"{self.before}{name}{self.after}"
        return text.rstrip()


#: By tokenizer: its template, and how that writes a call. Asked several times in a request.
_known: WeakKeyDictionary[Tokens, tuple[str, CallForm | None]] = WeakKeyDictionary()


def call_form(tokens: Tokens) -> CallForm | None:
    """How this model's template writes a call; ``None`` where it writes none behind its prompt."""
    template = tokens.template_text
    known = _known.get(tokens)
    if known is None or known[0] != template:
        known = _known[tokens] = (template, _rendered_form(tokens))
    return known[1]


def _rendered_form(tokens: Tokens) -> CallForm | None:
    try:
        asked = tokens.render([_USER], tools=[_TOOL])
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        answered = tokens.render([_USER, called], tools=[_TOOL], add_generation_prompt=False)
    except Exception:  # jinja errors of many kinds: a template that takes no such message
        return None
    before, found, rest = answered.removeprefix(asked).partition(_NAME)
    if not answered.startswith(asked) or not found:
        return None
    after, found, _ = rest.partition("{}")
    return CallForm(before, after if found else "")


def forced_opening(tokens: Tokens, name: str | None = None) -> str:
    """What an answer begins with that must be a call (of the tool ``name``).

    Raises :class:`InvalidInputError` where the template shows no way to begin one.
    """
    form = call_form(tokens)
    if form is None:
        raise InvalidInputError(
            "this model's chat template does not show how a tool call begins, so none can be forced; "
            "leave tool_choice out and let the model choose"
        )
    return form.opening(name)


def opening_for(tokens: Tokens, choice: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """:func:`forced_opening` of what :func:`chosen_tool` said; nothing for a call that need not be made."""
    if choice in (None, "auto", "none"):
        return ""
    if choice == "any":  # of one tool, that one
        return forced_opening(tokens, tool_names(tools)[0] if len(tools) == 1 else None)
    return forced_opening(tokens, choice)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of function schemas, in OpenAI's nesting or without it."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]


def chosen_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """A ``tool_choice`` in OpenAI's spellings as ``auto``, ``none``, ``any`` or a tool's name.

    ``None`` for none given. Raises :class:`InvalidInputError` for a tool that is not among ``tools``.
    """
    if choice is None or choice is False:
        return None
    if choice is True or choice == "required":
        return "any"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    names = tool_names(tools)
    if isinstance(choice, str) and choice in ("auto", "none", "any", *names):
        return choice
    raise InvalidInputError(
        f"tool_choice {choice!r} is not auto, none, any or one of the tools "
        f"({', '.join(names) or 'none given'})"
    )


def json_instruction(schema: Mapping[str, Any] | None) -> str:
    """What is added to a question whose answer must be JSON (of ``schema``)."""
    if schema is None:
        return "Answer with one JSON object and nothing else."
    return (
        "Answer with one JSON object and nothing else. It must follow this JSON schema:\n"
        f"{json.dumps(schema, ensure_ascii=False)}"
    )
