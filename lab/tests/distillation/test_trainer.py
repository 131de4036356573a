"""A writer is trained, kept, resumed and refused."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
import writers
from blendrag.corpus.embedder import Embedder
from blendrag.engine.kv_validity import BEHIND_SHARE
from blendrag.engine.neighbours import Neighbours
from blendrag.errors import InvalidInputError, ModelError
from blendrag.model.writer import FittedWriter, Writer
from blendrag.text.chunking import Chunker
from blendrag_lab.distillation import trainer
from blendrag_lab.distillation.adapt import (
    VECTORS,
    _similar,
    _vectors,
    adapt,
    held_out_prompts,
    run_digest,
)
from blendrag_lab.distillation.forwards import Forwards
from blendrag_lab.distillation.material import (
    Asked,
    Group,
    Material,
    Similar,
    documents_as_groups,
    split,
    with_questions,
)
from blendrag_lab.distillation.memory import SHARE, needs_of
from blendrag_lab.distillation.memory import _kept_bytes as kept_bytes
from blendrag_lab.distillation.plot import write_plot
from blendrag_lab.distillation.questions import cleaned_question, read_questions
from blendrag_lab.distillation.report import AdaptReport
from blendrag_lab.distillation.trainer import (
    CHECKPOINT,
    MAX_SKIPPED,
    Ending,
    HeldOut,
    Progress,
    Score,
    Trainer,
)
from blendrag_lab.distillation.writer import TrainedWriter
from lab.tests.distillation.tiny_material import (
    corpus,
    forwards,
    passage,
    prompt,
    randomised,
    recipe,
    small,
)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(out / "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[AdaptReport, Path]:
    """A run of ``recipe()`` without interruption, and its folder."""
    adapter, out = small(), tmp_path_factory.mktemp("whole")
    return adapt(adapter, corpus(adapter), recipe(), out), out


def scored(kl: float) -> Score:
    return Score.over([kl], [0.5], [kl], [""])


def test_training_brings_answers_nearer_to_full_prefill(tmp_path: Path) -> None:
    adapter = small()
    report = adapt(adapter, corpus(adapter), recipe(steps=20, measure_every=10), tmp_path)
    assert report.after.mean_kl < 0.9 * report.before.mean_kl
    measured = [score.typical_kl for _, score in report.progress.scores if score is not None]
    assert report.after.typical_kl == min(measured)
    assert report.before.questions == report.after.questions > 0
    assert {p.name for p in tmp_path.iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors", "README.md", "report.json",
    }  # fmt: skip
    assert not (tmp_path / CHECKPOINT).exists()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["bias"]) == ("LORA", 4, "none")
    assert "lm_head" not in str(config["target_modules"])
    assert f"| {report.after.questions} |" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["best_step"] == report.best_step


@pytest.mark.parametrize(
    "before", ["", "The mill of Hadley stood near the bridge, until it burnt."]
)
def test_store_encodes_chunks_with_a_saved_writer_as_the_student_did(
    tmp_path: Path, before: str
) -> None:
    adapter = small()
    prefix = corpus(adapter).prefix_ids
    context = tuple(adapter.tokens.encode_text(before))
    asked = replace(prompt(adapter), contexts=(context, context, ()))
    with adapter.lock:
        trained = TrainedWriter(adapter, 4, 0)
        randomised(trained)
        trained.save(tmp_path)
        with torch.no_grad():
            kv, places = forwards(adapter, trained).stored([asked], writes=True)
        trained.close()
    fitted = FittedWriter(Writer.load(tmp_path), adapter)
    first, second, _ = asked.chunks
    ids = second.ids
    with fitted.active(len(prefix), len(ids)):
        stored = adapter.encode(prefix, ids)
    plain = adapter.encode(prefix, ids)
    if context:
        with fitted.active(len(prefix) + len(context), len(ids)):
            behind = adapter.encode(prefix, ids, context_ids=context)
            stored = behind.mean_with(stored, BEHIND_SHARE)
        plain = adapter.encode(prefix, ids, context_ids=context).mean_with(plain, BEHIND_SHARE)
    at = {int(p): n for n, p in enumerate(places.positions[0])}
    rows, of_first = ([at[p] for p in range(each.position, each.end)] for each in (second, first))
    stock = adapter.encode(prefix, first.ids)
    for layer, (_, values) in enumerate(kv):
        assert tiny.difference(values[0, :, rows], stored.layers[layer][1]) < 1e-4
        assert tiny.difference(values[0, :, rows], plain.layers[layer][1]) > 1e-2
        assert tiny.difference(values[0, :, of_first], stock.layers[layer][1]) < 1e-4


class NamesEmbedder(Embedder):
    """Counts of capitalised words, so that texts about one town are similar."""

    def embed(
        self, texts: Sequence[str], titles: Sequence[str] | None = None, **given: object
    ) -> np.ndarray:
        names = sorted({word for text in texts for word in text.split() if word.istitle()})
        rows = [[text.split().count(name) for name in names] for text in texts]
        counts = np.array(rows, np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_chunks_are_encoded_after_those_that_an_ingest_would_choose(tmp_path: Path) -> None:
    adapter = small()
    given = corpus(adapter)
    adapted = replace(given, encode_after=2, embedder=NamesEmbedder("names"))
    train, held = given.groups[:6], given.groups[6:]
    assert adapted.embedder is not None
    vectors = _vectors(adapted.embedder, given.groups, tmp_path, "a run", lambda *_: None)
    similar = partial(_similar, adapter, adapted, vectors)
    materials = [
        Material(adapter.tokens, groups, 3, 2, 64, similar(known))
        for groups, known in ((train, train), (held, given.groups))
    ]
    ids = {
        passage.text: tuple(adapter.tokens.encode_text(passage.text))
        for group in given.groups
        for passage in group.passages
    }
    for material, is_short in itertools.product(materials, (False, True)):
        for seed in range(4):
            drawn = material.draw(random.Random(seed), is_short)
            for chunk, context in zip(drawn.chunks, drawn.contexts, strict=True):
                own = next(text for text in ids if chunk.text in text)
                town = own.split()[3]
                one, other = (ids[t] for t in ids if t.split()[3] == town and t != own)
                assert context in {one + other, other + one}
    assert _similar(adapter, given, {}, train) is None


def test_prompts_are_worded_in_several_ways() -> None:
    adapter = small()
    material = Material(adapter.tokens, corpus(adapter).groups, 3, 2, 64)
    drawn = [material.draw(random.Random(seed)) for seed in range(24)]
    asked = [adapter.tokens.tokenizer.decode([*one.shared_ids, *one.tails[0]]) for one in drawn]
    for words in ("from the context", "Helpful Answer", "Given the context", "shortest possible"):
        assert 1 < sum(words in text for text in asked) < 20


def test_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, whole: tuple[AdaptReport, Path]
) -> None:
    def stop(progress: Progress, _: Score) -> None:
        if progress.step == 1:
            raise KeyboardInterrupt

    other = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(other, corpus(other), recipe(), tmp_path, watch=stop)
    again = small()
    said: list[str] = []
    adapt(again, corpus(again), recipe(), tmp_path, note=said.append)
    assert "going on after step 1 of 4" in said
    expected, found = weights(whole[1]), weights(tmp_path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_killed_run_goes_on_from_a_checkpoint_between_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[AdaptReport, Path]
) -> None:
    real, calls = torch.optim.AdamW.step, []

    def killed(self: torch.optim.AdamW, *more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise SystemExit  # nothing is saved on the way out
        return real(self, *more)

    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(torch.optim.AdamW, "step", killed)
    adapter = small()
    with pytest.raises(SystemExit):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)
    again = small()
    said: list[str] = []
    adapt(again, corpus(again), recipe(), tmp_path, note=said.append)
    assert "going on after step 3 of 4" in said  # 2 was measured
    expected, found = weights(whole[1]), weights(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_interrupted_measurement_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[AdaptReport, Path]
) -> None:
    real, calls = HeldOut.score, []

    def interrupted(self: HeldOut, writes: bool = True) -> Score:
        calls.append(writes)
        if len(calls) == 2:  # the first one precedes training
            raise KeyboardInterrupt
        return real(self, writes)

    monkeypatch.setattr(HeldOut, "score", interrupted)
    adapter = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)
    again = small()
    report = adapt(again, corpus(again), recipe(), tmp_path)
    assert report.progress.scores == whole[0].progress.scores


def test_interrupted_copy_of_the_best_writer_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TrainedWriter.state, []

    def interrupted(self: TrainedWriter) -> dict[str, torch.Tensor]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(TrainedWriter, "state", interrupted)
    adapter = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)
    kept = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert kept["progress"]["step"] == 2
    assert kept["best"] is None
    assert not kept["progress"]["scores"]


def test_ctrl_c_while_weights_change_takes_effect_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[AdaptReport, Path]
) -> None:
    real, calls = torch.optim.AdamW.step, []

    def interrupted(self: torch.optim.AdamW, *more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self, *more)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    adapter = small()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            adapt(adapter, corpus(adapter), recipe(), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    again = small()
    said: list[str] = []
    adapt(again, corpus(again), recipe(), tmp_path, note=said.append)
    assert "going on after step 3 of 4" in said
    expected, found = weights(whole[1]), weights(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_finished_writer_is_not_overwritten(tmp_path: Path) -> None:
    adapter = small()
    adapt(adapter, corpus(adapter), recipe(steps=1), tmp_path)
    with pytest.raises(InvalidInputError, match="holds a finished writer"):
        adapt(adapter, corpus(adapter), recipe(steps=2), tmp_path)


def test_prompts_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    adapter = small(max_position_embeddings=300)
    with pytest.raises(InvalidInputError, match="fewer chunks"):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)


def test_training_ends_when_held_out_prompts_gain_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kls = iter([1.0, 0.5, 0.6, 0.7, 0.8, 0.9])

    monkeypatch.setattr(HeldOut, "score", lambda self, writes=True: scored(next(kls)))
    adapter = small()
    given = recipe(steps=50, measure_every=1, patience=2)
    report = adapt(adapter, corpus(adapter), given, tmp_path)
    assert report.progress.step == 3
    assert report.best_step == 1
    assert report.recovered == 0.5


def test_card_of_a_writer_that_does_not_help_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kls = iter([1.0, 1.1])
    monkeypatch.setattr(HeldOut, "score", lambda self, writes=True: scored(next(kls)))
    adapter = small()
    report = adapt(adapter, corpus(adapter), recipe(steps=1), tmp_path)
    assert not report.helps
    card = (tmp_path / "README.md").read_text()
    assert "Do not use it yet" in card
    assert "blendrag ingest" not in card


class Broken:
    """Makes the answer's KL of some prompts that are trained on NaN, or its gradient infinite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, numbers: Container[int], what: str) -> None:
        real, self.calls = Forwards.deviations, 0

        def deviations(forwards: Forwards, prompts: Any, targets: Any, writes: bool = True) -> Any:
            found = real(forwards, prompts, targets, writes)
            if not torch.is_grad_enabled():
                return found
            self.calls += 1
            if self.calls not in numbers:
                return found
            return [
                [type(d)(d.question, self.changed(d.answer, what), d.agrees) for d in each]
                for each in found
            ]

        monkeypatch.setattr(Forwards, "deviations", deviations)

    def changed(self, answer: torch.Tensor, what: str) -> torch.Tensor:
        if what == "loss":
            return answer * float("nan")
        answer.register_hook(lambda gradient: gradient * float("inf"))
        return answer


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_step_without_a_finite_loss_or_gradient_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    real = Trainer.step

    def step(self: Trainer) -> None:
        real(self)
        moments = {
            f"{n} {name}": value.clone()
            for n, each in enumerate(self._optimizer.state.values())
            for name, value in each.items()
        }
        kept.append(self._writer.state() | moments)

    monkeypatch.setattr(Trainer, "step", step)
    Broken(monkeypatch, {2}, what)
    adapter = small()
    report = adapt(adapter, corpus(adapter), recipe(), tmp_path)
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert not all(torch.equal(kept[1][name], kept[2][name]) for name in kept[1])
    assert report.progress.losses[1] is None
    assert report.progress.skipped == 1
    saved = json.loads((tmp_path / "report.json").read_text())
    assert (saved["skipped_steps"], saved["steps"], saved["ended"]) == (1, 4, "all steps are done")
    assert "1 of them skipped" in (tmp_path / "README.md").read_text()
    if what == "loss":
        write_plot(report, tmp_path / "run.png")


