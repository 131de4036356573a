"""One value says how a prompt is blended, from the settings to what the fusor is asked."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from blendrag.config import DEFAULT_POLICY
from blendrag.engine import Options
from blendrag.fusor.selection import Blending, Schedule


def test_equal_names_are_equal_blendings() -> None:
    one, other = (Blending.of("boundary(16)", "first:4", 0.3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Blending.of("boundary(32)", "first:4", 0.3)


def test_an_automatic_ratio_is_the_smallest_until_one_is_chosen() -> None:
    auto = Blending.of("query", "constant", "auto", 0.1)
    assert (auto.is_auto, auto.fixed_ratio, auto.at(0.4).fixed_ratio) == (True, 0.1, 0.4)
    assert not auto.at(0.4).is_auto


def test_calibrated_is_the_default_policy_that_may_be_replaced() -> None:
    given = Blending.of("calibrated")
    assert given.is_calibrated
    assert str(given.policy) == DEFAULT_POLICY
    assert not Blending.of("query").is_calibrated


@pytest.mark.parametrize(
    ("options", "policy", "ratio"),
    [
        ({"policy": "hkvd", "ratio": 0.5}, "hkvd", 0.5),
        ({"policy": "hkvd", "ratio": "auto", "min_ratio": 0.25}, "hkvd", 0.25),
        ({"mode": "reuse", "policy": "hkvd", "ratio": 0.5}, "reuse", 0.0),
        ({"policy": "hkvd", "ratio": 0}, "reuse", 0.0),
        ({"policy": "boundary(4)", "ratio": "auto", "min_ratio": 0}, "reuse", 0.0),
    ],
)
def test_a_request_carries_its_blending_to_the_fusor(
    tmp_path: Any, options: dict[str, Any], policy: str, ratio: float
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(i) for i in range(2)]).whole()
        prompt = tiny.prompt(engine, 0, 1)
        with tiny.counted(engine.kv_namespace.model.fusor, "fuse") as fused:
            engine.generate(prompt, Options(max_new_tokens=1, schedule="linear", **options))
        ((_, request, *_),) = fused
        assert str(request.blending.policy) == policy
        assert request.blending.schedule == Schedule("linear")
        assert request.blending.ratio == ratio
