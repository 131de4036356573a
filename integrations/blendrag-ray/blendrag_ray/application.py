"""The application of Ray Serve, from its start to the end of its last request.

``serve run blendrag_ray.application:build store=DIR`` starts it, and so does ``blendrag serve --ray``.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from blendrag.errors import InvalidInputError
from blendrag.server.access import Limits
from blendrag.server.running import DRAIN_S
from blendrag_ray.ingress import Ingress
from blendrag_ray.nodes import last_line, on_every_node, versions
from blendrag_ray.replica import Replica
from blendrag_ray.resident_router import REPORT_S
from blendrag_ray.settings import ServedCluster

NAME = "blendrag"
ROUTER = "blendrag_ray.resident_router:ResidentRouter"
#: Seconds of more or fewer requests until a replica is added or ended.
UPSCALE_S, DOWNSCALE_S = 10.0, 120.0
#: A process that is ended first finishes its requests, and looks so often whether there are any.
DRAINING = {"graceful_shutdown_timeout_s": DRAIN_S, "graceful_shutdown_wait_loop_s": 0.5}
#: In the traceback that Serve reports of a replica that did not start.
_SENTENCE = re.compile(r"blendrag\.errors\.\w+: (.+)")


def build(arguments: dict[str, Any]) -> Any:
    """Ingress and replicas from the arguments in a config file: fields of :class:`ServedCluster`."""
    return application(ServedCluster.of(arguments))


def application(
    served: ServedCluster,
    router: str = ROUTER,
    replica: type[Replica] = Replica,
    **replica_options: Any,
) -> Any:
    """:func:`build` with another router or replica, or other options of the replicas' deployment."""
    limits = Limits(**served.limits)
    options: dict[str, Any] = {
        "num_replicas": served.min_replicas,
        "ray_actor_options": {
            "num_cpus": served.cpus_per_replica, "num_gpus": served.gpus_per_replica,
        },
        # the server itself refuses more than max_requests, with the reason
        "max_ongoing_requests": limits.max_requests + 1,
        "max_queued_requests": limits.max_requests,
        **DRAINING,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "request_router_config": {
            "request_router_class": router, "request_routing_stats_period_s": REPORT_S,
            "request_router_kwargs": {"queued_share": served.queued_share},
        },
    }  # fmt: skip
    if served.max_replicas > served.min_replicas:
        del options["num_replicas"]
        options["autoscaling_config"] = {
            "min_replicas": served.min_replicas,
            "max_replicas": served.max_replicas,
            "target_ongoing_requests": served.target_requests,
            "upscale_delay_s": UPSCALE_S,
            "downscale_delay_s": DOWNSCALE_S,
        }
    replicas = serve.deployment(replica, name="Replica").options(**options | replica_options)
    ingress = serve.deployment(Ingress, name="Ingress").options(
        max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, **DRAINING
    )
    return ingress.bind(served, versions(), replicas.bind(served, versions()))


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
        report = "\n".join([str(exc), *(deployment.message for deployment in deployments)])
        sentences = _SENTENCE.findall(report)
        other = f"the replicas do not start: {last_line(report)}; --verbose shows their logs"
        raise InvalidInputError(sentences[-1] if sentences else other) from exc


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
