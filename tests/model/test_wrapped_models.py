"""Compiled, offloaded, spread and sharded models work, or say in one sentence what does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model.structure import uncompiled


class Compiled(Exception):
    """Something was compiled."""


def refuse(graph: Any, inputs: Any) -> Any:
    raise Compiled


def compiled(module: Any) -> Any:
    return torch.compile(module, backend=refuse, fullgraph=True)


def in_place(*modules: nn.Module) -> None:
    for module in modules:
        module.compile(backend=refuse, fullgraph=True)


#: Each returns the compiled model, or nothing if it changed the given one.
WAYS: dict[str, Callable[[Any], Any]] = {
    "the model": compiled,
    "the model in place": in_place,
    "its forward": lambda model: setattr(model, "forward", compiled(model.forward)),
    "its decoder": lambda model: setattr(model, "model", compiled(model.model)),
    "its layers in place": lambda model: in_place(*model.model.layers),
    "its layers": lambda model: setattr(
        model.model, "layers", nn.ModuleList(map(compiled, model.model.layers))
    ),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A store, and the answer of the model that filled it, which is not compiled."""
    root = tmp_path_factory.mktemp("compiled") / "store"
    with tiny.engine(tiny.llama(), root) as engine:
        engine.ingest([tiny.document(0)])
        return root, engine.generate(tiny.prompt(engine, 0))


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_blends_uncompiled(stored, way):
    model, (store, expected) = tiny.llama(), stored
    changed = WAYS[way](model)
    with tiny.engine(model if changed is None else changed, store) as engine:
        answer = engine.generate(tiny.prompt(engine, 0))
    assert answer.metrics.reused_tokens == expected.metrics.reused_tokens > 0
    assert answer.text == expected.text


def test_a_compiled_model_passes_the_gate_and_ingests_uncompiled(tmp_path):
    with tiny.engine(compiled(tiny.llama()), tmp_path / "s") as engine:
        assert engine.verify().blendable
        assert engine.ingest([tiny.document(0)]).chunks_computed > 0


def test_mode_full_runs_what_the_caller_compiled(tmp_path):
    model = tiny.llama()
    model.model.layers[0].compile(backend=refuse)
    with tiny.engine(model, tmp_path) as engine, pytest.raises(Exception, match=Compiled.__name__):
        engine.generate("hello there", Options(mode="full"))


def test_functions_are_compiled_again_once_the_last_thread_has_left():
    function = torch.compile(lambda x: x + 1, backend=refuse)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with uncompiled():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    with uncompiled():
        thread.start()
        inside.wait(60)
    assert function(torch.ones(1)) == 2  # the other thread is still in
    leave.set()
    thread.join()
    with pytest.raises(Exception, match=Compiled.__name__):
        function(torch.ones(1))


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = tiny.llama()
        head = model.lm_head
        whole = distribute_tensor(head.weight.detach(), mesh, [Replicate()])
        head.weight = nn.Parameter(whole, requires_grad=False)
        yield model
    finally:
        torch.distributed.destroy_process_group()


def assert_refused(engine: BlendEngine, saying: str) -> None:
    verdict = engine.verify()
    assert not verdict.blendable
    assert saying in verdict.reason
    assert tiny.one_sentence(verdict.reason)
    assert "use mode full" in verdict.reason
    for mode in ("blend", "reuse", "prefix"):
        with pytest.raises(UnsupportedModelError, match="use mode full"):
            engine.generate("hello there", Options(mode=mode))
    with pytest.raises(UnsupportedModelError, match="use mode full"):
        engine.ingest([tiny.document(0)])


def test_an_offloaded_model_answers_in_mode_full_only(tmp_path):
    model = accelerate.cpu_offload(tiny.llama(), torch.device("cpu"))
    with tiny.engine(model, tmp_path / "s") as engine:
        assert_refused(engine, "are offloaded")
        assert engine.generate("hello there", Options(mode="full")).metrics.new_tokens == 6
    ids = tiny.random_ids(9)
    assert tiny.difference(tiny.stock(model, ids), tiny.stock(tiny.llama(), ids)) < 1e-5


def test_a_model_on_several_devices_is_refused_with_their_names(tmp_path):
    model = tiny.llama()
    model.hf_device_map = {"": "cpu"}
    assert tiny.adapter(model).refusal is None
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with tiny.engine(model, tmp_path) as engine:
        assert_refused(engine, "are on cuda:0, cuda:1")


def test_sharded_weights_are_refused(sharded, tmp_path):
    with tiny.engine(sharded, tmp_path / "s") as engine:
        assert_refused(engine, "sharded over processes")


def test_a_wrapper_of_another_kind_is_refused():
    with pytest.raises(InvalidInputError, match=r"is a DataParallel.*model\.module") as raised:
        tiny.adapter(nn.DataParallel(tiny.llama()))
    assert tiny.one_sentence(str(raised.value))


def test_a_lora_wrapper_shares_the_lock_of_its_base_model():
    model = tiny.llama()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert tiny.adapter(wrapped).lock is tiny.adapter(model).lock


def test_a_waiting_thread_gets_the_models_lock_next(adapter):
    lock, turns = adapter.lock, []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with lock:
            turns.append("other")

    other = threading.Thread(target=wait)
    with lock:
        other.start()
        waiting.wait(60)
        while not lock._door.locked():
            time.sleep(0.001)
    for _ in range(3):
        with lock, lock:
            turns.append("this")
    other.join(60)
    assert turns[0] == "other"
