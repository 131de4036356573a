"""KV is used only with the model that computed it: weights, adapters and tokenizer are in its identity."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.fusor import gate
from blendrag.model import fingerprint
from blendrag.model.tokens import Tokens
from blendrag.store.identity import chunk_key, digest_fields


def prompt(engine: BlendEngine, number: int = 0) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, number)) + "\n\nWhat did the company build?"


def namespace(model: Any) -> str:
    return tiny.adapter(model).identity.namespace


def assert_computes_everything(engine: BlendEngine, text: str) -> None:
    """A request reuses nothing and has the logits of a stock prefill."""
    expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
    logits, answer = tiny.first_logits(engine, text, Options(mode="reuse"))
    assert answer.metrics.reused_tokens == 0
    assert {c.outcome for c in answer.metrics.chunks} == {"computed"}
    assert tiny.difference(logits, expected) < 1e-4
    engine.drain()


# -- the key ------------------------------------------------------------------------------------


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
    assert namespace(tiny.llama()) == namespace(tiny.llama())
    assert namespace(tiny.llama(**changes).to(dtype)) != namespace(tiny.llama())


def test_the_key_separates_prefix_from_chunk_and_depends_on_order() -> None:
    fields = [((1,), (2, 3)), ((1, 2), (3,)), ((), (1, 2, 3)), ((1,), (3, 2))]
    keys = {chunk_key("n", *each) for each in fields} | {chunk_key("m", (1,), (2, 3))}
    assert len(keys) == 5
    assert chunk_key("n", (1,), (2, 3)) in keys
    assert digest_fields([b"ab", b"c"]) != digest_fields([b"a", b"bc"])


def test_a_call_of_the_tokenizer_does_not_change_its_fingerprint() -> None:
    tokenizer = tiny.tokenizer()
    before = Tokens(tokenizer).fingerprint
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert Tokens(tokenizer).fingerprint == before
    assert tokenizer.backend_tokenizer.truncation is not None  # the caller's setting is kept
    tokenizer.add_tokens(["<|another|>"])
    assert Tokens(tokenizer).fingerprint != before


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
def test_a_changed_weight_is_another_identity(change: Callable[[Any], None]) -> None:
    model = tiny.llama()
    adapter = tiny.adapter(model)
    before = adapter.identity
    assert adapter.identity is before  # an unchanged model is not hashed again
    change(model)
    assert adapter.identity.tensors_fingerprint != before.tensors_fingerprint
    assert adapter.identity.namespace == namespace(model) != before.namespace


def test_kv_from_before_a_weight_changed_is_never_used(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        engine.drain()
        through_data(model)
        assert_computes_everything(engine, prompt(engine))  # then encodes the chunks again
        again = engine.generate(prompt(engine), Options(mode="blend", ratio=1.0))
        assert again.metrics.reused_tokens > 0
        assert again.text == engine.generate(prompt(engine), Options(mode="full")).text


def test_a_long_prompt_does_not_change_the_identity_of_a_length_dependent_rotary() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    adapter = tiny.adapter(tiny.llama(rope_parameters=rope, max_position_embeddings=2048))
    before, table = adapter.identity, adapter.model.model.rotary_emb.inv_freq.clone()
    tiny.stock(adapter.model, tiny.random_ids(600))
    assert not torch.equal(adapter.model.model.rotary_emb.inv_freq, table)
    assert adapter.identity == before


def test_ingest_waits_for_a_blended_request_and_keeps_the_namespace(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        before = engine.adapter.identity.namespace
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
                report.result(0.2)
            go_on.set()
            assert answer.result(10).metrics.reused_tokens > 0
            assert report.result(10).chunks_computed > 0
        handle.remove()
        assert engine.resources.require_corpus().manifest.namespace == before
        assert engine.generate(prompt(engine, 1)).metrics.reused_tokens > 0


# -- LoRA ---------------------------------------------------------------------------------------

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)


def fill(wrapped: Any, adapter: str, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if f"lora_B.{adapter}" in name:
                weight.normal_(0, 0.5)


def with_lora(seed: int = 0) -> Any:
    wrapped = get_peft_model(tiny.llama(), LORA)
    fill(wrapped, "default", 100 + seed)
    return wrapped.eval()


def with_two_adapters() -> Any:
    wrapped = with_lora()
    wrapped.add_adapter("second", LORA)
    fill(wrapped, "second", 7)
    return wrapped.eval()


def test_each_lora_adapter_has_its_own_namespace_and_passes_the_gate() -> None:
    adapter = tiny.adapter(with_lora())
    assert gate.verify(adapter).blendable
    assert adapter.identity.adapters
    names = {adapter.identity.namespace, namespace(tiny.llama()), namespace(with_lora(1))}
    assert len(names) == 3
    assert namespace(with_two_adapters()) == adapter.identity.namespace, "the second is inactive"


def test_switching_merging_or_scaling_an_adapter_switches_the_namespace() -> None:
    wrapped = with_two_adapters()
    adapter = tiny.adapter(wrapped)
    names = [adapter.identity.namespace]
    with wrapped.disable_adapter():
        names.append(adapter.identity.namespace)
    assert adapter.identity.namespace == names[0]
    wrapped.merge_adapter()
    names.append(adapter.identity.namespace)
    wrapped.unmerge_adapter()
    wrapped.set_adapter("second")
    names.append(adapter.identity.namespace)
    wrapped.set_adapter("default")
    for module in wrapped.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    names.append(adapter.identity.namespace)
    assert len(set(names)) == 5


def test_switching_adapters_hashes_every_tensor_once() -> None:
    wrapped = with_two_adapters()
    seconds = {id(weight) for name, weight in wrapped.named_parameters() if ".second." in name}
    adapter = tiny.adapter(wrapped)
    with tiny.counted(fingerprint, "hash_bytes") as hashed:
        first = adapter.identity
        assert not {id(tensor) for (tensor,) in hashed} & seconds
        del hashed[:]
        wrapped.set_adapter("second")
        second = adapter.identity
        assert {id(tensor) for (tensor,) in hashed} == seconds
        del hashed[:]
        for name, identity in (("default", first), ("second", second)) * 2:
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
    _ = adapter.identity
    (weight, *_) = (w for name, w in wrapped.named_parameters() if part in name)
    with torch.no_grad():
        weight.mul_(1.5)
    wrapped.set_adapter("second")
    assert adapter.identity.namespace != before.namespace


def test_kv_of_an_adapter_is_never_used_for_the_base_model(tmp_path: Path) -> None:
    wrapped = with_lora()
    with tiny.engine(wrapped, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0
        engine.drain()
        with wrapped.disable_adapter():
            assert_computes_everything(engine, prompt(engine))
        assert engine.generate(prompt(engine)).metrics.reused_tokens > 0


# -- other stores and damaged models ------------------------------------------------------------


def test_a_chunk_whose_kv_is_not_finite_is_rejected_by_name(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.verify()
        (rare, *_) = engine.resources.text_ids("Ω")
        used = engine.resources.text_ids(tiny.document(0).text + tiny.document(2).text)
        assert rare not in (*used, *gate._gate_prompt(engine.adapter).flatten().tolist())
        with torch.no_grad():
            model.model.embed_tokens.weight[rare] = float("nan")
        poisoned = replace(tiny.document(1), text=tiny.document(1).text + "\n\nΩ Ω")
        report = engine.ingest([tiny.document(0), poisoned, tiny.document(2)])
        assert (report.failed, report.documents) == (1, 2)
        (failure,) = report.failures
        assert failure.startswith("doc1.txt")
        assert "\n" not in failure
        assert "doc1.txt" not in engine.resources.require_corpus().sources()


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    other = tiny.tokenizer()
    other.add_tokens(["<|another|>"])
    with tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=other) as engine:
        with pytest.raises(InvalidInputError, match="ingested with model") as raised:
            engine.ingest([tiny.document(1)])
        assert tiny.one_sentence(str(raised.value))


def test_a_store_of_other_weights_is_a_miss(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
        text = prompt(engine)
    with tiny.engine(tiny.llama(seed=9), tmp_path / "s") as engine:
        assert_computes_everything(engine, text)
