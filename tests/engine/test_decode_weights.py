"""Packed weights decode answers, and nothing else; a model that cannot have them keeps its own."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, IngestReport, packed_files
from blendrag.engine import decode_weights as choosing
from blendrag.fusor import decode_agreement as agreeing
from blendrag.model import decode_weights as packing
from blendrag.wording import is_step
from cli.commands import invoke, printed

NAMES = ("int8", "int4")


@pytest.fixture(autouse=True)
def packs_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if copies of layers of any size were faster for up to four rows."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(packing, "most_rows", lambda layers: packing.FastRows(4, True))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product with a packed copy."""
    rows: list[int] = []
    assert packing.is_available()  # has tried them

    def counted(stock: Callable[..., Any]) -> Callable[..., Any]:
        def product(x: torch.Tensor, *packed: torch.Tensor) -> Any:
            rows.append(len(x))
            return stock(x, *packed)

        return product

    for name, kind in packing.FORMATS.items():
        kind = replace(kind, product=counted(kind.product))
        monkeypatch.setitem(packing.FORMATS, name, kind)  # type: ignore[arg-type]
    return rows


@pytest.fixture
def cache(empty_cache: Path) -> Path:
    return empty_cache / "decode-weights"


def model(**changes: Any) -> Any:
    """Two layers: each is packed in the same way."""
    return tiny.llama(**{"num_hidden_layers": 2, **changes}).bfloat16()


