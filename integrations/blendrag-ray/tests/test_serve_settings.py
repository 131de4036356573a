"""The arguments of the application, the example for KubeRay, and nodes that cannot serve."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.engine import BlendEngine
from blendrag.errors import CorpusError, InvalidInputError, ModelLoadError
from blendrag_ray.application import build
from blendrag_ray.command import require_room
from blendrag_ray.nodes import check_versions, versions
from blendrag_ray.settings import ServedCluster

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kuberay" / "rayservice.yaml"


@pytest.fixture
def arguments() -> dict[str, Any]:
    """Those of the example, after Serve's own check."""
    service = yaml.safe_load(EXAMPLE.read_text())
    assert service["kind"] == "RayService"
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    return dict(application.args)


def test_the_example_for_kuberay_builds_the_application(arguments: dict[str, Any]):
    served = ServedCluster.of(arguments)
    assert (served.min_replicas, served.max_replicas, served.gpus_per_replica) == (1, 8, 1)
    assert isinstance(build(arguments), serve.Application)


def test_the_example_starts_pods_for_all_replicas(arguments: dict[str, Any]):
    cluster = yaml.safe_load(EXAMPLE.read_text())["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert group["maxReplicas"] >= arguments["max_replicas"]
    assert int(limits["nvidia.com/gpu"]) >= arguments["gpus_per_replica"]
    assert int(limits["cpu"]) >= arguments["cpus_per_replica"]


@pytest.mark.parametrize(("wrong", "told"), [
    ({"stor": "kv"}, "stor: not an argument of the application; did you mean store"),
    ({"min_replicas": 0}, "argument min_replicas .* greater than or equal to 1"),
    ({"mode": "fast"}, "^mode 'fast' must be one of blend"),
    ({"cors_origins": ["app.example"]}, "--cors-origin 'app.example' must be"),
    ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 .* max_replicas 2"),
])  # fmt: skip
def test_wrong_arguments_are_refused_in_one_sentence(wrong: dict[str, Any], told: str):
    with pytest.raises(InvalidInputError, match=told):
        ServedCluster.of(wrong)


def test_a_node_without_the_model_or_the_store_is_refused(store: Path, tmp_path: Path):
    chunks, _ = ServedCluster(model="demo", store=str(store)).documents()
    assert chunks == 2
    with pytest.raises(ModelLoadError, match="no model at /nowhere/model; expected the same path"):
        ServedCluster(model="/nowhere/model", store=str(store)).documents()
    with pytest.raises(InvalidInputError, match="no schema /nowhere/town"):
        ServedCluster(model="demo", store=str(store), schemas=("/nowhere/town.xml",)).documents()
    with pytest.raises(CorpusError, match="there is no corpus"):
        ServedCluster(model="demo", store=str(tmp_path / "gone")).documents()
    with pytest.raises(InvalidInputError, match="mount it on every node"):
        ServedCluster(api_key_file=str(tmp_path / "none")).keys()


def test_a_node_follows_the_corpus_that_the_remote_publishes(store: Path, tmp_path: Path):
    remote = (tmp_path / "remote").as_uri()
    (tmp_path / "remote").mkdir()
    served = ServedCluster(model="demo", store=str(tmp_path / "node"), remote=remote)
    with pytest.raises(CorpusError, match="there is no corpus"):
        served.documents()
    with BlendEngine("demo", shutil.copytree(store, tmp_path / "origin"), remote=remote) as engine:
        engine.publish()
    checked = served.documents()
    assert checked[0] == 2
    assert not (tmp_path / "node").exists()  # a check of a large corpus takes no time
    served.engine(is_ingress=True).close()
    assert (tmp_path / "node" / "corpus").exists()
    assert served.documents() == checked
    own = ServedCluster(model="demo", store=str(store), remote=remote)
    assert own.documents() == served.documents()  # a store with documents of its own keeps them


@pytest.mark.parametrize("name", ["blendrag", "torch", "transformers"])
def test_another_version_on_a_node_is_refused(name: str):
    check_versions(versions())
    with pytest.raises(InvalidInputError, match=rf"has {name} .*, expected 0\.0\.1"):
        check_versions(versions() | {name: "0.0.1"})


@pytest.mark.parametrize(("given", "told"), [
    ({"gpus_per_replica": 1, "min_replicas": 2, "max_replicas": 2}, "--gpus-per-replica asks for 2 GPUs"),
    ({"cpus_per_replica": 64}, "--cpus-per-replica asks for 64 cores, and this machine has 2"),
])  # fmt: skip
def test_replicas_that_this_machine_can_never_start_are_refused(
    given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64, "GPU": 1})
    require_room(ServedCluster(gpus_per_replica=1), cores=2)
    with pytest.raises(InvalidInputError, match=told):
        require_room(ServedCluster(**given), cores=2)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def refuse_token(*args: Any, **kwargs: Any) -> None:
    """As Ray 2.60 tells it."""
    raise ConnectionError("Failed to connect") from RuntimeError("RPC error: InvalidAuthToken: …")


def test_the_command_refuses_what_it_cannot_do_before_ray_starts(
    store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen" in refused("--ray", "--store", str(store), "--port", port)
    assert "--replicas '3-1'" in refused("--ray", "--replicas", "3-1")
    assert "--replicas without --ray" in refused("--replicas", "2")
    with monkeypatch.context() as away:
        away.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert "cannot be used (" in refused("--ray", "--store", str(store))
    with monkeypatch.context() as away:
        away.setattr("ray.init", refuse_token)
        assert "asks for a token; set RAY_AUTH_MODE" in refused("--ray", "--store", str(store))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'blendrag[ray]'" in refused("--ray", "--store", str(store))


def test_a_key_file_that_is_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        ServedCluster(api_key_file=str(tmp_path / "keys")).keys()
