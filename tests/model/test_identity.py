"""KV is used only with the model that computed it: weights, adapters and tokenizer are in its identity."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.fusor import gate
from blendrag.model import fingerprint
from blendrag.model.tokens import Tokens
from blendrag.store.identity import chunk_key, digest_fields


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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of ``tiny.llama()``, with one document."""
    root = tmp_path_factory.mktemp("identity") / "s"
    with tiny.engine(tiny.llama(), root) as engine:
        engine.ingest([tiny.document(0)])
    return root


# -- the key ------------------------------------------------------------------------------------


def test_whatever_changes_the_kv_changes_the_namespace():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"rope_parameters": rope},
        {"rms_norm_eps": 1e-3},
        {"attn_implementation": "eager"},
    ]
    names = [namespace(tiny.llama(**each)) for each in changes]
    names.append(namespace(tiny.llama().to(torch.bfloat16)))
    assert len(set(names)) == len(names)
    assert namespace(tiny.llama()) == names[0]


def test_the_key_separates_prefix_from_chunk_and_depends_on_order():
    fields = [((1,), (2, 3)), ((1, 2), (3,)), ((), (1, 2, 3)), ((1,), (3, 2))]
    keys = {chunk_key("n", *each) for each in fields} | {chunk_key("m", (1,), (2, 3))}
    assert len(keys) == 5
    assert chunk_key("n", (1,), (2, 3)) in keys
    assert digest_fields([b"ab", b"c"]) != digest_fields([b"a", b"bc"])


def test_a_call_of_the_tokenizer_does_not_change_its_fingerprint():
    tokenizer = tiny.tokenizer()
    before = Tokens(tokenizer).fingerprint
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert Tokens(tokenizer).fingerprint == before
    assert tokenizer.backend_tokenizer.truncation is not None  # the caller's setting is kept
    tokenizer.add_tokens(["<|another|>"])
    assert Tokens(tokenizer).fingerprint != before


# -- weights changed in place -------------------------------------------------------------------


def in_inference_mode(projection: nn.Linear) -> None:
    with torch.inference_mode():
        projection.weight.mul_(1.5)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda projection: projection.weight.mul_(1.5),
    "in inference mode": in_inference_mode,
    "through data": lambda projection: projection.weight.data.mul_(1.5),
    "replaced": lambda projection: setattr(
        projection, "weight", nn.Parameter(projection.weight.detach() * 1.5)
    ),
    "data replaced": lambda projection: setattr(
        projection.weight, "data", projection.weight.data * 1.5
    ),
}


def test_a_changed_weight_is_another_identity():
    model = tiny.llama()
    adapter = tiny.adapter(model)
    seen = [adapter.identity]
    assert adapter.identity is seen[0]  # an unchanged model is not hashed again
    one, other = (layer.self_attn.v_proj for layer in model.model.layers[1:3])
    for how, change in CHANGES.items():
        with torch.no_grad():
            change(one)
        assert adapter.identity.namespace not in {each.namespace for each in seen}, how
        seen.append(adapter.identity)
    assert seen[-1].namespace == namespace(model)
    one.weight, other.weight = other.weight, one.weight
    assert adapter.identity.namespace not in {each.namespace for each in seen}


def test_kv_from_before_a_weight_changed_is_never_used(store):
    model = tiny.llama()
    with tiny.engine(model, store) as engine:
        assert engine.generate(tiny.prompt(engine, 0)).metrics.reused_tokens > 0
        engine.drain()
        model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)
        assert_computes_everything(engine, tiny.prompt(engine, 0))  # then encodes the chunks again
        again = engine.generate(tiny.prompt(engine, 0), Options(mode="blend", ratio=1.0))
        assert again.metrics.reused_tokens > 0
        assert again.text == engine.generate(tiny.prompt(engine, 0), Options(mode="full")).text


def test_a_long_prompt_does_not_change_the_identity_of_a_length_dependent_rotary():
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


def test_the_identity_waits_for_a_request_in_progress(adapter):
    with ThreadPoolExecutor(1) as pool:
        with adapter.lock:
            identity = pool.submit(lambda: adapter.identity)
            with pytest.raises(TimeoutError):
                identity.result(0.1)
        assert identity.result(10) == adapter.identity


