"""Connecting to Ray: the cluster that ``RAY_ADDRESS`` names, else one that is started on this machine."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blendrag.errors import BlendragError, InvalidInputError

#: What a cluster of this machine keeps in shared memory: only texts and vectors pass through it.
LOCAL_OBJECT_BYTES = 256 << 20

#: Longest wait for the cluster that ``RAY_ADDRESS`` names.
CONNECT_S = 5.0


class RayError(BlendragError):
    """Ray cannot be reached or started."""


def require_ray() -> Any:
    """The module ``ray``. Raises :class:`InvalidInputError` if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray 2.60 warns of what Ray Data does itself: https://github.com/ray-project/ray/issues/53727
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise InvalidInputError(
            f"this needs Ray, which is not installed ({exc}); pip install 'blendrag[ray]'"
        ) from exc
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextmanager
def ray_session(cpus: int | None = None, verbose: bool = False) -> Iterator[Any]:
    """The module ``ray``, connected. Raises :class:`InvalidInputError` and :class:`RayError`.

    ``cpus``: logical cores of a cluster that is started here; ``verbose``: show what workers log.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS")
    here = {"include_dashboard": False, "object_store_memory": LOCAL_OBJECT_BYTES, "num_cpus": cpus}
    try:
        if address:
            _require_listening(address)
        with _quiet_stderr():
            ray.init(
                address or "local",
                log_to_driver=verbose,
                logging_level="info" if verbose else "error",
                **({} if address else here),
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
        what = f"Ray at RAY_ADDRESS={address}" if address else "Ray"
        if "InvalidAuthToken" in str(exc.__cause__):
            raise RayError(
                f"{what} asks for a token; set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN, or copy its "
                "~/.ray/auth_token"
            ) from exc
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise RayError(
            f"{what} cannot be used ({reason}); expected a running cluster of the same versions of Ray and "
            "Python, or no RAY_ADDRESS to start one on this machine"
        ) from exc
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Raise :class:`OSError` if nobody listens at ``host:port``; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Ray's C++ part prints its log level to stderr when it starts (2.60). Errors are raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