def test_several_such_steps_in_a_row_end_the_run_and_keep_the_best_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch, range(4, 99), "loss")
    adapter = small()
    report = adapt(adapter, corpus(adapter), recipe(steps=50, measure_every=2), tmp_path)
    assert report.ending is Ending.NOT_FINITE
    assert report.progress.step == 3 + MAX_SKIPPED
    assert report.best_step in {2, 4, 6, 8}
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
    assert not hasattr(adapter.model, "peft_config")


def test_run_without_any_finite_loss_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch, range(99), "loss")
    adapter = small()
    with pytest.raises(
        ModelError, match=r"loss of every step is not a number.*after 5 steps; nothing"
    ):
        adapt(adapter, corpus(adapter), recipe(steps=50), tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_skipped_step_is_known_to_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(progress: Progress, _: Score) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    Broken(monkeypatch, {1}, "loss")
    adapter = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), recipe(), tmp_path, watch=stop)
    report = adapt(adapter, corpus(adapter), recipe(), tmp_path)
    assert report.progress.losses[0] is None
    assert report.progress.skipped == 1


def test_measurement_that_is_no_number_counts_as_one_without_a_better_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kls = iter([1.0, 0.5, math.nan, 0.4, math.nan, math.nan])
    monkeypatch.setattr(HeldOut, "score", lambda self, writes=True: scored(next(kls)))
    adapter = small()
    given = recipe(steps=50, measure_every=1, patience=2)
    report = adapt(adapter, corpus(adapter), given, tmp_path)
    assert report.best_step == 3
    assert report.progress.step == 5
    assert report.ending is Ending.PATIENCE
    assert "NaN" not in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("broken", "says"),
    [(0, "does not compute numbers.*--dtype"), (1, "KL of held-out prompts is not a number")],
)
def test_run_whose_measurements_are_no_numbers_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int, says: str
) -> None:
    kls = iter([1.0] * broken + [math.nan] * 9)
    monkeypatch.setattr(HeldOut, "score", lambda self, writes=True: scored(next(kls)))
    adapter = small()
    with pytest.raises(ModelError, match=says):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_one_question_far_off_does_not_choose_the_writer() -> None:
    most_better = Score.over([0.01, 0.02, 0.01, 0.6], [1.0] * 4, [0.0] * 4, [""] * 4)
    one_better = Score.over([0.04, 0.05, 0.04, 0.5], [1.0] * 4, [0.0] * 4, [""] * 4)
    assert one_better.mean_kl < most_better.mean_kl
    assert Progress(scores=((1, one_better), (2, most_better))).best == (2, most_better)


