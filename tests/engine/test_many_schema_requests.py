"""Requests of schemas that run at the same time decode together, each at its own positions, over modules that
are in memory once."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options, SchemaPrompt
from blendrag.schema.concatenation import ModuleCache
from blendrag.serving import chunk_pool, scheduler
from blendrag.serving.chunk_pool import ChunkPool

pytestmark = pytest.mark.timeout(120)


def schema(name: str) -> str:
    def texts(*numbers: int) -> str:
        return " ".join(map(tiny.sentence, numbers))

    return f"""
<schema name="{name}">Read about the town.
<module name="harbour">{texts(1, 2, 3)} Days: <param name="days" len="4"/>.
<module name="boat">{texts(4, 5)}</module></module>
<union>
<module name="sea">{texts(6, 7, 8)}</module>
<module name="hill">{texts(9)}</module>
</union>
<module name="food">{texts(10, 11, 12, 13)}</module>
</schema>"""


#: With gaps, in another order, with text between modules, with a module as its end.
IMPORTS = (
    '<harbour days="3"><boat/></harbour><food/> What did the company do?',
    '<food/><harbour days="three"/> What did the sister write?',
    "<sea/> by night <food/> What happened in 5?",
    "<hill/> What happened in 3? <food/>",
    "<food/> What happened in 4?",
)


def prompt(number: int, name: str = "placed") -> SchemaPrompt:
    return SchemaPrompt(f'<prompt schema="{name}">{IMPORTS[number % len(IMPORTS)]}</prompt>')


def engine(model: Any, root: Any, **given: Any) -> BlendEngine:
    made = tiny.engine(model, root, **given)
    made.add_schema(schema("placed"))
    made.add_schema(schema("blended"), positions="blend")
    return made


class Steps:
    """Joint steps: how many requests of schemas each had, and how many others; and KV in memory."""

    def __init__(self) -> None:
        self.placed: list[int] = []
        self.others: list[int] = []
        self.kv_bytes = 0
        """At the first step that ``measured`` requests of schemas had."""
        self.measured = 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Prefills do not pause, so that many join."""
    seen, stock = Steps(), scheduler.decoded_together

    def watched(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        placed = sum(isinstance(step.kv.cache, ModuleCache) for step in steps)
        if len(steps) > 1:
            seen.placed.append(placed)
            seen.others.append(len(steps) - placed)
        output = stock(steps, pool)
        if placed == seen.measured > 0:
            seen.kv_bytes, seen.measured = kv_bytes(pool), 0
        return output

    monkeypatch.setattr(scheduler, "decoded_together", watched)
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    return seen


@pytest.mark.parametrize(("family", "shares"), [("gemma4", True), ("minicpm3", False)])
def test_requests_that_come_and_go_get_the_answers_that_each_gets_alone(
    family, shares, tmp_path, steps, monkeypatch
):
    """Of full, sliding and latent attention. Requests that share nothing keep their own KV."""
    monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", 32 if shares else sys.maxsize)
    with engine(tiny.shared(family), tmp_path) as made:
        made.ingest([tiny.document(1)])
        made.encode_schema("placed")
        asked: list[tuple[Any, Options]] = []
        for number in range(5):
            options = Options(max_new_tokens=4 + 5 * number % 13)
            asked.append((prompt(number), options))
        asked += [
            (prompt(0), Options(temperature=1.0, seed=3, max_new_tokens=9)),
            (prompt(0, "blended"), Options(max_new_tokens=9)),
            (prompt(1, "blended"), Options(max_new_tokens=6)),
            (tiny.prompt(made, 1), Options(ratio=0.2, max_new_tokens=9)),
            (tiny.prompt(made, 1), Options(mode="full", max_new_tokens=9)),
        ]
        for each, _ in asked:  # chunks of the blended schema are encoded after their first use
            made.generate(each, Options(max_new_tokens=1))
        made.drain()
        alone = [made.generate(*each).text for each in asked]
        assert not steps.placed

        with made.scheduler.held():  # none ends before all others are there
            asking = [made.stream(*each) for each in asked]
        assert [pieces.answer.text for pieces in asking] == alone
        assert max(steps.placed) > 2
        assert max(steps.others) > 1
        assert len({*zip(steps.placed, steps.others, strict=True)}) > 2  # joined and left


def kv_bytes(pool: ChunkPool) -> int:
    """The bytes of all KV on the heap."""
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.ndim >= 4 and each.shape[-1] == HEAD:
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


#: No other tensor of the model has this width.
HEAD = 20


@pytest.mark.parametrize("shares", [True, False])
def test_modules_are_in_memory_once(shares, tmp_path, steps, monkeypatch):
    if not shares:
        monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", sys.maxsize)
    with engine(tiny.llama(head_dim=HEAD), tmp_path) as made:
        made.encode_schema("placed")
        count, options = 6, Options(max_new_tokens=12)
        alone = made.generate(prompt(0), options)
        steps.measured = count
        answers = made.batch([prompt(0)] * count, options)
        assert {answer.text for answer in answers} == {alone.text}
        assert max(steps.placed) == count
        one = made.adapter.layout.size_bytes(alone.metrics.reused_tokens)
        own = made.adapter.layout.size_bytes(alone.metrics.fresh_tokens + 12 + 1)
        assert one > 3 * own
        if shares:
            assert steps.kv_bytes < 1.3 * (one + count * own)
        else:
            assert steps.kv_bytes > count * one


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_models_that_cannot_be_blended_decode_alone(family, tmp_path, steps):
    with tiny.engine(tiny.family(family, initializer_range=0.2), tmp_path) as made:
        made.add_schema(schema("placed"))
        made.encode_schema("placed")
        prompts, options = [prompt(i) for i in range(3)], Options(max_new_tokens=5)
        alone = [made.generate(each, options).text for each in prompts]
        assert [answer.text for answer in made.batch(prompts, options)] == alone
        assert not steps.placed


@pytest.mark.parametrize("given", [{"kv_encoding": "int8"}, {"disk_bytes": 40_000}])
def test_modules_encoded_for_a_request_are_shared_as_what_they_are(
    given, tmp_path, steps, monkeypatch
):
    """The first request of an int8 store has other numbers than those after it; what a full store did not
    take is shared under its own key."""
    monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", 32)
    orders = [prompt(0), prompt(0), prompt(1), prompt(2), prompt(4)]
    options, model = Options(max_new_tokens=9, logprobs=1), tiny.llama()
    with engine(model, tmp_path / "alone", **given) as made:
        alone = [made.generate(each, options) for each in orders]
    with engine(model, tmp_path / "together", **given) as made:
        answers = made.batch(orders, options)
    for ours, theirs in zip(answers, alone, strict=True):
        assert ours.text == theirs.text
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert max(steps.placed) == len(orders)


def test_small_modules_stay_with_their_requests(tmp_path, steps, moves, monkeypatch):
    """A call of attention for each would take longer."""
    monkeypatch.setattr(chunk_pool, "MIN_SHARED_TOKENS", 32)
    small = '<module name="small">The old ships.</module></schema>'
    with tiny.engine(tiny.shared_llama(), tmp_path) as made:
        made.add_schema(schema("placed").replace("</schema>", small))
        asked = SchemaPrompt(prompt(4).pml.replace("<food/>", "<food/><small/>"))
        alone = made.generate(asked).text
        assert [answer.text for answer in made.batch([asked] * 2)] == [alone] * 2
    assert [len(move.running.held) for move in moves] == [1, 1]
