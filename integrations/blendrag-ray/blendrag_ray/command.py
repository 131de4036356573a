"""What ``--ray`` of ``blendrag ingest`` and ``blendrag serve`` calls, by the entry points ``blendrag.ray``.

Heavy imports are inside functions, because Ray may not be installed.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE
from blendrag.cli.output import count, say
from blendrag.cli.progress import StatusLine
from blendrag.errors import InvalidInputError
from blendrag.wording import quoted
from blendrag_ray.ray_session import ray_session, require_ray

if TYPE_CHECKING:
    from blendrag_ray.settings import ServedCluster

_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)


def ingest(workers: int | None, gpus_per_worker: float | None) -> Callable[..., Any]:
    """:func:`blendrag_ray.ingest.ingest_on_ray` with these workers.

    Raises :class:`InvalidInputError` if Ray is not installed.
    """
    require_ray()
    from blendrag_ray.ingest import ingest_on_ray

    return partial(ingest_on_ray, workers=workers, gpus_per_worker=gpus_per_worker)


def serve(given: Mapping[str, Any], limits: Mapping[str, Any]) -> int:
    """``blendrag serve --ray`` until Ctrl-C or SIGTERM.

    ``given``: the command's parameters; ``limits``: who may ask and how much, as fields of
    :class:`ServedCluster`.
    """
    require_ray()
    from blendrag.cli.serve import warn_of_others
    from blendrag.config import absolute_model, settings
    from blendrag.server.running import DRAIN_S, bound_socket
    from blendrag_ray.application import check_nodes, deployed, sigterm_exits
    from blendrag_ray.settings import ServedCluster

    least, most = _range_of(given["replicas"] or "1")
    paths = {
        "store": os.path.abspath(given["store"] or settings().store),
        "model": given["model"] and absolute_model(given["model"]),
        "lora": given["lora"] and absolute_model(given["lora"]),
        "writer": given["writer"] and absolute_model(given["writer"]),
        "schemas": tuple(map(os.path.abspath, given["schema"] or ())),
        "api_key_file": None,  # its text is among the limits
    }
    named = options.given(given, tuple(ServedCluster.model_fields))
    counts = {"min_replicas": least, "max_replicas": most}
    is_here, cores = not os.environ.get("RAY_ADDRESS"), os.cpu_count() or 1
    if is_here and given["cpus_per_replica"] is None:
        counts["cpus_per_replica"] = max(1, cores // most)
    every = named | dict(limits) | paths | counts
    served = ServedCluster.of({name: value for name, value in every.items() if value is not None})
    host, port = given["host"], given["port"]
    if is_here:
        with bound_socket(host, port) as at:  # a proxy that cannot listen says so only in its log
            port = at.getsockname()[1]
    with ExitStack() as stack:
        with StatusLine("starting Ray"):
            logical = math.ceil(most * served.cpus_per_replica)
            stack.enter_context(ray_session(max(logical, cores), given["verbose"]))
            stack.enter_context(sigterm_exits())
        if is_here:
            require_room(served, cores)
        with StatusLine("checking the nodes"):
            check_nodes(served)
        with StatusLine(f"starting {count(least, 'replica')}"):
            stack.enter_context(deployed(served, host, port, given["verbose"]))
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say("serving", f"{url}/v1 with {count(least, 'replica')}")
        say("page", f"{url}/")
        warn_of_others(host, limits["api_keys"] is not None, served.cors_origins)
        interrupt.expect("the server has stopped", DRAIN_S)
        threading.Event().wait()
    return DONE


def require_room(served: ServedCluster, cores: int) -> None:
    """Raise :class:`InvalidInputError` for replicas that this machine can never start."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0)
    has = {"--cpus-per-replica": (served.cpus_per_replica, cores, "cores"),
           "--gpus-per-replica": (served.gpus_per_replica * served.min_replicas, gpus, "GPUs")}  # fmt: skip
    for name, (wanted, available, what) in has.items():
        if wanted > available:
            raise InvalidInputError(
                f"{name} asks for {wanted:g} {what}, and this machine has {available:g}; ask for fewer, or "
                "name a cluster with RAY_ADDRESS"
            )


def _range_of(replicas: str) -> tuple[int, int]:
    """``3`` → 3 to 3, ``1-3`` → 1 to 3."""
    low, _, high = replicas.partition("-")
    high = high or low
    is_range = _COUNT.fullmatch(low) and _COUNT.fullmatch(high)
    if not (is_range and 1 <= int(low) <= int(high)):
        raise InvalidInputError(
            f"--replicas {quoted(replicas)} must be a number of at least 1, or a range such as 1-3"
        )
    return int(low), int(high)
