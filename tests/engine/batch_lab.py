"""An engine over four documents whose prompts are prefilled together, and what is seen of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny
from blendrag.engine import BlendEngine, Options

LEAD = "Answer the question from the context.\n\n"
REUSE = Options(mode="reuse")


@contextmanager
def made_in(folder: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), folder / "store", ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(4)])
        for _ in range(2):  # the leading part is stored once it comes back
            made.generate(prompt(made, 3), REUSE)
            made.drain()
        yield made


def prompt(engine: BlendEngine, *numbers: int, ask: str = "What did the company do?") -> str:
    texts = [text for number in numbers for text in tiny.chunk_texts(engine, number)]
    return LEAD + "\n\n".join(texts) + f"\n\nQuestion: {ask}"


@contextmanager
def prefills(engine: BlendEngine) -> Iterator[list[int]]:
    """Rows that the third layer computes, whenever more than one: a token's own forward is not one."""
    rows: list[int] = []

    def note(module: Any, args: Any, out: Any) -> None:
        if out.shape[1] > 1:
            rows.append(out.shape[1])

    hook = engine.adapter.stack.layers[2].register_forward_hook(note)
    try:
        yield rows
    finally:
        hook.remove()
