"""Messages and tools that a chat template is rendered with to see what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

#: What probes contain: a name that no template has, an id that the strictest template (Mistral's, nine
#: characters) takes, and one that contains the name, as Kimi's must.
NAME, ID = "name_of_the_tool", "a1b2c3d4e"
IDS = (ID, f"functions.{NAME}:0")
KEY, VALUE = "key_of_the_probe", "text of the probe"
ARGUMENTS = {KEY: VALUE}
USER = {"role": "user", "content": "x"}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
    },
}


def try_render(tokens: Tokens, messages: Sequence[dict[str, Any]], **given: Any) -> str | None:
    """What the chat template makes of ``messages``; ``None`` if it refuses them.

    Templates check what they are given, and end in jinja errors of many kinds.
    """
    try:
        return tokens.render(list(messages), **given)
    except Exception:
        return None
