"""The arena end to end on a tiny model: what is asked, what it is compared with, how it resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny
from blendrag.config import DEFAULT_POLICY
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.engine.request import RagPrompt
from blendrag.errors import ContextOverflowError, InvalidInputError, UnsupportedModelError
from blendrag.lab.evaluation.arena import Arena
from blendrag.lab.evaluation.asking import Reply, ask
from blendrag.lab.evaluation.cases import Case
from blendrag.lab.evaluation.journal import Journal
from blendrag.lab.evaluation.library import Library
from blendrag.lab.evaluation.report import table
from blendrag.lab.evaluation.rows import Row
from blendrag.lab.evaluation.source import source_digest
from blendrag.lab.evaluation.synthetic import synthetic_dataset
from blendrag.lab.evaluation.ways import Way, make_ways
from blendrag.model.loading import load_adapter
from lab.evaluation import lab

pytestmark = pytest.mark.early
WAYS = make_ways(["reuse", "query"], ["constant"], [0.3, 1.0], [True, False])


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return lab.arena(WAYS).run()


def row_of(rows: list[Row], way: Way, kind: str = "all") -> Row:
    (found,) = (
        row for row in rows
        if (row.policy, row.encode_prefix, row.kind) == (way.policy, way.encode_prefix, kind)
        and way.ratio in (None, row.ratio) and way.schedule in ("", row.schedule)
    )  # fmt: skip
    return found


@pytest.fixture
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked a second time to be compared token by token."""
    monkeypatch.setattr(Arena, "_follow", lambda self, library, case, way, reply, full: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, unforced: None) -> Iterator[list[RagPrompt]]:
    """Prompts that reached an engine."""
    prompts: list[RagPrompt] = []
    real = BlendEngine.generate

    def spy(self: BlendEngine, prompt: RagPrompt, *rest: object) -> object:
        prompts.append(prompt)
        return real(self, prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BlendEngine, "generate", spy)
    monkeypatch.setattr(Arena, "_warm_up", lambda *_: None)
    return prompts


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, unforced: None) -> list[tuple[str, str]]:
    """Case and policy, in the order in which they were asked."""
    seen: list[tuple[str, str]] = []
    real = Arena._reply

    def spy(self: Arena, library: Library, case: Case, way: Way) -> Reply:
        seen.append((case.case_id, way.policy))
        return real(self, library, case, way)

    monkeypatch.setattr(Arena, "_reply", spy)
    return seen


# -- rows -----------------------------------------------------------------------------------------


def test_there_is_a_row_for_every_way_and_kind(rows: list[Row]) -> None:
    assert len(rows) == len(WAYS) * 3
    assert [row.kind for row in rows[:3]] == ["all", "even", "odd"]
    assert [row.n for row in rows[:3]] == [4, 2, 2]
    assert {row.dataset for row in rows} == {"tiny"}


def test_full_prefill_agrees_with_itself_and_everything_recomputed_with_it(
    rows: list[Row],
) -> None:
    full = row_of(rows, Way("full"))
    assert (full.kl, full.agreement, full.same_answer, full.charged_ratio) == (0.0, 1.0, 1.0, 1.0)
    for prefix in (True, False):
        everything = row_of(rows, Way("query", "constant", 1.0, prefix))
        assert everything.kl == pytest.approx(0.0, abs=1e-4)
        assert everything.agreement == 1.0
        assert everything.charged_ratio == 1.0


def test_reuse_is_charged_nothing_and_answers_otherwise(rows: list[Row]) -> None:
    for prefix in (True, False):
        reuse = row_of(rows, Way("reuse", encode_prefix=prefix))
        assert (reuse.ratio, reuse.charged_ratio) == (0.0, 0.0)
        assert reuse.kl is not None
        assert reuse.kl > 1e-3


def test_chunks_encoded_behind_nothing_are_other_chunks(rows: list[Row]) -> None:
    on, off = (row_of(rows, Way("reuse", encode_prefix=prefix)) for prefix in (True, False))
    assert on.kl != off.kl


def test_recomputing_some_comes_nearer_than_recomputing_nothing(rows: list[Row]) -> None:
    some = row_of(rows, Way("query", "constant", 0.3, True))
    none = row_of(rows, Way("reuse", encode_prefix=True))
    assert some.kl is not None
    assert none.kl is not None
    assert some.kl < none.kl
    assert 0.2 < some.charged_ratio < 0.5