def test_layers_that_no_store_takes_a_writer_of_are_not_trained(tmp_path: Path) -> None:
    """Beside experts, some models flatten the batch before a linear layer."""
    adapter = small()
    beside = adapter.model.model.layers[1].mlp
    forward = beside.forward
    beside.forward = lambda x: forward(x.flatten(0, 1)).view_as(x)
    report = adapt(adapter, corpus(adapter), recipe(), tmp_path)
    assert report.after.mean_kl > 0
    writer = Writer.load(tmp_path)
    changed = {name.rpartition(".")[0] for name in writer.parts}
    assert changed == {"model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn"}
    FittedWriter(writer, adapter)


def test_saving_a_writer_does_not_ask_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "peft.utils.save_and_load.check_file_exists_on_hf_hub",
        lambda name, *more: asked.append(name),
    )
    adapter = small()
    adapter.model.name_or_path = "someone/model"
    with adapter.lock:
        trained = TrainedWriter(adapter, 4, 0)
        trained.save(tmp_path)
        trained.close()
    assert not asked


def test_checkpoint_of_another_run_or_a_damaged_one_is_not_taken(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    adapter = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), recipe(), tmp_path, watch=stop)
    said: list[str] = []
    with pytest.raises(InvalidInputError, match="another model, material, recipe or version"):
        adapt(
            adapter,
            corpus(adapter),
            recipe(seed=1),
            tmp_path,
            say=lambda text, done, total: said.append(text),
        )
    assert not said  # before anything is computed
    content = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidInputError, match="is damaged"):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)


def test_run_of_another_version_objective_embedder_or_name_is_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = small()
    given = corpus(adapter)

    def digest(**changes: Any) -> str:
        return run_digest(adapter, replace(given, **changes), recipe(), None, ())

    first = digest()
    assert digest(embedder=Embedder("other")) == first  # it embeds nothing
    of_embedders = {digest(encode_after=1, embedder=Embedder(name)) for name in ("one", "other")}
    group = given.groups[0]
    renamed = replace(group, passages=tuple(replace(p, name="other.txt") for p in group.passages))
    found = {first, *of_embedders, digest(groups=(renamed, *given.groups[1:]))}
    for name, value in (("__version__", "0.0.1"), ("OBJECTIVE", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(f"blendrag_lab.distillation.adapt.{name}", value)
            found.add(digest())
    assert len(found) == 6


@pytest.mark.parametrize("changed", [{"writer": None}, {"progress": {"step": 1, "epoch": 2}}])
def test_checkpoint_of_another_version_is_refused(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    adapter = small()
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), recipe(), tmp_path, watch=stop)
    kept = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    kept |= changed
    torch.save({k: v for k, v in kept.items() if v is not None}, tmp_path / CHECKPOINT)
    with pytest.raises(InvalidInputError, match="of another version of blendrag"):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)


