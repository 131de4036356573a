"""Runs an ingestion pipeline with two worker processes and prints the result, for ``test_processes.py``.

python pipeline_of_processes.py STORE
"""

from __future__ import annotations

import asyncio
import json
import sys

from llama_index.core.ingestion import IngestionPipeline
from places import document

from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    close_shared_engines,
)

PLACES = ("Bay", "Cape", "Dale", "Elm")


def main(store: str) -> None:
    names = {"model": "demo", "store": store, "embedder": "minilm-offline"}
    precompute = BlendPrecompute(**names)
    steps = [BlendNodeParser(**names), BlendEmbedding(**names), precompute]
    made = IngestionPipeline(transformations=steps)
    documents = [document(place) for place in PLACES]
    told = ""
    try:  # forks where that is the default
        asyncio.run(made.arun(documents=documents, num_workers=2))
    except ValueError as exc:
        told = str(exc)
    nodes = made.run(documents=documents, num_workers=2)
    library = precompute.engine.library
    found = {
        "told": told,
        "parents": sorted({str(node.ref_doc_id) for node in nodes}),
        "embedded": all(node.embedding for node in nodes),
        "kv": all(library.has_kv([node.node_id for node in nodes]).values()),
    }
    close_shared_engines()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
