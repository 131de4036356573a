"""Ratio 0 recomputes nothing of stored chunks, on every surface: the plan of mode reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from blendrag.config import Settings
from blendrag.engine import BlendEngine, Options

REUSE = Options(mode="reuse", max_new_tokens=1)
#: A budgeted policy of each kind, those that ignore other ratios, and the default.
POLICIES = (None, "random", "hkvd", "query", "query+shift", "cacheblend", "boundary(4)", "full")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("zero") / "s") as made:
        made.ingest([tiny.document(i) for i in range(3)]).whole()
        yield made


@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_0_computes_what_mode_reuse_computes_with_any_policy(engine, policy):
    prompt = tiny.prompt(engine, 0, 1)
    engine.drain()  # of earlier answers, whose common head is encoded now
    reused, other = tiny.first_logits(engine, prompt, REUSE)
    zero = Options(policy=policy, ratio=0, max_new_tokens=1)
    with tiny.counted(engine.kv_namespace.model.fusor, "fuse") as fused:
        logits, answer = tiny.first_logits(engine, prompt, zero)
    assert torch.equal(logits, reused)
    ((_, request, *_),) = fused
    assert not request.blending.policy.needs_attention  # no scout pass
    m = answer.metrics
    assert (m.policy, m.ratio, m.charged_ratio, m.recomputed_tokens) == ("reuse", 0, 0, 0)
    assert {chunk.outcome for chunk in m.chunks} <= {"exact", "reused"}
    assert m.fresh_tokens == other.metrics.fresh_tokens


def test_requests_at_ratio_0_are_prefilled_together(engine):
    prompts = [tiny.prompt(engine, i, 2) for i in (0, 1)]
    zero = Options(policy="hkvd", ratio=0, max_new_tokens=2)
    for each in engine.batch(prompts, zero):
        assert each.metrics.batch_size == 2
        assert each.metrics.charged_ratio == 0


def test_the_page_says_that_nothing_was_recomputed(engine):
    answer = engine.generate(tiny.prompt(engine, 0, 1), ratio=0, max_new_tokens=1, explain=True)
    page = answer.explain().page()
    assert "<b>blend at ratio 0</b>" in page
    assert "Nothing of the stored chunks was recomputed" in page


def test_ratio_0_may_come_from_the_environment_and_the_engine(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("BLENDRAG_RATIO", "0")
    monkeypatch.setenv("BLENDRAG_MIN_RATIO", "0")
    assert Settings.from_environment().fixed_ratio == 0
    with tiny.engine(engine.adapter.model, engine.kv_namespace.root, ratio=0) as made:
        asked = Options(max_new_tokens=1)
        assert made.generate(tiny.prompt(made, 0, 1), asked).metrics.charged_ratio == 0
        auto = replace(asked, ratio="auto", min_ratio=0.0)  # without a profile: the smallest
        assert made.generate(tiny.prompt(made, 0, 1), auto).metrics.charged_ratio == 0


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"policy": "hkvd", "ratio": 0}, "policy ignored: ratio 0 recomputes nothing"),
        (
            {"policy": "hkvd", "schedule": "linear", "ratio": 0},
            "policy and schedule ignored: ratio 0 recomputes nothing",
        ),
        (
            {"policy": "cacheblend", "schedule": "linear"},
            "schedule ignored: policy cacheblend has its own, geometric:0.95",
        ),
        (
            {"policy": "boundary(4)", "ratio": 0.3},
            "ratio ignored: policy boundary(4) recomputes the same tokens at any ratio and in every layer",
        ),
        ({"ratio": 0.2, "min_ratio": 0.1}, "min_ratio ignored: it applies only to ratio=auto"),
        ({"policy": "cacheblend", "schedule": "geometric:0.95"}, None),
        ({"policy": "hkvd", "schedule": "linear", "ratio": 0.2}, None),
        ({"mode": "reuse", "policy": "hkvd", "schedule": "linear"}, None),
    ],
)
def test_options_that_change_nothing_are_noted(engine, options, note):
    metrics = engine.generate(tiny.prompt(engine, 0, 1), max_new_tokens=1, **options).metrics
    assert metrics.notes == (() if note is None else (note,))


def test_a_schedule_of_the_engine_that_a_policy_does_not_follow_is_noted(engine):
    root = engine.kv_namespace.root
    defaults: dict[str, Any] = {"policy": "cacheblend", "schedule": "linear"}
    with tiny.engine(engine.adapter.model, root, **defaults) as made:
        (note,) = made.generate(tiny.prompt(made, 0, 1), max_new_tokens=1).metrics.notes
        assert note.startswith("schedule ignored: policy cacheblend has its own")
