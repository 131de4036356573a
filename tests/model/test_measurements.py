"""What is measured of a hybrid model when it is loaded is remembered for the next time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tiny
from blendrag.model import ModelAdapter, continuation, linear_layers, measurements

pytestmark = pytest.mark.usefixtures("empty_cache")


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The tokens of each forward of ``model``."""
    tokens = list[int]()

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield tokens
    hook.remove()


def opened(model: Any) -> tuple[ModelAdapter, int]:
    """An adapter, and how many forwards its checks took."""
    with counted(model) as forwards:
        made = tiny.adapter(model)
    return made, len(forwards)


@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma"])
def test_the_second_opening_takes_at_most_half_the_forwards(name):
    (one, measured), (two, recalled) = (
        opened(tiny.family(name, initializer_range=0.2)) for _ in range(2)
    )
    assert recalled <= measured / 2
    assert one.continuation is not None
    assert two.continuation is not None
    assert one.continuation.checks == two.continuation.checks
    assert one.composition is not None
    assert two.composition is not None
    assert one.composition.kinds == two.composition.kinds
    for a, b in zip(one.composition.entries, two.composition.entries, strict=True):
        assert (a.index, a.shape, a.attention) == (b.index, b.shape, b.attention)
        if a.linear is not None:
            assert b.linear is not None
            assert type(a.linear.mixer) is type(b.linear.mixer)
            assert (a.linear.place, a.linear.recurrent, a.linear.conv) == (
                b.linear.place, b.linear.recurrent, b.linear.conv,
            )  # fmt: skip


def test_another_model_dtype_library_or_check_is_measured(monkeypatch):
    def model(**more: Any) -> Any:
        return tiny.family("lfm2", **{"initializer_range": 0.2, **more})

    _, measured = opened(model())
    assert opened(model())[1] < measured
    assert opened(model(initializer_range=0.21))[1] >= measured
    assert opened(model().bfloat16())[1] >= measured
    for changed, name, value in (
        (measurements.transformers, "__version__", "9.9"),
        (torch, "__version__", "9.9"),
        (continuation, "CHECKS_VERSION", 99),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, name, value)
            assert opened(model())[1] > opened(model())[1]


def test_a_remembered_model_that_goes_on_wrongly_is_refused(monkeypatch):
    model = tiny.family("qwen3_5", initializer_range=0.2)
    assert tiny.adapter(model).continuation is not None
    tiny.forget_states(monkeypatch)
    assert tiny.adapter(model).continuation is None


def test_layers_that_are_not_those_remembered_are_measured(monkeypatch):
    def missing(self: Any, layers: Any, cache: Any) -> Any:
        raise AttributeError

    made, _ = opened(tiny.family("lfm2", initializer_range=0.2))
    monkeypatch.setattr(linear_layers.KnownLinear, "linear_layer", missing)
    again, _ = opened(tiny.family("lfm2", initializer_range=0.2))
    assert made.composition is not None
    assert again.composition is not None
    assert again.composition.checks == made.composition.checks
