"""A seed repeats an answer, whatever else draws meanwhile, and nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.decoding import SeededDraws
from blendrag.errors import InvalidInputError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    model = tiny.llama()
    model.generation_config.eos_token_id = None
    with tiny.engine(model, tmp_path_factory.mktemp("seed") / "s", max_new_tokens=16) as made:
        made.ingest([tiny.document(0)])
        yield made


def ask(engine: BlendEngine, seed: int | None, **changes: Any) -> tuple[str, ...]:
    text = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"
    given = {"temperature": 2.0, "mode": "full", **changes}
    return engine.generate(text, Options(seed=seed, **given)).texts


SEVERAL = [{}, {"num_return_sequences": 3}, {"num_beams": 2}]


@pytest.mark.parametrize("generate", SEVERAL)
def test_a_seed_repeats_an_answer_and_another_gives_another(
    engine: BlendEngine, generate: dict[str, Any]
) -> None:
    first = ask(engine, 7, generate=generate)
    torch.manual_seed(1)
    assert ask(engine, 7, generate=generate) == first
    assert ask(engine, 8, generate=generate) != first


@pytest.mark.parametrize("generate", SEVERAL)
def test_a_seeded_request_leaves_torchs_generator_where_it_was(
    engine: BlendEngine, generate: dict[str, Any]
) -> None:
    before = torch.get_rng_state()
    ask(engine, 7, generate=generate)
    assert torch.equal(torch.get_rng_state(), before)
    ask(engine, None, generate=generate)
    assert not torch.equal(torch.get_rng_state(), before)


def test_seeded_and_blended_at_ratio_one_equals_stock(engine: BlendEngine) -> None:
    assert ask(engine, 5, mode="blend", ratio=1.0) == ask(engine, 5)


def test_without_a_seed_sampling_follows_torchs_generator(engine: BlendEngine) -> None:
    torch.manual_seed(3)
    first = ask(engine, None)
    assert ask(engine, None) != first
    torch.manual_seed(3)
    assert ask(engine, None) == first


def test_other_threads_are_not_seeded() -> None:
    probabilities = torch.full((1000,), 0.001)
    elsewhere: list[int] = []
    with SeededDraws(0, torch.device("cpu")):
        here = int(torch.multinomial(probabilities, 1))
        torch.manual_seed(11)
        thread = threading.Thread(
            target=lambda: elsewhere.append(int(torch.multinomial(probabilities, 1)))
        )
        thread.start()
        thread.join()
    torch.manual_seed(11)
    assert elsewhere == [int(torch.multinomial(probabilities, 1))]
    with SeededDraws(0, torch.device("cpu")):
        assert int(torch.multinomial(probabilities, 1)) == here


def test_operations_within_a_forward_are_not_intercepted(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the few operations that choose a token are; a forward has many, and draws nothing."""
    looked: list[bool] = []
    inside: list[bool] = []
    real = SeededDraws.__torch_function__

    def look(self: SeededDraws, *args: Any, **kwargs: Any) -> Any:
        looked.append(bool(inside))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SeededDraws, "__torch_function__", look)
    layer = engine.adapter.decoder_layers[0]
    hooks = [
        layer.register_forward_pre_hook(lambda *_: inside.append(True)),
        layer.register_forward_hook(lambda *_: inside.clear()),
    ]
    try:
        ask(engine, 7)
        ask(engine, 7, mode="blend")
    finally:
        for hook in hooks:
            hook.remove()
    assert looked
    assert not any(looked)


@pytest.mark.parametrize("failing", [False, True])
def test_sampling_is_seeded_again_after_a_failed_forward(failing: bool) -> None:
    class Failing(torch.nn.Module):
        def forward(self) -> None:
            if failing:
                raise MemoryError

    model, probabilities = Failing(), torch.full((1000,), 0.001)
    drawn = []
    for _ in range(2):
        with SeededDraws(0, torch.device("cpu")).between_forwards(model):
            with suppress(MemoryError):
                model()
            drawn.append(int(torch.multinomial(probabilities, 1)))
    assert drawn[0] == drawn[1]
    torch.manual_seed(1)
    first = int(torch.multinomial(probabilities, 1))
    torch.manual_seed(1)
    assert int(torch.multinomial(probabilities, 1)) == first  # and no longer once it is over
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(InvalidInputError, match="64-bit") as raised:
        Options(seed=seed)
    assert tiny.one_sentence(str(raised.value))
