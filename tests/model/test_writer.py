"""A writer changes what is encoded for a store exactly as peft would, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from greenlet import getcurrent, greenlet

import tiny
import writers
from blendrag.errors import BlendragError, ModelLoadError
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import before_layers
from blendrag.model.writer import CONFIG, MARK, WEIGHTS, FittedWriter, Writer, layers_for_writers
from blendrag.store.kv import ChunkKV

PREFIX = tiny.random_ids(9, seed=1)[0].tolist()
IDS = tiny.random_ids(40, seed=2)[0].tolist()


def encoded(adapter: ModelAdapter, folder: Path, prefix: list[int] = PREFIX) -> ChunkKV:
    with FittedWriter(Writer.load(folder), adapter).active(len(prefix), len(IDS)):
        return adapter.encode(prefix, IDS)


def largest_difference(one: ChunkKV, other: ChunkKV) -> float:
    """Relative to the largest number of a layer, because products are rounded differently on each CPU."""
    pairs = [(a.float(), b.float()) for a, b in zip(one.layers, other.layers, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"use_rslora": True}),
        ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\..*": 3}}),
        ("qwen3", {}),
        ("gemma3_text", {}),
        ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
        ("qwen3_moe", {"target_modules": ["q_proj", "v_proj"]}),
        ("gemma3", {"target_modules": r".*language_model.*\.(q_proj|v_proj|up_proj)"}),
    ],
)
def test_a_chunk_is_encoded_as_peft_computes_it_behind_a_stock_prefix(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.family(family)
    made = writers.with_lora(model, **changes)
    adapter, folder = tiny.adapter(model), writers.saved(made, tmp_path)
    for prefix in (PREFIX, []):
        expected = writers.by_peft(made, prefix, IDS)
        largest = max(float(layer.abs().max()) for layer in expected.layers)
        assert largest_difference(encoded(adapter, folder, prefix), expected) < 1e-5 * largest
        assert largest_difference(adapter.encode(prefix, IDS), expected) > 1e-3


@pytest.mark.parametrize("has_writer", [False, True])
def test_encoding_ends_with_the_last_kv(has_writer: bool, tmp_path: Path) -> None:
    model, ran = tiny.llama(), list[str]()
    adapter, expected = tiny.adapter(model), tiny.adapter(model).prefill_at(IDS)
    if has_writer:
        made = writers.with_lora(model)
        folder, kv = writers.saved(made, tmp_path), writers.by_peft(made, [], IDS)
    last = model.model.layers[-1]
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name, module in (
            ("k", last.self_attn.k_proj),
            ("mlp", last.mlp),
            ("norm", model.model.norm),
        )
    ]
    if has_writer:
        fitted = FittedWriter(Writer.load(folder), adapter)
        ran.clear()  # fitting it runs the whole model once
        with fitted.active(0, len(IDS)):
            found = adapter.encode([], IDS)
        assert largest_difference(found, kv) < 1e-5
    else:
        found = adapter.encode([], IDS)
        for layer, stored in zip(expected.layers, found.layers, strict=True):
            assert torch.equal(
                adapter.layout.layers[0].joined(layer.keys[0], layer.values[0]), stored
            )
    for hook in hooks:
        hook.remove()
    assert ran == ["k"]


def test_a_model_may_name_the_arguments_when_it_fills_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.llama()
    adapter = tiny.adapter(model)
    expected = adapter.encode(PREFIX, IDS)

    def by_name(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs["past_key_values"]
        update = cache.update
        names = "key_states", "value_states", "layer_idx"
        monkeypatch.setattr(
            cache,
            "update",
            lambda *given, **more: update(**dict(zip(names, given, strict=False)), **more),
        )
        return args, kwargs

    hook = model.model.register_forward_pre_hook(by_name, with_kwargs=True)
    assert largest_difference(adapter.encode(PREFIX, IDS), expected) == 0
    hook.remove()


def test_a_model_that_fills_its_cache_in_another_way_is_run_whole_with_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.llama()
    made = writers.with_lora(model)
    adapter, folder = tiny.adapter(model), writers.saved(made, tmp_path)
    expected, real = writers.by_peft(made, PREFIX, IDS), adapter.prefill_at
    monkeypatch.setattr(adapter, "prefill_at", lambda ids, **_: real(ids))  # no update() is noticed
    assert largest_difference(encoded(adapter, folder), expected) < 1e-5


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny.llama()
    adapter, before = tiny.adapter(model), tiny.adapter(model).encode(PREFIX, IDS)
    identity = adapter.identity
    encoded(adapter, writers.writer(model, tmp_path))
    assert largest_difference(adapter.encode(PREFIX, IDS), before) == 0
    assert adapter.identity == identity
    assert not any(module._forward_hooks for module in model.modules())


def test_a_base_model_with_a_lora_of_its_own_takes_a_writer_too(tmp_path: Path) -> None:
    both = writers.with_lora(tiny.llama(), seed=1, target_modules=["q_proj", "v_proj"])
    folder = writers.writer(tiny.llama(), tmp_path)
    adapter = tiny.adapter(both)
    alone = adapter.encode(PREFIX, IDS)
    assert largest_difference(encoded(adapter, folder), alone) > 1e-3


def test_a_file_of_a_store_holds_the_whole_writer(tmp_path: Path) -> None:
    one = Writer.load(writers.writer(tiny.llama(), tmp_path / "a", r=2))
    other = Writer.load(writers.writer(tiny.llama(), tmp_path / "b", seed=1, r=2))
    again = Writer.from_bytes(one.to_bytes(), "the copy")
    assert again.fingerprint == one.fingerprint
    assert other.fingerprint != one.fingerprint
    assert again.rank == 2


def test_another_scale_is_another_writer(tmp_path: Path) -> None:
    made = writers.with_lora(tiny.llama())
    one = Writer.load(writers.saved(made, tmp_path))
    edit(lambda config: config | {"lora_alpha": 9})(tmp_path)
    assert Writer.load(tmp_path).fingerprint != one.fingerprint


def test_forwards_while_a_chunk_is_encoded_do_not_see_the_writer(tmp_path: Path) -> None:
    """Those of another greenlet, between two layers, and of another thread."""
    model = tiny.llama()
    adapter = tiny.adapter(model)
    stock = adapter.encode(PREFIX, IDS)
    fitted = FittedWriter(Writer.load(writers.writer(model, tmp_path)), adapter)
    outer, between = getcurrent(), list[ChunkKV]()

    def pause() -> None:
        outer.switch()

    def encode() -> ChunkKV:
        with (
            before_layers(adapter.decoder_layers, pause),
            fitted.active(len(PREFIX), len(IDS)),
        ):
            return adapter.encode(PREFIX, IDS)

    encoding = greenlet(encode)
    found = encoding.switch()
    with ThreadPoolExecutor(1) as threads:
        while not encoding.dead:
            between.append(adapter.encode(PREFIX, IDS))
            between.append(threads.submit(adapter.encode, PREFIX, IDS).result())
            found = encoding.switch()
    assert len(between) == 2 * len(adapter.decoder_layers)
    assert all(largest_difference(kv, stock) == 0 for kv in between)
    assert largest_difference(found, encoded(adapter, tmp_path)) == 0


# -- bad input ------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def edit(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    def edited(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return edited


def weights(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Damage:
    def changed(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        safetensors.torch.save_file(
            {name: change(name, tensor) for name, tensor in tensors.items()}, folder / WEIGHTS
        )

    return changed


def renamed(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    safetensors.torch.save_file(
        tensors | {"base_model.model.x": torch.zeros(2, 2)}, folder / WEIGHTS
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / MARK).unlink(), "not trained as a writer.*give it as lora"),
        (lambda folder: (folder / CONFIG).unlink(), "not the directory of a writer"),
        (shutil.rmtree, "there is no writer"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x"), "is damaged"),
        (lambda folder: (folder / CONFIG).write_text("["), "cannot be read"),
        (lambda folder: (folder / CONFIG).write_text("{}"), "peft_type None"),
        (edit(lambda c: c | {"peft_type": "IA3"}), "peft_type 'IA3'"),
        (edit(lambda c: c | {"peft_type": "PROMPT_TUNING"}), "peft_type 'PROMPT_TUNING'"),
        (edit(lambda c: c | {"use_dora": True}), "use_dora"),
        (edit(lambda c: c | {"bias": "all"}), "bias 'all'"),
        (edit(lambda c: c | {"modules_to_save": ["lm_head"]}), "modules_to_save"),
        (edit(lambda c: c | {"r": 3}), "of rank 3"),
        (edit(lambda c: c | {"lora_alpha": "x"}), "lora_alpha is 'x'"),
        (edit(lambda c: c | {"rank_pattern": {"(a+)+": 3}}), "repetition of repetitions"),
        (weights(lambda name, tensor: tensor * torch.nan), "NaN"),
        (renamed, "base_model.model.x"),
    ],
)  # fmt: skip
def test_what_is_no_writer_is_refused_in_one_sentence(
    damage: Damage, says: str, tmp_path: Path
) -> None:
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    damage(folder)
    with tiny.refuses(says, ModelLoadError):
        Writer.load(folder)


@pytest.fixture
def llama_writer(tmp_path: Path) -> Writer:
    return Writer.load(writers.writer(tiny.llama(), tmp_path))


def test_the_first_layer_that_a_model_lacks_is_named(tmp_path: Path) -> None:
    made = Writer.load(writers.writer(tiny.llama(num_hidden_layers=12), tmp_path / "writer"))
    model = tiny.adapter(tiny.llama(num_hidden_layers=2))
    for each in (made, Writer.from_bytes(made.to_bytes(), "the copy")):
        with tiny.refuses("has no layer model.layers.2.mlp.down_proj;", ModelLoadError), model.lock:
            FittedWriter(each, model)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: tiny.llama(hidden_size=64), "q_proj is 64 × 64, not 32 × 32"),
        (lambda: tiny.llama(num_hidden_layers=2), "has no layer model.layers"),
        (lambda: tiny.family("gpt_neox"), "has no layer"),
    ],
)
def test_a_writer_of_another_model_is_refused(
    other: Callable[[], Any], says: str, llama_writer: Writer
) -> None:
    with tiny.refuses(says, ModelLoadError):
        FittedWriter(llama_writer, tiny.adapter(other()))


def test_a_layer_that_gets_only_some_tokens_is_refused(tmp_path: Path) -> None:
    """As an expert does."""
    model = tiny.llama()
    layer = model.model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x.flatten(0, 1))[None]
    with tiny.refuses("not given all tokens in their order", ModelLoadError):
        FittedWriter(Writer.load(writers.writer(tiny.llama(), tmp_path)), tiny.adapter(model))


def test_a_layer_that_encoding_leaves_out_is_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    model.model.spare = torch.nn.Linear(32, 32)
    folder = writers.writer(model, tmp_path, target_modules=["q_proj", "spare"])
    with tiny.refuses("does not run model.spare", ModelLoadError):
        FittedWriter(Writer.load(folder), tiny.adapter(model))


def test_a_layer_that_is_left_out_later_is_noticed(tmp_path: Path) -> None:
    """Chunks are not stored as the writer's if it did not change all of its layers."""
    model = tiny.llama()
    adapter = tiny.adapter(model)
    fitted = FittedWriter(Writer.load(writers.writer(model, tmp_path)), adapter)
    model.model.layers[1].mlp.forward = lambda x: x
    with (
        tiny.refuses("does not fit.*does not run model.layers.1.mlp", ModelLoadError),
        fitted.active(0, len(IDS)),
    ):
        adapter.encode([], IDS)


def test_a_writer_is_trained_only_where_it_changes_stored_kv() -> None:
    model = tiny.llama()
    linear = {n: m for n, m in model.named_modules() if ".layers." in n and not list(m.children())}
    linear = {n: m for n, m in linear.items() if isinstance(m, torch.nn.Linear)}
    found = layers_for_writers(tiny.adapter(model), linear)
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    assert [n for n in linear if n not in found] == [
        f"{last}{n}" for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]


def test_a_refused_writer_leaves_no_hook(llama_writer: Writer) -> None:
    model = tiny.llama(hidden_size=64)
    with pytest.raises(BlendragError):
        FittedWriter(llama_writer, tiny.adapter(model))
    assert not any(module._forward_hooks for module in model.modules())
