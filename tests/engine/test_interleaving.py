"""A prefill pauses between layers to let running requests decode, and nobody's answer changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import tiny
import writers
from blendrag.engine import BlendEngine, Options, exact_prefixes, generation, packing_rule
from blendrag.engine.answers import AnswerIterator
from blendrag.engine.stream import AnswerStream
from blendrag.errors import RequestCancelled, RequestTimeout
from blendrag.metrics import Timeline
from blendrag.serving import scheduler
from blendrag.serving.chunk_pool import ChunkPool
from blendrag.serving.coroutine import Coroutine

pytestmark = pytest.mark.timeout(120)
LAYERS = tiny.COMMON["num_hidden_layers"]
LONG = Options(max_new_tokens=24, ratio=0.2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("interleaving")) as made:
        made.ingest([tiny.document(number, 5) for number in range(4)])
        yield made


class Pauses:
    """Prefills pause before every layer; each pause calls ``then()`` first."""

    def __init__(self) -> None:
        self.count = 0
        self.then: Callable[[], object] = lambda: None


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses, wait = Pauses(), Coroutine.wait

    def watched(call: Coroutine, step: Any, is_paused: bool = False) -> Any:
        if is_paused:
            pauses.count += 1
            pauses.then()
        return wait(call, step, is_paused)

    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", 0)
    monkeypatch.setattr(scheduler, "MAX_OVERTAKEN", 0)  # in order
    monkeypatch.setattr(Coroutine, "wait", watched)
    return pauses


class Fails(LogitsProcessor):
    """Fails at its fourth token."""

    calls = 0

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("a processor failed")
        return scores


def asked(engine: BlendEngine, number: int) -> str:
    return tiny.prompt(engine, number % 4, (number + 1) % 4, ask=f"What happened in {number}?")


def stream(engine: BlendEngine, number: int, options: Options = LONG) -> AnswerIterator:
    return engine.stream(asked(engine, number), options)


def newcomers(engine: BlendEngine, ways: Sequence[Options]) -> list[AnswerIterator]:
    return [stream(engine, 1 + i, options) for i, options in enumerate(ways)]


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[AnswerStream]:
    """The stream of every token, in order."""
    tokens: list[AnswerStream] = []
    put = AnswerStream.put

    def noted(stream: AnswerStream, value: torch.Tensor) -> None:
        tokens.append(stream)
        put(stream, value)

    monkeypatch.setattr(AnswerStream, "put", noted)
    return tokens


@pytest.mark.parametrize("mode", ["blend", "full"])
@pytest.mark.parametrize("per_step", [0, math.inf])
def test_a_running_request_decodes_while_others_are_prefilled(
    engine, tokens, pauses, monkeypatch, mode, per_step
):
    """With infinity, prefills do not pause."""
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", per_step)
    with engine.scheduler.held():
        first = stream(engine, 0)
        others = newcomers(engine, [Options(mode=mode, max_new_tokens=2)] * 2)
    for pieces in (first, *others):
        list(pieces)
    starts = [tokens.index(pieces.pending.stream) for pieces in others]
    assert starts[0] < starts[1]  # in order
    meanwhile = tokens[: starts[0]].count(first.pending.stream)
    assert meanwhile > LAYERS if per_step == 0 else meanwhile <= 2
    assert (pauses.count > 0) == (per_step == 0)


WAYS = [
    Options(max_new_tokens=5, ratio=0.2),
    Options(max_new_tokens=5, mode="full"),
    Options(max_new_tokens=9, policy="hkvd", ratio=0.3, temperature=1.0, seed=7),
    Options(max_new_tokens=5, mode="reuse", logprobs=1),
    Options(max_new_tokens=5, generate_kwargs={"num_beams": 2}),
    Options(max_new_tokens=9, mode="full", temperature=1.0, seed=8),
]


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_answers_are_those_of_each_request_alone(family, tmp_path, pauses):
    model = tiny.family(family, initializer_range=0.2)
    with tiny.engine(model, tmp_path) as engine:
        engine.ingest([tiny.document(number, 5) for number in range(4)])
        expected = [engine.generate(asked(engine, 1 + i), way).text for i, way in enumerate(WAYS)]
        long = engine.generate(asked(engine, 0), LONG).text
        assert not pauses.count
        with engine.scheduler.held():
            first = stream(engine, 0)
            others = newcomers(engine, WAYS)
        assert [pieces.answer.text for pieces in others] == expected
        assert first.answer.text == long
        assert pauses.count >= 3 * LAYERS
        engine.drain()  # what the answers had encoded in the background
        assert "forward" not in vars(engine.adapter.model)
        assert not any(layer._forward_pre_hooks for layer in engine.adapter.stack.layers)


def test_prompts_that_are_prefilled_together_pause(engine, pauses, monkeypatch):
    monkeypatch.setitem(packing_rule.ROWS, "cpu", 10_000)
    prompts, short = [asked(engine, 1 + i) for i in range(3)], Options(max_new_tokens=4)
    expected = [engine.generate(prompt, short).text for prompt in prompts]
    with engine.scheduler.held():
        first = stream(engine, 0)
        batch, _ = tiny.submitted(engine, lambda: engine.batch(prompts, short), 3)
    answers = batch.result()
    assert [answer.text for answer in answers] == expected
    assert {answer.metrics.batch_size for answer in answers} == {3}
    assert pauses.count >= LAYERS
    list(first)


def test_a_prompt_of_a_schema_lets_others_decode(engine, pauses, monkeypatch):
    engine.add_schema(
        '<schema name="s"><module name="m">The old ships of the town.</module>'
        '<module name="n">The founder built them.</module></schema>'
    )
    prompt, short = (
        '<prompt schema="s"><m/>What did they build?</prompt>',
        Options(max_new_tokens=4),
    )
    long = engine.generate(asked(engine, 0), LONG).text
    expected = engine.generate(pml=prompt, options=short).text
    with engine.scheduler.held():
        first = stream(engine, 0)
        pieces = engine.stream(pml=prompt, options=short)
    assert pieces.answer.text == expected
    assert pauses.count >= LAYERS
    assert first.answer.text == long
    paused = within(monkeypatch, pauses, engine.schemas.model, "encode_at")
    with engine.scheduler.held():
        first = stream(engine, 0)
        pieces = engine.stream(pml=prompt.replace("<m/>", "<n/>"), options=short)
    encoded = pieces.answer.text
    assert len(paused) >= LAYERS
    assert engine.generate(pml=prompt.replace("<m/>", "<n/>"), options=short).text == encoded
    assert first.answer.text == long


def within(monkeypatch: pytest.MonkeyPatch, pauses: Pauses, target: Any, name: str) -> list[bool]:
    """An entry for every pause in a call of ``target.name``."""
    stock, under_way, paused = getattr(target, name), list[bool](), list[bool]()

    def noted(*args: Any, **more: Any) -> Any:
        under_way.append(True)
        try:
            return stock(*args, **more)
        finally:
            under_way.pop()

    monkeypatch.setattr(target, name, noted)
    pauses.then = lambda: paused.extend(under_way)
    return paused


def test_encoding_of_missing_chunks_pauses(engine, pauses, monkeypatch):
    short = Options(max_new_tokens=4, ratio=0.2)
    expected = engine.generate(asked(engine, 2), short).text
    paused = within(monkeypatch, pauses, engine.kv_namespace.validity, "encode_chunk")
    tiny.lose_kv(engine, *tiny.chunk_keys(engine, 2))
    with engine.scheduler.held():
        first = stream(engine, 0)
        others = [stream(engine, 2, short) for _ in range(2)]
    assert [pieces.answer.text for pieces in others] == [expected] * 2
    assert len(paused) >= LAYERS
    list(first)


def test_requests_that_decode_while_chunks_are_encoded_do_not_see_the_writer(
    tmp_path, pauses, monkeypatch
):
    with tiny.engine(
        tiny.llama(), tmp_path / "s", writer=str(writers.writer(tiny.llama(), tmp_path / "w"))
    ) as engine:
        engine.ingest([tiny.document(number) for number in range(4)])
        short = Options(max_new_tokens=4, ratio=0.2)
        expected = engine.generate(asked(engine, 0), LONG).text
        encoded = engine.generate(asked(engine, 2), short).text
        paused = within(monkeypatch, pauses, engine.kv_namespace.validity, "encode_chunk")
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 2))
        with engine.scheduler.held():
            first = stream(engine, 0)
            others = [stream(engine, 2, short) for _ in range(2)]
        assert [pieces.answer.text for pieces in others] == [encoded] * 2
        assert len(paused) >= LAYERS
        assert first.answer.text == expected


def test_the_common_prefill_of_waiting_prompts_pauses(tmp_path, pauses, monkeypatch):
    monkeypatch.setattr(exact_prefixes, "MARGIN", 1)
    with tiny.engine(tiny.shared_llama(), tmp_path) as engine:
        engine.ingest([tiny.document(number) for number in range(2)])
        paused = within(monkeypatch, pauses, engine.prefixes, "_compute")
        asks = [f"What happened in {number}?" for number in range(6)]
        with engine.scheduler.held():
            first = stream(engine, 0)
            others = [engine.stream(tiny.prompt(engine, 1, ask=ask), LONG) for ask in asks]
        assert any("once for 6" in note for note in others[0].answer.metrics.notes)
        assert len(paused) >= LAYERS
        list(first)


@pytest.mark.parametrize(("mode", "error"), [("blend", RequestCancelled), ("full", RequestTimeout)])
def test_a_paused_request_that_is_over_stops_at_once(engine, pauses, mode, error):
    long = engine.generate(asked(engine, 0), LONG).text
    short = Options(max_new_tokens=4, mode=mode)
    expected = engine.generate(asked(engine, 2), short).text
    counts: list[int] = []
    began = pauses.count

    def end() -> None:
        if error is RequestCancelled:
            over.close()
        else:
            over.pending.stream.timeout_s = 0.0
        counts.append(pauses.count)
        pauses.then = lambda: None

    pauses.then = end
    with engine.scheduler.held():
        first = stream(engine, 0)
        over, after = newcomers(
            engine, [Options(max_new_tokens=4, mode=mode, timeout_s=600), short]
        )
    assert isinstance(over.pending.future.exception(), error)
    assert counts == [began + 1]
    assert after.answer.text == expected
    assert first.answer.text == long
    engine.drain()
    assert not engine.scheduler.running


def test_a_step_that_fails_does_not_disturb_the_paused_prefill(engine, pauses, monkeypatch):
    """Neither a joint step nor a request that fails by itself."""
    long = engine.generate(asked(engine, 3), LONG).text
    short = Options(max_new_tokens=4, ratio=0.2)
    expected = engine.generate(asked(engine, 1), short).text
    stock, failures = scheduler.decoded_together, []

    def fail(steps: Sequence[Any], pool: ChunkPool) -> list[Any]:
        if len(steps) > 1 and pauses.count:
            failures.append(len(steps))
            raise RuntimeError("no memory for all")
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "decoded_together", fail)
    fails = Options(
        max_new_tokens=40, generate_kwargs={"logits_processor": LogitsProcessorList([Fails()])}
    )
    with engine.scheduler.held():
        going = stream(engine, 3)
        failing = stream(engine, 0, fails)
        newcomer = stream(engine, 1, short)
    assert newcomer.answer.text == expected
    assert going.answer.text == long
    with pytest.raises(RuntimeError, match="a processor failed"):
        _ = failing.answer
    assert failures


class Asks(LogitsProcessor):
    """Asks another question at its third token."""

    def __init__(self, engine: BlendEngine, prompt: str, options: Options) -> None:
        self._ask = lambda: engine.generate(prompt, options).text
        self.calls = 0
        self.answer = ""

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        if self.calls == 3:
            self.answer = self._ask()
        return scores


@pytest.mark.parametrize("mode", ["blend", "full"])
def test_prefills_of_requests_within_requests_pause(engine, pauses, mode):
    inner = Options(mode=mode, max_new_tokens=5)
    expected = engine.generate(asked(engine, 3), inner).text
    seeded = [Options(max_new_tokens=5, temperature=1.0, seed=i, mode=mode) for i in range(2)]
    alone = [engine.generate(asked(engine, 1 + i), way).text for i, way in enumerate(seeded)]
    asking = [Asks(engine, asked(engine, 3), inner) for _ in seeded]
    ways = [
        Options(
            **{**vars(way), "generate_kwargs": {"logits_processor": LogitsProcessorList([asks])}},
        )
        for way, asks in zip(seeded, asking, strict=True)
    ]
    with engine.scheduler.held():
        first = stream(engine, 0)
        others = newcomers(engine, ways)
    assert [pieces.answer.text for pieces in others] == alone
    assert {asks.answer for asks in asking} == {expected}
    assert pauses.count > LAYERS * len(ways)
    list(first)


def test_the_timeline_of_a_layer_does_not_contain_pauses(engine, pauses, monkeypatch):
    lines: list[Timeline] = []
    entered: list[dict[int, float]] = []

    def made() -> Timeline:
        lines.append(Timeline())
        return lines[-1]

    monkeypatch.setattr(generation, "Timeline", made)
    pauses.then = lambda: entered.extend(line._open for line in lines if line._open)
    with engine.scheduler.held():
        first = stream(engine, 0)
        explained = stream(engine, 1, Options(max_new_tokens=2, explain=True))
    assert explained.answer.explain()
    assert pauses.count
    assert not entered
    list(first)
