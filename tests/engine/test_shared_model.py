"""One loaded model under several engines, and under its owner's own ``generate`` on other threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options, resources
from blendrag.engine.stream import AnswerStream
from blendrag.errors import InvalidInputError, RequestTimeout
from blendrag.model import ModelAdapter

IDS = tiny.random_ids(90)
ROUNDS = 2
#: What a request may switch on: masks, a peek, a scout, seeded draws, log probabilities.
REQUESTS = (
    Options(policy="hkvd", ratio=0.3),
    Options(policy="query", ratio=0.3),
    Options(mode="full"),
    Options(policy="reuse", temperature=0.8, seed=3),
    Options(policy="query", ratio=0.3, logprobs=2),
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
    """Two engines over one model, each with a store and documents of its own."""
    tmp_path = tmp_path_factory.mktemp("engines")
    with tiny.engine(model, tmp_path / "a") as a, tiny.engine(model, tmp_path / "b") as b:
        a.ingest([tiny.document(0), tiny.document(1)])
        b.ingest([tiny.document(2), tiny.document(3)])
        yield [a, b]


def prompt(engine: BlendEngine, number: int) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, number)) + "\n\nWhat did the company build?"


def own_generate(model: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=1)
    return out[0].tolist()


def own_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def answers(engine: BlendEngine, number: int) -> list[tuple[str, int, Any]]:
    made = [engine.generate(prompt(engine, number), options) for options in REQUESTS]
    return [(answer.text, answer.metrics.reused_tokens, answer.logprobs) for answer in made]


def test_engines_and_their_models_owner_compute_what_each_would_alone(
    model: Any, engines: list[BlendEngine]
) -> None:
    alone = [answers(engines[0], 0), answers(engines[1], 2)]
    assert all(reused for made in alone for _, reused, _ in made[:2])
    ids, logits = own_generate(model), own_logits(model)
    implementation, done = model.config._attn_implementation, threading.Event()

    def repeatedly(own: Callable[[], bool]) -> int:
        right = 0
        while not done.is_set():
            assert own()
            assert model.config._attn_implementation == implementation
            right += 1
        return right

    with ThreadPoolExecutor(4) as pool:
        owners = [
            pool.submit(repeatedly, lambda: own_generate(model) == ids),
            pool.submit(repeatedly, lambda: torch.equal(own_logits(model), logits)),
        ]
        try:
            asked = [
                pool.submit(lambda e=e, n=n: [answers(e, n) for _ in range(ROUNDS)])
                for e, n in zip(engines, (0, 2), strict=True)
            ]
            got = [one.result(60) for one in asked]
        finally:
            done.set()
        assert all(owner.result(10) > 0 for owner in owners)
    assert got == [[expected] * ROUNDS for expected in alone]
    assert hooks(model) == 0
    assert model.config._attn_implementation == implementation


def test_a_forward_inside_a_blended_one_is_stock(model: Any, engines: list[BlendEngine]) -> None:
    """At any layer of a blended request, another thread's forward finds the model as it was."""
    engine = engines[0]
    logits, ids = own_logits(model), own_generate(model)
    found: list[tuple[bool, bool]] = []

    def elsewhere(*_: Any) -> None:
        if threading.current_thread().name.startswith("blendrag"):
            with ThreadPoolExecutor(1) as pool:
                same = pool.submit(lambda: torch.equal(own_logits(model), logits)).result(10)
                found.append((same, pool.submit(own_generate, model).result(10) == ids))

    handles = [layer.self_attn.register_forward_pre_hook(elsewhere) for layer in model.model.layers]
    try:
        answer = engine.generate(prompt(engine, 0), Options(policy="query", ratio=0.3))
    finally:
        for handle in handles:
            handle.remove()
    assert answer.metrics.reused_tokens > 0
    assert found
    assert set(found) == {(True, True)}


@pytest.mark.slow
def test_a_forward_compiled_during_a_request_is_stock(tmp_path: Path) -> None:
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
                found.append(pool.submit(compiled).result(60))

    with tiny.engine(model, tmp_path / "s") as engine, pytest.MonkeyPatch.context() as patch:
        engine.ingest([tiny.document(0)])
        patch.setattr(AnswerStream, "check", check_in_layer)  # a hook would be traced too
        answer = engine.generate(prompt(engine, 0), Options(logprobs=1))
    assert answer.metrics.reused_tokens > 0
    assert found == [True]


def test_a_lora_wrapper_shares_the_lock_of_its_base_model() -> None:
    peft = pytest.importorskip("peft")
    model = tiny.llama()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert tiny.adapter(wrapped).lock is tiny.adapter(model).lock


def test_a_waiting_thread_gets_the_models_lock_next(adapter: ModelAdapter) -> None:
    lock, turns = adapter.lock, []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with lock:
            turns.append("other")

    other = threading.Thread(target=wait)
    with lock:
        other.start()
        waiting.wait(5)
        while not lock._door.locked():
            pass
    for _ in range(3):
        with lock, lock:
            turns.append("this")
    other.join(5)
    assert turns[0] == "other"


def test_a_request_that_waits_for_another_engine_keeps_its_timeout(
    model: Any, engines: list[BlendEngine]
) -> None:
    text = prompt(engines[1], 2)
    with engines[0].adapter.lock, pytest.raises(RequestTimeout):
        engines[1].generate(text, Options(timeout_s=0.2))
    assert engines[1].generate(text).metrics.reused_tokens > 0


# -- by name --------------------------------------------------------------------------------------


def test_two_stores_under_one_model_name_load_it_once_and_free_it_last(
    checkpoint: str, tmp_path: Path
) -> None:
    with tiny.counted(resources, "load_adapter") as loads:
        a = tiny.engine(checkpoint, tmp_path / "a", tokenizer=None)
        b = tiny.engine(checkpoint, tmp_path / "b", tokenizer=None)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda e: e.ingest([tiny.document(0)]), (a, b)))
            texts = list(pool.map(lambda e: e.generate(prompt(e, 0)).text, (a, b)))
    assert len(loads) == 1
    assert a.adapter is b.adapter
    assert texts[0] == texts[1]
    weights = weakref.ref(a.adapter.model)
    a.close()
    with pytest.raises(InvalidInputError, match="this engine is closed"):
        _ = a.adapter
    assert b.generate(prompt(b, 0)).text == texts[1]
    b.close()
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("difference", ["dtype", "files"])
def test_models_that_would_be_loaded_otherwise_are_not_shared(
    checkpoint: str, tmp_path: Path, difference: str
) -> None:
    dtype = "bfloat16" if difference == "dtype" else "float32"
    with tiny.engine(checkpoint, tmp_path / "a", tokenizer=None, dtype="float32") as a:
        first = a.adapter
        if difference == "files":
            tiny.llama(seed=1).save_pretrained(checkpoint)
        with tiny.engine(checkpoint, tmp_path / "b", tokenizer=None, dtype=dtype) as b:
            assert b.adapter is not first
            assert b.adapter.lock is not first.lock
