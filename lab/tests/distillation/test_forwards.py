"""Teacher and student: what a request computes, in forwards that gradients pass through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import tiny
from blendrag.engine.kv_validity import BEHIND_SHARE
from blendrag.engine.rendering import prefix_token_ids
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.loader import HeldKV, LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag.model import ModelAdapter
from blendrag_lab.distillation.forwards import Forwards, Target, _deviation
from blendrag_lab.distillation.prompts import ChunkPrompt, chunk_prompt
from blendrag_lab.distillation.trainer import _loss_of
from blendrag_lab.distillation.writer import TrainedWriter
from lab.tests.distillation.tiny_material import (
    ANSWER_TOKENS,
    forwards,
    passage,
    prompt,
    randomised,
    small,
)

#: One and several types of layers, windows shorter than a prompt, latent KV.
FAMILIES = ("llama", "qwen2", "gemma3_text", "minicpm3")


@contextmanager
def made(adapter: ModelAdapter) -> Iterator[tuple[TrainedWriter, Forwards]]:
    with adapter.lock:
        writer = TrainedWriter(adapter, 4, 0)
        try:
            yield writer, forwards(adapter, writer)
        finally:
            writer.close()


def shorter_prompt(adapter: ModelAdapter) -> ChunkPrompt:
    """With fewer chunks and questions than :func:`prompt`'s."""
    made = chunk_prompt(
        adapter.tokens, [passage(n) for n in (2, 7)], ["Who owned the mill of Garth?"]
    )
    assert made is not None
    return made


def after_others(adapter: ModelAdapter) -> ChunkPrompt:
    """:func:`prompt`'s, with chunks encoded after two others, one other and none."""
    ids = [tuple(adapter.tokens.encode_text(passage(n).text)) for n in (6, 8)]
    return replace(prompt(adapter), contexts=(ids[0] + ids[1], ids[1][:9], ()))


def full_ids(asked: ChunkPrompt, number: int) -> list[int]:
    return [*asked.shared_ids, *asked.tails[number]]


def reused(adapter: ModelAdapter, asked: ChunkPrompt, number: int) -> torch.Tensor:
    """Logits ``[V]`` of a prompt's last token as a request over stored KV computes them."""
    prefix = prefix_token_ids(adapter.tokens)
    spans = [
        LoadedSpan(
            chunk.position, chunk.end, HeldKV(adapter.encode(prefix, chunk.ids)), len(prefix), False
        )
        for chunk in asked.chunks
    ]
    ids = torch.tensor([full_ids(asked, number)])
    request = BlendRequest(ids.shape[1], tuple(spans), Blending.of("reuse", "constant", 0.0))
    logits, _, _ = Fusor(adapter).prefill(ids, request)
    return logits[0, -1].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_without_the_writer_the_student_is_a_request_over_stored_kv(name: str) -> None:
    adapter = small(name)
    asked = prompt(adapter)
    expected = [reused(adapter, asked, n) for n in range(2)]
    with made(adapter) as (_, both), torch.no_grad():
        found = both.students([asked], [[(0,), (0,)]], writes=False)[0]
    for logits, one in zip(found, expected, strict=True):
        assert tiny.difference(logits[-1], one) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_teacher_is_the_stock_prefill_and_its_greedy_answer(name: str) -> None:
    adapter = small(name)
    asked = prompt(adapter)
    expected = [
        adapter.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER_TOKENS,
            output_logits=True, return_dict_in_generate=True,
        )
        for ids in (torch.tensor([full_ids(asked, n)]) for n in range(2))
    ]  # fmt: skip
    with made(adapter) as (writer, both):
        randomised(writer)
        targets = both.teachers([asked])[0]
    for n, target in enumerate(targets):
        assert target.answer == tuple(expected[n].sequences[0, -ANSWER_TOKENS:].tolist())
        own = torch.stack([logits[0] for logits in expected[n].logits])  # [A, V]
        assert tiny.difference(target.logits[len(asked.tails[n]) - 1 :], own) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_answered_in_one_batch_say_what_each_says_alone(name: str) -> None:
    adapter = small(name)
    prompts = [prompt(adapter), shorter_prompt(adapter)]
    with made(adapter) as (_, both):
        alone = [both.teachers([each])[0] for each in prompts]
        runs: list[int] = []
        hook = adapter.model.register_forward_hook(lambda *_: runs.append(1))
        together = both.teachers(prompts)
        hook.remove()
    assert len(runs) == len(prompts) + ANSWER_TOKENS - 1
    for one, other in zip(alone, together, strict=True):
        assert [t.answer for t in one] == [t.answer for t in other]
        assert all(
            tiny.difference(a.logits, b.logits) < 1e-4 for a, b in zip(one, other, strict=True)
        )


def test_answer_that_ends_early_does_not_change_the_others() -> None:
    adapter = small()
    asked = prompt(adapter)
    with made(adapter) as (_, both):
        whole = both.teachers([asked])[0]
        only, early = next(
            ({token}, n)
            for n in (0, 1)
            for token in whole[n].answer[:-1]
            if token not in whole[1 - n].answer
        )
        both.ends = only
        cut = both.teachers([asked])[0]
    end = whole[early].answer.index(*only) + 1
    assert cut[early].answer == whole[early].answer[:end]
    assert cut[1 - early].answer == whole[1 - early].answer
    assert tiny.difference(cut[1 - early].logits, whole[1 - early].logits) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_after", [False, True])
