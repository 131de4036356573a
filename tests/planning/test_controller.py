"""Plans through the engine: what is opened, predicted and chosen is what is done, and is explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from blendrag.config import Settings
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.fusor.selection import Blending
from blendrag.planning.controller import CORRUPT
from blendrag.planning.plan import Plan
from blendrag.planning.profile import Tier, conditions_of, profiles
from blendrag.text.prompt import SegmentedPrompt
from blendrag_lab.bench.tiers import Throttle, ThrottledStore
from planning.invented import LAYERS, line, profile

AUTO = Options(ratio="auto", policy="random", max_new_tokens=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("auto") / "store"
    with tiny.engine(tiny.llama(), root, ram_bytes=0, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


@pytest.fixture(autouse=True)
def _forgotten(engine: BlendEngine) -> Iterator[None]:
    yield
    for kept in (engine.root / "verified").glob("*.*.json"):
        kept.unlink()


def prompt(engine: BlendEngine) -> str:
    return tiny.prompt(engine, 0, 1, 2)


def profiled(engine: BlendEngine, bytes_per_s: float, row_s: float = 1e-6, **changes: Any) -> None:
    """Have the engine remember an invented profile: one disk, and ``row_s`` per row and layer."""
    layout = engine.kv_namespace.layout
    given = {
        "conditions": conditions_of(engine.adapter, engine.kv_namespace.validity.namespace),
        "prefill": line(LAYERS * row_s),
        "layer": line(row_s),
        "scout": line(row_s),
        "chunk_tokens": 64,
        "layer_bytes": tuple(layout.layer_bytes(i, 64) for i in range(LAYERS)),
    }
    made = profile(bytes_per_s, **{**given, **changes})
    profiles(engine.root, made.conditions.namespace).keep(made)


def token_bytes(engine: BlendEngine) -> int:
    """Of one token in one layer."""
    return engine.kv_namespace.layout.layer_bytes(0, 1)


def ask(engine: BlendEngine, options: Options = AUTO) -> Answer:
    answer = engine.generate(prompt(engine), options)
    engine.drain()
    return answer


def profile_notes(answer: Answer) -> list[str]:
    return [note for note in answer.metrics.notes if "calibrate" not in note]


# -- plans without a profile -------------------------------------------------------------------------


def planned(
    engine: BlendEngine,
    mode: Any,
    asked: SegmentedPrompt | None = None,
    avoid: tuple[str, ...] = (),
) -> Plan:
    controller = engine.planner.controller(engine.kv_namespace.validity.namespace)
    blending = Blending.of("random", ratio=0.5)
    asked = asked or engine.segments(prompt(engine))
    plan = controller.plan(asked, mode, blending, frozenset(avoid))
    plan.close()
    return plan


def test_chunks_that_failed_verification_are_computed_and_not_missing(engine):
    plan = planned(engine, "reuse", avoid=tuple(tiny.chunk_keys(engine, 2)[-1:]))
    *others, last = plan.chunks
    assert (last.span, last.reason) == (None, CORRUPT)
    assert "verification" in last.reason.text
    assert len(plan.spans) == len(others) > 0
    assert plan.missing == ()
    # the question begins after the last chunk, even if that is computed
    assert plan.request(len(plan.prompt.ids)).question_start == last.segment.end


def test_readers_already_open_are_closed_if_a_later_chunk_cannot_be_opened(engine, monkeypatch):
    asked = engine.segments(prompt(engine))
    readers: list[tiny.Held] = []

    def opened(*given: Any) -> tiny.Held:
        if len(readers) == 2:
            raise OSError("too many open files")
        readers.append(tiny.Held(SimpleNamespace(tokens=given[2]), given[1]))  # type: ignore[arg-type]
        return readers[-1]

    monkeypatch.setattr(engine.store, "_open_here", opened)
    with pytest.raises(OSError, match="too many open files"):
        planned(engine, "blend", asked)
    assert [reader.closed for reader in readers] == [True, True]


# -- the ratio ---------------------------------------------------------------------------------------


def test_behind_a_throttled_store_the_larger_ratio_that_hides_is_taken(engine, monkeypatch):
    """A token loads twice as long as it computes."""
    row_s = 5e-6
    bytes_per_s = token_bytes(engine) / (2 * row_s)
    profiled(engine, bytes_per_s, row_s)
    store = engine.store
    unthrottled: Any = SimpleNamespace(open=store.disk.open)
    slow = ThrottledStore(unthrottled, Throttle(bytes_per_s), "disk")
    monkeypatch.setattr(store, "open_all", slow.open_all)
    monkeypatch.setattr("blendrag.planning.choice.MIN_SPEEDUP_SHARE", 1.0)  # load everything
    metrics = ask(engine, replace(AUTO, min_ratio=0.05)).metrics
    assert metrics.ratio > 0.055
    assert "hides behind the load" in metrics.decision
    assert metrics.reused_tokens > 0
    assert metrics.predicted_load_s is not None
    assert metrics.load_s >= 0.99 * metrics.predicted_load_s  # it slept for that long


def test_from_a_fast_store_the_smallest_ratio_is_taken(engine):
    profiled(engine, 1e12)
    metrics = ask(engine).metrics
    assert metrics.ratio == pytest.approx(0.3, abs=0.01)
    assert "smallest that keeps quality" in metrics.decision
    assert metrics.schedule == "constant"
    assert None not in (metrics.predicted_ttft_s, metrics.predicted_compute_s)
    assert ask(engine, replace(AUTO, schedule="linear")).metrics.schedule == "linear"


# -- load or compute ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_s", "fixed_s", "reason", "says"),
    [
        (1e3, 0.0, "here than waiting", "the store is slower than computing here, so nothing"),
        (1e12, 10.0, "here than blending", "blending takes longer than computing here"),
    ],
)
def test_nothing_is_read_if_computing_is_faster_and_the_answer_says_so(
    engine, bytes_per_s, fixed_s, reason, says
):
    profiled(engine, bytes_per_s, fixed_s=fixed_s)
    before = engine.stats()
    answer = ask(engine)
    metrics = answer.metrics
    assert (metrics.reused_tokens, metrics.load_s) == (0, 0.0)
    assert {chunk.outcome for chunk in metrics.chunks} == {"computed"}
    assert all(reason in chunk.reason for chunk in metrics.chunks)
    (note,) = profile_notes(answer)
    assert note.startswith(says)
    assert metrics.decision.endswith("with everything loaded)")  # and nothing about the ratio
    assert "computed afresh" in metrics.decision
    assert answer.text == ask(engine, Options(mode="full", max_new_tokens=2)).text
    after = engine.stats()  # what was computed by choice is not stored again
    assert (after.entries, after.puts) == (before.entries, before.puts)


@pytest.mark.parametrize("policy", ["random", "boundary(16)"])
def test_of_a_store_in_between_some_chunks_are_loaded(engine, policy):
    row_s = 5e-6
    profiled(engine, token_bytes(engine) / (0.8 * row_s), row_s)
    metrics = ask(engine, replace(AUTO, policy=policy)).metrics
    outcomes = [chunk.outcome for chunk in metrics.chunks]
    assert {"computed", "blended"} <= {*outcomes}
    assert "stored parts computed afresh" in metrics.decision
    assert metrics.prompt_tokens == metrics.reused_tokens + metrics.fresh_tokens
    if policy != "random":  # heads of chunks that are not loaded are not counted as recomputed
        rows = metrics.fresh_tokens + 16 * outcomes.count("blended")
        assert metrics.predicted_compute_s == pytest.approx(LAYERS * rows * row_s)


def test_with_a_fixed_ratio_everything_is_loaded(engine):
    profiled(engine, 1e3)
    metrics = ask(engine, replace(AUTO, ratio=0.5)).metrics
    assert metrics.ratio == pytest.approx(0.5, abs=0.01)
    assert metrics.reused_tokens > 0
    assert metrics.decision == ""


# -- predictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["random", "boundary(4)"])
def test_the_rows_predicted_are_the_rows_computed(engine, policy):
    profiled(engine, 1e12, row_s=1e-6)  # the predicted compute counts rows
    metrics = ask(engine, Options(policy=policy, ratio=0.3, max_new_tokens=1)).metrics
    blended = sum(c.tokens for c in metrics.chunks if c.outcome == "blended")
    rows = LAYERS * metrics.fresh_tokens + LAYERS * metrics.charged_ratio * blended
    assert metrics.predicted_compute_s == pytest.approx(rows * 1e-6, rel=0.02)


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("random", 0.3), ("random", 1.0), ("hkvd", 0.3), ("query", 1.0), ("boundary(4096)", 0.3)],
)
def test_the_bytes_whose_loading_is_predicted_are_the_bytes_read(engine, policy, ratio):
    profiled(engine, 1e9)
    before = engine.stats().tiers[-1].read_bytes
    metrics = ask(engine, Options(policy=policy, ratio=ratio, max_new_tokens=1)).metrics
    assert metrics.predicted_load_s is not None
    read = engine.stats().tiers[-1].read_bytes - before
    assert read > 0
    assert metrics.predicted_load_s * 1e9 == pytest.approx(read)


# -- without a profile for this machine --------------------------------------------------------------


def test_without_a_profile_auto_is_the_smallest_ratio_and_names_the_command(engine):
    answer = ask(engine)
    assert answer.metrics.ratio == pytest.approx(0.3, abs=0.01)
    (note,) = profile_notes(answer)
    assert f"blendrag profile --model {engine.model_name}" in note
    assert str(engine.root) in note
    assert "ratio 0.3 is used" in note
    assert tiny.one_sentence(note)
    fixed = ask(engine, replace(AUTO, ratio=0.2)).metrics
    assert (fixed.predicted_ttft_s, fixed.decision) == (None, "")
    assert not [note for note in fixed.notes if "profile" in note]


def test_a_profile_of_another_machine_or_without_times_for_the_disk_is_not_used(engine):
    here = conditions_of(engine.adapter, engine.kv_namespace.validity.namespace)
    for changes, says in (
        ({"conditions": replace(here, machine="another")}, "is for machine another"),
        ({"tiers": (Tier("memory", 1e9),)}, "no times for reading from disk"),
    ):
        profiled(engine, 1e3, **changes)
        answer = ask(engine)
        assert answer.metrics.reused_tokens > 0
        (note,) = profile_notes(answer)
        assert says in note


def test_other_modes_ignore_auto(engine):
    assert not ask(engine, replace(AUTO, mode="reuse")).metrics.notes


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["fast", "0.2", 1.01, float("nan"), True, [0.1]])
def test_a_bad_ratio_is_refused(tmp_path, bad):
    for made in (
        lambda: Options(ratio=bad),
        lambda: Options(min_ratio=bad),
        lambda: BlendEngine("demo", tmp_path, min_ratio=bad),
    ):
        with tiny.refuses(r"ratio .*\[0, 1\]"):
            made()


def test_settings_take_the_ratios_from_the_environment(monkeypatch, engine):
    monkeypatch.setenv("BLENDRAG_RATIO", "auto")
    monkeypatch.setenv("BLENDRAG_MIN_RATIO", "0.4")
    made = Settings.from_environment()
    assert (made.ratio, made.fixed_ratio) == ("auto", 0.4)
    monkeypatch.setenv("BLENDRAG_RATIO", "automatic")
    with tiny.refuses("BLENDRAG_RATIO 'automatic' must be a number in"):
        Settings.from_environment()
    ratios = replace(engine.settings, ratio="auto", min_ratio=0.4)
    monkeypatch.setattr(engine.kv_namespace.corpus, "settings", ratios)
    one = Options(policy="random", max_new_tokens=1)
    assert ask(engine, one).metrics.ratio == pytest.approx(0.4, abs=0.01)
    assert ask(engine, replace(one, min_ratio=0.0)).metrics.recomputed_tokens == 0
    fixed = ask(engine, replace(one, ratio=0.2, min_ratio=0.4)).metrics
    assert fixed.ratio == pytest.approx(0.2, abs=0.01)
    assert any("min_ratio" in note for note in fixed.notes)