def test_questions_that_are_finished_survive_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(adapter: object, texts: Sequence[str], watch: object) -> Iterator[tuple[str, str]]:
        for text in texts:
            if len(asked) == 2:
                asked.append("")
                raise KeyboardInterrupt
            asked.append(text)
            yield text, f"What of {text[:30]}?"

    monkeypatch.setattr("blendrag_lab.distillation.adapt.ask_model", ask)
    adapter = small()
    few = recipe(steps=8)
    with pytest.raises(KeyboardInterrupt):
        adapt(adapter, corpus(adapter), few, tmp_path)
    adapt(adapter, corpus(adapter), few, tmp_path)
    again = [text for text in asked if text]
    assert len(again) == len(set(again)) > 2


def test_a_run_that_goes_on_embeds_nothing_again(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    class Counting(NamesEmbedder):
        calls = 0

        def embed(self, *given: Any, **named: Any) -> np.ndarray:
            self.calls += 1
            return super().embed(*given, **named)

    adapter, embedder = small(), Counting("names")
    given = replace(corpus(adapter), encode_after=1, embedder=embedder)
    for damaged in (False, True):
        out = tmp_path / str(damaged)
        with pytest.raises(KeyboardInterrupt):
            adapt(adapter, given, recipe(), out, watch=stop)
        if damaged:
            (out / VECTORS).write_bytes((out / VECTORS).read_bytes()[:-9])
        embedder.calls = 0
        adapt(adapter, given, recipe(), out)
        assert embedder.calls == damaged
        assert not (out / VECTORS).exists()
    assert weights(tmp_path / "False").keys() == weights(tmp_path / "True").keys()
    for name, tensor in weights(tmp_path / "False").items():
        assert torch.equal(tensor, weights(tmp_path / "True")[name])


def test_held_out_questions_are_as_many_as_announced_and_differ() -> None:
    adapter = small()
    given = corpus(adapter)
    material = Material(adapter.tokens, given.groups, 3, 2, given.chunk_tokens)
    for wanted in (1, 4, 5):
        made = held_out_prompts(material, recipe(held_out=wanted))
        asked = [question for each in made for question in each.questions]
        assert len(asked) == len(set(asked)) == wanted == sum(len(each.tails) for each in made)
    few = replace(material, groups=given.groups[:2])  # one question each
    assert sum(len(each.questions) for each in held_out_prompts(few, recipe(held_out=9))) == 2


def test_training_goes_on_from_a_writer_and_keeps_it_if_none_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = small()
    first = adapt(adapter, corpus(adapter), recipe(), tmp_path / "first")
    start = Writer.load(tmp_path / "first")
    adapt(adapter, corpus(adapter), recipe(), tmp_path / "second", start=start)
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert report["measured"][0]["step"] == 0
    assert report["measured"][0]["typical_kl"] == pytest.approx(first.after.typical_kl, rel=1e-4)
    kls = iter([1.0, 0.5, 0.6, 0.7])
    monkeypatch.setattr(HeldOut, "score", lambda self, writes=True: scored(next(kls)))
    worse = adapt(adapter, corpus(adapter), recipe(), tmp_path / "third", start=start)
    assert worse.best_step == 0
    kept = Writer.load(tmp_path / "third")
    for name, part in start.parts.items():
        assert torch.equal(kept.parts[name].down, part.down)
        assert tiny.difference(kept.parts[name].up, part.up) < 1e-6


def test_training_goes_on_from_a_writer_that_changes_the_whole_last_layer(tmp_path: Path) -> None:
    """As those of earlier versions do, the one that ships among them."""
    adapter = small()
    start = Writer.load(writers.writer(adapter.model, tmp_path / "earlier"))
    trained = TrainedWriter(adapter, start.rank, seed=0)
    try:
        trained.begin_with(start)
        trained.save(tmp_path)
    finally:
        trained.close()
    kept = Writer.load(tmp_path)
    assert kept.parts.keys() < start.parts.keys()
    for name, part in kept.parts.items():
        assert torch.equal(part.down, start.parts[name].down)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"intermediate_size": 80}]
)
def test_writer_that_does_not_fit_is_no_beginning(tmp_path: Path, changes: dict[str, int]) -> None:
    start = Writer.load(writers.writer(small().model, tmp_path / "first"))
    other = small("llama", **changes)
    with pytest.raises(InvalidInputError, match=r"does not fit .*other names or shapes"):
        adapt(other, corpus(other), recipe(), tmp_path / "second", start=start)
    assert not hasattr(other.model, "peft_config")


