"""``blendrag bench`` in this process, at a size that takes no time."""

from __future__ import annotations

import json
from typing import Any

from cli.commands import invoke

#: Two chunks of 32 tokens and a question of 8, over 4 layers of 2 KV heads of 16.
SMALL = (
    "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "32", "--question-tokens", "8",
    "--rounds", "1",
)  # fmt: skip


def measured(*args: str) -> dict[str, Any]:
    """What ``blendrag bench … --json`` prints."""
    result = invoke("bench", *args, "--json")
    assert result.exit_code == 0, result.stderr
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields
