"""The application of Ray Serve.

``serve run blendrag_ray.application:build store=DIR`` starts it, and so does ``blendrag serve --ray``.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from blendrag.server.access import Limits
from blendrag.server.running import DRAIN_S
from blendrag_ray.ingress import Ingress
from blendrag_ray.nodes import versions
from blendrag_ray.replica import Replica
from blendrag_ray.resident_router import REPORT_S
from blendrag_ray.settings import ServedCluster

ROUTER = "blendrag_ray.resident_router:ResidentRouter"
#: Seconds of more or fewer requests until a replica is added or ended.
UPSCALE_S, DOWNSCALE_S = 10.0, 120.0
#: A process that is ended first finishes its requests, and looks so often whether there are any.
DRAINING = {"graceful_shutdown_timeout_s": DRAIN_S, "graceful_shutdown_wait_loop_s": 0.5}


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
