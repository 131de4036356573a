"""Which code answers: a digest of the package's own source.

Owns what counts as such code. Kept answers are looked up by it, so that an answer of other code, such
as a policy that was changed since, is never taken for one of this.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from blendrag.store.identity import digest_fields

PACKAGE = Path(__file__).parents[1]
#: Folders whose code decides no answer to a question that is given.
ELSEWHERE = ("bench", "cli", "demo", "plugs")


@lru_cache(maxsize=1)
def source_digest(package: Path = PACKAGE) -> str:
    """64 hex digits over names and bytes of the modules in ``package``."""
    fields: list[bytes] = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in ELSEWHERE:
            fields += [name.as_posix().encode(), path.read_bytes()]
    return digest_fields(fields)