def test_student_kv_is_that_of_the_store_moved_to_its_places(name: str, is_after: bool) -> None:
    adapter = small(name)
    asked = after_others(adapter) if is_after else prompt(adapter)
    prefix = prefix_token_ids(adapter.tokens)
    with made(adapter) as (_, both), torch.no_grad():
        kv, places = both.stored([asked], writes=False)
    at = {int(p): n for n, p in enumerate(places.positions[0])}
    repositioner = adapter.repositioner
    for chunk, context in zip(asked.chunks, asked.contexts, strict=True):
        stored = adapter.encode(prefix, chunk.ids)
        if context and chunk is not asked.chunks[0]:
            behind = adapter.encode(prefix, chunk.ids, context_ids=context)
            stored = behind.mean_with(stored, BEHIND_SHARE)
        tables = repositioner.tables(
            torch.full((len(chunk.ids),), chunk.position - len(prefix), dtype=torch.long)
        )
        rows = [at[p] for p in range(chunk.position, chunk.end)]
        for layer, (keys, values) in enumerate(kv):
            shape = adapter.layout.layers[layer]
            expected = [part.clone() for part in shape.split(stored.layers[layer])]
            repositioner.rotate_(expected[repositioner.part(layer)], layer, tables)
            for part, own in zip((keys, values), expected, strict=True):
                assert tiny.difference(part[0, :, rows], own) < 1e-5


def test_rotated_keys_equal_those_rotated_in_place_and_pass_gradients_on() -> None:
    repositioner = small().repositioner
    tables = repositioner.tables(torch.tensor([3, 700, 0]))
    keys = torch.randn(2, 3, 8, requires_grad=True)
    found = repositioner.rotated(keys, 1, tables)
    expected = keys.detach().clone()
    repositioner.rotate_(expected, 1, tables)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert keys.grad is not None
    assert keys.grad.abs().min() > 0


def test_questions_of_one_prompt_do_not_see_each_other() -> None:
    adapter = small()
    questions = ("Who owned the mill of Bexley?", "When was it built near the river bank?")
    with made(adapter) as (writer, both), torch.no_grad():
        randomised(writer)
        together = both.students([prompt(adapter, *questions)], [[(4, 9), (7, 8, 9)]])[0]
        for n, (question, answer) in enumerate(zip(questions, [(4, 9), (7, 8, 9)], strict=True)):
            ((alone,),) = both.students([prompt(adapter, question)], [[answer]])
            assert tiny.difference(together[n], alone) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_that_run_together_give_the_losses_and_gradients_of_each_alone(name: str) -> None:
    adapter = small(name)
    shorter = shorter_prompt(adapter)
    prompts = [prompt(adapter), replace(shorter, head=shorter.head[:-1] + shorter.head[:1])]
    found = []
    with made(adapter) as (writer, both):
        randomised(writer)
        targets = both.teachers(prompts)
        for size in (1, 2):
            for parameter in writer.parameters.values():
                parameter.grad = None
            losses = []
            for n in range(0, 2, size):
                pairs = both.deviations(prompts[n : n + size], targets[n : n + size])
                each = [_loss_of(one) for pair in pairs for one in pair]
                torch.stack(each).sum().backward()
                losses += each
            grads = [p.grad.flatten() for p in writer.parameters.values() if p.grad is not None]
            found.append((torch.stack(losses).detach(), torch.cat(grads)))
    for alone, together in zip(*found, strict=True):
        assert alone.abs().sum() > 0
        assert tiny.difference(alone, together) < 1e-4


def test_only_chunks_are_written() -> None:
    adapter = small()
    asked = prompt(adapter)
    with made(adapter) as (writer, both), torch.no_grad():
        before = both.teachers([asked])[0]
        stock, places = both.stored([asked], writes=False)
        randomised(writer)
        written, _ = both.stored([asked], writes=True)
        after = both.teachers([asked])[0]
    head = int((places.positions < asked.chunks[0].position).sum())
    for n, ((keys, values), (other_keys, other_values)) in enumerate(
        zip(stock, written, strict=True)
    ):
        assert torch.equal(keys[:, :, :head], other_keys[:, :, :head])
        assert tiny.difference(values[:, :, head:], other_values[:, :, head:]) > 1e-2
        assert n > 0 or tiny.difference(keys[:, :, head:], other_keys[:, :, head:]) > 1e-2
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.logits, other.logits)


def test_chunks_encoded_in_turns_give_the_same_gradients() -> None:
    adapter = small()
    asked = prompt(adapter)
    found = []
    with made(adapter) as (writer, both):
        randomised(writer)
        targets = both.teachers([asked])
        for size in (0, 1):
            both.encode_batch = size
            for parameter in writer.parameters.values():
                parameter.grad = None
            sum(d.answer.mean() for d in both.deviations([asked], targets)[0]).backward()  # type: ignore[union-attr]
            grads = [p.grad for p in writer.parameters.values() if p.grad is not None]
            found.append(torch.cat([g.flatten() for g in grads]))
    assert found[0].abs().sum() > 0
    assert tiny.difference(found[0], found[1]) < 1e-4


def test_model_is_left_as_it_was() -> None:
    adapter = small()
    names = {name: p.requires_grad for name, p in adapter.model.named_parameters()}
    with made(adapter) as (writer, _):
        randomised(writer)
    assert {name: p.requires_grad for name, p in adapter.model.named_parameters()} == names
    assert not hasattr(adapter.model, "peft_config")


def test_token_that_both_exclude_adds_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.5, 0.1, -torch.inf]])
    student = (logits + torch.tensor([0.3, 0.0, 0.0])).requires_grad_()
    found = _deviation(Target((1,), logits), student)
    (found.answer.sum() + found.question.sum()).backward()
    alone = _deviation(Target((1,), logits[:, :2]), student.detach()[:, :2])
    assert torch.allclose(found.answer, alone.answer)
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_question_of_one_token_has_a_loss() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    found = _deviation(Target((1,), logits), torch.tensor([[2.0, 2.0]]))
    assert found.question.numel() == 0
    assert _loss_of(found) == found.answer[0] > 0
