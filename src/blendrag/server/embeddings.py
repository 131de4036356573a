"""``POST /v1/embeddings``: vectors of the store's embedder."""

from __future__ import annotations

import base64

import numpy as np

from blendrag.engine import BlendEngine
from blendrag.server.bodies import EmbeddingBody
from blendrag.server.refusals import Refusal
from blendrag.server.replies import Fields

#: Most texts in one request, as in OpenAI's API.
MAX_TEXTS = 2048


def embeddings(engine: BlendEngine, body: EmbeddingBody, model_id: str) -> Fields:
    """Vectors at unit length; ``usage`` counts tokens of the language model."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts or len(texts) > MAX_TEXTS:
        raise Refusal(
            400, f"input has {len(texts)} texts, expected 1 to {MAX_TEXTS}", param="input"
        )
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise Refusal(
            400,
            "input holds token ids or empty texts, expected texts; with LangChain's OpenAIEmbeddings set "
            "check_embedding_ctx_length=False",
            param="input",
        )
    if body.dimensions is not None:
        raise Refusal(
            400, "dimensions is not supported; leave it out and cut the vectors", param="dimensions"
        )
    given = [str(text) for text in texts]
    vectors = engine.library.embed(given)  # [n, dim]
    tokens = sum(len(engine.resources.text_ids(text)) for text in given)
    return {
        "object": "list",
        "model": model_id,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(vector: np.ndarray, body: EmbeddingBody) -> str | list[float]:
    """Numbers, or base64 of little-endian float32, which is what the ``openai`` package asks for."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
