"""How messages repeat what others wrote: cut to a length, and without characters that a terminal obeys. How
logs tell ordinary steps from warnings."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

#: Longest part of a value that a message repeats, in characters.
SHOWN_CHARS = 80
#: Longest message, in characters, whatever it repeats.
MESSAGE_CHARS = 1000

#: Control characters (escape sequences begin with one), directions of text (U+202E and others, see
#: https://trojansource.codes), invisible and line-separating characters, and lone surrogates. Joiners
#: (U+200C, U+200D) stay: several scripts and emoji need them.
_OBEYED = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_TEXT = re.compile(f"[{_OBEYED}]")
_IN_LINE = re.compile(f"[\t\n{_OBEYED}]")


def printable(text: str) -> str:
    r"""``text`` with its control characters as escapes, ``\x1b``; line ends and tabs stay."""
    return _IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    """:func:`printable`, in one line."""
    return _IN_LINE.sub(_escape, text)


def printable_json(text: str) -> str:
    """JSON with its own escapes for such characters, which occur in strings only."""
    return _IN_TEXT.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 0x10000 else json.dumps(found[0])[1:-1]


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def a_type(value: object) -> str:
    """``a str``, ``an int``: what a value is."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shortened(text: str, chars: int = SHOWN_CHARS) -> str:
    """At most ``chars`` characters of ``text``, the last of which shows that more follow."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def first_line(error: BaseException, chars: int = 200) -> str:
    """What an error says, without the lines that follow; its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:chars].rstrip(" .:") if lines else type(error).__name__


def condensed(message: str) -> str:
    """A message without its middle if it is long: it begins with what is wrong, and ends with the remedy."""
    if len(message) <= MESSAGE_CHARS:
        return message
    end = MESSAGE_CHARS // 3
    return f"{message[: MESSAGE_CHARS - end - 3]} … {message[-end:]}"


def quoted(value: Any, chars: int = SHOWN_CHARS) -> str:
    """``repr`` of a value, cut. Of a long text only the beginning is read."""
    if isinstance(value, str | bytes) and len(value) > chars:
        return f"{value[:chars]!r}…"
    return shortened(_repr(value), chars)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, lists in lists
        return f"{a_type(value)} that is too large to show"


def short_model(name: str) -> str:
    """The last part of a model's directory; the name of a model on the hub is unchanged."""
    return Path(name).name if Path(name).is_absolute() else name


def log_step(log: logging.Logger, message: str, *args: object) -> None:
    """Log an ordinary step that takes a while, or much room. The command line prints it as a note."""
    log.info(message, *args, extra={"is_step": True}, stacklevel=2)


def is_step(record: logging.LogRecord) -> bool:
    """Whether :func:`log_step` made it."""
    return getattr(record, "is_step", False)
