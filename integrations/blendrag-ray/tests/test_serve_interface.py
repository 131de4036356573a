"""Ray Serve's interface for request routers, which is alpha, is as ``resident_router`` uses it (Ray 2.60)."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from ray.serve._private.constants import REQUEST_ROUTING_STATS_METHOD
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from blendrag_ray.replica import Replica
from blendrag_ray.resident_router import ResidentRouter


@pytest.mark.parametrize("name", ["choose_replicas", "on_request_routed", "update_replicas"])
def test_serve_calls_the_router_with_these_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(RequestRouter, name)).parameters
    assert list(inspect.signature(getattr(ResidentRouter, name)).parameters) == list(theirs)


def test_serve_makes_the_router_with_its_options() -> None:
    names = {"request_router_class", "request_routing_stats_period_s", "request_router_kwargs"}
    assert names <= RequestRouterConfig.model_fields.keys()
    _, options = inspect.signature(RequestRouter.initialize_state).parameters.values()
    assert options.kind is inspect.Parameter.VAR_KEYWORD


def test_the_router_sees_arguments_of_requests_and_reports_of_replicas() -> None:
    assert {"args", "kwargs"} <= {each.name for each in dataclasses.fields(PendingRequest)}
    for name in ("replica_id", "routing_stats"):
        assert isinstance(inspect.getattr_static(RunningReplica, name), property)


def test_serve_asks_a_replica_for_its_report() -> None:
    assert hasattr(Replica, REQUEST_ROUTING_STATS_METHOD)
