"""The cluster that this process uses, and whether its nodes have what the work needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from blendrag import __version__
from blendrag.errors import BlendragError, InvalidInputError

#: Memory of a cluster that is started here: only requests and answers are passed, never KV.
OBJECT_STORE_BYTES = 200 * 1024**2
#: Seconds that nodes may take to answer a check; they import torch for it.
CHECK_S = 120.0


def require_ray(command: str) -> None:
    """Raise :class:`InvalidInputError` if the extra is not installed."""
    if find_spec("ray") is None:
        raise InvalidInputError(f"{command} needs ray; pip install 'blendrag[ray]'")


@contextmanager
def connected(cpus: int, verbose: bool = False) -> Iterator[None]:
    """Connect to the cluster at ``RAY_ADDRESS``, or run one of ``cpus`` logical cores on this machine.

    Raises :class:`InvalidInputError` if there is no cluster at that address.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {} if address else {
        "num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES,
    }  # fmt: skip
    try:
        ray.init(
            address or "local",
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
            **local,
        )
    except (ConnectionError, ValueError, RuntimeError) as exc:
        where = f"the Ray cluster at RAY_ADDRESS={address}" if address else "a local Ray cluster"
        raise InvalidInputError(
            f"{where} cannot be used ({_first_line(exc)}); start it with the same versions of Ray and "
            "Python, or unset RAY_ADDRESS to use this machine alone"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def check_version(expected: str) -> None:
    """Raise :class:`InvalidInputError` if another version of blendrag is installed on this node."""
    if expected != __version__:
        raise InvalidInputError(
            f"{_here()} has blendrag {__version__}, expected {expected} as where the command was started; "
            "install the same version on all nodes"
        )


def on_every_node(check: Callable[[], Any]) -> list[Any]:
    """The results of ``check``, run on each node. Raises the first error, naming the node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0, max_retries=0)
    def run(expected: str) -> Any:
        try:
            check_version(expected)
            return check()
        except BlendragError as error:
            told = str(error)
            return InvalidInputError(told if told.startswith("node ") else f"{_here()}: {told}")

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    begun = [
        run.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            __version__
        )
        for node in nodes
    ]
    try:
        results = ray.get(begun, timeout=CHECK_S)
    except (ray.exceptions.RayError, ModuleNotFoundError) as exc:
        raise InvalidInputError(
            f"a node of the cluster cannot run blendrag ({_first_line(exc)}); install blendrag {__version__} "
            "on all nodes"
        ) from exc
    for result in results:
        if isinstance(result, BlendragError):
            raise result
    return results


def _here() -> str:
    import ray

    return f"node {ray.util.get_node_ip_address()}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
