"""Deploying on a cluster that Serve uses already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("ray")

import tiny
from blendrag_ray import application
from blendrag_ray.application import NAME, deployed


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for Serve, with the applications that its attribute ``served`` names."""
    made = mock.Mock(served={})
    made.status = lambda: SimpleNamespace(applications=made.served)
    monkeypatch.setattr(application, "serve", made)
    monkeypatch.setattr(application, "application", lambda served, **options: "application")
    return made


def test_the_application_of_another_command_is_left_alone(serve):
    serve.served = {NAME: None}
    with tiny.refuses("has an application 'blendrag' already"), deployed(mock.Mock(), "::", 8000):
        pass
    assert not serve.run.called
    assert not serve.delete.called


def test_ctrl_c_during_the_start_leaves_no_replicas(serve):
    serve.run.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), deployed(mock.Mock(), "::", 8000):
        pass
    serve.delete.assert_called_once_with(NAME)
