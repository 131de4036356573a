"""Threads: many callers of one engine, several engines over one model, and no more threads."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options, lazy_model
from blendrag.engine.background_writer import Job
from blendrag.engine.stream import AnswerStream
from blendrag.errors import InvalidInputError, NoThreadError, RequestTimeout
from blendrag.frameworks.streaming import to_thread
from blendrag.model.tokens import Tokens
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler
from blendrag.text.recognition import ChunkIndex
from corpus.small_corpus import chunk_of
from loops import BLOCKED_S, turns_while

# -- callers on threads and event loops ---------------------------------------------------------


async def test_an_event_loop_runs_while_the_model_works(engine):
    text = tiny.prompt(engine, 1)
    assert await turns_while(engine.adapter.model, engine.agenerate(text))
    assert await turns_while(engine.adapter.model, engine.abatch([text, text]))


async def test_astream_yields_before_the_answer_is_complete(engine):
    text, heard, forwards = tiny.prompt(engine, 2), threading.Event(), []

    def wait_at_the_last(*_: Any) -> None:
        forwards.append(len(forwards) < 9 or heard.wait(BLOCKED_S))

    pieces = []
    with engine.adapter.model.register_forward_pre_hook(wait_at_the_last):
        async for piece in engine.astream(text, Options(max_new_tokens=10)):
            pieces.append(piece)
            heard.set()
    assert forwards == [True] * 10
    assert "".join(pieces) == engine.generate(text, Options(max_new_tokens=10)).text


async def test_a_loading_model_does_not_block_the_event_loop(tmp_path, monkeypatch):
    loading, go_on, loads = threading.Event(), threading.Event(), []

    def load(name: str, *args: Any) -> Any:
        loads.append(name)
        loading.set()
        assert go_on.wait(BLOCKED_S)
        return tiny.adapter(tiny.llama())

    monkeypatch.setattr(lazy_model, "load_adapter", load)
    monkeypatch.setattr(lazy_model, "load_tokens", lambda *args: Tokens(tiny.tokenizer()))
    with tiny.engine("some/model", tmp_path / "s", tokenizer=None) as fresh:
        asked = [asyncio.create_task(fresh.agenerate("hello there")) for _ in range(2)]
        adapters = [asyncio.create_task(asyncio.to_thread(lambda: fresh.adapter)) for _ in "ab"]
        while not loading.is_set():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        go_on.set()
        assert len({(await answer).text for answer in asked}) == 1
        assert len({id(await adapter) for adapter in adapters}) == 1
    assert loads == ["some/model"], "it was loaded once"


async def test_threads_and_tasks_each_get_their_answer(engine):
    modes: tuple[Any, ...] = ("blend", "full", "reuse")
    jobs = [(tiny.prompt(engine, i), Options(mode=mode)) for i in range(2) for mode in modes]
    alone = [engine.generate(*job).text for job in jobs]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda job: "".join(engine.stream(*job)), jobs)) == alone
    found = await asyncio.gather(*(engine.agenerate(*job) for job in jobs))
    assert [answer.text for answer in found] == alone


def test_many_threads_can_look_up_the_corpus(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "nothing") as fresh:
        used = fresh.kv_namespace.corpus
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # switch threads as often as possible
        try:
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _: used.current, range(2000)))
        finally:
            sys.setswitchinterval(interval)
        assert found == [None] * 2000


@pytest.mark.parametrize("changes", [1, 9])
def test_a_prompt_is_recognised_in_one_state_of_the_corpus(tmp_path, monkeypatch, changes):
    """A document is replaced between search and look-up, once or each time."""
    with tiny.engine(tiny.shared_llama(), tmp_path) as made, ThreadPoolExecutor(1) as writer:
        made.ingest([tiny.document(0, 2), tiny.document(1, 2)]).whole()
        corpus, found_in = made.require_corpus(), ChunkIndex.found_in
        (first,), (last,) = tiny.chunk_texts(made, 0), tiny.chunk_texts(made, 1)
        # the last chunk is taken for the question if the first one is known
        prompt = f"{tiny.LEAD}{first}\n\n{last}\n\nParagraph 7 tells"
        done: list[Future[Any]] = []

        def replaced_after(*given: Any) -> Any:
            found = found_in(*given)
            if len(done) < changes:
                document = replace(tiny.document(2 + len(done), 2), source="doc0.txt")
                vectors = tiny.WordEmbedder().embed([document.text])
                given = document, "digest", [chunk_of(document.text)], vectors
                done.append(writer.submit(corpus.put_document, *given))
                wait(done, timeout=0.05)  # in a transaction, it waits for the request
            return found

        monkeypatch.setattr(ChunkIndex, "found_in", replaced_after)
        found = [segment.chunk_id for segment in made.segments(prompt).chunks]
        wait(done)
        monkeypatch.undo()
        assert found == [segment.chunk_id for segment in made.segments(prompt).chunks]
        assert found


# -- several engines over one model, and the model's owner --------------------------------------

IDS = tiny.random_ids(90)
#: Requests that use masks, a peek, a scout, seeded draws and log probabilities.
REQUESTS = (
    Options(policy="hkvd", ratio=0.3),
    Options(policy="query", ratio=0.3, logprobs=2),
    Options(mode="full"),
    Options(policy="reuse", temperature=0.8, seed=3),
)


def hooks(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny.llama()
    made.generation_config.eos_token_id = None
    made.set_attn_implementation(request.param)
    return made


@pytest.fixture(scope="module")
def engines(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BlendEngine]]:
    """Two engines over one model, with different stores and documents."""
    tmp_path = tmp_path_factory.mktemp("engines")
    with tiny.engine(model, tmp_path / "a") as a, tiny.engine(model, tmp_path / "b") as b:
        a.ingest([tiny.document(0)])
        b.ingest([tiny.document(2)])
        yield [a, b]


def own_generate(model: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=1)
    return out[0].tolist()


def own_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def answers(engine: BlendEngine, number: int) -> list[tuple[str, int, Any]]:
    text = tiny.prompt(engine, number).removeprefix(tiny.LEAD)  # whose KV would be stored meanwhile
    made = [engine.generate(text, options) for options in REQUESTS]
    return [(answer.text, answer.metrics.reused_tokens, answer.logprobs) for answer in made]


@pytest.mark.slow
def test_engines_and_their_models_owner_compute_what_each_would_alone(model, engines):
    calls = [lambda: answers(engines[0], 0), lambda: answers(engines[1], 2)]
    calls += [lambda: own_generate(model), lambda: own_logits(model).tolist()]
    alone = [call() for call in calls]
    assert all(reused for made in alone[:2] for _, reused, _ in made[:2])
    implementation = model.config._attn_implementation
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: [call() for _ in range(2)], calls))
    assert found == [[expected] * 2 for expected in alone]
    assert hooks(model) == 0
    assert model.config._attn_implementation == implementation


def test_a_forward_inside_a_blended_one_is_stock(model, engines):
    """Another thread runs the model during a layer of a blended request."""
    engine = engines[0]
    logits, ids = own_logits(model), own_generate(model)
    found: list[tuple[bool, bool]] = []

    def elsewhere(*_: Any) -> None:
        if threading.current_thread().name.startswith("blendrag"):
            with ThreadPoolExecutor(1) as pool:
                same = pool.submit(lambda: torch.equal(own_logits(model), logits)).result(BLOCKED_S)
                found.append((same, pool.submit(own_generate, model).result(BLOCKED_S) == ids))

    first, third = model.model.layers[0].self_attn, model.model.layers[2].self_attn
    with (
        first.register_forward_pre_hook(elsewhere),
        third.register_forward_pre_hook(elsewhere),
    ):
        answer = engine.generate(tiny.prompt(engine, 0), Options(policy="query", ratio=0.3))
    assert answer.metrics.reused_tokens > 0
    assert found
    assert set(found) == {(True, True)}


@pytest.mark.slow
def test_a_forward_compiled_during_a_request_is_stock(tmp_path):
    model = tiny.llama(num_hidden_layers=2)
    logits, found = own_logits(model), []

    def compiled() -> bool:
        own = torch.compile(model, backend="eager", fullgraph=True)
        with torch.inference_mode():
            return torch.equal(own(input_ids=IDS, use_cache=False).logits, logits)

    check = AnswerStream.check

    def check_in_layer(stream: AnswerStream) -> None:
        check(stream)
        if not found and model.model.layers[0]._forward_pre_hooks:
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(compiled).result(BLOCKED_S))

    with tiny.engine(model, tmp_path / "s") as engine, pytest.MonkeyPatch.context() as patch:
        engine.ingest([tiny.document(0)])
        patch.setattr(AnswerStream, "check", check_in_layer)  # a hook would be traced too
        answer = engine.generate(tiny.prompt(engine, 0), Options(logprobs=1))
    assert answer.metrics.reused_tokens > 0
    assert found == [True]


def test_a_request_that_waits_for_another_engine_keeps_its_timeout(model, engines):
    text = tiny.prompt(engines[1], 2)
    with engines[0].adapter.lock, pytest.raises(RequestTimeout):
        engines[1].generate(text, Options(timeout_s=0.2))
    assert engines[1].generate(text).metrics.reused_tokens > 0


def test_background_calls_of_two_engines_do_not_give_way_to_each_other(engines, monkeypatch):
    gave_way = []

    def put_back(scheduler: Scheduler, pending: Pending[Any]) -> None:
        gave_way.append(pending)
        pending.future.cancel()

    monkeypatch.setattr(Scheduler, "put_back", put_back)
    with engines[0].adapter.lock:  # both wait for it
        for engine in engines:
            prefix = engine.kv_namespace.corpus.prefix_ids
            texts = [tuple(range(5 + number, 40)) for number in range(4)]
            engine.background.queue([Job(ids, prefix, None) for ids in texts])
    for engine in engines:
        engine.drain()
    assert not gave_way


def test_engines_of_one_model_name_load_it_once_and_the_last_frees_it(checkpoint, tmp_path):
    with tiny.counted(lazy_model, "load_adapter") as loads:
        a = tiny.engine(checkpoint, tmp_path / "a", tokenizer=None)
        b = tiny.engine(checkpoint, tmp_path / "b", tokenizer=None)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda e: e.ingest([tiny.document(0)]), (a, b)))
            texts = list(pool.map(lambda e: e.generate(tiny.prompt(e, 0)).text, (a, b)))
    assert len(loads) == 1
    assert a.adapter is b.adapter
    assert texts[0] == texts[1]
    weights = weakref.ref(a.adapter.model)
    a.close()
    with pytest.raises(InvalidInputError, match="this engine is closed"):
        _ = a.adapter
    assert b.generate(tiny.prompt(b, 0)).text == texts[1]
    b.close()
    gc.collect()
    assert weights() is None


def test_models_of_another_dtype_or_other_files_are_not_shared(checkpoint, tmp_path):
    def made(dtype: str) -> BlendEngine:
        return tiny.engine(checkpoint, tmp_path / "s", tokenizer=None, dtype=dtype)

    with made("float32") as one, made("bfloat16") as other, made("float32") as later:
        adapters = {id(one.adapter), id(other.adapter)}
        tiny.llama(seed=1).save_pretrained(checkpoint)
        assert len(adapters | {id(later.adapter)}) == 3


# -- no more threads ----------------------------------------------------------------------------

start = threading.Thread.start


@contextmanager
def no_threads(name: str = "") -> Iterator[None]:
    """The system starts no thread, or none of this name; :func:`outcome` may start its own."""

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name or (not name and thread.name != "caller"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("threads") / "store"
    with tiny.engine(tiny.llama(), root) as made:
        made.ingest([tiny.document(0)])
    return root


@pytest.fixture
def idle(store: Path) -> Iterator[BlendEngine]:
    """An engine that has started no thread yet."""
    with tiny.engine(tiny.shared_llama(), store) as made:
        yield made


def outcome(call: Callable[[], Any]) -> Any:
    """The result or the error of ``call`` while no thread can be started."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as exc:
            found.set_exception(exc)

    with no_threads():
        threading.Thread(target=run, name="caller", daemon=True).start()
        return found.exception(BLOCKED_S) or found.result()


