"""The writer while it is trained: a PEFT LoRA on the linear layers of the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn

from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model import fingerprint
from blendrag.model.adapter import ModelAdapter
from blendrag.model.writer import Writer, layers_for_writers, mark_as_writer

#: The factor of a LoRA's product is alpha / rank.
ALPHA_PER_RANK = 2


def public_name(model_id: str) -> str:
    """The id of a model without the path of this machine: of a local directory or file, only its name."""
    place = Path(model_id)
    if not place.is_absolute():
        return model_id
    cached = next((part for part in place.parts if part.startswith("models--")), "")
    return "/".join(cached.split("--")[1:]) if cached else place.name


class TrainedWriter:
    """A new LoRA on the model of ``adapter``, active except within :meth:`stock`. Close it to remove it."""

    def __init__(self, adapter: ModelAdapter, rank: int, seed: int, encode_after: int = 0) -> None:
        """``encode_after``: how many similar chunks each chunk is encoded after, which is saved with it."""
        adapter.require_fusing()
        if fingerprint.is_quantised(adapter.model):
            raise UnsupportedModelError(
                f"{adapter.model_id} is quantised, expected floating-point weights to train over; train "
                "on the model that it was made from"
            )
        if hasattr(adapter.model, "peft_config"):
            raise InvalidInputError(
                f"{adapter.model_id} has an adapter already, expected the plain model; leave out lora"
            )
        inside = {id(m) for layer in adapter.stack.layers for m in layer.modules()}
        linear = {
            name: module
            for name, module in adapter.model.named_modules()
            if type(module) is nn.Linear and id(module) in inside
        }
        names = layers_for_writers(adapter, linear)
        if not names:
            raise UnsupportedModelError(
                f"the decoder layers of {adapter.model_id} have no linear layers of torch, which a writer "
                "changes; train on another model"
            )
        config = LoraConfig(
            r=rank, lora_alpha=ALPHA_PER_RANK * rank, target_modules=names, task_type="CAUSAL_LM"
        )  # fmt: skip
        self._before = {name: p.requires_grad for name, p in adapter.model.named_parameters()}
        self._adapter, self._encode_after = adapter, encode_after
        self._untrained = {
            name: (layer.in_features, layer.out_features)
            for name, layer in linear.items()
            if name not in names
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Any = get_peft_model(adapter.model, config)
        self.model.eval()  # it has no dropout
        self._casting = disable_input_dtype_casting(self.model)
        self._casting.__enter__()
        self._stock_depth = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if ".lora_" in n}

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Within this context the model computes what it does without a writer; may be nested."""
        self._stock_depth += 1
        try:
            if self._stock_depth > 1:
                yield
            else:
                with self.model.disable_adapter():
                    yield
        finally:
            self._stock_depth -= 1

    def begin_with(self, writer: Writer) -> None:
        """Take the weights of a writer of this model and rank. Raises :class:`InvalidInputError`.

        Writers of earlier versions also have parts that change nothing in a store, which are left out.
        """
        given = {}
        for name, part in writer.parts.items():
            if self._untrained.get(name) == part.shape:
                continue
            key = f"base_model.model.{name}.lora_"
            given[f"{key}A.default.weight"] = part.down
            given[f"{key}B.default.weight"] = part.up * (part.scale / ALPHA_PER_RANK)
        own = {name: parameter.shape for name, parameter in self.parameters.items()}
        if {name: weight.shape for name, weight in given.items()} != own:
            of = f" of {writer.model_id}" if writer.model_id else ""
            raise InvalidInputError(
                f"{writer.label}{of} does not fit {self._adapter.model_id}, whose layers have other names or "
                "shapes; begin with one that was trained for this model"
            )
        self.load(given)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the weights, on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.parameters.items()}

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def save(self, folder: Path) -> None:
        """As a PEFT directory that stores take as a writer."""
        with TemporaryDirectory(dir=folder, prefix=".") as name:
            made = Path(name)
            model_id = public_name(self._adapter.model_id)
            self.model.peft_config["default"].base_model_name_or_path = model_id
            # else peft asks the hub whether the vocabulary was changed
            self.model.save_pretrained(name, save_embedding_layers=False)
            mark_as_writer(made, model_id, self._encode_after)
            for path in sorted(made.iterdir()):
                path.replace(folder / path.name)

    def close(self) -> None:
        """Take the LoRA out of the model."""
        self._casting.__exit__(None, None, None)
        self.model.unload()
        for name, parameter in self._adapter.model.named_parameters():
            parameter.requires_grad_(self._before.get(name, False))
