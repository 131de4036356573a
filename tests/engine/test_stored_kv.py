"""When stored KV is used and when it is not: corrupt, of another machine, in an encoding, or read-only."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options, kv_validity
from blendrag.engine.kv_validity import PROBE_TOLERANCE, _alike, _encoded
from blendrag.fusor import gate
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.encodings.codec import CodedBlock, Int8
from blendrag.store.kv import ChunkKV

DOCUMENTS = [tiny.document(i) for i in range(3)]
REUSE = Options(mode="reuse")
BLEND = Options(mode="blend", policy="boundary(8)", ratio=0.3)
#: Largest difference of logits of about 3 to those of native KV: an error of 1/254 of a scale, through four
#: layers. Reuse differs by 1.0 from full prefill.
NEAR = 0.04

# -- corrupt, or of another machine -------------------------------------------------------------


@pytest.mark.parametrize("sequences", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_corrupt_chunk_is_computed_as_if_it_were_missing(tmp_path, sequences):
    generate = {"num_beams": sequences} if sequences > 1 else {}
    options = Options(mode="blend", ratio=0.3, max_new_tokens=8, generate_kwargs=generate)
    with tiny.engine(tiny.shared_llama(), tmp_path / "s", ram_bytes=0) as engine:
        engine.ingest(DOCUMENTS)
        text = tiny.prompt(engine, 0, 1)
        victim = tiny.chunk_keys(engine, 0)[1]
        tiny.damage(engine, victim)
        corrupt = engine.generate(text, options)
        (reason,) = {c.reason for c in corrupt.metrics.chunks if c.outcome == "computed"}
        assert "verification" in reason
        m = corrupt.metrics
        assert m.prompt_tokens == m.reused_tokens + m.fresh_tokens
        assert m.new_tokens <= 8 * sequences
        engine.drain()
        missing = engine.generate(text, options)  # it was quarantined
        assert [c.outcome for c in missing.metrics.chunks].count("computed") == 1
        assert missing.texts == corrupt.texts
        engine.drain()
        again = engine.generate(text, options)
        assert "computed" not in [c.outcome for c in again.metrics.chunks]


def test_stored_kv_is_not_used_if_the_machine_computes_other_kv(tmp_path):
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s", kv_encoding="int8") as engine:
        engine.ingest([tiny.document(0)])
        text = tiny.prompt(engine, 0)
        assert engine.generate(text).metrics.reused_tokens > 0
    # another kernel: the same fingerprint, other numbers
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    with tiny.engine(model, tmp_path / "s") as engine:
        expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
        found, answer = tiny.first_logits(engine, text, REUSE)
    assert answer.metrics.reused_tokens == 0
    assert any("ingest again" in note for note in answer.metrics.notes)
    assert torch.equal(found, expected)


# -- encodings ----------------------------------------------------------------------------------


def made(root: Path, encoding: str | None = None, **changes: object) -> BlendEngine:
    return tiny.engine(tiny.shared_llama(), root, kv_encoding=encoding, **changes)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, BlendEngine]]:
    """One store of the same documents for each encoding."""
    opened = {}
    for encoding in ("native", "int8"):
        opened[encoding] = made(tmp_path_factory.mktemp(encoding) / "s", encoding, ram_bytes=0)
        opened[encoding].ingest(DOCUMENTS).whole()
    yield opened
    for engine in opened.values():
        engine.close()


def logits(engine: BlendEngine, options: Options) -> torch.Tensor:
    found, answer = tiny.first_logits(engine, tiny.prompt(engine, 2, 0, 1), options)
    if options.mode != "full":
        assert answer.metrics.reused_tokens > 600
        assert {chunk.outcome for chunk in answer.metrics.chunks} & {"reused", "blended"}
    return found


@pytest.mark.parametrize("options", [REUSE, BLEND])
def test_a_blend_over_encoded_kv_is_near_one_over_native_kv(engines, options):
    """Its chunks are moved, so keys must be decoded before they are rotated."""
    native, found = logits(engines["native"], options), logits(engines["int8"], options)
    assert 0 < tiny.difference(found, native) < NEAR
    full = logits(engines["native"], Options(mode="full"))
    assert tiny.difference(native, full) > 2 * NEAR
    assert torch.equal(logits(engines["int8"], Options(mode="full")), full)


@pytest.mark.slow
def test_kv_in_another_encoding_is_never_read(tmp_path):
    """A corpus without documents may get another encoding while old KV is still stored."""
    with made(tmp_path / "s") as engine:
        engine.ingest(DOCUMENTS)
        before = logits(engine, REUSE)
        native = engine.kv_namespace.validity.namespace
        assert native == engine.adapter.identity.namespace
        old = set(engine.store.keys(native))
        for document in DOCUMENTS:
            engine.require_corpus().remove_source(document.source)
    with made(tmp_path / "s", "int8", ram_bytes=0) as engine:
        report = engine.ingest(DOCUMENTS)
        assert report.chunks_computed == report.chunks
        store = engine.store
        new = set(store.keys(engine.kv_namespace.validity.namespace))
        assert len(new) == len(old)
        assert not old & new
        assert set(store.keys(native)) == old
        assert 0 < tiny.difference(logits(engine, REUSE), before) < NEAR
        assert store.stats().quarantined == 0


def test_a_store_remembers_its_encoding(tmp_path):
    documents = DOCUMENTS[:1]
    with made(tmp_path / "s", "int8") as engine:
        engine.ingest(documents)
    with (
        made(tmp_path / "s", "native") as engine,
        tiny.refuses("in encoding int8, not native"),
    ):
        engine.ingest(documents)
    with made(tmp_path / "s") as engine:  # readers need not name the encoding
        assert engine.ingest(documents).chunks_computed == 0
        assert engine.ingest([tiny.document(7)]).chunks_computed > 0
        assert engine.require_corpus().manifest.encoding == "int8"
        (key, *_) = tiny.chunk_keys(engine, 0)
        tiny.lose_kv(engine, key)
        assert engine.generate(tiny.prompt(engine, 0), REUSE).metrics.reused_tokens > 0
        engine.drain()  # chunks that a query missed are stored in the same encoding
        assert engine.store.where(engine.kv_namespace.validity.namespace, [key])
        assert not set(engine.store.keys(engine.adapter.identity.namespace))


def test_ingest_reports_and_predicts_encoded_bytes(tmp_path):
    with made(tmp_path / "s", "int8") as engine:
        planned = engine.dry_run(DOCUMENTS)
        report = engine.ingest(DOCUMENTS)
        layout = engine.kv_namespace.layout
        lengths = [
            len(engine.kv_namespace.model.text_ids(text)) for text in tiny.chunk_texts(engine, 0)
        ]
        assert sum(stored_chunk_bytes(layout, n) for n in lengths) < report.bytes
        native = stored_chunk_bytes(engine.adapter.layout, report.tokens)
        assert report.bytes < 0.5 * native  # of float32
        assert planned.bytes == pytest.approx(report.bytes, rel=0.2)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no keys": lambda kv: torch.stack((0 * kv[0], kv[1])),
    "no values": lambda kv: torch.stack((kv[0], 0 * kv[1])),
    "values of other tokens": lambda kv: torch.stack((kv[0], kv[1].flip(1))),
    "keys of other tokens": lambda kv: torch.stack((kv[0].flip(1), kv[1])),
    "values of other heads": lambda kv: torch.stack((kv[0], kv[1].flip(0))),
}


@pytest.mark.parametrize("encoding", ["native", "int8"])
def test_a_probe_of_other_kv_is_noticed_despite_large_key_biases(encoding):
    def stored(kv: ChunkKV) -> tiny.Held:
        return tiny.Held(replace(kv, layers=list(_encoded(kv))))

    adapter = tiny.adapter(tiny.large_biases().to(torch.bfloat16))
    kv = adapter.encode((0,), list(range(3, 35)))
    kv = replace(kv, layout=kv.layout.encoded(encoding))
    tolerance = PROBE_TOLERANCE["bfloat16"]
    assert _alike(kv, stored(kv), tolerance)
    noise = torch.Generator().manual_seed(1)
    rounded = [
        (layer + 0.02 * torch.randn(layer.shape, generator=noise)).to(layer.dtype)
        for layer in kv.layers
    ]
    assert _alike(kv, stored(replace(kv, layers=rounded)), tolerance), "another kernel's rounding"
    for name, wrong in WRONG.items():
        layers = [wrong(kv.layers[0]), *kv.layers[1:]]
        assert not _alike(kv, stored(replace(kv, layers=layers)), tolerance), name


@pytest.mark.usefixtures("empty_cache")
def test_the_gate_runs_once_over_native_kv_in_any_encoding(tmp_path, monkeypatch):
    def never(*args: object) -> None:
        raise AssertionError("the gate read encoded KV")

    monkeypatch.setattr(kv_validity, "verify", gate.verify)
    with made(tmp_path / "s", "int8") as engine, monkeypatch.context() as patch:
        patch.setattr(Int8, "_encode", never)
        patch.setattr(CodedBlock, "decode", never)
        assert engine.verify().blendable
    with (
        made(tmp_path / "s", "native") as engine,
        tiny.counted(engine.adapter, "prefill_at") as prefills,
    ):
        assert engine.verify().blendable
    assert prefills == []


# -- stores that cannot be written --------------------------------------------------------------


@pytest.fixture
def root(checkpoint: str, tmp_path: Path) -> Path:
    """A store of two documents that lacks the KV of one chunk."""
    with tiny.engine(checkpoint, tmp_path / "s", tokenizer=None) as engine:
        engine.ingest(DOCUMENTS[:2])
        tiny.lose_kv(engine, tiny.chunk_keys(engine, 1)[0])
    return tmp_path / "s"


@pytest.fixture
def read_only_mount(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written, even by root."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))


def files(root: Path) -> dict[str, bytes]:
    """All files but those in which readers of SQLite share locks."""
    gc.collect()  # closes leftover SQLite connections, which writes
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in found if not p.name.endswith(("-wal", "-shm"))}


@pytest.mark.usefixtures("read_only_mount")
def test_a_store_on_a_read_only_mount_answers_with_one_warning(checkpoint, root, caplog):
    before = files(root)
    with tiny.engine(checkpoint, root, tokenizer=None) as engine:
        for is_first in (True, False):  # what a prefill has computed stays in memory
            answer = engine.generate(tiny.prompt(engine, 0, 1))
            assert answer.metrics.reused_tokens > 0
            outcomes = [chunk.outcome for chunk in answer.metrics.chunks]
            assert ("computed" in outcomes) == is_first
            engine.drain()
    assert files(root) == before
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cannot be written" in warning


@pytest.mark.parametrize("computes_other_kv", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_opened_read_only_writes_nothing(checkpoint, root, computes_other_kv):
    before = files(root)
    with tiny.engine(checkpoint, root, tokenizer=None, read_only=True) as engine:
        if computes_other_kv:
            layer = engine.adapter.stack.layers[1]
            layer.mlp.register_forward_hook(lambda module, args, out: out * 2)
        metrics = engine.generate(tiny.prompt(engine, 0, 1)).metrics
        assert (metrics.reused_tokens == 0) == computes_other_kv
        assert any("ingest again" in note for note in metrics.notes) == computes_other_kv
        assert engine.retrieve("What did the company of Place0 build?", 1)
        engine.drain()
    assert files(root) == before