@pytest.fixture
def engines(cache: Path, tmp_path: Path) -> Iterator[Callable[..., BlendEngine]]:
    made: list[BlendEngine] = []

    def make(loaded: Any = None, **options: Any) -> BlendEngine:
        made.append(tiny.engine(loaded or model(), tmp_path / f"store{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def hybrid() -> Any:
    return tiny.family("qwen3_5", initializer_range=0.2, **HYBRID).bfloat16()


def closed(engine: BlendEngine) -> None:
    """Close it, so that its packed weights leave memory."""
    engine.close()
    gc.collect()


QUESTION = "what did the company do in the year 1874?"


@pytest.mark.parametrize(
    ("name", "loaded"), [*((name, model) for name in NAMES), (NAMES[0], hybrid)]
)
def test_tokens_behind_the_first_are_decoded_with_packed_weights(
    name: str,
    loaded: Callable[[], Any],
    engines: Callable[..., BlendEngine],
    products: list[int],
) -> None:
    engine = engines(loaded(), decode_weights=name)
    answer = engine.generate(QUESTION, max_new_tokens=4)
    layers = len(packing.linear_layers(engine.adapter.model))
    assert answer.metrics.decode_weights == name
    assert products == [1] * layers * (answer.metrics.new_tokens - 1)
    assert not answer.metrics.notes


def test_native_weights_decode_by_themselves(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    answer = engines(decode_weights="native").generate(QUESTION, max_new_tokens=4)
    assert answer.metrics.decode_weights == "native"
    assert not products


def test_prefills_and_stored_kv_are_those_of_the_native_weights(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    loaded = model()
    native, packed = engines(loaded), engines(loaded, decode_weights="int8")
    layers = len(packing.linear_layers(loaded))
    for engine in (native, packed):
        engine.ingest([tiny.document(0, 4)])
    for mode in ("blend", "full", "reuse", "prefix"):
        text = f"In mode {mode}:\n\n{tiny.chunk_texts(native, 0)[0]}"
        first = native.generate(text, max_new_tokens=1, mode=mode)
        assert not products
        answer = packed.generate(text, max_new_tokens=2, mode=mode)
        assert answer.text.startswith(first.text)
        assert answer.metrics.reused_tokens == first.metrics.reused_tokens
        assert products == [1] * layers * (answer.metrics.new_tokens - 1)
        products.clear()
    namespaces = {engine.kv_namespace.validity.namespace for engine in (native, packed)}
    assert len(namespaces) == 1


def test_a_prompt_of_which_one_token_is_computed_is_no_step_of_decoding(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    engine, prompt = engines(decode_weights="int8"), " ".join([QUESTION] * 8)
    steps = 0
    for computed in (None, 1):
        metrics = engine.generate(prompt, max_new_tokens=2).metrics
        assert computed in (None, metrics.prompt_tokens - metrics.prefix_tokens)
        steps += metrics.new_tokens - 1
    assert products == [1] * len(packing.linear_layers(engine.adapter.model)) * steps


def test_one_token_needs_no_packed_weights(
    engines: Callable[..., BlendEngine], cache: Path
) -> None:
    answer = engines(decode_weights="int8").generate(QUESTION, max_new_tokens=1)
    assert answer.metrics.decode_weights == "native"
    assert not answer.metrics.notes
    assert not cache.exists()


@pytest.mark.parametrize("loaded", [model, hybrid])
def test_joint_steps_use_packed_weights_up_to_the_rows_where_they_are_faster(
    loaded: Callable[[], Any],
    engines: Callable[..., BlendEngine],
    products: list[int],
    sizes: list[int],
) -> None:
    engine = engines(loaded(), decode_weights="int8")
    answers = engine.batch([f"{QUESTION} {i}" for i in range(6)], max_new_tokens=6)
    assert max(products) == 4 < max(sizes)
    assert {answer.metrics.decode_weights for answer in answers} == {"int8"}
    products.clear()
    engine.batch([QUESTION] * 3, max_new_tokens=4)
    assert max(products) > 1


def test_requests_that_run_together_decode_each_with_the_weights_of_its_metrics(
    engines: Callable[..., BlendEngine], products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the weights are chosen while a request runs that began with the model's own."""
    engine = engines(decode_weights="int8")
    choice = engine.kv_namespace.model.decode_weights
    weights = [None, choice.now()]
    monkeypatch.setattr(choice, "now", lambda: weights.pop(0))
    with engine.scheduler.held():
        asking = [
            engine.stream(
                f"{QUESTION} {i}", max_new_tokens=tokens, generate_kwargs={"min_new_tokens": tokens}
            )
            for i, tokens in enumerate((12, 8))
        ]
    own, packed = (pieces.answer.metrics for pieces in asking)
    assert (own.decode_weights, packed.decode_weights) == ("native", "int8")
    layers = len(packing.linear_layers(engine.adapter.model))
    assert products == [1] * layers * (packed.new_tokens - 1)


def test_changed_weights_are_packed_again(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    loaded = model()
    engine = engines(loaded, decode_weights="int8")
    engine.generate(QUESTION, max_new_tokens=3)
    before = engine.kv_namespace.model.decode_weights.now()
    assert before is engine.kv_namespace.model.decode_weights.now()
    loaded.lm_head.weight.data.mul_(-1)  # changes no version and no address
    engine.generate(QUESTION, max_new_tokens=3)
    after = engine.kv_namespace.model.decode_weights.now()
    assert before is not None
    assert after is not None
    assert after is not before
    assert not torch.equal(before.layers["lm_head"].packed[0], after.layers["lm_head"].packed[0])


def test_packed_weights_are_kept_and_read_again(
    engines: Callable[..., BlendEngine], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(decode_weights="int4")
    first = engine.generate(QUESTION, max_new_tokens=4)
    closed(engine)
    [file] = cache.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    packed: list[int] = []
    stock = packing.pack
    monkeypatch.setattr(packing, "pack", lambda *given: packed.append(1) or stock(*given))
    again = engines(decode_weights="int4").generate(QUESTION, max_new_tokens=4)
    assert not packed
    assert again.text == first.text


def test_packed_weights_that_are_read_are_aligned_as_the_products_need(
    engines: Callable[..., BlendEngine],
) -> None:
    engine = engines(decode_weights="int8")
    engine.generate(QUESTION, max_new_tokens=2)
    closed(engine)
    with tiny.counted(packing, "pack") as made:
        found = engines(decode_weights="int8").kv_namespace.model.decode_weights.now()
    assert found is not None
    assert not made
    assert all(part.data_ptr() % 64 == 0 for one in found.layers.values() for part in one.packed)


def test_engines_over_the_same_weights_share_the_packed_copies(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one loaded model or over two, also if there is no memory for further copies."""
    loaded = model()
    with tiny.counted(packing, "pack") as made, tiny.counted(packed_files, "_read") as read:
        using = [engines(loaded, decode_weights="int8")]
        assert using[0].kv_namespace.model.decode_weights.now() is not None
        monkeypatch.setattr(packed_files, "available_bytes", lambda: 1000)
        using += [engines(each, decode_weights="int8") for each in (loaded, model())]
        found = [engine.kv_namespace.model.decode_weights.now() for engine in using]
    assert (len(made), len(read)) == (1, 1)
    copies = [weights.layers["lm_head"].packed[0] for weights in found if weights is not None]
    assert [copy is copies[0] for copy in copies] == [True] * 3
    texts = {engine.generate(QUESTION, max_new_tokens=6).text for engine in using}
    assert len(texts) == 1
    kept = weakref.ref(copies[0])
    del found, copies
    for engine in using:
        assert kept() is not None
        closed(engine)
    assert kept() is None


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_damaged_packed_weights_are_made_and_kept_again(
    damage: str,
    engines: Callable[..., BlendEngine],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engines(decode_weights="int8")
    first = engine.generate(QUESTION, max_new_tokens=4)
    closed(engine)
    [file] = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[-100] ^= 255
    file.write_bytes({"flipped": content, "cut": content[:-50], "empty": b""}[damage])
    for is_damaged in (True, False):
        caplog.clear()
        engine = engines(decode_weights="int8")
        again = engine.generate(QUESTION, max_new_tokens=4)
        closed(engine)
        assert again.text == first.text
        assert again.metrics.decode_weights == "int8"
        warnings = [each for each in caplog.messages if "packed weights" in each]
        assert len(warnings) == is_damaged
        assert all(f"{file}" in each and "are made again" in each for each in warnings)


@pytest.mark.parametrize(
    ("name", "kept"), [("ours/model", [1, 2]), ("", [1, 2, 3, 4])], ids=["named", "unnamed"]
)
def test_packed_weights_written_long_ago_are_removed_and_the_last_ones_stay(
    name: str,
    kept: list[int],
    engines: Callable[..., BlendEngine],
    cache: Path,
) -> None:
    """Two adapters of one model may take turns, and models without a name may be different ones."""
    files: dict[int, Path] = {}
    for seed in range(kept[-1] + 1):
        loaded = model(seed=seed, num_hidden_layers=1)
        loaded.config.name_or_path = name
        engines(loaded, decode_weights="int8").kv_namespace.model.decode_weights.now()
        [file] = {*cache.iterdir()} - {*files.values()}
        os.utime(file, (seed, seed))
        files[seed] = file
    assert [seed for seed, file in files.items() if file.exists()] == kept


def test_a_cache_that_cannot_be_written_is_no_error_and_said_once(
    engines: Callable[..., BlendEngine], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file")
    for name in NAMES:
        answer = engines(decode_weights=name).generate(QUESTION, max_new_tokens=2)
        assert answer.metrics.decode_weights == name
    [warning] = [each for each in caplog.messages if "BLENDRAG_CACHE" in each]
    assert warning.startswith(f"{cache.parent} cannot be written (")


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_files, "available_bytes", lambda: 1000)


def no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "is_available", lambda: False)


def only_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 2**40)


def never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "most_rows", lambda layers: packing.FastRows(0, True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_memory, "1000 bytes are free"),
        (no_operators, "torch has no products"),
        (only_small_layers, "no linear layer of at least"),
        (never_faster, "not faster on this machine"),
    ],
)
def test_a_model_that_cannot_have_packed_weights_keeps_its_own_and_says_why(
    change: Callable[[pytest.MonkeyPatch], None],
    why: str,
    engines: Callable[..., BlendEngine],
    monkeypatch: pytest.MonkeyPatch,
    products: list[int],
) -> None:
    change(monkeypatch)
    answer = engines(decode_weights="int8").generate(QUESTION, max_new_tokens=3)
    assert answer.metrics.decode_weights == "native"
    [note] = [note for note in answer.metrics.notes if "decode_weights int8" in note]
    assert why in note
    assert not products


def test_other_dtypes_and_refused_models_keep_their_weights(
    engines: Callable[..., BlendEngine],
) -> None:
    wide = engines(tiny.llama(), decode_weights="int8").generate(QUESTION, max_new_tokens=2)
    assert any("another dtype" in note for note in wide.metrics.notes)
    refused = engines(tiny.family("gpt2").bfloat16(), decode_weights="int8")
    answer = refused.generate(QUESTION, max_new_tokens=2, mode="full")
    assert any("decoded together" in note for note in answer.metrics.notes)


def test_a_model_that_decodes_alone_keeps_its_weights(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    capped = tiny.family("gemma2").bfloat16()
    answer = engines(capped, decode_weights="int8").generate(QUESTION, max_new_tokens=3)
    assert any("not decoded together" in note for note in answer.metrics.notes)
    assert not products


def test_copies_that_cannot_be_made_are_no_error(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 2 bytes")

    monkeypatch.setattr(packing, "pack", fail)
    answer = engines(decode_weights="int8").generate(QUESTION, max_new_tokens=3)
    assert answer.metrics.decode_weights == "native"
    assert any("cannot be made: not enough memory" in note for note in answer.metrics.notes)


def test_an_interrupted_packing_is_done_again(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    choice = engines(decode_weights="int8").kv_namespace.model.decode_weights
    with monkeypatch.context() as patched:
        patched.setattr(packing, "pack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            choice.now()
    assert choice.now() is not None


# -- auto -----------------------------------------------------------------------------------------


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of any size are measured, on one short text."""
    monkeypatch.setattr(choosing, "LEAST_BYTES", 0)
    monkeypatch.setattr(agreeing, "TEXTS", ("the company of the old town",))
    monkeypatch.setattr(agreeing, "TOKENS", 10)


@pytest.fixture
def agrees(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def set_least(suffices: bool) -> None:
        monkeypatch.setattr(agreeing, "LEAST_AGREEMENT", 0.0 if suffices else 1.1)

    return set_least


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(("suffices", "name"), [(True, "int8"), (False, "native")])
def test_auto_measures_in_the_background_and_then_uses_weights_that_agree(
    suffices: bool,
    name: str,
    engines: Callable[..., BlendEngine],
    agrees: Callable[[bool], None],
) -> None:
    agrees(suffices)
    engine = engines(decode_weights="auto")
    choice = engine.kv_namespace.model.decode_weights
    assert engine.generate(QUESTION, max_new_tokens=3).metrics.decode_weights == "native"
    while choice.is_measurable:
        engine.drain()
    assert engine.generate(QUESTION, max_new_tokens=3).metrics.decode_weights == name
    again = engines(decode_weights="auto")
    answer = again.generate(QUESTION, max_new_tokens=3)
    assert answer.metrics.decode_weights == name  # remembered
    assert not answer.metrics.notes


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(("wrong", "name"), [(["int8"], "head"), (["int8", "int4"], "native")])
def test_auto_packs_the_lm_head_and_reorders_layers_if_packed_ones_choose_other_tokens(
    wrong: list[str],
    name: str,
    engines: Callable[..., BlendEngine],
    products: list[int],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packing, "EXACT_LOGITS", 8)
    for each in wrong:
        kind = packing.FORMATS[each]
        negated = replace(kind, pack=lambda weight, pack=kind.pack: pack(-weight))
        monkeypatch.setitem(packing.FORMATS, each, negated)  # type: ignore[arg-type]
    loaded = model()
    engine = engines(loaded, decode_weights="auto")
    choice = engine.kv_namespace.model.decode_weights
    with caplog.at_level("INFO", "blendrag"):
        choice.measure_all()
    assert (
        f" decodes with its own weights{' and a packed LM head' * (name == 'head')}"
        in caplog.messages[-1]
    )
    chosen = choice.now()
    expected = ["lm_head", *packing.reorder(loaded)] if name == "head" else []
    assert list(chosen.layers if chosen else []) == expected
    assert ["-head-" in file.name for file in cache.iterdir()] == [True] * (name == "head")
    products.clear()
    answer = engine.generate(QUESTION, max_new_tokens=4)
    assert answer.metrics.decode_weights == name
    assert products == [1] * (answer.metrics.new_tokens - 1) * (name == "head")
    own = engines(loaded, decode_weights="native").generate(QUESTION, max_new_tokens=4)
    assert answer.text == own.text
    room = packing.size_bytes(loaded, "head") * 4 // 3  # too little for all copies
    monkeypatch.setattr(packed_files, "available_bytes", lambda: room)
    again = engines(decode_weights="auto").generate(QUESTION, max_new_tokens=4)
    assert again.metrics.decode_weights == name  # remembered


@pytest.mark.usefixtures("texts")
def test_copies_that_agree_too_little_are_gone_before_others_are_made(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_sufficient", lambda found: "head")
    monkeypatch.setattr(agreeing, "LEAST_AGREEMENT", 1.1)
    real, made, alive = choosing.packed_weights, [], []  # type: ignore[var-annotated]

    def packed_weights(adapter: Any, name: str) -> Any:
        alive.append([each() is not None for each in made])
        found = real(adapter, name)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(choosing, "packed_weights", packed_weights)
    engines(decode_weights="auto").kv_namespace.model.decode_weights.measure_all()
    assert alive == [[], [False]]


def test_layers_are_reordered_only_if_there_is_memory_for_it(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = engines().adapter
    needed = packing.reordered_bytes(adapter.model)
    for free in (2 * needed, needed):
        monkeypatch.setattr(packed_files, "available_bytes", lambda free=free: free)
        layers = packing.reorder(adapter.model) if free > needed else {}
        assert [*packed_files.packed_weights(adapter, "head")] == ["lm_head", *layers]


@pytest.mark.usefixtures("texts")
def test_no_request_waits_for_copies_that_it_does_not_use(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = engines(decode_weights="auto").kv_namespace.model.decode_weights
    with tiny.counted(packing, "pack") as packed:
        assert choice.now() is None
        assert choice.is_measurable
        assert not packed
        choice.measure()
        assert packed


@pytest.mark.usefixtures("texts")
def test_requests_may_run_between_the_shapes_whose_copies_are_timed(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = engines(decode_weights="auto").kv_namespace.model.decode_weights
    timed = list[int]()

    def most_rows(layers: Any) -> packing.FastRows:
        timed.append(len(layers))
        return packing.FastRows(4, True)

    monkeypatch.setattr(packing, "most_rows", most_rows)
    assert choice.now() is None
    each_piece = list[int]()
    while choice.is_measurable:
        before = len(timed)
        choice.measure()
        each_piece.append(len(timed) - before)
    assert sum(each_piece) > 2
    assert set(each_piece) == {0, 1}


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(("wanted", "is_steady"), [("auto", False), ("int8", True)])
def test_packed_weights_that_are_not_faster_are_not_made_again_if_that_is_certain(
    wanted: str,
    is_steady: bool,
    engines: Callable[..., BlendEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "most_rows", lambda layers: packing.FastRows(0, is_steady))
    engines(decode_weights=wanted).kv_namespace.model.decode_weights.measure_all()
    with tiny.counted(choosing, "_making") as made:
        again = engines(decode_weights=wanted)
        again.kv_namespace.model.decode_weights.measure_all()
        answer = again.generate(QUESTION, max_new_tokens=3)
    assert bool(made) is not is_steady
    assert answer.metrics.decode_weights == "native"
    assert any(choosing.NOT_FASTER in note for note in answer.metrics.notes) is (wanted == "int8")


def test_numbers_of_rows_that_are_not_certain_are_measured_again(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_steady, is_measured in ((False, True), (True, True), (True, False)):
        measured = []

        def most_rows(layers: Any, steady: bool = is_steady, seen: Any = measured) -> Any:
            seen.append(layers)
            return packing.FastRows(4, steady)

        monkeypatch.setattr(packing, "most_rows", most_rows)
        assert engines(decode_weights="int8").kv_namespace.model.decode_weights.now() is not None
        assert bool(measured) is is_measured


def test_copies_are_measured_together_if_their_layers_have_the_same_outputs(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, key and value have as many outputs as gate and up."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    of_model = model(hidden_size=128, intermediate_size=128, **heads)
    measured = []

    def most_rows(layers: Any) -> packing.FastRows:
        measured.append({tuple(each.out_features for each in one.layers) for one in layers})
        return packing.FastRows(4, True)

    monkeypatch.setattr(packing, "most_rows", most_rows)
    engines(of_model, decode_weights="int8").kv_namespace.model.decode_weights.now()
    assert {(128, 64, 64)} in measured
    assert {(128, 128)} in measured


@pytest.mark.usefixtures("texts")
def test_an_ingest_measures_and_says_what_it_found(
    engines: Callable[..., BlendEngine],
    agrees: Callable[[bool], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    agrees(True)
    engine = engines(decode_weights="auto")
    with caplog.at_level("INFO", "blendrag"):
        engine.ingest([tiny.document(0, 2)])
    began, found = [each for each in caplog.records if is_step(each)]  # nothing is wrong
    assert "measuring once whether" in began.getMessage()
    assert found.getMessage().endswith(" decodes with int8 weights")
    assert engine.generate(QUESTION, max_new_tokens=3).metrics.decode_weights == "int8"


@pytest.mark.usefixtures("texts")
def test_an_ingest_that_is_interrupted_while_it_measures_has_stored_its_documents(
    engines: Callable[..., BlendEngine],
) -> None:
    shares: list[float] = []

    def watch(report: IngestReport) -> None:
        if report.measured is not None:
            shares.append(report.measured)
            if report.measured >= 0.3:
                raise KeyboardInterrupt

    engine = engines(decode_weights="auto")
    report = engine.ingest([tiny.document(0, 2)], watch)
    assert report.interrupted
    assert sorted({*shares}) == pytest.approx([0.0, 0.1, 0.2, 0.3])  # the first make the copies
    assert (report.documents, report.chunks_computed) == (1, 1)
    again = engine.ingest([tiny.document(0, 2)])
    assert (again.documents_unchanged, again.measured) == (1, None)
    assert engine.kv_namespace.model.decode_weights.is_measurable


@pytest.mark.usefixtures("texts")
def test_an_ingest_that_is_interrupted_after_it_measured_says_that_it_did(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(found: object) -> str:  # as while the LM head is packed
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "_sufficient", interrupt)
    told: list[float | None] = []
    engine = engines(decode_weights="auto")
    report = engine.ingest([tiny.document(0, 2)], lambda report: told.append(report.measured))
    assert report.interrupted
    assert told[-2:] == [0.9, 1.0]


@pytest.mark.usefixtures("texts")
def test_a_dry_run_counts_the_seconds_of_the_measurement_until_it_is_done(
    engines: Callable[..., BlendEngine], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(decode_weights="auto")
    choice = engine.kv_namespace.model.decode_weights
    assert choice.expected_s(1.0) >= 320
    with monkeypatch.context() as patch:
        patch.setattr(choice, "expected_s", lambda step_s: 1e6)
        assert engine.dry_run([tiny.document(0)]).seconds >= 1e6
    assert not cache.exists()  # made no copies
    engine.ingest([tiny.document(0, 2)])
    assert choice.expected_s(1.0) == 0


@pytest.mark.parametrize("name", ["native", *NAMES])
def test_named_weights_are_not_measured(engines: Callable[..., BlendEngine], name: str) -> None:
    choice = engines(decode_weights=name).kv_namespace.model.decode_weights
    assert choice.expected_s(1.0) == 0


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("pieces", [1, 8], ids=["copies-are-timed", "tokens-are-decoded"])
def test_weights_that_change_while_they_are_measured_are_measured_again(
    pieces: int, engines: Callable[..., BlendEngine], agrees: Callable[[bool], None]
) -> None:
    agrees(True)
    loaded = model()
    engine = engines(loaded, decode_weights="auto")
    choice = engine.kv_namespace.model.decode_weights
    with engine.kv_namespace.model.adapter.lock, torch.inference_mode():
        choice.now()
        for _ in range(pieces):
            choice.measure()
        assert choice.is_measurable
        loaded.lm_head.weight.data.mul_(-1)
        while choice.is_measurable:
            choice.measure()
        assert choice.now() is None
        assert choice.is_measurable
        choice.measure_all()
        assert choice.now() is not None


@pytest.mark.usefixtures("texts")
def test_an_ingest_lets_requests_in_while_it_measures(engines: Callable[..., BlendEngine]) -> None:
    pieces: list[str] = []

    def computed(call: Callable[[], object]) -> object:
        pieces.append("piece")
        return call()

    engines(decode_weights="auto").kv_namespace.model.decode_weights.measure_all(computed)
    # the look at what is known, packing, times of 4 shapes, 10 tokens, and saying what was found
    assert len(pieces) == 17


@pytest.mark.usefixtures("texts")
def test_a_measurement_that_fails_leaves_the_native_weights(
    engines: Callable[..., BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(agreeing.AgreementMeasurement, "_decode", fail)
    engine = engines(decode_weights="auto")
    engine.ingest([tiny.document(0, 2)])
    assert engine.generate(QUESTION, max_new_tokens=3).metrics.decode_weights == "native"
    assert not engine.kv_namespace.model.decode_weights.is_measurable


def test_auto_leaves_small_models_alone(
    engines: Callable[..., BlendEngine], products: list[int]
) -> None:
    engine = engines(decode_weights="auto")
    engine.ingest([tiny.document(0, 2)])
    answer = engine.generate(QUESTION, max_new_tokens=3)
    assert answer.metrics.decode_weights == "native"
    assert not any("decode_weights" in note for note in answer.metrics.notes)
    assert not products


@pytest.mark.usefixtures("texts")
def test_exact_ties_count_as_agreement_and_other_tokens_do_not() -> None:
    adapter = tiny.adapter(model())

    def measured(change: Callable[[torch.Tensor], torch.Tensor]) -> agreeing.DecodeAgreement:
        class Fake:
            size_bytes = 1024
            head = None
            layers_by_format: ClassVar[dict[str, int]] = {}

            def decode(self, forward: Any, **given: Any) -> Any:
                out = forward(**given)
                out.logits = change(out.logits)
                return out

        return agreeing.AgreementMeasurement(adapter, Fake()).run()  # type: ignore[arg-type]

    same = measured(lambda logits: logits)
    assert (same.tokens, same.share, same.kl) == (10, 1.0, 0.0)
    assert measured(lambda logits: -logits).share == 0.0
    head = adapter.model.lm_head.weight.data
    head[5], head[7], head[9], head[11] = 100.0, 100.0, -100.0, -100.0  # two are always the highest
    last = torch.arange(len(head)) * 1e-6
    assert measured(lambda logits: logits.float() + last).share == 1.0


@pytest.mark.usefixtures("texts")
def test_forwards_of_other_threads_are_not_measured() -> None:
    adapter = tiny.adapter(model())
    head, own = adapter.model.lm_head, threading.get_ident()
    weights = packing.DecodeWeights(adapter.model, "int8", packing.pack(adapter.model, "int8"))

    def compute_elsewhere(layer: Any, inputs: Any, output: Any) -> None:
        if threading.get_ident() == own:
            other = threading.Thread(target=torch.inference_mode()(head), args=inputs)
            other.start()
            other.join()

    head.register_forward_hook(compute_elsewhere)
    assert agreeing.AgreementMeasurement(adapter, weights).run().head_agreed == 10


@pytest.mark.usefixtures("texts", "cache")
@pytest.mark.parametrize("has_copy", [True, False])
def test_verify_tells_of_the_lm_head_alone_if_it_has_a_copy(
    has_copy: bool, agrees: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def most_rows(layers: Any) -> packing.FastRows:
        return packing.FastRows(0 if layers[0].is_head and not has_copy else 4, True)

    agrees(False)
    kept = model()
    monkeypatch.setattr("blendrag.model.loading.load_adapter", lambda *_: tiny.adapter(kept))
    monkeypatch.setattr(packing, "most_rows", most_rows)
    shown = invoke("verify", "tiny").stdout
    assert ("only the LM head packed: the same token in " in shown) is has_copy


@pytest.mark.usefixtures("texts", "cache")
def test_verify_measures_copies_once_that_two_names_have_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a model that was unpacked from 4 bits: in both, all layers have 4 bits."""
    kept = model()
    monkeypatch.setattr("blendrag.model.loading.load_adapter", lambda *_: tiny.adapter(kept))
    monkeypatch.setattr(packing, "_unpacked_from", lambda weight: packing.FORMATS["int4"])
    with tiny.counted(agreeing.AgreementMeasurement, "run") as runs:
        fields = printed("verify", "tiny")["decode_weights"]
        assert fields["int8"] == fields["int4"]
        assert len(runs) == 1
    assert invoke("verify", "tiny").stdout.count("decoding with int8 or int4 weights, ") == 1


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("suffices", [True, False])
def test_verify_times_the_opening_of_copies_from_the_cache_and_keeps_those_that_agree(
    suffices: bool,
    agrees: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
) -> None:
    agrees(suffices)
    kept = model()
    monkeypatch.setattr("blendrag.model.loading.load_adapter", lambda *_: tiny.adapter(kept))
    with tiny.counted(packing, "pack") as packed, tiny.counted(packed_files, "_copy") as read:
        printed("verify", "tiny")
    assert len(packed) == len(NAMES)
    assert len(read) == 2 * len(packing.linear_layers(kept)) * len(NAMES)
    assert len(list(cache.iterdir())) == len(NAMES) * suffices


@pytest.mark.usefixtures("texts", "cache")
def test_verify_prints_agreement_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = model()
    monkeypatch.setattr("blendrag.model.loading.load_adapter", lambda *_: tiny.adapter(kept))
    fields = printed("verify", "tiny")["decode_weights"]
    assert [fields[name]["tokens"] for name in NAMES] == [10, 10]
    assert 0 <= fields["int8"]["share"] <= 1
    assert fields["int8"]["opening_s"] > 0
    shown = invoke("verify", "tiny").stdout
    assert re.search(r"decoding with int8 weights, .* more, opened in \d\.\d s: ", shown)
    assert "of 10 steps, KL " in shown
    layers = len(packing.linear_layers(kept)) - 1  # but the LM head
    assert fields["int8"]["layers"] == {"int4": 1, "int8": layers}
    assert f"{layers} int8" in shown
    assert "1 int4" in shown
