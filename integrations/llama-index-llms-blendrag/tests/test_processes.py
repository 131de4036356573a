"""Pipelines with ``num_workers``: each process has its own engine over the same store.

``python test_processes.py STORE`` runs a pipeline with two worker processes and prints what it did.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llama_index.core.ingestion import IngestionPipeline
from places import document

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import (
    BlendEmbedding,
    BlendNodeParser,
    BlendPrecompute,
    close_shared_engines,
)

HERE = Path(__file__).resolve().parent
PLACES = ["Bay", "Cape", "Dale", "Elm"]
ENVIRONMENT = {
    **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "BLENDRAG_CHUNK_TOKENS": "64",
    "PYTHONPATH": os.pathsep.join([*map(str, (HERE, HERE.parents[2] / "tests")), *sys.path]),
}  # fmt: skip


def run_pipeline(store: str) -> None:
    names = {"model": "demo", "store": store, "embedder": "minilm-offline"}
    precompute = BlendPrecompute(**names)
    steps = [BlendNodeParser(**names), BlendEmbedding(**names), precompute]
    made = IngestionPipeline(transformations=steps)
    documents = [document(place) for place in PLACES]
    refusal = ""
    try:  # forks where that is the default
        asyncio.run(made.arun(documents=documents, num_workers=2))
    except ValueError as exc:
        refusal = str(exc)
    nodes = made.run(documents=documents, num_workers=2)
    library = precompute.engine.library
    found = {
        "refusal": refusal,
        "parents": sorted({str(node.ref_doc_id) for node in nodes}),
        "embedded": all(node.embedding for node in nodes),
        "kv": all(library.has_kv([node.node_id for node in nodes]).values()),
    }
    close_shared_engines()
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spawned_workers_store_kv_and_forked_ones_are_refused(tmp_path: Path) -> None:
    script = [sys.executable, __file__, str(tmp_path / "kv")]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    refusal = found.pop("refusal")
    assert found == {"parents": PLACES, "embedded": True, "kv": True}
    if multiprocessing.get_start_method() == "fork":
        assert "forked, and cannot be used in both; start processes by spawn" in refusal
        assert tiny.one_sentence(refusal)
    else:
        assert refusal == ""


def test_a_given_engine_cannot_be_sent_to_workers(engine: BlendEngine) -> None:
    made = IngestionPipeline(transformations=[BlendPrecompute(engine=engine)])
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled") as raised:
        made.run(documents=[document("Bay"), document("Cape")], num_workers=2)
    assert tiny.one_sentence(str(raised.value))


if __name__ == "__main__":
    run_pipeline(sys.argv[1])