def test_what_is_recovered_of_reuses_divergence_lies_between_reuse_and_full_prefill(
    rows: list[Row],
) -> None:
    assert row_of(rows, Way("full")).token_kl == 0.0
    for prefix in (True, False):
        reuse = row_of(rows, Way("reuse", encode_prefix=prefix))
        some, everything = (row_of(rows, Way("query", "constant", r, prefix)) for r in (0.3, 1.0))
        assert reuse.token_kl is not None
        assert reuse.token_kl > 1e-3
        assert reuse.recovered == 0.0
        assert everything.recovered == pytest.approx(1.0, abs=1e-2)
        assert some.recovered is not None
        assert some.token_kl is not None
        assert some.recovered == pytest.approx(1 - some.token_kl / reuse.token_kl)


def test_an_answer_that_is_forced_is_judged_as_one_forward_over_it_would_be(tmp_path: Path) -> None:
    said = (5, 9, 7, 6)
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        reply = ask(engine, "Where is it?", Options(mode="full", max_new_tokens=4), (), said)
        ids = engine.plan("Where is it?").ids
        rows = tiny.stock(engine.adapter.model, torch.tensor([[*ids, *said]]))[0, len(ids) - 1 : -1]
    assert reply.logits is not None
    assert tiny.difference(reply.logits, rows) < 1e-4
    assert reply.tokens == tuple(rows.argmax(-1).tolist())


def test_no_context_reads_no_chunk(rows: list[Row]) -> None:
    nothing = row_of(rows, Way("none"))
    assert nothing.charged_ratio == 0.0
    assert nothing.kl is not None
    assert nothing.kl > 1e-3


def test_a_random_model_gains_nothing_from_context_so_pgr_is_undefined(rows: list[Row]) -> None:
    assert {row.pgr for row in rows} == {None}


def test_the_table_has_a_line_for_every_way(rows: list[Row]) -> None:
    assert table(rows).row_count == len(WAYS)


def test_prefix_caching_computes_all_but_the_first_chunk_exactly() -> None:
    (case,) = lab.cases(1, 1)
    arena = lab.arena(make_ways(["prefix"], [], [], []), [case])
    prefix = row_of(arena.run(), Way("prefix"))
    sizes = [len(arena.adapter.tokens.encode_text(chunk)) for chunk in case.chunks]
    assert prefix.charged_ratio == pytest.approx(1 - sizes[0] / sum(sizes))
    assert prefix.kl == pytest.approx(0.0, abs=1e-4)


def test_the_embedded_model_needs_attention_across_chunks_and_recomputing_gives_it_back() -> None:
    adapter = load_adapter("demo")
    dataset = synthetic_dataset(adapter.tokens, n_contexts=6, n_questions=8)
    found = Arena(
        adapter, dataset, make_ways(["reuse", "query"], ["constant"], [1.0], [True])
    ).run()
    full, reuse, everything = (
        row_of(found, way, "coreference")
        for way in (
            Way("full"),
            Way("reuse", encode_prefix=True),
            Way("query", "constant", 1.0, True),
        )
    )
    assert full.score >= reuse.score + 0.25
    assert everything.score == full.score
    assert everything.pgr == pytest.approx(1.0)
    assert reuse.pgr is not None
    assert reuse.pgr < 0.75


def test_a_twentieth_of_the_tokens_answers_as_full_prefill_does_where_references_are_resolved() -> (
    None
):
    """The embedded model resolves them in layers 1 to 5: nothing spent before is of use, nor later."""
    adapter = load_adapter("demo")
    dataset = synthetic_dataset(adapter.tokens, seed=7, n_contexts=6, n_questions=8)
    schedules = ["constant", "first:3", "first:5"]
    found = Arena(
        adapter, dataset, make_ways(["reuse", DEFAULT_POLICY], schedules, [0.05], [True])
    ).run()

    def score(way: Way, kind: str = "coreference") -> float:
        return row_of(found, way, kind).score

    full, reuse = score(Way("full")), score(Way("reuse", encode_prefix=True))
    constant, early, enough = (score(Way(DEFAULT_POLICY, s, 0.05, True)) for s in schedules)
    assert full >= 0.9
    assert reuse <= full - 0.25
    assert min(constant, enough) >= full - 0.15
    assert early <= reuse + 0.15
    assert score(Way(DEFAULT_POLICY, "first:5", 0.05, True), "direct") >= 0.85


