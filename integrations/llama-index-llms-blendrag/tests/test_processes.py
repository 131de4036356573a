"""Pipelines with ``num_workers``: each process has its own engine over the same store."""

from __future__ import annotations

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
from llama_index.llms.blendrag import BlendPrecompute

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
OFFLINE = {
    **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "BLENDRAG_CHUNK_TOKENS": "64",
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spawned_workers_store_kv_and_forked_ones_are_refused(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "pipeline_of_processes.py"), str(tmp_path / "kv")]
    done = subprocess.run(script, env=OFFLINE, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    told = found.pop("told")
    assert found == {
        "parents": ["Bay", "Cape", "Dale", "Elm"], "embedded": True, "kv": True
    }  # fmt: skip
    if multiprocessing.get_start_method() == "fork":
        assert "forked, and cannot be used in both; start processes by spawn" in told
        assert tiny.one_sentence(told)
    else:
        assert told == ""


def test_a_given_engine_cannot_be_sent_to_workers(engine: BlendEngine) -> None:
    made = IngestionPipeline(transformations=[BlendPrecompute(engine=engine)])
    with pytest.raises(InvalidInputError, match="made with engine= cannot be pickled") as raised:
        made.run(documents=[document("Bay"), document("Cape")], num_workers=2)
    assert tiny.one_sentence(str(raised.value))