# -- LoRA ---------------------------------------------------------------------------------------

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)


def with_lora(*names: str, seed: int = 0) -> Any:
    """A model with the adapters of these names; the first is active."""
    wrapped = get_peft_model(tiny.llama(), LORA, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, LORA)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name in names:
            for key, weight in wrapped.named_parameters():
                if f"lora_B.{name}" in key:
                    weight.normal_(0, 0.5)
    return wrapped.eval()


def test_each_lora_adapter_has_its_own_namespace_and_passes_the_gate():
    adapter = tiny.adapter(with_lora("first"))
    assert gate.verify(adapter).blendable
    assert adapter.identity.adapters
    own = adapter.identity.namespace
    assert len({own, namespace(tiny.llama()), namespace(with_lora("first", seed=1))}) == 3
    assert namespace(with_lora("first", "second")) == own  # the second is not active


def test_switching_merging_or_scaling_an_adapter_switches_the_namespace():
    wrapped = with_lora("first", "second")
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
    wrapped.set_adapter("first")
    for module in wrapped.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] *= 2
    names.append(adapter.identity.namespace)
    assert len(set(names)) == 5


def test_switching_adapters_hashes_every_tensor_once():
    wrapped = with_lora("first", "second")
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
        for name, identity in (("first", first), ("second", second)) * 2:
            wrapped.set_adapter(name)
            assert adapter.identity == identity
        with wrapped.disable_adapter():
            assert adapter.identity not in (first, second)
        assert not hashed


def test_a_weight_changed_between_two_switches_is_noticed():
    wrapped = with_lora("first", "second")
    adapter = tiny.adapter(wrapped)
    for part in ("base_layer.weight", "lora_A.second", "lora_B.second"):
        wrapped.set_adapter("second")
        before = adapter.identity
        wrapped.set_adapter("first")
        _ = adapter.identity
        (weight, *_) = (w for name, w in wrapped.named_parameters() if part in name)
        with torch.no_grad():
            weight.mul_(1.5)
        wrapped.set_adapter("second")
        assert adapter.identity.namespace != before.namespace, part


# -- other stores and damaged models ------------------------------------------------------------


def test_a_chunk_whose_kv_is_not_finite_is_rejected_by_name(tmp_path):
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.verify()
        (rare, *_) = engine.kv_namespace.model.text_ids("Ω")
        with torch.no_grad():
            model.model.embed_tokens.weight[rare] = float("nan")
        poisoned = replace(tiny.document(1), text=tiny.document(1).text + "\n\nΩ Ω")
        report = engine.ingest([tiny.document(0), poisoned, tiny.document(2)])
        assert (report.failed, report.documents) == (1, 2)
        (failure,) = report.failures
        assert failure.startswith("doc1.txt")
        assert tiny.one_sentence(failure)
        assert "doc1.txt" not in engine.require_corpus().sources()


def test_a_store_of_another_tokenizer_is_refused(store):
    other = tiny.tokenizer()
    other.add_tokens(["<|another|>"])
    with tiny.engine(tiny.llama(), store, tokenizer=other) as engine:
        with pytest.raises(InvalidInputError, match="ingested with model") as raised:
            engine.ingest([tiny.document(1)])
        assert tiny.one_sentence(str(raised.value))


def test_a_store_of_other_weights_is_a_miss(store):
    with tiny.engine(tiny.llama(seed=9), store) as engine:
        assert_computes_everything(engine, tiny.prompt(engine, 0))


def test_identified_weights_are_those_of_the_identity_without_another_look() -> None:
    adapter = tiny.adapter(tiny.llama())
    _ = adapter.identity
    with tiny.counted(fingerprint, "loaded") as looks:
        known = adapter.identified_weights
    assert not looks
    assert known == adapter.weights_now()
    with torch.no_grad():
        adapter.model.lm_head.weight.add_(1)
    assert known != adapter.weights_now()


@pytest.mark.parametrize("size", [1, 9, 10, 11, 20, 55])
def test_a_weight_is_copied_from_a_device_in_pieces(size, monkeypatch):
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 10)
    weight = torch.randint(0, 255, (size,), dtype=torch.uint8)
    copied = b"".join(piece.numpy().tobytes() for piece in fingerprint._pieces_of(weight, False))
    assert copied == weight.numpy().tobytes()
