"""The application on a cluster, from its start to the end of its last request."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from blendrag.errors import InvalidInputError
from blendrag_ray.application import application
from blendrag_ray.nodes import on_every_node
from blendrag_ray.settings import ServedCluster

NAME = "blendrag"
#: In the traceback that Serve reports of a replica that did not start.
_SENTENCE = re.compile(r"blendrag\.errors\.\w+: (.+)")


def check_nodes(served: ServedCluster) -> None:
    """Raise :class:`InvalidInputError`, naming the node, where a replica could not start.

    Nodes need the same version of blendrag, the model's files, and the same documents.
    """
    documents = on_every_node(served.documents)
    if len(set(documents)) > 1:
        counts = ", ".join(sorted({f"{chunks} chunks" for chunks, _ in documents}))
        raise InvalidInputError(
            f"store {served.store_path} differs between nodes ({counts}); name a directory that all nodes "
            "share, or a --remote to which the corpus is published (blendrag store publish)"
        )


@contextmanager
def deployed(
    served: ServedCluster, host: str, port: int, verbose: bool = False, **options: Any
) -> Iterator[None]:
    """Serve behind proxies at ``host`` and ``port`` while the context is open; the cluster is connected.

    On leaving it, running answers are finished. ``options``: those of :func:`application`.
    Raises :class:`InvalidInputError` if no replica can start, or the cluster serves blendrag already.
    """
    if not verbose:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    if NAME in serve.status().applications:
        raise InvalidInputError(
            f"the cluster has an application {NAME!r} already, expected none; end its blendrag serve --ray, "
            "or delete the application"
        )
    try:
        _run(application(served, **options))
        yield
    finally:
        serve.delete(NAME)  # waits for requests that run


def _run(app: Any) -> None:
    """Return when all replicas have started."""
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as exc:
        found = serve.status().applications.get(NAME)
        deployments = found.deployments.values() if found is not None else ()
        told = "\n".join([str(exc), *(deployment.message for deployment in deployments)])
        sentences = _SENTENCE.findall(told)
        raise InvalidInputError(sentences[-1] if sentences else _last_line(told)) from exc


def _last_line(told: str) -> str:
    """What Serve says of a deployment that did not start for another reason."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return f"the replicas do not start: {lines[-1][:300]}; --verbose shows their logs"


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """SIGTERM leaves the context once, by :class:`SystemExit`. Ray's own handler would abort."""

    def leave(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