def test_card_names_the_task_of_each_file_and_documents(tmp_path: Path) -> None:
    adapter = small()
    given = corpus(adapter)
    half = [replace(group, task="records" if n % 2 else "") for n, group in enumerate(given.groups)]
    adapt(adapter, replace(given, groups=tuple(half)), recipe(steps=1, held_out=9), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| records: with |" in card
    assert "| documents: with |" in card


def test_too_small_a_corpus_is_refused(tmp_path: Path) -> None:
    adapter = small()
    with pytest.raises(InvalidInputError, match=r"too small to train a writer on: 3 groups"):
        adapt(adapter, corpus(adapter, groups=3), recipe(), tmp_path)


def test_draws_end_if_all_groups_are_equal() -> None:
    """As those of a file of records that is given twice."""
    adapter = small()
    equal = tuple(Group((passage(0),), (Asked("Who owned it?"),)) for _ in range(2))
    with pytest.raises(InvalidInputError, match="none of 50 prompts"):
        Material(adapter.tokens, equal, 3, 2, 64).draw(random.Random(0))


def test_prompts_of_one_chunk_are_refused_before_the_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> Iterator[tuple[str, str]]:
        raise AssertionError("the model is asked")

    monkeypatch.setattr("blendrag_lab.distillation.adapt.ask_model", ask)
    adapter = small()
    single = replace(corpus(adapter), top_k=1)
    with pytest.raises(InvalidInputError, match=r"--top-k is 1, expected 2 or more.*; raise it"):
        adapt(adapter, single, recipe(), tmp_path / "writer")
    monkeypatch.setenv("BLENDRAG_TOP_K", "1")
    with pytest.raises(InvalidInputError, match=r"--top-k is 1 \(BLENDRAG_TOP_K\), expected 2"):
        adapt(adapter, single, recipe(), tmp_path / "writer")
    assert not (tmp_path / "writer").exists()


def test_model_that_cannot_be_blended_is_refused(tmp_path: Path) -> None:
    from blendrag.errors import UnsupportedModelError

    adapter = small("gpt2", n_layer=2)
    with pytest.raises(UnsupportedModelError, match="use mode full"):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)


def test_too_little_memory_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag_lab.distillation.memory.available_bytes", lambda: 1 << 20)
    adapter = small()
    with pytest.raises(
        InvalidInputError, match=r"training takes at least .* 1.0 MiB are available"
    ):
        adapt(adapter, corpus(adapter), recipe(), tmp_path)


def test_fewer_chunks_are_held_at_a_time_where_memory_is_short(tmp_path: Path) -> None:
    adapter = small()
    given = corpus(adapter)
    with adapter.lock:
        trained = TrainedWriter(adapter, 4, 0)
        material = Material(adapter.tokens, given.groups, 3, 2, given.chunk_tokens)
        both = forwards(adapter, trained)
        ample = needs_of(adapter, trained, both, material, recipe(), available=1 << 40)
        room = ample.writer_bytes + ample.rows_bytes + 2.5 * ample.chunk_bytes
        scarce = needs_of(adapter, trained, both, material, recipe(), available=int(room / SHARE))
        several = needs_of(adapter, trained, both, material, recipe(), 1 << 40, together=8)
        trained.close()
    assert (ample.encode_batch, ample.student_batch) == (0, 1)
    assert (several.teacher_batch, several.student_batch) == (8, 8)
    assert several.total_bytes > ample.total_bytes + 7 * 3 * ample.chunk_bytes
    assert "are held" not in str(ample)
    assert scarce.encode_batch == 2
    assert scarce.total_bytes == ample.total_bytes - ample.chunk_bytes
    assert "activations of 2 of 3 chunks are held at a time" in str(scarce)