def test_prefix_caching_has_its_chunk_in_memory_from_the_first_question_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiers: list[str] = []
    real = BlendEngine.generate

    def spy(self: BlendEngine, prompt: RagPrompt, options: Options) -> Answer:
        answer = real(self, prompt, options)
        tiers.extend(chunk.tier for chunk in answer.metrics.chunks if options.mode == "prefix")
        return answer

    monkeypatch.setattr(BlendEngine, "generate", spy)
    lab.arena(make_ways(["prefix"], [], [], []), lab.cases(2, 1)).run()
    assert set(tiers) == {"memory"}
    assert len(tiers) == 3  # two questions of a context each, and the one that warms up


def test_kv_kept_in_eight_bits_is_what_is_read_and_journalled_apart() -> None:
    ways, cases = make_ways(["reuse"], [], [], [True]), lab.cases(1, 2)
    native = lab.arena(ways, cases)
    encoded = Arena(native.adapter, native.dataset, ways, kv_encoding="int8")
    assert encoded.digest != native.digest
    of_native, of_encoded = (
        row_of(arena.run(), Way("reuse", encode_prefix=True)) for arena in (native, encoded)
    )
    assert (of_native.kv_encoding, of_encoded.kv_encoding) == ("native", "int8")
    assert of_native.kl is not None
    assert of_encoded.kl is not None
    assert 0 < abs(of_native.kl - of_encoded.kl) < 0.1 * of_native.kl


# -- the order of questions -----------------------------------------------------------------------


def test_no_way_and_not_even_full_prefill_has_a_place_of_its_own(
    turns: list[tuple[str, str]],
) -> None:
    cases = lab.cases(1, 12)
    lab.arena(make_ways(["reuse"], [], [], [True]), cases).run()
    assert turns[:3] == [("0/0", "full"), ("0/0", "none"), ("0/0", "reuse")]  # to warm up
    orders = [turns[at : at + 3] for at in range(3, len(turns), 3)]
    assert [{case for case, _ in order} for order in orders] == [{c.case_id} for c in cases]
    assert all(len({policy for _, policy in order}) == 3 for order in orders)
    assert len({order[0][1] for order in orders}) == 3
    assert len({tuple(policy for _, policy in order) for order in orders}) > 3


def test_ways_that_only_later_questions_lack_are_warmed_up_too(
    tmp_path: Path, turns: list[tuple[str, str]]
) -> None:
    path = tmp_path / "journal.jsonl"
    first, *_ = cases = lab.cases(1, 2)
    lab.arena(make_ways(["reuse"], [], [], [True]), [first]).run(Journal(path))
    turns.clear()
    ways = make_ways(["reuse", "boundary(4)"], [], [], [True])
    lab.arena(ways, cases).run(Journal(path))
    assert {policy for _, policy in turns[:4]} == {"full", "none", "reuse", "boundary(4)"}
    assert {case for case, _ in turns[:4]} == {first.case_id}
    assert {policy for case, policy in turns[4:] if case == first.case_id} == {
        "full",
        "boundary(4)",
    }


def test_full_prefill_answers_a_question_once_and_no_context_sees_no_chunk(
    asked: list[RagPrompt],
) -> None:
    lab.arena(make_ways(["reuse"], [], [], [True]), lab.cases(1, 2)).run()
    assert len(asked) == 2 * 3
    without = [prompt for prompt in asked if lab.CHUNKS[0][0] not in prompt.text]
    assert len(without) == 2
    assert all("\n\n\n" not in prompt.text for prompt in asked)


