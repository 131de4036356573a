"""A store that keeps KV in one byte a number: its own keys, its own memory of it, nearly its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.kv_validity import _alike, _encoded
from blendrag.errors import InvalidInputError
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.encodings.codec import Staging
from blendrag.store.encodings.int8 import Int8
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV

DOCUMENTS = [tiny.document(i) for i in range(3)]
CODECS = ("int8", "fp8")
REUSE = Options(mode="reuse")
BLEND = Options(mode="blend", policy="boundary(8)", ratio=0.3)
#: Largest difference of logits of about 3 to native KV's: an error of 1/254 and of 1/16 of a scale,
#: through four layers, with room to spare. Reuse is 1.0 away from full prefill.
NEAR = {"int8": 0.04, "fp8": 0.3}


def made(root: Path, encoding: str | None = None, **changes: object) -> BlendEngine:
    return tiny.engine(tiny.llama(), root, encoding=encoding, **changes)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, BlendEngine]]:
    """One store for each encoding, the same documents in all."""
    opened = {}
    for encoding in ("native", *CODECS):
        opened[encoding] = made(tmp_path_factory.mktemp(encoding) / "s", encoding, ram_bytes=0)
        opened[encoding].ingest(DOCUMENTS).whole()
    yield opened
    for engine in opened.values():
        engine.close()


def prompt(engine: BlendEngine) -> str:
    texts = [text for number in (2, 0, 1) for text in tiny.chunk_texts(engine, number)]
    return "\n\n".join(texts) + "\n\nQuestion: What did the company do?"


def logits(engine: BlendEngine, options: Options) -> torch.Tensor:
    found, answer = tiny.first_logits(engine, prompt(engine), options)
    if options.mode != "full":
        assert answer.metrics.reused_tokens > 600
        assert {chunk.outcome for chunk in answer.metrics.chunks} & {"reused", "blended"}
    return found


@pytest.mark.parametrize("options", [REUSE, BLEND], ids=["reuse", "blend"])
@pytest.mark.parametrize("encoding", CODECS)
def test_a_blend_over_encoded_kv_is_near_one_over_native_kv(
    engines: dict[str, BlendEngine], encoding: str, options: Options
) -> None:
    native, found = logits(engines["native"], options), logits(engines[encoding], options)
    assert 0 < tiny.difference(found, native) < NEAR[encoding]
    full = logits(engines["native"], Options(mode="full"))
    assert tiny.difference(native, full) > 2 * NEAR[encoding]  # so that near means something
    assert torch.equal(logits(engines[encoding], Options(mode="full")), full)


Parts = dict[str, torch.Tensor]


def without_middles(parts: Parts) -> None:
    parts[".key_middles"].zero_()


def with_the_next_tokens_scale(parts: Parts) -> None:
    parts[".value_scales"].copy_(1.5 * parts[".value_scales"].roll(5, -1))


def with_the_next_channels_scale(parts: Parts) -> None:
    parts[".key_scales"].copy_(parts[".key_scales"].roll(1, -1))


def with_the_heads_swapped(parts: Parts) -> None:
    parts[""].copy_(parts[""].flip(1))


def with_keys_for_values(parts: Parts) -> None:
    parts[""].copy_(parts[""].flip(0))


@pytest.mark.parametrize(
    "wrong",
    [
        without_middles,
        with_the_next_tokens_scale,
        with_the_next_channels_scale,
        with_the_heads_swapped,
        with_keys_for_values,
    ],
)
def test_kv_decoded_wrongly_would_not_be_near(
    engines: dict[str, BlendEngine],
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[Parts], None],
) -> None:
    """What the test above is worth: each of these mistakes fails it."""
    native, right = logits(engines["native"], REUSE), Staging.read

    def read(self: Staging, layer: int, fill: Callable[[Any], None], out: torch.Tensor) -> None:
        right(self, layer, fill, out)  # so that there is room, and bytes in it
        assert self._stored is not None
        with torch.inference_mode():
            wrong(self._codec._parts(layer, self._tokens, self._stored))
        right(self, layer, lambda room: None, out)

    monkeypatch.setattr(Staging, "read", read)
    assert tiny.difference(logits(engines["int8"], REUSE), native) > 1.5 * NEAR["int8"]


@pytest.mark.parametrize("encoding", CODECS)
def test_keys_are_decoded_before_they_are_moved(
    engines: dict[str, BlendEngine], encoding: str
) -> None:
    """A chunk far from where it was encoded: rotating coded numbers would turn nothing but noise."""
    near = []
    for name in ("native", encoding):
        engine = engines[name]
        text = "word " * 400 + "\n\n" + tiny.chunk_texts(engine, 1)[0] + "\n\nWhat was built?"
        found, answer = tiny.first_logits(engine, text, REUSE)
        (chunk,) = answer.metrics.chunks
        assert chunk.outcome == "reused"
        assert "moved by" in chunk.reason
        near.append(found)
    assert 0 < tiny.difference(*near) < NEAR[encoding]


def test_each_encoding_has_its_own_namespace_and_keys(
    engines: dict[str, BlendEngine],
) -> None:
    identity = engines["native"].adapter.identity
    names = {name: identity.encoded(name).namespace for name in ("native", *CODECS)}
    assert len(set(names.values())) == 3
    assert names["native"] == identity.namespace
    assert len({chunk_key(namespace, (0,), (1, 2)) for namespace in names.values()}) == 3
    for name, engine in engines.items():
        assert engine.resources.kv_validity.namespace == names[name]
        stored = {other: set(engine.resources.store.keys(at)) for other, at in names.items()}
        assert [other for other, keys in stored.items() if keys] == [name]


def test_two_encodings_in_one_store_never_mix(tmp_path: Path) -> None:
    """Documents gone, an ingest may choose anew; what is left of the old encoding is never read."""
    with made(tmp_path / "s") as engine:
        engine.ingest(DOCUMENTS)
        before = logits(engine, REUSE)
        old = set(engine.resources.store.keys(engine.resources.kv_validity.namespace))
        corpus = engine.resources.require_corpus()
        for document in DOCUMENTS:
            corpus.remove_source(document.source)  # and not their KV
    with made(tmp_path / "s", "int8", ram_bytes=0) as engine:
        report = engine.ingest(DOCUMENTS)
        assert report.chunks_computed == report.chunks
        used = engine.resources
        assert len(set(used.store.keys(used.kv_validity.namespace))) == len(old)
        assert not old & set(used.store.keys(used.kv_validity.namespace))
        assert set(used.store.keys(engine.adapter.identity.namespace)) == old
        assert 0 < tiny.difference(logits(engine, REUSE), before) < NEAR["int8"]
        assert used.store.stats().quarantined == 0


def test_a_store_remembers_its_encoding(tmp_path: Path) -> None:
    with made(tmp_path / "s", "int8") as engine:
        engine.ingest(DOCUMENTS)
        expected = logits(engine, REUSE)
    for encoding in (None, "int8", "native"):  # asking with another one finds what is there
        with made(tmp_path / "s", encoding) as engine:
            assert torch.equal(logits(engine, REUSE), expected)
            assert engine.resources.encoding == "int8"
    with made(tmp_path / "s") as engine:
        report = engine.ingest(DOCUMENTS)
        assert report.chunks_computed == 0
        assert engine.ingest([tiny.document(7)]).chunks_computed > 0
        assert engine.resources.corpus is not None
        assert engine.resources.corpus.manifest.encoding == "int8"
        assert not set(engine.resources.store.keys(engine.adapter.identity.namespace))


def test_ingesting_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    with made(tmp_path / "s", "fp8") as engine:
        engine.ingest(DOCUMENTS)
    with (
        made(tmp_path / "s", "int8") as engine,
        pytest.raises(InvalidInputError, match="in encoding fp8, not int8") as raised,
    ):
        engine.ingest(DOCUMENTS)
    assert tiny.one_sentence(str(raised.value))


def test_an_encoding_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'int4' is not one of native, int8, fp8") as raised:
        made(tmp_path / "s", "int4")
    assert tiny.one_sentence(str(raised.value))


@pytest.mark.parametrize("encoding", CODECS)
def test_bytes_are_those_of_the_store(
    engines: dict[str, BlendEngine], encoding: str, tmp_path: Path
) -> None:
    with made(tmp_path / "s", encoding) as engine:
        planned = engine.dry_run(DOCUMENTS)
        report = engine.ingest(DOCUMENTS)
        assert report.bytes < 0.5 * engine.adapter.layout.chunk_bytes(report.tokens)  # of float32
        layout, corpus = engine.resources.layout, engine.resources.require_corpus()
        lengths = [len(engine.resources.text_ids(c.text)) for c in corpus.chunks_of("doc0.txt")]
        assert engine.ingest([tiny.document(0)]).bytes == 0
        assert report.bytes > sum(stored_chunk_bytes(layout, n) for n in lengths)
        assert planned.bytes == pytest.approx(report.bytes, rel=0.2)


@pytest.mark.parametrize("encoding", CODECS)
def test_a_kept_probe_of_other_kv_is_noticed_in_any_encoding(
    encoding: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with made(tmp_path / "s", encoding) as engine:
        engine.ingest(DOCUMENTS)
        used = engine.resources
        key, ids = (
            used.kv_validity._probe_key(used.kv_validity.namespace),
            used.kv_validity._probe_ids(),
        )
        kv = used.kv_validity.encode(used.kv_validity.namespace, ids, used.prefix_ids)
        used.store.delete(used.kv_validity.namespace, key)
        layers = [layer * (1.2 if i == 2 else 1.0) for i, layer in enumerate(kv.layers)]
        used.store.put(used.kv_validity.namespace, key, ChunkKV(kv.layout, kv.tokens, layers))
    with made(tmp_path / "s") as engine:
        answer = engine.generate(prompt(engine), REUSE)
        assert answer.metrics.reused_tokens == 0
        assert "computes different KV" in caplog.text
        engine.ingest(DOCUMENTS)
        assert engine.generate(prompt(engine), REUSE).metrics.reused_tokens > 0


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no keys": lambda kv: torch.stack((0 * kv[0], kv[1])),
    "no values": lambda kv: torch.stack((kv[0], 0 * kv[1])),
    "values of other tokens": lambda kv: torch.stack((kv[0], kv[1].flip(1))),
    "keys of other tokens": lambda kv: torch.stack((kv[0].flip(1), kv[1])),
    "values of other heads": lambda kv: torch.stack((kv[0], kv[1].flip(0))),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("encoding", ["native", *CODECS])
def test_a_kept_probe_of_other_kv_is_noticed_behind_large_key_biases(
    encoding: str, wrong: str
) -> None:
    adapter = tiny.adapter(tiny.large_biases().to(torch.bfloat16))
    kv = adapter.encode((0,), list(range(3, 35)))
    kv = replace(kv, layout=kv.layout.encoded(encoding))
    assert _alike(kv, kept(kv)), "what is computed again"
    noise = torch.Generator().manual_seed(1)
    nearly = [
        (layer + 0.02 * torch.randn(layer.shape, generator=noise)).to(layer.dtype)
        for layer in kv.layers
    ]
    assert _alike(kv, kept(replace(kv, layers=nearly))), "another kernel's rounding"
    layers = [WRONG[wrong](layer) if i == 0 else layer for i, layer in enumerate(kv.layers)]
    assert not _alike(kv, kept(replace(kv, layers=layers)))


def kept(kv: ChunkKV) -> tiny.Held:
    """A reader over ``kv`` as a store in its encoding gives it back."""
    return tiny.Held(replace(kv, layers=list(_encoded(kv))))


def test_the_gate_runs_over_native_kv_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the gate read encoded KV")

    with made(tmp_path / "s", "int8") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Int8, "_encode", never)
            patch.setattr(Int8, "decode", never)
            assert engine.verify().blendable
        (verdict,) = (tmp_path / "s" / "verified").iterdir()
        assert verdict.stem == engine.adapter.identity.namespace
    with (
        made(tmp_path / "s", "fp8") as engine,
        tiny.counted(engine.adapter, "prefill_at") as prefills,
    ):
        assert engine.verify().blendable
    assert prefills == []  # remembered


def test_chunks_missed_by_a_query_are_stored_in_the_stores_encoding(tmp_path: Path) -> None:
    with made(tmp_path / "s", "int8") as engine:
        engine.ingest(DOCUMENTS)
        used = engine.resources
        namespace = used.kv_validity.namespace
        ids = used.text_ids(tiny.chunk_texts(engine, 1)[0])
        key = chunk_key(namespace, used.prefix_ids, ids)
        assert used.store.delete(namespace, key)
        engine.generate(prompt(engine), REUSE)
        engine.drain()
        reader = used.store.open(namespace, key, used.layout, len(ids))
        assert reader is not None
        reader.close()