def test_an_engine_without_its_thread_refuses_and_answers_later(idle):
    text = tiny.prompt(idle, 0)
    for call in (idle.generate, lambda text: list(idle.stream(text)), idle.generate):
        refused = outcome(lambda call=call: call(text))
        assert isinstance(refused, NoThreadError)
        assert tiny.one_sentence(str(refused))
    assert idle.generate(text).metrics.reused_tokens > 0


def test_requests_without_a_loader_are_refused_and_later_ones_answered(idle):
    text = tiny.prompt(idle, 0)
    expected = idle.generate(text)  # starts the worker's thread
    for count in (1, 2):
        assert isinstance(outcome(lambda n=count: idle.batch([text] * n)), NoThreadError)
    full = outcome(lambda: idle.generate(text, Options(mode="full")))
    assert full.metrics.new_tokens > 0  # mode full needs no loader
    assert idle.generate(text).text == expected.text
    idle.drain()  # the second answer has what is encoded in the background
    assert hooks(idle.adapter.model) == 0


def test_without_a_thread_to_promote_them_chunks_stay_on_disk(idle):
    text = tiny.prompt(idle, 0)
    with no_threads("blendrag-promotion"):
        for _ in range(2):
            assert idle.generate(text).metrics.reused_tokens > 0
    assert not any(tier.hits for tier in idle.stats().tiers if tier.tier == "memory")
    idle.close()  # does not wait for the promotion


def test_an_event_loop_without_threads_is_refused_and_runs_nothing_later(idle):
    text, called = tiny.prompt(idle, 0), []

    async def ask() -> list[Any]:
        with no_threads():
            waited = [idle.agenerate(text), to_thread(called.append, 1)]
            refused = await asyncio.gather(*waited, return_exceptions=True)
        await to_thread(called.append, 2)
        return refused

    assert [type(error) for error in asyncio.run(ask())] == [NoThreadError, NoThreadError]
    assert called == [2]
