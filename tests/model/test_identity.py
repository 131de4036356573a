"""KV is served only to the model that computed it: weights, adapters, quantisation, tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.fusor.gate import verify
from blendrag.model import fingerprint
from blendrag.model.tokens import Tokens
from blendrag.store.identity import chunk_key, digest_fields


def prompt(engine: BlendEngine, number: int = 0) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, number)) + "\n\nWhat did the company build?"


def namespace(model: Any) -> str:
    return tiny.adapter(model).identity.namespace


# -- what is in the key -------------------------------------------------------------------------


def test_the_same_weights_loaded_twice_have_the_same_namespace() -> None:
    assert namespace(tiny.llama()) == namespace(tiny.llama())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"attn_implementation": "eager"},
        {"dtype": torch.bfloat16},
    ],
)
def test_whatever_changes_the_kv_changes_the_namespace(changes: dict[str, Any]) -> None:
    dtype = changes.pop("dtype", torch.float32)
    assert namespace(tiny.llama(**changes).to(dtype)) != namespace(tiny.llama())


def test_the_key_tells_prefix_from_chunk_and_order_from_order() -> None:
    keys = {
        chunk_key("n", (1,), (2, 3)),
        chunk_key("n", (1, 2), (3,)),
        chunk_key("n", (), (1, 2, 3)),
        chunk_key("n", (1,), (3, 2)),
        chunk_key("m", (1,), (2, 3)),
    }
    assert len(keys) == 5
    assert chunk_key("n", (1,), (2, 3)) in keys
    assert digest_fields([b"ab", b"c"]) != digest_fields([b"a", b"bc"])


# -- weights changed in place -------------------------------------------------------------------


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def through_data(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)


def replaced(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight = torch.nn.Parameter(attention.v_proj.weight.detach() * 1.5)


def data_replaced(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data * 1.5


def loaded(model: Any) -> None:
    model.load_state_dict(tiny.llama(seed=3).state_dict())


def swapped(model: Any) -> None:
    a, b = (model.model.layers[i].self_attn.v_proj for i in (0, 2))
    a.weight, b.weight = b.weight, a.weight


CHANGES = [in_place, in_inference_mode, through_data, replaced, data_replaced, loaded, swapped]


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_changed_in_place_is_another_identity(change: Callable[[Any], None]) -> None:
    model = tiny.llama()
    adapter = tiny.adapter(model)
    before = adapter.identity
    assert adapter.identity is before  # an unchanged model is not hashed again
    change(model)
    assert adapter.identity.tensors_fingerprint != before.tensors_fingerprint
    assert adapter.identity.namespace != before.namespace
    assert adapter.identity.namespace == namespace(model)


@pytest.mark.parametrize("change", [in_place, through_data, swapped])
def test_a_weight_changed_after_ingest_is_never_served_old_kv(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        engine.drain()
        change(model)
        expected, _ = tiny.first_logits(engine, prompt(engine), Options(mode="full"))
        logits, answer = tiny.first_logits(engine, prompt(engine), Options(mode="reuse"))
        assert answer.metrics.reused_tokens == 0
        assert {c.outcome for c in answer.metrics.chunks} == {"computed"}
        assert tiny.difference(logits, expected) < 1e-4
        engine.drain()  # the chunks are encoded anew by what the model is now
        again = engine.generate(prompt(engine), Options(mode="blend", ratio=1.0))
        assert again.metrics.reused_tokens > 0
        assert again.text == engine.generate(prompt(engine), Options(mode="full")).text


def test_a_long_prompt_in_mode_full_leaves_the_identity_of_a_dynamic_rotary_alone(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    model = tiny.llama(rope_parameters=rope, max_position_embeddings=2048)
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        before = engine.generate(prompt(engine)).metrics.reused_tokens
        assert before > 0
        identity = engine.adapter.identity
        engine.generate("the town of Place " * 150, Options(mode="full"))
        assert engine.adapter.identity == identity
        assert engine.generate(prompt(engine)).metrics.reused_tokens >= before


def test_ingest_during_a_blended_request_stores_under_the_models_own_name(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        before = engine.adapter.identity.namespace
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        own = engine.adapter.model.config._attn_implementation
        blending, go_on = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            blending.set()
            assert go_on.wait(10)

        handle = engine.adapter.stack.layers[2].register_forward_pre_hook(wait)
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(engine.generate, prompt(engine))
            assert blending.wait(10)
            assert engine.adapter.model.config._attn_implementation == own
            report = pool.submit(engine.ingest, [tiny.document(1)])
            with pytest.raises(TimeoutError):
                report.result(0.3)  # it waits for the request
            go_on.set()
            assert answer.result(10).metrics.reused_tokens > 0
            assert report.result(10).chunks_computed > 0
        handle.remove()
        assert engine.resources.require_corpus().manifest.namespace == before
        assert engine.adapter.identity.namespace == before
        assert engine.generate(prompt(engine, 1)).metrics.reused_tokens > 0


# -- the tokenizer ------------------------------------------------------------------------------


def test_a_call_of_the_tokenizer_leaves_its_fingerprint_alone() -> None:
    tokenizer = tiny.tokenizer()
    before = Tokens(tokenizer).fingerprint
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert Tokens(tokenizer).fingerprint == before
    assert tokenizer.backend_tokenizer.truncation is not None  # it is the caller's
    tokenizer.add_tokens(["<|another|>"])
    assert Tokens(tokenizer).fingerprint != before


# -- LoRA ---------------------------------------------------------------------------------------


def with_lora(seed: int = 0) -> Any:
    wrapped = get_peft_model(
        tiny.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
    )
    torch.manual_seed(100 + seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.5)
    return wrapped.eval()


def test_a_lora_adapter_has_a_namespace_of_its_own_and_passes_the_gate() -> None:
    adapter = tiny.adapter(with_lora())
    assert verify(adapter).blendable
    assert adapter.identity.adapters
    names = {adapter.identity.namespace, namespace(tiny.llama()), namespace(with_lora(1))}
    assert len(names) == 3


def test_switching_an_adapter_off_and_on_switches_the_namespace() -> None:
    wrapped = with_lora()
    adapter = tiny.adapter(wrapped)
    active = adapter.identity.namespace
    with wrapped.disable_adapter():
        assert adapter.identity.namespace != active
    assert adapter.identity.namespace == active
    wrapped.merge_adapter()
    assert adapter.identity.namespace != active
    wrapped.unmerge_adapter()


def test_another_adapter_or_scaling_is_another_namespace() -> None:
    wrapped = with_lora()
    adapter = tiny.adapter(wrapped)
    first = adapter.identity.namespace
    wrapped.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    wrapped.set_adapter("second")
    second = adapter.identity.namespace
    assert second != first
    wrapped.set_adapter("default")
    for module in wrapped.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    assert adapter.identity.namespace not in (first, second)


def with_two_adapters() -> Any:
    wrapped = with_lora()
    wrapped.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B.second" in name:
                weight.normal_(0, 0.5)
    return wrapped.eval()


def weights_of(wrapped: Any, adapter: str) -> set[int]:
    return {id(weight) for name, weight in wrapped.named_parameters() if f".{adapter}." in name}


def test_switching_adapters_hashes_the_base_once_and_each_adapter_once() -> None:
    wrapped = with_two_adapters()
    adapter = tiny.adapter(wrapped)
    with tiny.counted(fingerprint, "hash_bytes") as hashed:
        first = adapter.identity
        assert not {id(tensor) for (tensor,) in hashed} & weights_of(wrapped, "second")
        del hashed[:]
        wrapped.set_adapter("second")
        second = adapter.identity
        assert {id(tensor) for (tensor,) in hashed} == weights_of(wrapped, "second")
        del hashed[:]
        for _ in range(3):
            for name, identity in (("default", first), ("second", second)):
                wrapped.set_adapter(name)
                assert adapter.identity == identity
        with wrapped.disable_adapter():
            assert adapter.identity not in (first, second)
        assert not hashed


@pytest.mark.parametrize("part", ["base_layer.weight", "lora_A.second", "lora_B.second"])
def test_a_weight_changed_between_two_switches_is_noticed(part: str) -> None:
    wrapped = with_two_adapters()
    adapter = tiny.adapter(wrapped)
    wrapped.set_adapter("second")
    before = adapter.identity
    wrapped.set_adapter("default")
    (weight, *_) = (w for name, w in wrapped.named_parameters() if part in name)
    with torch.no_grad(), tiny.counted(fingerprint, "hash_bytes") as hashed:
        _ = adapter.identity
        weight.mul_(1.5)
        wrapped.set_adapter("second")
        assert adapter.identity.namespace != before.namespace
        weights = [tensor for (tensor,) in hashed]
    assert any(tensor is weight for tensor in weights)


def test_an_adapter_that_is_not_active_leaves_the_namespace_alone() -> None:
    assert namespace(with_two_adapters()) == namespace(with_lora())


def test_a_lora_model_is_never_served_the_bases_kv(tmp_path: Path) -> None:
    wrapped = with_lora()
    with tiny.engine(wrapped, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        engine.drain()
        with wrapped.disable_adapter():
            expected, _ = tiny.first_logits(engine, prompt(engine), Options(mode="full"))
            logits, off = tiny.first_logits(engine, prompt(engine), Options(mode="reuse"))
            assert off.metrics.reused_tokens == 0
            assert tiny.difference(logits, expected) < 1e-4
            engine.drain()
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0


# -- quantised weights --------------------------------------------------------------------------


def test_packed_quantised_weights_are_refused_with_a_sentence_and_answer_in_full(
    tmp_path: Path,
) -> None:
    engines = torch.backends.quantized.supported_engines
    if not {"fbgemm", "x86", "qnnpack", "onednn"} & set(engines):
        pytest.skip(f"torch has no quantised kernels here ({engines})")
    quantised = torch.ao.quantization.quantize_dynamic(
        tiny.llama(), {torch.nn.Linear}, dtype=torch.qint8
    )
    with tiny.engine(quantised, tmp_path / "s") as engine:
        full = engine.generate("hello there", Options(mode="full"))
        assert full.metrics.new_tokens == 6
        with pytest.raises(UnsupportedModelError, match="use mode full") as raised:
            engine.ingest([tiny.document(0)])
        assert tiny.one_sentence(str(raised.value))


# -- NaN ----------------------------------------------------------------------------------------


def test_a_chunk_whose_kv_is_not_finite_is_rejected_with_its_source_named(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.verify()
        bad = tiny.document(1)
        rare = "Ω Ω"
        (first, *_) = engine.resources.text_ids("Ω")
        used = engine.resources.text_ids(tiny.document(0).text + tiny.document(2).text)
        assert first not in used
        with torch.no_grad():
            model.model.embed_tokens.weight[first] = float("nan")
        assert not torch.isin(_gate_ids(engine), torch.tensor([first])).any()
        poisoned = type(bad)(source=bad.source, title=bad.title, text=bad.text + "\n\n" + rare)
        report = engine.ingest([tiny.document(0), poisoned, tiny.document(2)])
        assert report.failed == 1
        assert report.documents == 2
        (failure,) = report.failures
        assert failure.startswith("doc1.txt")
        assert "\n" not in failure
        assert "doc1.txt" not in engine.resources.require_corpus().sources()


def _gate_ids(engine: BlendEngine) -> torch.Tensor:
    from blendrag.fusor import gate

    return gate._gate_prompt(engine.adapter)


# -- another model's store ----------------------------------------------------------------------


def test_a_store_of_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    other = tiny.tokenizer()
    other.add_tokens(["<|another|>"])
    with tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=other) as engine:
        with pytest.raises(InvalidInputError, match="ingested with model") as raised:
            engine.ingest([tiny.document(1)])
        assert tiny.one_sentence(str(raised.value))


def test_a_store_of_other_weights_is_a_miss_and_never_an_answer(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        text = prompt(engine)
    with tiny.engine(tiny.llama(seed=9), tmp_path / "s") as engine:
        expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
        logits, answer = tiny.first_logits(engine, text, Options(mode="reuse"))
        assert answer.metrics.reused_tokens == 0
        assert tiny.difference(logits, expected) < 1e-4
