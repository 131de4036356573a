"""The page at ``/``: ``page.html``, and headers that let a browser run and load nothing else."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files

from fastapi.responses import HTMLResponse

#: What the page may do besides its own script and style: ask this server, and show its icon.
_POLICY = (
    "default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'",
    "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
)  # fmt: skip


def page() -> HTMLResponse:
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    text = files("blendrag.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [f"script-src {_hash_of('script', text)}", f"style-src {_hash_of('style', text)}"]
    headers = {
        "Content-Security-Policy": "; ".join([*_POLICY, *policy]),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return text, headers


def _hash_of(tag: str, text: str) -> str:
    """The source expression that allows the only ``tag`` of ``text``."""
    (inside,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
