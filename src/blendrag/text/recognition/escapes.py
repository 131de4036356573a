"""Text as ``repr`` or JSON writes it, read back."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([ntr"'\\/]))""")
_PLAIN = {"n": "\n", "t": "\t", "r": "\r"}


def unescaped(prompt: str) -> str:
    """The prompt with every escape replaced by what it stands for; itself where there is none."""

    def plain(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        return chr(int(code, 16)) if code else _PLAIN.get(escape[3], escape[3])

    if "\\" not in prompt:
        return prompt
    text, count = _ESCAPE.subn(plain, prompt)
    if not count:
        return prompt
    # JSON writes characters beyond the first plane as two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
