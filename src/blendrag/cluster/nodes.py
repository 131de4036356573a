"""Whether the nodes of a cluster have what the work needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blendrag import __version__
from blendrag.errors import BlendragError, InvalidInputError

#: Seconds that nodes may take to answer a check; they import torch for it.
CHECK_S = 120.0


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
