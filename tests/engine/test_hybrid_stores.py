"""What is stored for hybrid models travels between stores, counts, and is kept for whom it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
import writers
from blendrag.corpus.documents import LEARNED
from blendrag.engine import BlendEngine, Options
from blendrag.errors import ModelLoadError
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.maintenance import check, export_archive, import_archive

SHAPE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def engine_in(root: Path, **changes: Any) -> BlendEngine:
    """One that recomputes nothing."""
    model = tiny.family("qwen3_5", initializer_range=0.2, **SHAPE)
    given = {"prefix_text": tiny.BOS, "ram_bytes": 0, "ratio": 0.0, **changes}
    return tiny.engine(model, root, **given)


def ingest(made: BlendEngine, documents: int = 1) -> Any:
    return made.ingest([tiny.document(i, paragraphs=5) for i in range(documents)]).whole()


def tiers(answer: Any) -> set[tuple[str, str]]:
    return {(chunk.outcome, chunk.tier) for chunk in answer.metrics.chunks}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two documents, which no test changes."""
    root = tmp_path_factory.mktemp("hybrid") / "store"
    with engine_in(root) as made:
        ingest(made, 2)
    return root


@pytest.fixture
def expected(root: Path) -> str:
    with engine_in(root, read_only=True) as made:
        return made.generate(tiny.prompt(made, 1, 0)).text


def test_an_archive_carries_states(root, tmp_path, expected):
    export_archive(root, tmp_path / "kv.tar")
    import_archive(tmp_path / "other", tmp_path / "kv.tar")
    assert check(tmp_path / "other").is_good
    with engine_in(tmp_path / "other") as made:
        assert not ingest(made, 2).chunks_computed
        answer = made.generate(tiny.prompt(made, 1, 0))
    assert tiers(answer) == {("reused", "disk")}
    assert answer.text == expected


@pytest.mark.usefixtures("slow_prefill")
def test_a_machine_that_follows_loads_states_of_the_one_that_published(tmp_path, expected):
    pytest.importorskip("obstore")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    remote = {"remote": f"file://{bucket}"}
    with engine_in(tmp_path / "one", **remote) as one, engine_in(tmp_path / "two", **remote) as two:
        ingest(one, 2)
        assert not one.publish().missing
        two.follow()
        answer = two.generate(tiny.prompt(two, 1, 0))
        assert tiers(answer) == {("reused", "remote")}
        assert answer.text == expected
        damaged = tiny.chunk_keys(two, 0)[0]
        (path,) = bucket.rglob(f"{damaged}.kv")
        data = bytearray(path.read_bytes())
        data[-100] ^= 0x40
        path.write_bytes(data)
        with engine_in(tmp_path / "three", **remote) as three:
            three.follow()
            answer = three.generate(tiny.prompt(three, 0))
    assert ("computed", "") in tiers(answer)


def test_states_count_in_memory_and_on_disk(root, tmp_path):
    with engine_in(root, read_only=True, ram_bytes=1 << 24) as made:
        layout = made.kv_namespace.layout
        for _ in range(2):
            answer = made.generate(tiny.prompt(made, 1, 0))
            made.store.drain()
        chunks = [chunk.tokens for chunk in answer.metrics.chunks]
        assert tiers(answer) == {("reused", "memory")}
        held = made.store.memory.stats().size_bytes
    assert held >= sum(stored_chunk_bytes(layout, tokens) for tokens in chunks)
    assert layout.size_bytes(0) == 3072  # of a state

    with engine_in(root, read_only=True, ram_bytes=held - 1) as made:
        for _ in range(2):
            made.generate(tiny.prompt(made, 1, 0))
            made.store.drain()
        assert 0 < made.store.memory.stats().size_bytes < held

    room = held  # for the records of these chunks, without their headers
    with engine_in(tmp_path / "small", disk_bytes=room) as made:
        report = made.ingest([tiny.document(i, paragraphs=5) for i in range(2)])
        assert tiny.one_sentence(report.stopped)
        assert made.store.disk.stats().size_bytes <= room


def test_passages_are_learned_for_their_tenant_alone(tmp_path):
    text = f"{tiny.LEAD}{tiny.document(3, paragraphs=3).text}\n\nQuestion: Who built it?"
    with engine_in(tmp_path, learn=True) as made:
        found = []
        for tenant in ("mine", "mine", "mine", "yours"):
            found.append(made.generate(text, tenant=tenant))
            made.drain()
        assert [*made.library.entries(parent=LEARNED)]
    assert tiers(found[2]) == {("reused", "")}
    assert not found[3].metrics.reused_tokens


def test_a_writer_is_refused_in_one_sentence(tmp_path):
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    with (
        engine_in(tmp_path / "store", writer=str(folder)) as made,
        tiny.refuses("layers have running states", ModelLoadError),
    ):
        ingest(made)


def test_kv_of_a_lora_is_kept_apart(root, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["in_proj_qkv"], init_lora_weights=False)
    model = tiny.family("qwen3_5", initializer_range=0.2, **SHAPE)
    with tiny.engine(peft.get_peft_model(model, lora), tmp_path, prefix_text=tiny.BOS) as made:
        ingest(made)
        text = tiny.prompt(made, 0)
        answers = made.batch([text, text], Options(max_new_tokens=4, ratio=0.0))
    assert {outcome for answer in answers for outcome, _ in tiers(answer)} == {"reused"}
    with engine_in(tmp_path) as made:
        assert not made.generate(text).metrics.reused_tokens
