"""Waiting prompts that begin alike: the beginning is computed exactly, once, and kept in memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.corpus.documents import LEARNED
from blendrag.engine import Answer, AnswerIterator, BlendEngine, Options, exact_prefixes
from blendrag.errors import BlendragError, RequestCancelled
from blendrag.fusor import Fusor
from blendrag.planning.plan import IN_MEMORY
from blendrag.serving.prefix_tree import PrefixTree
from integrity import check_tree

pytestmark = pytest.mark.timeout(120)
BLEND = Options(mode="blend", ratio=0.3, max_new_tokens=6)
NOTE = "were computed once for"
MANY = 6


@pytest.fixture(autouse=True)
def blended_as_alone() -> None:
    """Not here."""


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ingested") / "store"
    with tiny.engine(tiny.shared_llama(), root, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(i, 4) for i in range(4)]).whole()
    return root


@pytest.fixture
def engine(ingested: Path, tmp_path: Path) -> Iterator[BlendEngine]:
    root = shutil.copytree(ingested, tmp_path / "store")
    with tiny.engine(tiny.shared_llama(), root, prefix_text=tiny.BOS) as made:
        made.open()  # checks what is stored
        yield made
        assert not users(made)
        if made.prefixes.tree is not None:
            check_tree(made.prefixes.tree)


def users(engine: BlendEngine) -> int:
    tree = engine.prefixes.tree
    return sum(node.users for _, node in tree.nodes()) if tree else 0


def prompts(engine: BlendEngine, count: int = MANY, *documents: int) -> list[str]:
    numbers = documents or (0, 1, 2)
    return [tiny.prompt(engine, *numbers, ask=f"What is {i}?") for i in range(count)]


def queued(engine: BlendEngine, asked: list[str], *options: Options) -> list[AnswerIterator]:
    """Their answers; all are queued before the first begins, each as a call of its own."""
    ways = options * len(asked) if len(options) < 2 else options
    with engine.scheduler.held():
        return [engine.stream(text, way) for text, way in zip(asked, ways, strict=False)]


def together(engine: BlendEngine, asked: list[str], options: Options = BLEND) -> list[Answer]:
    return [pieces.answer for pieces in queued(engine, asked, options)]


def notes(answer: Answer) -> list[str]:
    return [note for note in answer.metrics.notes if NOTE in note]


def in_memory(answer: Answer) -> int:
    """Chunks whose KV came from the tree."""
    return sum(chunk.reason == IN_MEMORY.text for chunk in answer.metrics.chunks)


def full(engine: BlendEngine, text: str) -> str:
    return engine.generate(text, Options(mode="full", max_new_tokens=6)).text


@pytest.mark.parametrize("batch", [True, False])
def test_one_exact_prefill_serves_all_that_wait(engine, batch):
    """Rows are counted: this fails if every request blends for itself."""
    asked = prompts(engine)
    exact = [full(engine, text) for text in asked]
    tokens = len(engine.segments(asked[0]).ids)
    rows: list[int] = []

    def note(module: Any, args: Any) -> None:
        if args[0].shape[1] > 1 and not tiny.is_background():
            rows.append(args[0].shape[1])

    hook = engine.adapter.decoder_layers[1].register_forward_pre_hook(note)
    answers = engine.batch(asked, BLEND) if batch else together(engine, asked)
    hook.remove()
    assert [answer.text for answer in answers] == exact
    assert len([a for a in answers if notes(a)]) == 1
    assert sum(rows) < 1.3 * tokens + MANY * 40
    for answer in answers:
        metrics = answer.metrics
        assert metrics.fresh_tokens < 40
        assert {chunk.outcome for chunk in metrics.chunks} == {"exact"}
        assert {chunk.tier for chunk in metrics.chunks} == {"memory"}
        assert in_memory(answer) == len(metrics.chunks)
        assert (
            metrics.prefix_tokens + sum(c.tokens for c in metrics.chunks) == metrics.reused_tokens
        )
        assert metrics.recomputed_tokens == 0


def test_the_suffix_over_memory_is_what_a_full_prefill_computes(engine):
    text = prompts(engine)[0]
    theirs, _ = tiny.first_logits(engine, text, Options(mode="full", max_new_tokens=1))
    blended, _ = tiny.first_logits(engine, text, BLEND)
    together(engine, prompts(engine))
    ours, answer = tiny.first_logits(engine, text, BLEND)
    assert {chunk.outcome for chunk in answer.metrics.chunks} == {"exact"}
    assert tiny.difference(ours, theirs) < 1e-4 < tiny.difference(blended, theirs)


def test_later_requests_use_as_much_as_their_prompts_have_in_common(engine):
    together(engine, prompts(engine))
    for documents, exact in (((0, 1, 2), 3), ((0, 1, 3), 2), ((0,), 1), ((1, 0), 0)):
        text = prompts(engine, 1, *documents)[0]
        answer = engine.generate(text, BLEND)
        outcomes = [chunk.outcome for chunk in answer.metrics.chunks]
        whole = len(outcomes) * exact // len(documents)
        assert outcomes == ["exact"] * whole + ["blended"] * (len(outcomes) - whole)
        prefix = engine.generate(text, mode="prefix", max_new_tokens=6)
        assert prefix.text == full(engine, text)
        assert in_memory(prefix) == in_memory(answer) == whole
    assert engine.generate(prompts(engine)[0], mode="full").metrics.reused_tokens == 0
    for same in ({"mode": "reuse"}, {"ratio": 0}):
        chunks = engine.generate(prompts(engine)[0], **same).metrics.chunks
        assert {chunk.outcome for chunk in chunks} == {"exact"}


def test_few_requests_are_blended_as_before(engine):
    for count in (1, 4):
        answers = together(engine, prompts(engine, count))
        assert not any(notes(answer) for answer in answers)
        assert not any(in_memory(answer) for answer in answers)
    assert not engine.scheduler.budget.kept_bytes


def test_two_requests_share_what_each_would_compute_in_full(engine):
    tiny.lose_kv(engine, *(key for i in range(3) for key in tiny.chunk_keys(engine, i)))
    validity = engine.kv_namespace.validity
    with tiny.counted(validity, "encode", in_background=False) as encoded:
        first, second = together(engine, prompts(engine, 2))
    assert notes(first)
    assert not encoded
    assert {c.outcome for c in second.metrics.chunks} == {"exact"}
    assert second.text == full(engine, prompts(engine, 2)[1])


def test_requests_of_other_salts_share_nothing(engine):
    salted = Options(mode="blend", ratio=0.3, max_new_tokens=6, cache_salt="tenant")
    together(engine, prompts(engine))
    for options in (salted, BLEND):
        answers = together(engine, prompts(engine, 4), options)
        assert {bool(in_memory(answer)) for answer in answers} == {options is BLEND}
    mixed = [salted] * 4 + [Options(mode="blend", ratio=0.3, cache_salt="other")] * 4
    started = queued(engine, prompts(engine, 8), *mixed)
    assert not any(notes(pieces.answer) for pieces in started)
    assert any(notes(answer) for answer in together(engine, prompts(engine), salted))


def test_nothing_of_a_salted_prompt_is_stored_or_learned(tmp_path):
    salted = Options(mode="blend", ratio=0.3, max_new_tokens=6, cache_salt="tenant")
    learned: list[int] = []
    with tiny.engine(tiny.shared_llama(), tmp_path, prefix_text=tiny.BOS, learn=True) as made:
        made.ingest([tiny.document(i, 4) for i in range(2)])
        passage = tiny.document(7).text
        for options, stored in ((salted, False), (BLEND, True), (salted, False)):
            for number in range(4):
                text = prompts(made, 1, 0)[0] + passage + f" Now answer {number}."
                metrics = made.generate(text, options).metrics
                made.drain()
            assert bool(metrics.prefix_tokens) == stored
            assert (LEARNED in {chunk.source for chunk in metrics.chunks}) == stored
            (count,) = re.findall(r"learned_passages_total{.*} (\d+)", made.prometheus())
            learned.append(int(count))
    assert learned[0] == 0 < learned[1] == learned[2]


def test_nothing_is_reused_after_the_weights_changed(engine):
    together(engine, prompts(engine))
    before = engine.generate(prompts(engine)[0], BLEND)
    engine.drain()
    with torch.no_grad():
        engine.adapter.model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    text = prompts(engine)[0]
    after = engine.generate(text, BLEND)
    assert in_memory(before)
    assert not after.metrics.reused_tokens
    assert after.text == full(engine, text)


def test_weights_that_change_during_the_prefill(engine, monkeypatch):
    stock = Fusor.prefill

    def changing(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(Fusor, "prefill", stock)
        made = stock(*args, **kwargs)
        with torch.no_grad():
            engine.adapter.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        return made

    monkeypatch.setattr(Fusor, "prefill", changing)
    asked = prompts(engine)
    first, *others = together(engine, asked)
    assert not in_memory(first)
    assert [answer.text for answer in others] == [full(engine, text) for text in asked[1:]]


def during_the_prefill(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """``act(layer)`` before each layer of the prefill of the common beginning."""
    stock = Fusor.prefill

    def prefill(fusor: Fusor, ids: Any, request: Any, check: Any = None) -> Any:
        layers: list[int] = []

        def checked() -> None:
            layers.append(len(layers))
            act(layers[-1])
            check()

        return stock(fusor, ids, request, check=checked)

    monkeypatch.setattr(Fusor, "prefill", prefill)


def test_a_request_cancelled_during_the_prefill_leaves_its_kv_to_the_others(engine, monkeypatch):
    asked = prompts(engine)
    exact = [full(engine, text) for text in asked]
    during_the_prefill(monkeypatch, lambda layer: started[0].close() if layer == 2 else None)
    with engine.scheduler.held():
        started = [engine.stream(text, BLEND) for text in asked]
    assert isinstance(started[0].pending.future.exception(60), RequestCancelled)
    answers = [pieces.answer for pieces in started[1:]]
    assert [answer.text for answer in answers] == exact[1:]
    assert all(in_memory(answer) for answer in answers)
    assert not any(notes(answer) for answer in answers)  # it was not computed again


def test_the_prefill_ends_when_nobody_waits_for_it(engine, monkeypatch):
    reached: list[int] = []

    def cancel(layer: int) -> None:
        reached.append(layer)
        for pieces in started if layer == 1 else ():
            pieces.close()

    during_the_prefill(monkeypatch, cancel)
    with engine.scheduler.held():
        started = [engine.stream(text, BLEND) for text in prompts(engine)]
    for pieces in started:
        assert isinstance(pieces.pending.future.exception(60), BlendragError)
    assert reached == [0, 1]
    assert not engine.scheduler.budget.kept_bytes


def test_a_prefill_that_fails_is_not_tried_again(engine, monkeypatch):
    tries: list[int] = []

    def fail(layer: int) -> None:
        tries.append(layer)
        raise RuntimeError("no memory for it")

    alone = [engine.generate(text, BLEND).text for text in prompts(engine)]
    during_the_prefill(monkeypatch, fail)
    answers = together(engine, prompts(engine))
    assert [answer.text for answer in answers] == alone
    assert tries == [0]


def test_only_the_newest_failures_are_remembered(engine, monkeypatch, tmp_path):
    def fail(layer: int) -> None:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(exact_prefixes, "FAILED", 2)
    during_the_prefill(monkeypatch, fail)
    with tiny.engine(tiny.shared_llama(), tmp_path / "other", prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(i, 4) for i in range(3)])
        for number in range(3):
            together(made, prompts(made, MANY, number))
        newest = [ids[:40] for ids in made.prefixes.failed]
        assert newest == [made.segments(prompts(made, 1, i)[0]).ids[:40] for i in (1, 2)]


def test_what_nobody_uses_makes_room_for_running_requests(engine):
    together(engine, prompts(engine))
    assert engine.scheduler.budget.kept_bytes
    needed = engine.adapter.layout.size_bytes(len(engine.segments(prompts(engine)[0]).ids) + 7)
    engine.scheduler.budget.limit_bytes = 2 * needed
    engine.batch(prompts(engine, 2), Options(mode="full", max_new_tokens=6))
    assert not engine.scheduler.budget.kept_bytes


def test_a_beginning_that_does_not_fit_is_not_computed(engine, monkeypatch):
    monkeypatch.setattr(engine.prefixes, "limit_bytes", 10_000)
    assert not any(notes(answer) for answer in together(engine, prompts(engine)))


def test_running_requests_attend_to_the_tree_without_copies(engine, moves):
    asked = prompts(engine)
    exact = [full(engine, text) for text in asked]
    assert [answer.text for answer in engine.batch(asked, BLEND)] == exact
    assert len(moves) == MANY
    tree = engine.prefixes.tree
    assert isinstance(tree, PrefixTree)
    (slab,) = tree.pool.slabs
    (chunk,) = {one.chunk for move in moves for one in move.running.held}
    own, pooled = chunk.layers[0], slab.layers[0]
    assert own.untyped_storage().data_ptr() == pooled.untyped_storage().data_ptr()
    assert all(one.at == chunk.start for move in moves for one in move.running.held)
    assert sum(move.own for move in moves) < 0.2 * sum(move.tokens for move in moves)


def test_a_conversation_before_the_chunks_is_computed_once(engine):
    turns = ["What did the mayor of the town say about the harbour and its ships? " * 4] * 3
    (chunk,) = tiny.chunk_texts(engine, 0)[:1]

    def asked(count: int) -> str:
        return "Hello. " + "".join(turns[:count]) + f"\n\n{chunk}\n\nQuestion: What else?"

    leading = [len(engine.segments(asked(count)).leading_ids) for count in (1, 2, 3)]
    assert leading[0] >= 64
    engine.generate(asked(1), BLEND)
    for before, count in ((0, 2), (1, 3)):
        engine.prefixes.close()
        theirs, _ = tiny.first_logits(engine, asked(count), BLEND)
        engine.prefixes.close()
        engine.generate(asked(count - 1), BLEND)
        ours, answer = tiny.first_logits(engine, asked(count), BLEND)
        assert leading[before] - 8 <= answer.metrics.prefix_tokens < leading[before + 1]
        assert tiny.difference(ours, theirs) < 1e-4
    engine.prefixes.close()
    engine.generate(asked(1), Options(mode="full"))
    assert not engine.scheduler.budget.kept_bytes