def test_questions_of_records_with_the_same_passages_are_asked_together(tmp_path: Path) -> None:
    adapter = small()
    ctxs = [{"text": passage(n).text} for n in range(3)]
    records = [
        {"question": f"Who moved the works to the harbour {n} times?", "ctxs": ctxs}
        for n in range(3)
    ]
    path = tmp_path / "records.json"
    path.write_text(json.dumps([*records, {"question": "Who else?", "ctxs": ctxs[:2]}]))
    _, groups = read_questions(path, Chunker(adapter.tokens.text, 64))
    assert [len(group.asked) for group in groups] == [3, 1]
    titled = [{"title": "Mills", "text": passage(n).text} for n in range(3)]
    path.write_text(json.dumps([{"question": "Who moved the works?", "ctxs": titled}]))
    _, (under_title,) = read_questions(path, Chunker(adapter.tokens.text, 64))
    assert all(each.text.startswith("Mills\n") for each in under_title.passages)
    material = Material(adapter.tokens, (groups[0],), 3, 3, 64)
    assert len(material.draw(random.Random(0), is_short=False).questions) == 3


def test_attention_that_keeps_its_weights_is_counted_by_the_length_of_chunks(
    tmp_path: Path,
) -> None:
    found = {}
    for attention in ("sdpa", "eager"):
        adapter = small()
        adapter.model.set_attn_implementation(attention)
        given = corpus(adapter)
        with adapter.lock:
            trained = TrainedWriter(adapter, 4, 0)
            both = forwards(adapter, trained)
            for tokens, most in ((256, 0), (512, 0), (256, 2)):
                similar = Similar(adapter.tokens, Neighbours(None, most), most, 0, 0)
                material = Material(adapter.tokens, given.groups, 3, 2, tokens, similar)
                needs = needs_of(adapter, trained, both, material, recipe(), available=1 << 40)
                held = kept_bytes(both, tokens)
                if most:  # encoded alone and behind others
                    held += kept_bytes(both, tokens, most * tokens)
                assert 0.8 * held < needs.chunk_bytes < 1.2 * held
                found[attention, tokens, most] = needs.chunk_bytes
            trained.close()
        assert found[attention, 256, 2] > 1.3 * found[attention, 256, 0]
    assert found["sdpa", 512, 0] < 2.5 * found["sdpa", 256, 0]
    assert found["eager", 512, 0] > 3 * found["eager", 256, 0]


def test_the_model_asks_only_what_is_missing() -> None:
    groups = [Group((passage(n), passage(n, 1)), (Asked(f"Who owned {n}?"),)) for n in range(3)]
    about: list[str] = []

    def ask(texts: Sequence[str]) -> list[str]:
        about.extend(texts)
        return [f"What of {text[-40:]}?" for text in texts]

    made = with_questions(groups, 5, ask, 0)
    assert len(about) == 2
    assert sorted(len(group.asked) for group in made) == [1, 2, 2]  # spread over the groups
    assert with_questions(groups, 3, ask, 0) == tuple(groups)


def test_held_out_groups_share_no_passage_with_training() -> None:
    shared = passage(0)
    groups = [Group((passage(n), passage(n, 1))) for n in range(1, 10)]
    groups += [Group((shared, passage(n, 2))) for n in range(4)]
    for seed in range(8):
        train, held = split(groups, seed)
        kept = {p.text for group in held for p in group.passages}
        assert not any(p.text in kept for group in train for p in group.passages)


def test_long_documents_become_several_groups_and_repeated_texts_one() -> None:
    groups = documents_as_groups(
        [("a", "a", [f"text {n}" for n in range(10)]), ("b", "b", ["text 1", "other"])]
    )
    assert [len(group.passages) for group in groups] == [8, 2, 1]


@pytest.mark.parametrize(
    ("said", "question"),
    [
        ("Question: When was the mill built? It was", "When was the mill built?"),
        ("\n1. **Where is the harbour of Altmar?**", "Where is the harbour of Altmar?"),
        ("What is the context?", ""),
        ("The mill is old.", ""),
        ("Which dragon slept there?", ""),
    ],
)
def test_only_questions_about_the_passage_are_kept(said: str, question: str) -> None:
    assert cleaned_question(said, "The mill at the harbour of Altmar was built.") == question
