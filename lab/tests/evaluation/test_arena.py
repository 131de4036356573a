"""The arena end to end on a tiny model: what is asked, what it is compared with, how it resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
import writers
from blendrag.config import DEFAULT_EMBEDDER
from blendrag.corpus.embedder import Embedder
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.engine.request import RagPrompt
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model import ModelAdapter
from blendrag.model.loading import load_adapter
from blendrag_lab.evaluation.arena import Arena, Engines, source_digest
from blendrag_lab.evaluation.asking import ObservedAnswer
from blendrag_lab.evaluation.datasets import Case, synthetic_dataset
from blendrag_lab.evaluation.report import reuse_note, tables
from blendrag_lab.evaluation.rows import ArenaRow, Journal
from blendrag_lab.evaluation.ways import Way, make_ways
from lab.tests.evaluation import lab

WAYS = make_ways(["reuse", "query"], ["constant"], [0.3, 1.0], [True, False])
FULL, NONE = Way("full"), Way("none")
REUSE = Way("reuse", encode_prefix=True)
BASE = make_ways([], [], [], [])
REUSING = make_ways(["reuse"], [], [], [True])


@pytest.fixture(scope="module")
def rows() -> list[ArenaRow]:
    return lab.arena(WAYS).run()


def row_of(rows: list[ArenaRow], way: Way, kind: str = "all") -> ArenaRow:
    (found,) = (
        row for row in rows
        if (row.policy, row.encode_prefix, row.kind) == (way.policy, way.encode_prefix, kind)
        and way.ratio in (None, row.ratio) and way.schedule in ("", row.schedule)
    )  # fmt: skip
    return found


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Case and policy, in the order in which they were asked."""
    seen: list[tuple[str, str]] = []
    real = Arena._reply

    def spy(self: Arena, engines: Engines, case: Case, way: Way, *more: Any) -> ObservedAnswer:
        seen.append((case.case_id, way.policy))
        return real(self, engines, case, way, *more)

    monkeypatch.setattr(Arena, "_reply", spy)
    return seen


def test_there_is_a_row_for_every_way_and_kind(rows):
    assert len(rows) == len(WAYS) * 3
    assert [row.kind for row in rows[:3]] == ["all", "even", "odd"]
    assert [row.n for row in rows[:3]] == [4, 2, 2]
    assert {row.dataset for row in rows} == {"tiny"}
    assert {row.pgr for row in rows} == {None}  # a random model gains nothing from context


def test_full_prefill_agrees_with_itself_and_with_everything_recomputed(rows):
    full, nothing = row_of(rows, FULL), row_of(rows, NONE)
    assert (full.kl, full.agreement, full.same_answer, full.charged_ratio) == (0.0, 1.0, 1.0, 1.0)
    assert full.token_kl == 0.0
    assert nothing.charged_ratio == 0.0
    assert nothing.kl is not None
    assert nothing.kl > 1e-3
    for prefix in (True, False):
        everything = row_of(rows, Way("query", "constant", 1.0, prefix))
        assert everything.kl == pytest.approx(0.0, abs=1e-4)
        assert (everything.agreement, everything.charged_ratio) == (1.0, 1.0)


def test_divergence_and_recovered_share_are_between_reuse_and_full_prefill(rows):
    for prefix in (True, False):
        reuse = row_of(rows, Way("reuse", encode_prefix=prefix))
        some, everything = (row_of(rows, Way("query", "constant", r, prefix)) for r in (0.3, 1.0))
        assert (reuse.ratio, reuse.charged_ratio, reuse.recovered) == (0.0, 0.0, 0.0)
        assert reuse.token_kl > 1e-3  # type: ignore[operator]
        assert some.kl < reuse.kl  # type: ignore[operator]
        assert 0.2 < some.charged_ratio < 0.5
        assert everything.recovered == pytest.approx(1.0, abs=1e-2)
        assert some.recovered == pytest.approx(1 - some.token_kl / reuse.token_kl)  # type: ignore[operator]
    off = row_of(rows, Way("reuse", encode_prefix=False))
    assert row_of(rows, REUSE).kl != off.kl


def test_prefix_caching_computes_all_but_the_first_chunk_which_is_in_memory(monkeypatch):
    tiers: list[str] = []
    real = BlendEngine.generate

    def spy(self: BlendEngine, prompt: RagPrompt, options: Options) -> Answer:
        answer = real(self, prompt, options)
        tiers.extend(chunk.tier for chunk in answer.metrics.chunks if options.mode == "prefix")
        return answer

    monkeypatch.setattr(BlendEngine, "generate", spy)
    cases = lab.cases(2, 1)
    arena = lab.arena(make_ways(["prefix"], [], [], []), cases)
    prefix = row_of(arena.run(), Way("prefix"))
    count = arena.adapter.tokens.encode_text
    sizes = [[len(count(chunk)) for chunk in case.chunks] for case in cases]
    expected = sum(1 - first / (first + sum(rest)) for first, *rest in sizes) / len(sizes)
    assert prefix.charged_ratio == pytest.approx(expected)
    assert prefix.kl == pytest.approx(0.0, abs=1e-4)
    assert tiers == ["memory"] * 3  # a question for each context, and the warm-up


