"""``POST /v1/embeddings``: vectors of the store's embedder."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np

from blendrag.corpus.embedder import SHORT_CHARS
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.engine import BlendEngine
from blendrag.errors import check_unicode
from blendrag.server.bodies import EmbeddingBody
from blendrag.server.refusals import Refusal, wrong_field

#: Most texts in one request, and most of their tokens, as in OpenAI's API.
MAX_TEXTS, MAX_TOKENS = 2048, 300_000
#: Most characters, which are counted first: four for each token.
MAX_CHARS = 4 * MAX_TOKENS


def texts_of(body: EmbeddingBody) -> list[str]:
    """The texts to embed. Raises :class:`Refusal` for too many, too long or empty ones."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts or len(texts) > MAX_TEXTS:
        remedy = "send fewer" if texts else "send one"
        raise wrong_field("input", f"has {len(texts)} texts, expected 1 to {MAX_TEXTS}; {remedy}")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise wrong_field(
            "input",
            "holds token ids or empty texts, expected texts; leave out empty ones, and with "
            "LangChain's OpenAIEmbeddings set check_embedding_ctx_length=False",
        )
    if body.dimensions is not None:
        raise wrong_field("dimensions", "is not supported; leave it out and cut the vectors")
    given = [str(text) for text in texts]
    for number, text in enumerate(given):
        check_unicode(text, f"input[{number}]")
    characters = sum(map(len, given))
    if characters > MAX_CHARS:
        raise _too_long(f"{characters} characters", f"{MAX_CHARS}")
    return given


def is_short(texts: Sequence[str]) -> bool:
    """Whether they are embedded as fast as a question."""
    return sum(map(len, texts)) <= SHORT_CHARS


def embeddings(
    engine: BlendEngine,
    texts: Sequence[str],
    body: EmbeddingBody,
    model_id: str,
    check: Check = proceed,
) -> tuple[bytes, int]:
    """Vectors at unit length as JSON, and the embedder's tokens, which ``usage`` counts.

    ``check`` may raise to give up between batches.
    """
    counts: list[int] = []

    def counted(tokens: int) -> None:
        if tokens > MAX_TOKENS:
            raise _too_long(f"{tokens} tokens", f"{MAX_TOKENS}")
        counts.append(tokens)

    vectors = engine.library.embed(texts, check=check, counted=counted)  # [n, dim]
    tokens = sum(counts)
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    # row by row: one long call would hold the interpreter's lock, and so every stream
    rows = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{json.dumps(_encoded(vector, body))}}}'
        for index, vector in enumerate(vectors)
    )
    head = f'{{"object":"list","model":{json.dumps(model_id)}'
    return f'{head},"data":[{rows}],"usage":{usage}}}'.encode(), tokens


def _too_long(found: str, most: str) -> Refusal:
    return Refusal(
        413,
        f"input has {found}, expected at most {most} in one request; send the texts in several requests",
        param="input",
    )


def _encoded(vector: np.ndarray, body: EmbeddingBody) -> str | list[float]:
    """Numbers, or base64 of little-endian float32, which is what the ``openai`` package asks for."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
