"""Whether the nodes of a cluster have what ingest and replicas need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from blendrag import __version__
from blendrag.errors import BlendragError, InvalidInputError, ModelLoadError

#: Seconds that nodes may take to answer a check; they may import torch for it.
CHECK_S = 120.0


def versions() -> dict[str, str]:
    """Versions of the packages that must be the same on all nodes; 2.13.0+cpu equals 2.13.0+cu130."""
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        name: version.partition("+")[0]
        for name, version in {"blendrag": __version__, **found}.items()
    }


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise :class:`InvalidInputError` if this node has another version than :func:`versions` elsewhere."""
    found = versions()
    for name, version in expected.items():
        if found[name] != version:
            raise InvalidInputError(
                f"{_here()} has {name} {found[name]}, expected {version} as where the command was started; "
                "install the same version on all nodes"
            )


def check_model(model: str) -> None:
    """Raise :class:`ModelLoadError` if ``model`` is a directory that this node does not have."""
    if os.path.isabs(model) and not os.path.exists(model):
        raise ModelLoadError(
            f"there is no model at {model}; expected the same path on every node: copy it there, share its "
            "directory, or name a hub id"
        )


def on_every_node(check: Callable[[], Any]) -> list[Any]:
    """The results of ``check``, run on each node after :func:`check_versions`.

    Raises the first error as :class:`InvalidInputError` that names the node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0, max_retries=0)
    def run(expected: Mapping[str, str]) -> Any:
        try:
            check_versions(expected)
            return check()
        except BlendragError as error:
            message = str(error)
            return InvalidInputError(
                message if message.startswith("node ") else f"{_here()}: {message}"
            )

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    begun = [
        run.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            versions()
        )
        for node in nodes
    ]
    try:
        results = ray.get(begun, timeout=CHECK_S)
    except (ray.exceptions.RayError, ModuleNotFoundError) as exc:
        cause = last_line(str(exc)) or type(exc).__name__
        raise InvalidInputError(
            f"a node of the cluster cannot run blendrag ({cause}); install blendrag {__version__} on "
            "all nodes"
        ) from exc
    for result in results:
        if isinstance(result, BlendragError):
            raise result
    return results


def _here() -> str:
    import ray

    return f"node {ray.util.get_node_ip_address()}"


def last_line(report: str) -> str:
    """The last line of what Ray tells of an error elsewhere, which is that error."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