def test_an_interrupted_run_asks_nothing_twice(tmp_path: Path, asked: list[RagPrompt]) -> None:
    ways = make_ways(["reuse"], [], [], [True])
    path = tmp_path / "journal.jsonl"

    def stop_after_two(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.arena(ways).run(Journal(path), stop_after_two)
    first = len(asked)
    assert first == 2 * len(ways)
    seen: list[int] = []
    rows = lab.arena(ways).run(Journal(path), lambda done, total: seen.append(done))
    assert len(asked) - first == 2 * len(ways)
    assert seen == [2, 3, 4]
    assert rows[0].n == 4
    lab.arena(ways).run(Journal(path))
    assert len(asked) == 4 * len(ways)


def test_more_ways_ask_only_what_is_new_and_what_it_is_compared_with(
    tmp_path: Path, asked: list[RagPrompt]
) -> None:
    path, cases = tmp_path / "journal.jsonl", lab.cases(1, 1)
    lab.arena(make_ways([], [], [], []), cases).run(Journal(path))
    assert len(asked) == 2
    lab.arena(make_ways(["reuse"], [], [], [True]), cases).run(Journal(path))
    assert len(asked) == 2 + 2  # full prefill again, for its logits
    assert len(path.read_text().splitlines()) == 3


def test_another_model_or_length_of_answer_is_asked_anew(
    tmp_path: Path, asked: list[RagPrompt]
) -> None:
    path, data, ways = tmp_path / "j.jsonl", lab.dataset(lab.cases(1, 1)), make_ways([], [], [], [])
    Arena(lab.adapter(), data, ways, max_new_tokens=4).run(Journal(path))
    Arena(lab.adapter(), data, ways, max_new_tokens=5).run(Journal(path))
    other = tiny.adapter(tiny.llama(seed=1))
    Arena(other, data, ways, max_new_tokens=4).run(Journal(path))
    assert len(asked) == 3 * 2


def test_answers_of_other_code_are_asked_anew(
    tmp_path: Path, asked: list[RagPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cases, ways = tmp_path / "j.jsonl", lab.cases(1, 1), make_ways([], [], [], [])
    lab.arena(ways, cases).run(Journal(path))
    lab.arena(ways, cases).run(Journal(path))
    assert len(asked) == 2
    monkeypatch.setattr("blendrag.lab.evaluation.arena.source_digest", lambda: "of other code")
    lab.arena(ways, cases).run(Journal(path))
    assert len(asked) == 4


def test_code_that_decides_no_answer_is_no_other_code(tmp_path: Path) -> None:
    def digest() -> str:
        return source_digest.__wrapped__(tmp_path)

    for name in ("selection/query.py", "cli/eval.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("one = 1\n", encoding="utf-8")
    before = digest()
    (tmp_path / "cli" / "eval.py").write_text("one = 2\n", encoding="utf-8")
    assert digest() == before
    (tmp_path / "selection" / "query.py").write_text("one = 2\n", encoding="utf-8")
    assert digest() != before


# -- bad input ------------------------------------------------------------------------------------


def test_a_question_longer_than_the_context_is_named_before_anything_is_asked() -> None:
    case = Case("long one", "0", "k", "why " * 5000, ("x",), lab.CHUNKS[0])
    with pytest.raises(InvalidInputError, match=r"the question of long one takes .* leave it out"):
        lab.arena(make_ways([], [], [], []), [case])


def test_chunks_that_do_not_fit_the_context_are_named_too() -> None:
    case = Case("big", "0", "k", "why?", ("x",), tuple(tiny.sentence(i) for i in range(400)))
    with pytest.raises(InvalidInputError, match=r"the prompt of big takes .* fewer --chunks") as e:
        lab.arena(make_ways([], [], [], []), [case])
    assert not isinstance(e.value, ContextOverflowError)


def test_an_empty_chunk_list_is_refused() -> None:
    case = Case("bare", "0", "k", "why?", ("x",), ())
    with pytest.raises(InvalidInputError, match="chunk list is empty"):
        lab.arena(make_ways([], [], [], []), [case]).run()


def test_a_model_whose_kv_cannot_be_reused_is_refused() -> None:
    refused = tiny.adapter(tiny.family("gpt2"))
    with pytest.raises(UnsupportedModelError):
        Arena(refused, lab.dataset(), make_ways([], [], [], []))


def test_chains_without_their_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.lab.evaluation.chains.PACKAGES", ("no_such_package",))
    with pytest.raises(InvalidInputError, match="no_such_package, which is not installed"):
        lab.arena(make_ways(["map-reduce"], [], [], []))