def test_int8_kv_is_read_and_has_its_own_journal():
    cases = lab.cases(1, 2)
    native = lab.arena(REUSING, cases)
    encoded = Arena(native.adapter, native.dataset, REUSING, kv_encoding="int8")
    assert encoded.digest != native.digest
    of_native, of_encoded = (row_of(arena.run(), REUSE) for arena in (native, encoded))
    assert (of_native.kv_encoding, of_encoded.kv_encoding) == ("native", "int8")
    assert 0 < abs(of_native.kl - of_encoded.kl) < 0.1 * of_native.kl  # type: ignore[operator]


def test_a_twentieth_of_the_tokens_answers_as_full_prefill_on_the_embedded_model():
    """It resolves references in layers 1 to 5, so rows in earlier layers alone are of no use."""
    adapter = load_adapter("demo")
    dataset = synthetic_dataset(adapter.tokens, seed=7, n_contexts=1, n_questions=8)
    kinds = ("coreference", "direct")
    dataset = replace(dataset, cases=tuple(c for c in dataset.cases if c.kind in kinds))
    schedules = ["first:3", "first:5"]
    ways = make_ways(["reuse", "query"], schedules, [0.05], [True])
    found = Arena(adapter, dataset, ways).run()

    def score(way: Way, kind: str = "coreference") -> float:
        found_score = row_of(found, way, kind).score
        assert found_score is not None
        return found_score

    full, reuse = score(FULL), score(REUSE)
    early, enough = (score(Way("query", s, 0.05, True)) for s in schedules)
    assert full >= 0.9
    assert reuse <= full - 0.25
    assert enough >= full - 0.15
    assert early <= reuse + 0.15
    assert score(Way("query", "first:5", 0.05, True), "direct") >= 0.85
    assert row_of(found, REUSE, "coreference").pgr < 0.75  # type: ignore[operator]


def test_ways_are_asked_in_a_new_order_for_every_question(turns):
    cases = lab.cases(1, 8)
    lab.arena(REUSING, cases).run()
    assert turns[:3] == [("0/0", "full"), ("0/0", "none"), ("0/0", "reuse")]  # the warm-up
    orders = [turns[at : at + 3] for at in range(3, len(turns), 3)]
    assert [{case for case, _ in order} for order in orders] == [{c.case_id} for c in cases]
    assert {tuple(policy for _, policy in order) for order in orders} == {
        ("full", "none", "reuse"),
        ("full", "reuse", "none"),
    }


def test_the_warm_up_is_short(monkeypatch):
    sizes: list[int] = []
    real = Arena._reply

    def spy(self: Arena, engines: Engines, case: Case, *more: Any) -> ObservedAnswer:
        sizes.append(len(case.chunks))
        return real(self, engines, case, *more)

    monkeypatch.setattr(Arena, "_reply", spy)
    lab.arena(REUSING, lab.cases(1, 1)).run()
    assert sizes == [2] * 3 + [3] * 3


def test_agreement_is_of_the_tokens_preferred_after_full_prefills_answer():
    def reply(preferred: list[int], said: tuple[int, ...]) -> ObservedAnswer:
        return ObservedAnswer("x", said, torch.eye(8)[preferred], 0.0, 0.0, 0.1)

    (case,), arena = lab.cases(1, 1), lab.arena(BASE)
    full, other = reply([1, 2, 3, 4], (1, 2, 3, 4)), reply([1, 7, 3, 4], (1, 7, 7))
    outcome = arena._judge(case, REUSE, other, full)
    assert outcome.agreement == 0.75
    assert (outcome.model, outcome.dataset, outcome.kind) == (
        arena.adapter.model_id,
        "tiny",
        "even",
    )


def test_ways_that_only_later_questions_miss_are_warmed_up(turns):
    first, *_ = cases = lab.cases(1, 2)
    lab.arena(REUSING, [first]).run(journal := Journal())
    turns.clear()
    ways = make_ways(["reuse", "boundary(4)"], [], [], [True])
    lab.arena(ways, cases).run(journal)
    assert {policy for _, policy in turns[:4]} == {"full", "none", "reuse", "boundary(4)"}
    assert {case for case, _ in turns[:4]} == {first.case_id}
    asked_again = {policy for case, policy in turns[4:] if case == first.case_id}
    assert asked_again == {"full", "boundary(4)"}


