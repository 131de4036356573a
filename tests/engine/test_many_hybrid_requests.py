"""Requests of hybrid models that run at the same time decode together, and each gets what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import RequestCancelled
from blendrag.model.continuation import Continuation, State
from blendrag.serving import decode_step, scheduler
from blendrag.serving.hybrid_rows import HybridPool

pytestmark = pytest.mark.timeout(120)

#: Delta rules, Mamba-2 beside attention in every layer, and convolutions with windows of attention.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"num_hidden_layers": 2},
    "lfm3": {},
}


one_kind = pytest.mark.parametrize("engine", ["qwen3_5"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp(request.param)
    model = tiny.family(request.param, initializer_range=0.2, **KINDS[request.param])
    with tiny.engine(model, root, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(number, paragraphs=3) for number in range(2)]).whole()
        yield made


def options(number: int) -> Options:
    ways: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"mode": "full", "logprobs": 1},
        {"temperature": 0.9, "seed": number},
        {"mode": "prefix"},
        {"ratio": 0.4, "generate_kwargs": {"repetition_penalty": 1.3}},
        {"generate_kwargs": {"num_beams": 2}},
        {"stop": ("e",)},
    ]
    return Options(max_new_tokens=3 + 5 * number % 11, **ways[number % len(ways)])


def asked(engine: BlendEngine, number: int) -> str:
    if number % 3 == 2:  # goes on from states
        return "Tell me about the town of Place. " * 12 + str(number)
    return tiny.prompt(engine, number % 2, ask=f"What happened in {number}?")


def alike(ours: Any, theirs: Any) -> None:
    assert ours.text == theirs.text
    assert ours.finish_reason == theirs.finish_reason
    assert ours.metrics.new_tokens == theirs.metrics.new_tokens
    for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        assert one.id == other.id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_requests_that_come_and_go_get_the_answers_that_each_gets_alone(engine, sizes):
    alone = [engine.generate(asked(engine, i), options(i)) for i in range(7)]
    assert not sizes
    with engine.scheduler.held():  # none ends before all others are there
        asking = [engine.stream(asked(engine, i), options(i)) for i in range(7)]
    together = [pieces.answer for pieces in asking]
    assert max(sizes) > 3
    assert len(set(sizes)) > 2  # requests joined and left
    for ours, theirs in zip(together, alone, strict=True):
        alike(ours, theirs)


@one_kind
def test_prefills_pause_for_the_tokens_of_others(engine, monkeypatch):
    """A step is due before every layer of a prefill."""
    alone = [engine.generate(asked(engine, i), max_new_tokens=8) for i in range(3)]
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", 0)
    with tiny.counted(scheduler.Coroutine, "wait") as waited:
        with engine.scheduler.held():
            asking = [engine.stream(asked(engine, i), max_new_tokens=8) for i in range(3)]
        together = [pieces.answer for pieces in asking]
    assert any(is_paused for _, *is_paused in waited)
    for ours, theirs in zip(together, alone, strict=True):
        alike(ours, theirs)


def long(tokens: int = 12, **more: Any) -> Options:
    return Options(max_new_tokens=tokens, generate_kwargs={"min_new_tokens": tokens}, **more)


@one_kind
def test_one_that_is_cancelled_does_not_disturb_the_others(engine, sizes):
    alone = [engine.generate(asked(engine, i), long()).text for i in range(3)]
    with engine.scheduler.held():
        good = [engine.stream(asked(engine, i), long()) for i in range(3)]
        left = engine.stream(asked(engine, 0), long())
    next(left)
    left.close()
    assert [pieces.answer.text for pieces in good] == alone
    with pytest.raises(RequestCancelled):
        _ = left.answer
    assert max(sizes) > 2


@pytest.mark.parametrize("engine", ["qwen3_5", "lfm3"], indirect=True)
def test_a_step_that_fails_behind_its_last_layer_leaves_states_and_kv_as_they_were(engine, sizes):
    """In mode full lfm3 has a cache that drops what is behind its windows."""
    ways = [long(5), long(5, mode="full"), long(5)]
    alone = [engine.generate(asked(engine, i), way).text for i, way in enumerate(ways)]

    def fail(module: Any, args: Any, output: Any) -> None:
        if args[0].shape[0] > 2:
            raise RuntimeError("no memory for all")

    hook = engine.adapter.stack.layers[-1].register_forward_hook(fail)
    with engine.scheduler.held():
        asking = [engine.stream(asked(engine, i), way) for i, way in enumerate(ways)]
    together = [pieces.answer.text for pieces in asking]
    hook.remove()
    engine.drain()
    assert together == alone
    assert sizes == [2, 3]


@one_kind
def test_one_that_waits_for_memory_goes_on_from_what_was_moved_away(engine, sizes, monkeypatch):
    monkeypatch.setattr("blendrag.serving.kv_budget.FIRST_TOKENS", 4)
    budget, composition = engine.scheduler.budget, engine.adapter.composition
    prompts = [f"What happened in {i}?" for i in range(3)]
    alone = [engine.generate(prompt, long(20)).text for prompt in prompts]
    tokens = len(engine.segments(prompts[0]).ids) + 13
    each = tokens * engine.adapter.layout.token_bytes + 2 * composition.state_bytes
    monkeypatch.setattr(budget, "limit_bytes", 3 * each)
    with (
        tiny.counted(HybridPool, "put_aside") as put,
        tiny.counted(HybridPool, "take_back") as took,
    ):
        with engine.scheduler.held():
            asking = [engine.stream(prompt, long(20)) for prompt in prompts]
        together = [pieces.answer.text for pieces in asking]
    engine.drain()
    assert together == alone
    assert max(sizes) == 3
    assert put
    assert len(put) == len(took)
    assert not budget.size_bytes


@one_kind
@pytest.mark.usefixtures("empty_cache")
def test_requests_take_turns_if_joint_steps_give_something_else(engine, sizes, monkeypatch):
    alone = [engine.generate(asked(engine, i), long(4 + 4 * i)).text for i in range(3)]
    monkeypatch.setattr(decode_step, "steps_agree", lambda adapter: False)
    engine.scheduler.room.close()  # measures again
    ended: list[int] = []
    with engine.scheduler.held():
        asking = [engine.stream(asked(engine, i), long(4 + 4 * i)) for i in range(3)]
        for i, pieces in enumerate(asking):
            pieces.pending.future.add_done_callback(lambda _, i=i: ended.append(i))
        asking.reverse()  # the longest first
    assert [pieces.answer.text for pieces in reversed(asking)] == alone
    engine.drain()
    engine.scheduler.room.close()
    assert not sizes
    assert ended == [0, 1, 2]


@one_kind
@pytest.mark.usefixtures("empty_cache")
def test_joint_steps_are_measured_once_on_a_machine(engine):
    with tiny.counted(decode_step, "steps_agree") as measured:
        for _ in range(2):
            pool = HybridPool(engine.adapter)
            assert not decode_step.may_decode_together(pool, 1)
            assert decode_step.may_decode_together(pool, 2)
    assert len(measured) == 1


@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "zaya", "olmo_hybrid", "recurrent_gemma"])
def test_joint_steps_serve_other_families(name):
    assert decode_step.steps_agree(tiny.shared(name))


@one_kind
def test_steps_that_give_other_logits_are_noticed(engine, monkeypatch):
    adapter = engine.adapter
    assert decode_step.steps_agree(adapter)
    stock = decode_step.HybridRows.attend

    def first_for_all(self: Any, call: Any) -> torch.Tensor:
        return stock(self, call._replace(query=call.query[:1].expand_as(call.query)))

    monkeypatch.setattr(decode_step.HybridRows, "attend", first_for_all)
    assert not decode_step.steps_agree(adapter)


@one_kind
def test_states_of_other_requests_are_not_kept_with_those_of_one(engine, sizes, monkeypatch):
    kept: list[State] = []
    stock = Continuation.state

    def noted(self: Continuation, cache: Any) -> State:
        kept.append(stock(self, cache))
        return kept[-1]

    monkeypatch.setattr(Continuation, "state", noted)
    with engine.scheduler.held():
        asking = [engine.stream(asked(engine, 2) + str(i), long(5)) for i in range(3)]
    for pieces in asking:
        _ = pieces.answer
    assert max(sizes) == 3
    tensors = [
        tensor
        for state in kept
        for layer in state.cache.layers
        for states in (getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {}))
        for tensor in states.values()
    ]
    assert tensors
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
