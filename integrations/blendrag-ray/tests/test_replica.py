"""What replicas report, and where the ingress sends requests by it; replicas of this process, without Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from blendrag_ray.chunk_keys import ChunkKeys
from blendrag_ray.forwarding import WholeRequest
from blendrag_ray.nodes import versions
from blendrag_ray.replica import Replica
from blendrag_ray.resident_router import ReplicaLoad, chosen
from blendrag_ray.settings import ServedCluster
from server.live import CHAT

SCHEMA = """<schema name="people"><user>
<module name="anna">{}</module>
<module name="hans">{}</module>
</user></schema>"""


@pytest.fixture(scope="module")
def served(store: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two replicas on stores of their own."""
    root = tmp_path_factory.mktemp("replicas")
    schema = root / "people.xml"
    schema.write_text(SCHEMA.format(*texts))
    return [
        ServedCluster(
            model="demo",
            store=str(shutil.copytree(store, root / f"store{number}")),
            schemas=(str(schema),),
        )
        for number in range(2)
    ]


def asked(module: str) -> bytes:
    message = {"role": "user", "content": f"<{module}/><user>Who?</user>"}
    return json.dumps({"schema": "people", "messages": [message], "max_tokens": 1}).encode()


async def answered(replica: Replica, body: bytes) -> int:
    """The status."""
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    messages = [each async for each in replica.answer(WholeRequest(scope, body), {})]
    return messages[0]["status"]


async def test_a_request_of_a_schema_goes_to_the_replica_that_has_its_modules(served):
    replicas = [Replica(each, versions()) for each in served]
    with served[0].engine(is_ingress=True) as ingress:
        keys = ChunkKeys(ingress)
        anna, hans = (keys.of(asked(module)) for module in ("anna", "hans"))
        assert not ingress.kv_namespace.model.is_loaded
    for number, module in enumerate(("anna", "hans")):
        assert await answered(replicas[number], asked(module)) == 200
    loads = [ReplicaLoad(report=replica.record_routing_stats()) for replica in replicas]
    random = Random(0)
    for number, chunks in enumerate((anna, hans)):
        assert {chosen(loads, chunks, 0.0, random) for _ in range(20)} == {number}