def test_an_interrupted_run_asks_nothing_twice(tmp_path, turns):
    path = tmp_path / "journal.jsonl"

    def stop_after_two(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.arena(REUSING).run(Journal(path), stop_after_two)
    assert {case for case, _ in turns} == {"0/0", "0/1"}
    turns.clear()
    seen: list[int] = []
    rows = lab.arena(REUSING).run(Journal(path), lambda done, total: seen.append(done))
    assert {case for case, _ in turns} == {"1/0", "1/1"}
    assert seen == [2, 3, 4]
    assert rows[0].n == 4


def test_another_model_length_of_answer_or_code_is_asked_anew(tmp_path, turns, monkeypatch):
    monkeypatch.setattr(Arena, "_warm_up", lambda *_: None)
    data, adapter = lab.dataset(lab.cases(1, 1)), lab.adapter()

    def asked(ways: Sequence[Way] = BASE, model: ModelAdapter = adapter, length: int = 4) -> int:
        turns.clear()
        Arena(model, data, ways, max_new_tokens=length).run(Journal(tmp_path / "j.jsonl"))
        return len(turns)

    assert (asked(), asked()) == (2, 0)
    assert asked(REUSING) == 2  # the new way, and full prefill to compare it with
    assert asked(length=5) == 2
    assert asked(model=tiny.adapter(tiny.llama(seed=1))) == 2
    monkeypatch.setattr("blendrag_lab.evaluation.arena.source_digest", lambda: "of other code")
    assert asked() == 2


def test_a_writer_changes_only_the_ways_that_are_named_after_it(tmp_path, monkeypatch):
    adapter, cases = lab.adapter(), lab.cases(1, 1)
    writer = writers.writer(adapter.model, tmp_path / "writer")
    ways = make_ways(["prefix", "reuse", "query"], ["constant"], [1.0], [True])
    alone = lab.arena(ways, cases).run()
    monkeypatch.setenv("BLENDRAG_WRITER", str(writer))
    both = Arena(adapter, lab.dataset(cases), ways, max_new_tokens=4, writer=writer).run()
    assert [row.policy for row in both if row.kind == "all"] == [
        "none", "full", "prefix", "reuse", "query", "reuse+writer", "query+writer",
    ]  # fmt: skip
    of = {(row.policy, row.schedule and row.ratio, row.kind): row for row in both}
    for row in alone:  # the same answers as without one
        same = of[row.policy, row.schedule and row.ratio, row.kind]
        assert (same.token_kl, same.agreement) == (row.token_kl, row.agreement)
    reuse, written = of["reuse", "", "all"], of["reuse+writer", "", "all"]
    assert written.token_kl != reuse.token_kl
    assert written.token_kl is not None
    assert reuse.token_kl is not None
    assert written.recovered == pytest.approx(1 - written.token_kl / reuse.token_kl)
    everything = of["query+writer", 1.0, "all"]  # nothing of what was stored is left
    assert everything.kl == pytest.approx(0.0, abs=1e-4)


def test_chunks_are_also_encoded_after_similar_ones_of_the_whole_dataset(tmp_path):
    cases = lab.cases(2, 1)
    ways = make_ways(["reuse", "query"], ["constant"], [1.0], [True])
    alone = lab.arena(ways, cases).run()
    both = Arena(lab.adapter(), lab.dataset(cases), ways, max_new_tokens=4, encode_after=1).run()
    of = {row.policy: row for row in both if row.kind == "all"}
    assert list(of) == ["none", "full", "reuse", "query", "reuse+after1", "query+after1"]
    for row in alone:
        if row.kind == "all":
            same = of[row.policy]
            assert (same.token_kl, same.agreement) == (row.token_kl, row.agreement)
    assert of["reuse+after1"].token_kl != of["reuse"].token_kl
    everything = of["query+after1"]  # nothing of what was stored is left
    assert everything.kl == pytest.approx(0.0, abs=1e-4)


def test_answers_over_chunks_after_similar_ones_are_kept_for_the_chunks_that_were_searched(
    tmp_path, turns, monkeypatch
):
    monkeypatch.setattr(Arena, "_warm_up", lambda *_: None)
    path = tmp_path / "journal.jsonl"

    def asked(contexts: int, embedder: str = "minilm-offline") -> list[tuple[str, str]]:
        turns.clear()
        data = lab.dataset(lab.cases(contexts, 1))
        after = Arena(
            lab.adapter(), data, REUSING, max_new_tokens=4, encode_after=1,
            embedder=Embedder(embedder),
        )  # fmt: skip
        after.run(Journal(path))
        return sorted(turns)

    again = [("0/0", "full"), ("0/0", "reuse")]
    assert asked(1) == [("0/0", "full"), ("0/0", "none"), *[("0/0", "reuse")] * 2]
    assert asked(1) == []
    more = [("1/0", "full"), ("1/0", "none"), *[("1/0", "reuse")] * 2]
    assert asked(2) == again + more
    assert asked(2) == asked(1) == []
    assert asked(1, DEFAULT_EMBEDDER) == again
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:  # as before the key said so
        line["way_key"] = re.sub(r"\|after 1\|.*", "|after 1", line["way_key"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert asked(1) == again


def test_a_writer_also_encodes_chunks_after_similar_ones(tmp_path):
    ways = make_ways(["reuse"], ["constant"], [1.0], [True])
    adapter, data = lab.adapter(), lab.dataset(lab.cases(2, 1))
    folder = writers.writer(adapter.model, tmp_path / "writer", 1)
    arena = Arena(adapter, data, ways, max_new_tokens=4, writer=folder, encode_after=1)
    kl = {row.policy: row.kl for row in arena.run() if row.kind == "all"}
    assert list(kl) == [
        "none",
        "full",
        "reuse",
        "reuse+writer",
        "reuse+after1",
        "reuse+writer+after1",
    ]
    assert len(set(kl.values())) == len(kl)


def test_a_run_goes_on_with_another_writer_and_asks_only_what_it_changes(tmp_path, turns):
    adapter, cases = lab.adapter(), lab.cases(1, 2)

    def asked(seed: int | None) -> list[tuple[str, str]]:
        folder = None
        if seed is not None:
            folder = writers.writer(adapter.model, tmp_path / str(seed), seed)
        turns.clear()
        data = lab.dataset(cases)
        arena = Arena(adapter, data, REUSING, max_new_tokens=4, writer=folder)
        arena.run(Journal(tmp_path / "journal.jsonl"))
        return turns[:]

    asked(None)
    for seed in (0, 1):  # the warm-up and both questions: full prefill, to compare with
        assert [way for _, way in asked(seed)] == ["full", "reuse"] * 3
        assert asked(seed) == []


def test_only_full_prefill_answers_where_fidelity_alone_is_asked_for(monkeypatch):
    lengths: dict[str, set[int]] = {}
    real = Arena._reply

    def spy(self: Arena, engines: Engines, case: Case, way: Way, *more: Any) -> ObservedAnswer:
        reply = real(self, engines, case, way, *more)
        lengths.setdefault(way.policy, set()).add(len(reply.tokens))
        return reply

    adapter, data = lab.adapter(), lab.dataset(lab.cases(1, 2))
    answered = Arena(adapter, data, REUSING, max_new_tokens=4)
    monkeypatch.setattr(Arena, "_reply", spy)
    compared = Arena(adapter, data, REUSING, max_new_tokens=4, fidelity=True)
    assert compared.digest != answered.digest
    rows = compared.run()
    assert lengths == {"full": {4}, "none": {1}, "reuse": {1}}
    monkeypatch.undo()
    for row, whole in zip(rows, answered.run(), strict=True):
        assert (row.token_kl, row.agreement) == (whole.token_kl, whole.agreement)
        assert row.recovered == whole.recovered
        assert (row.score is not None) == (row.policy == "full")
        assert (row.pgr, row.f1 if row.policy != "full" else None) == (None, None)
    shown = tables(rows)[0]
    scores = {line[0]: line[shown.head.index("score")] for line in shown.rows}
    assert scores == {"none": "–", "full": "0.000", "reuse": "–"}
    assert reuse_note(rows) == ""


def test_the_digest_of_the_source_covers_only_code_that_decides_answers(tmp_path):
    def digest() -> str:
        return source_digest.__wrapped__([tmp_path])

    other, own = tmp_path / "bench/ttft.py", tmp_path / "fusor/selection/query.py"
    for path in (other, own):
        path.parent.mkdir(parents=True)
        path.write_text("one = 1\n", encoding="utf-8")
    before = digest()
    other.write_text("one = 2\n", encoding="utf-8")
    assert digest() == before
    own.write_text("one = 2\n", encoding="utf-8")
    assert digest() != before


def test_an_empty_chunk_list_and_a_model_without_reusable_kv_are_refused():
    with pytest.raises(InvalidInputError, match="chunk list is empty"):
        lab.arena(BASE, [Case("bare", "0", "k", "why?", ("x",), ())]).run()
    with pytest.raises(UnsupportedModelError):
        Arena(tiny.adapter(tiny.family("gpt2")), lab.dataset(), BASE)
